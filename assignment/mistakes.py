"""The reference's functions, and known mistakes, each of which changes a line or two.

If a mistake explains a student's answers, the grader names it. Each mistake is also a
submission in tests/test_assignment.py, which has to lose its items and no others.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


class Mistake(NamedTuple):
    """A change of the reference, and what a student who made it is told."""

    file: str
    items: str  # the items that it loses
    right: str  # text of the reference
    wrong: str  # the text that replaces it
    said: str  # completes "That is ..."


def source_of(file: str, mistake: Mistake | None = None) -> str:
    """Return the text of the reference; its loss.py is the repository's own."""
    path = ROOT / file if file == "loss.py" else HERE / "solution" / file
    text = path.read_text()
    return text.replace(mistake.right, mistake.wrong) if mistake else text


@cache
def functions_of(file: str, mistake: Mistake | None = None) -> dict[str, Any]:
    """Return the functions of the reference by name, unchanged or with a mistake."""
    text = source_of(file, mistake)
    text = text.replace("from toy import", "from assignment.starter.toy import")
    names: dict[str, Any] = {"__name__": file}
    exec(text, names)
    return names


MISTAKES = [
    Mistake(
        "loss.py",
        "1.1 1.2",
        "ratio.square().sum()",
        "ratio.sum().square()",
        "the square of the sum, not the sum of the squares",
    ),
    Mistake(
        "loss.py",
        "1.1 1.2 1.4",
        "[count, ratio.sum(), ratio.square().sum()]",
        "[count, ratio.mean(), ratio.square().mean()]",
        "means instead of sums, and means do not add up over micro-batches",
    ),
    Mistake(
        "loss.py",
        "1.2",
        "log_ratio.detach()[mask]",
        "log_ratio.detach().nan_to_num()",
        "the result of counting padding as tokens with a ratio of 1",
    ),
    Mistake(
        "loss.py",
        "1.4",
        "[mask].double().exp()",
        "[mask].exp()",
        "the result in float32, whose range does not include e^160",
    ),
    Mistake(
        "loss.py",
        "1.4",
        "[mask].double()",
        "[mask].double().clamp(-20, 20)",
        "the result of clamping log rho at 20 nats",
    ),
    Mistake(
        "loss.py",
        "1.4",
        "log_ratio.detach()",
        "log_ratio",
        'with a gradient"; expected a float64 tensor',
    ),
    Mistake(
        "loss.py",
        "1.4",
        "float(ratio.numel())",
        "float((ratio < 1e9).sum())",
        "the result of not counting a token with a large ratio",
    ),
    Mistake(
        "loss.py",
        "1.1",
        "[mask].double().exp()",
        "[mask].double().clamp(min=-5).exp()",
        "the result of clamping log rho at -5 nats",
    ),
    Mistake(
        "loss.py",
        "1.1 1.2",
        "log_ratio.detach()[mask]",
        "log_ratio.detach()[mask & (log_ratio != 0)]",
        "the result of taking a log rho of 0 for padding",
    ),
    Mistake(
        "loss.py",
        "1.2",
        "log_ratio.detach()[mask]",
        "log_ratio.detach()[log_ratio.isfinite()]",
        "the result of taking only NaN and infinity for padding",
    ),
    Mistake(
        "loss.py",
        "1.3",
        "ess.clamp(max=1.0)",
        "torch.where(ess > 0.9, ess / ess, ess)",
        "the result of rounding an e_B above 0.9 to 1",
    ),
    Mistake(
        "loss.py",
        "1.3",
        "ess.clamp(max=1.0)",
        "ess + 1e-8",
        "the result of adding 1e-8 to e_B, which may be as small as 1e-8",
    ),
    Mistake(
        "loss.py",
        "1.3 1.5",
        "(count * square_sum)",
        "(count * square_sum + 1e-8)",
        "the result of adding 1e-8 to the denominator, although e_B has no scale",
    ),
    Mistake(
        "loss.py",
        "1.3",
        "ess.clamp(max=1.0)",
        "1 / ess",
        "its inverse",
    ),
    Mistake(
        "loss.py",
        "1.3 1.5",
        "ess.clamp(max=1.0)",
        "count * ess",
        "|B| e_B, which is not normalized",
    ),
    Mistake(
        "loss.py",
        "1.3",
        "ess.clamp(max=1.0)",
        "1 / (1 + square_sum / count - (ratio_sum / count) ** 2)",
        "1 / (1 + var[rho]), without dividing the variance by mean[rho]^2",
    ),
    Mistake(
        "loss.py",
        "1.5",
        "ess.clamp(max=1.0)",
        "ess.nan_to_num(nan=1.0)",
        "what the authors' code returns: a broken batch then looks like a fresh one",
    ),
    Mistake(
        "loss.py",
        "1.6",
        "reward.std(dim=-1, keepdim=True)",
        "reward.std(dim=-1, keepdim=True, correction=0)",
        "the result with the population's deviation, over G instead of G - 1",
    ),
    Mistake(
        "loss.py",
        "1.6",
        "reward = reward - reward[..., :1]\n"
        "    advantage = reward - reward.mean(dim=-1, keepdim=True)\n"
        "    if scale:\n"
        "        advantage = advantage / (reward.std(dim=-1, keepdim=True)",
        "advantage = reward - reward.mean(dim=-1, keepdim=True)\n"
        "    if scale:\n"
        "        advantage = advantage / (reward.std()",
        "the result with the deviation of the whole batch, not of each group",
    ),
    Mistake(
        "loss.py",
        "1.6",
        "keepdim=True) + 1e-6)",
        "keepdim=True))",
        "the result without the 1e-6",
    ),
    Mistake(
        "loss.py",
        "1.6",
        "reward = reward - reward[..., :1]",
        "",
        "the rounding error of equal rewards minus their mean",
    ),
    Mistake(
        "derivations.py",
        "1.7",
        "1 / (1 + variation**2)",
        "1 / (1 + variation)",
        "1 / (1 + CV): the square is missing",
    ),
    Mistake(
        "derivations.py",
        "1.7",
        "1 / (1 + variation**2)",
        "1 - variation**2",
        "1 - CV^2",
    ),
    Mistake(
        "derivations.py",
        "1.8",
        "mean**2 / mean_square",
        "1 / token_count",
        "1 / |B|, which is only the limit",
    ),
    Mistake(
        "derivations.py",
        "1.8",
        "mean**2 / mean_square",
        "token_count * mean**2 / mean_square",
        "|B| e_B, which is not normalized",
    ),
    Mistake(
        "derivations.py",
        "1.9",
        "1 / float((policy**2 / behavior).sum())",
        "1 / float((policy**2 / behavior).sum() - 1)",
        "1 / chi^2: the denominator lacks a 1",
    ),
    Mistake(
        "derivations.py",
        "1.9",
        "1 / float((policy**2 / behavior).sum())",
        "float((policy * (behavior / policy).log()).sum().exp())",
        "exp(-KL), with the wrong divergence",
    ),
    Mistake(
        "loss.py",
        "2.1 2.2 2.3",
        "logp = logp.double()\n    logp_behavior = logp_behavior.detach().double()",
        "logp, logp_behavior = logp_behavior.double(), logp.double()",
        "KL(pi_b || pi_theta), the other direction",
    ),
    Mistake(
        "loss.py",
        "2.2",
        "return listed + rest",
        "return (p * log_ratio).sum(dim=-1) + (rest + p_rest - b_rest).detach()",
        "the result if no gradient flows through the bucket",
    ),
    Mistake(
        "loss.py",
        "2.1 2.2",
        "return listed + rest",
        "return (p * log_ratio).sum(dim=-1)",
        "the sum over the K tokens, without the bucket",
    ),
    Mistake(
        "loss.py",
        "2.2",
        "logp_behavior.detach()",
        "logp_behavior",
        "the right one, but logp_behavior gets a gradient too",
    ),
    Mistake(
        "loss.py",
        "2.2 2.3",
        "logp = logp.double()",
        "logp = logp.detach().double()",
        "no gradient at all",
    ),
    Mistake(
        "loss.py",
        "2.3",
        ".clamp(min=REST_FLOOR)",
        "",
        "the logarithm of a negative bucket",
    ),
    Mistake(
        "loss.py",
        "2.3",
        "return listed + rest",
        "p_rest, b_rest = 1 - p.sum(dim=-1), 1 - b.sum(dim=-1)\n"
        "    rest = p_rest * (p_rest / b_rest).log() - p_rest + b_rest\n"
        "    holds = (p_rest > 1e-6) & (b_rest > 1e-6)\n"
        "    return listed + torch.where(holds, rest, 0.0)",
        "the gradient of a negative number's logarithm, which torch.where does "
        "not remove: clamp first",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "-weight * advantage * logp",
        "-torch.minimum(rho * advantage, e_b * advantage).detach() * logp",
        "the result with PPO's min(rho A, e_B A), which does not cap if A < 0",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "rho.clamp(max=e_b)",
        "torch.where(rho > 1, e_b, rho)",
        "the result of capping only ratios above 1",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "(logp - logp_behavior).exp()",
        "(logp - logp_behavior).clamp(min=-5).exp()",
        "the result of clamping log rho at -5 nats",
    ),
    Mistake(
        "loss.py",
        "2.4 2.5",
        "rho = (logp",
        "e_b = 1.0 if e_b > 0.9 else e_b\n    rho = (logp",
        "the result of taking an e_B above 0.9 for 1",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "max=e_b",
        "max=1 / e_b",
        "the result with min(rho, 1/e_B)",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "max=e_b",
        "max=1",
        "the result with min(rho, 1)",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "rho.clamp(max=e_b)",
        "rho",
        "the result with rho itself, without a cap",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "rho = (logp - logp_behavior)",
        "rho = (logp_behavior - logp)",
        "the result with 1/rho, the inverted ratio",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "(max=e_b).detach()",
        "(max=e_b)",
        "the result if the capped ratio is not detached",
    ),
    Mistake(
        "loss.py",
        "2.4 2.6",
        "-weight * advantage * logp",
        "weight * advantage * logp",
        "the result with the opposite sign, but a loss is minimized",
    ),
    Mistake(
        "loss.py",
        "2.4 2.6",
        "-weight * advantage * logp",
        "-weight * advantage",
        "the result without log pi_theta",
    ),
    Mistake(
        "loss.py",
        "2.4 2.5 2.6",
        "return -weight * advantage * logp + (1 - e_b) * kl",
        "return (-weight * advantage * logp + (1 - e_b) * kl).mean()",
        "has the shape []; expected",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "(1 - e_b) * kl",
        "(1 - e_b) * kl * (advantage == 0)",
        "the result of using the KL only on tokens with A = 0",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "(1 - e_b) * kl",
        "(1 - e_b) * kl * (advantage != 0)",
        "the result of leaving out the KL of tokens with A = 0",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "(1 - e_b) * kl",
        "(1 - e_b) * kl * (rho != 1)",
        "the result of taking a log rho of 0 for padding",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "(1 - e_b) * kl",
        "(1 - e_b) * kl.mean()",
        "the result of averaging the KL over the tokens",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "(1 - e_b) * kl",
        "e_b * kl",
        "e_B instead of 1 - e_B",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "+ (1 - e_b) * kl",
        "- (1 - e_b) * kl",
        "-(1 - e_B), which pushes the policies apart",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "(1 - e_b) * kl",
        "kl",
        "the result without the weight",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "(1 - e_b) * kl",
        "(1 - e_b) * kl.detach()",
        "the result if the KL is left out or detached",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        " - (1 - e_b) * ratio * math.log(ratio)",
        "",
        "only the capped part",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        "advantage - (1 - e_b)",
        "advantage + (1 - e_b)",
        "the result with the KL's part added, not subtracted",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        "(1 - e_b) * ratio * math.log(ratio)",
        "(1 - e_b) * (ratio * math.log(ratio) - ratio + 1)",
        "the result with the KL itself, not its derivative",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        "(1 - e_b) * ratio * math.log(ratio)",
        "(1 - e_b) * math.log(ratio)",
        "the result with the derivative to rho, not to log rho",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        "min(ratio, e_b) * advantage",
        "min(ratio * advantage, e_b * advantage)",
        "the result with PPO's min(rho A, e_B A), which does not cap if A < 0",
    ),
    Mistake(
        "derivations.py",
        "2.8",
        "(log_ratio - kl)",
        "(log_ratio + 1)",
        "the gradient to log pi_theta, not to the logits",
    ),
    Mistake(
        "derivations.py",
        "2.8",
        "logp.exp() * (log_ratio - kl)",
        "logp.exp() - logp_behavior.exp()",
        "the gradient of KL(pi_b || pi_theta)",
    ),
    Mistake(
        "derivations.py",
        "2.9",
        "(1 - e_b) * (1 - 1 / temperature)",
        "1 - 1 / temperature",
        "the result without the weight 1 - e_B",
    ),
    Mistake(
        "derivations.py",
        "2.9",
        "(1 - 1 / temperature)",
        "(1 / temperature - 1)",
        "the number for the gradient, not for its negative",
    ),
    Mistake(
        "derivations.py",
        "2.9",
        "(1 - 1 / temperature)",
        "(temperature - 1)",
        "the result for log pi_b = T log pi_theta",
    ),
    Mistake(
        "batch.py",
        "3.2 3.4",
        "sums = all_reduce(sums)",
        "",
        "the result if each rank uses only its own sums",
    ),
    Mistake(
        "batch.py",
        "3.4",
        "sums = all_reduce(sums)\n    token_count, e_b = sums[0],",
        "token_count = sums[0].clone()\n    sums = all_reduce(sums)\n    e_b =",
        "the result if each rank uses its own token count",
    ),
    Mistake(
        "batch.py",
        "3.2 3.4 3.5",
        "sums += ratio_sums(output[0] - part.logp_behavior, part.mask)\n"
        "    sums = all_reduce(sums)",
        "sums += all_reduce(\n"
        "            ratio_sums(output[0] - part.logp_behavior, part.mask)\n"
        "        )",
        "all ranks have to call all_reduce equally often",
    ),
    Mistake(
        "batch.py",
        "3.3 3.4",
        "sums = torch.zeros(3",
        "policy.weight.grad = None\n    sums = torch.zeros(3",
        "the right one minus the gradient that was there before, to which "
        "`update` has to add",
    ),
    Mistake(
        "batch.py",
        "3.1 3.2 3.3 3.4",
        "kl = kl_divergence",
        "sums = ratio_sums(logp - part.logp_behavior, part.mask)\n"
        "        e_b = effective_sample_size(sums).item()\n"
        "        kl = kl_divergence",
        "the result with e_B of each micro-batch",
    ),
    Mistake(
        "batch.py",
        "3.1 3.2 3.3 3.4",
        "part.logp_behavior, part.mask)",
        "part.logp_behavior, part.mask | True)",
        "the result if padding counts as tokens",
    ),
    Mistake(
        "batch.py",
        "3.1 3.2 3.3 3.4",
        "sums += ratio_sums(output[0] - part.logp_behavior, part.mask)",
        "log_ratio = (output[0] - part.logp_behavior).clamp(min=-5)\n"
        "        sums += ratio_sums(log_ratio, part.mask)",
        "the result of clamping log rho at -5 nats",
    ),
    Mistake(
        "batch.py",
        "3.1 3.2 3.3 3.4",
        "part.logp_behavior, part.mask)",
        "part.logp_behavior, part.advantage != 0)",
        "the result of taking an advantage of 0 for padding",
    ),
    Mistake(
        "batch.py",
        "3.1 3.2 3.3 3.4",
        "part.logp_behavior, part.mask)",
        "part.logp_behavior, part.mask & (part.logp_behavior != output[0]))",
        "the result of taking a log rho of 0 for padding",
    ),
    Mistake(
        "batch.py",
        "3.1 3.2 3.3 3.4",
        "effective_sample_size(sums).item()",
        "(lambda e_b: 1.0 if e_b > 0.9 else e_b)(effective_sample_size(sums).item())",
        "the result of taking an e_B above 0.9 for 1",
    ),
    Mistake(
        "batch.py",
        "3.3 3.4",
        ".sum() / token_count",
        ".mean()",
        "the sum of the micro-batches' means",
    ),
    Mistake(
        "batch.py",
        "3.4",
        "(loss * world_size).backward()",
        "loss.backward()",
        "the right one divided by the number of ranks, because their gradients "
        "are averaged",
    ),
    Mistake(
        "batch.py",
        "3.3 3.4 3.5",
        "for part in reversed(parts)",
        "for part in parts[-1:]",
        "the result for only the last micro-batch",
    ),
    Mistake(
        "batch.py",
        "3.5",
        "part is parts[-1]",
        "False",
        "one pass too many: the graph of the last micro-batch can be kept",
    ),
    Mistake(
        "experiment.py",
        "4.1",
        "stats.t.ppf((1 + level) / 2, len(differences) - 1)",
        "stats.norm.ppf((1 + level) / 2)",
        "the interval of a normal distribution, not of Student's t",
    ),
    Mistake(
        "experiment.py",
        "4.1",
        "(1 + level) / 2",
        "level",
        "a one-sided interval",
    ),
    Mistake(
        "experiment.py",
        "4.1",
        "stats.sem(differences)",
        "stats.tstd(differences)",
        "the result with the deviation not divided by sqrt(n)",
    ),
    Mistake(
        "experiment.py",
        "4.1",
        "one - other",
        "other - one",
        "the result for the second minus the first",
    ),
]
