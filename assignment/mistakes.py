"""The reference's functions, and the mistakes that are known, each a change of a line.

Where a student's answers are those of a mistake, the grader names it. A mistake is also
a submission of tests/test_assignment.py, which has to lose its items and no others.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


class Mistake(NamedTuple):
    """A change of the reference, and what a student is told who made it."""

    file: str
    items: str  # that it loses
    right: str
    wrong: str
    said: str


def source_of(file: str, mistake: Mistake | None = None) -> str:
    """The text of the reference, which is the repository's own for loss.py."""
    path = ROOT / file if file == "loss.py" else HERE / "solution" / file
    text = path.read_text()
    return text.replace(mistake.right, mistake.wrong) if mistake else text


@cache
def functions_of(file: str, mistake: Mistake | None = None) -> dict[str, Any]:
    """The functions of the reference by name, as they are or with a mistake."""
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
        "means, which do not add up over micro-batches, not sums",
    ),
    Mistake(
        "loss.py",
        "1.2",
        "log_ratio.detach()[mask]",
        "log_ratio.detach().nan_to_num()",
        "what it is if padding counts as tokens of ratio 1",
    ),
    Mistake(
        "loss.py",
        "1.4",
        "[mask].double().exp()",
        "[mask].exp()",
        "what it is in float32, which has no e^160",
    ),
    Mistake(
        "loss.py",
        "1.4",
        "[mask].double()",
        "[mask].double().clamp(-20, 20)",
        "what it is if log rho is clamped at 20 nats",
    ),
    Mistake(
        "loss.py",
        "1.4",
        "log_ratio.detach()",
        "log_ratio",
        "with a gradient; expected a float64 tensor",
    ),
    Mistake(
        "loss.py",
        "1.4",
        "float(ratio.numel())",
        "float((ratio < 1e9).sum())",
        "what it is if a token of a large ratio is not counted",
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
        "1 / (1 + var[rho]): the variance is not divided by mean[rho]^2",
    ),
    Mistake(
        "loss.py",
        "1.5",
        "ess.clamp(max=1.0)",
        "ess.nan_to_num(nan=1.0)",
        "what the authors' code has: a batch that went wrong looks fresh",
    ),
    Mistake(
        "loss.py",
        "1.6",
        "reward.std(dim=-1, keepdim=True)",
        "reward.std(dim=-1, keepdim=True, correction=0)",
        "with the population's deviation, over G and not over G - 1",
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
        "with the deviation of the whole batch, not of each group",
    ),
    Mistake(
        "loss.py",
        "1.6",
        "keepdim=True) + 1e-6)",
        "keepdim=True))",
        "without the 1e-6",
    ),
    Mistake(
        "loss.py",
        "1.6",
        "reward = reward - reward[..., :1]",
        "",
        "what rounding makes of equal rewards less their mean",
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
        "1 / |B|, to which it tends",
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
        "1 / chi^2: 1 is missing below",
    ),
    Mistake(
        "derivations.py",
        "1.9",
        "1 / float((policy**2 / behavior).sum())",
        "float((policy * (behavior / policy).log()).sum().exp())",
        "exp(-KL): the divergence is another one",
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
        "what it is if no gradient goes through the rest",
    ),
    Mistake(
        "loss.py",
        "2.1 2.2",
        "return listed + rest",
        "return (p * log_ratio).sum(dim=-1)",
        "the sum over the K tokens alone: the bucket is missing",
    ),
    Mistake(
        "loss.py",
        "2.2",
        "logp_behavior.detach()",
        "logp_behavior",
        "the right one, and one to logp_behavior",
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
        "the logarithm of a rest below 0",
    ),
    Mistake(
        "loss.py",
        "2.3",
        "return listed + rest",
        "p_rest, b_rest = 1 - p.sum(dim=-1), 1 - b.sum(dim=-1)\n"
        "    rest = p_rest * (p_rest / b_rest).log() - p_rest + b_rest\n"
        "    holds = (p_rest > 1e-6) & (b_rest > 1e-6)\n"
        "    return listed + torch.where(holds, rest, 0.0)",
        "the gradient of a logarithm below 0, which torch.where keeps: clamp before it",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "-weight * advantage * logp",
        "-torch.minimum(rho * advantage, e_b * advantage).detach() * logp",
        "what it is with PPO's min(rho A, e_B A), which caps nothing where A < 0",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "max=e_b",
        "max=1 / e_b",
        "what it is with min(rho, 1/e_B)",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "max=e_b",
        "max=1",
        "what it is with min(rho, 1)",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "rho.clamp(max=e_b)",
        "rho",
        "what it is with rho: there is no cap",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "rho = (logp - logp_behavior)",
        "rho = (logp_behavior - logp)",
        "what it is with 1/rho: the ratio is inverted",
    ),
    Mistake(
        "loss.py",
        "2.4",
        "(max=e_b).detach()",
        "(max=e_b)",
        "what it is if the capped ratio is not detached",
    ),
    Mistake(
        "loss.py",
        "2.4 2.6",
        "-weight * advantage * logp",
        "weight * advantage * logp",
        "what the other sign gives: a loss is minimized",
    ),
    Mistake(
        "loss.py",
        "2.4 2.6",
        "-weight * advantage * logp",
        "-weight * advantage",
        "what it is without log pi_theta",
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
        "e_b * kl",
        "e_B, in place of 1 - e_B",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "+ (1 - e_b) * kl",
        "- (1 - e_b) * kl",
        "-(1 - e_B): it pushes away",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "(1 - e_b) * kl",
        "kl",
        "what it is without a weight",
    ),
    Mistake(
        "loss.py",
        "2.5",
        "(1 - e_b) * kl",
        "(1 - e_b) * kl.detach()",
        "what it is if the KL is left out, or detached",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        " - (1 - e_b) * ratio * math.log(ratio)",
        "",
        "the part of the cap alone",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        "advantage - (1 - e_b)",
        "advantage + (1 - e_b)",
        "with the KL's part added, not subtracted",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        "(1 - e_b) * ratio * math.log(ratio)",
        "(1 - e_b) * (ratio * math.log(ratio) - ratio + 1)",
        "with the KL itself, not its derivative",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        "(1 - e_b) * ratio * math.log(ratio)",
        "(1 - e_b) * math.log(ratio)",
        "with the derivative to rho, not to log rho",
    ),
    Mistake(
        "derivations.py",
        "2.7",
        "min(ratio, e_b) * advantage",
        "min(ratio * advantage, e_b * advantage)",
        "with PPO's min(rho A, e_B A), which caps nothing where A < 0",
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
        "what it is without the weight 1 - e_B",
    ),
    Mistake(
        "derivations.py",
        "2.9",
        "(1 - 1 / temperature)",
        "(1 / temperature - 1)",
        "the number for the gradient, not for minus the gradient",
    ),
    Mistake(
        "derivations.py",
        "2.9",
        "(1 - 1 / temperature)",
        "(temperature - 1)",
        "what it is with log pi_b = T log pi_theta",
    ),
    Mistake(
        "batch.py",
        "3.2 3.4",
        "sums = all_reduce(sums)",
        "",
        "what it is with the sums of each rank alone",
    ),
    Mistake(
        "batch.py",
        "3.4",
        "sums = all_reduce(sums)\n    token_count, e_b = sums[0],",
        "token_count = sums[0].clone()\n    sums = all_reduce(sums)\n    e_b =",
        "what it is with the token count of each rank",
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
        "the right one less the gradient that was there before: `update` adds to it",
    ),
    Mistake(
        "batch.py",
        "3.1 3.2 3.3 3.4",
        "kl = kl_divergence",
        "sums = ratio_sums(logp - part.logp_behavior, part.mask)\n"
        "        e_b = effective_sample_size(sums).item()\n"
        "        kl = kl_divergence",
        "what it is with e_B of each micro-batch",
    ),
    Mistake(
        "batch.py",
        "3.1 3.2 3.3 3.4",
        "part.logp_behavior, part.mask)",
        "part.logp_behavior, part.mask | True)",
        "what it is if padding counts as tokens",
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
        "the right one divided by the ranks: their gradients are averaged",
    ),
    Mistake(
        "batch.py",
        "3.3 3.4 3.5",
        "for part in reversed(parts)",
        "for part in parts[-1:]",
        "what it is for the last micro-batch alone",
    ),
    Mistake(
        "batch.py",
        "3.5",
        "part is parts[-1]",
        "False",
        "a pass too many: the graph of the last micro-batch could be kept",
    ),
    Mistake(
        "experiment.py",
        "4.1",
        "stats.t.ppf((1 + level) / 2, len(differences) - 1)",
        "stats.norm.ppf((1 + level) / 2)",
        "of a normal distribution, not of Student's t",
    ),
    Mistake(
        "experiment.py",
        "4.1",
        "(1 + level) / 2",
        "level",
        "the interval of one side",
    ),
    Mistake(
        "experiment.py",
        "4.1",
        "stats.sem(differences)",
        "stats.tstd(differences)",
        "of the deviation, which is not divided by sqrt(n)",
    ),
    Mistake(
        "experiment.py",
        "4.1",
        "one - other",
        "other - one",
        "of the second less the first",
    ),
]
