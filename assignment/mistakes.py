"""Known mistakes: changes of a line or two of the reference, and what each one loses.

If a mistake explains a student's answers, the grader names it. A test also submits each
mistake, which has to lose the items listed with it and no others.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


class Mistake(NamedTuple):
    """A change of the reference, and what a student who made it is told."""

    said: str  # completes "That is ...", or is a part of another message
    file: str
    items: str  # the items that it loses
    right: str  # text of the reference
    wrong: str  # the text that replaces it


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


def parse(table: str) -> list[Mistake]:
    """Return the mistakes of a table, in which each is a block of lines.

    The lines are what is said, the file with the items, the right text after minus
    signs, and the wrong text after plus signs.
    """
    mistakes = []
    for block in table.strip().split("\n\n"):
        said, where, *lines = block.splitlines()
        right, wrong = [
            "\n".join(line[2:] for line in lines if line[0] == sign) for sign in "-+"
        ]
        mistakes.append(Mistake(said, *where.split(": "), right, wrong))
    return mistakes


MISTAKES = parse(r"""
the square of the sum, not the sum of the squares
loss.py: 1.1 1.2
- ratio.square().sum()
+ ratio.sum().square()

means instead of sums, and means do not add up over micro-batches
loss.py: 1.1 1.2 1.4
- [count, ratio.sum(), ratio.square().sum()]
+ [count, ratio.mean(), ratio.square().mean()]

the result of counting padding as tokens with a ratio of 1
loss.py: 1.2
- log_ratio.detach()[mask]
+ log_ratio.detach().nan_to_num()

the result in float32, whose range does not include e^160
loss.py: 1.4
- [mask].double().exp()  # (7)
-     count = torch.ones_like(ratio).sum()
-     return torch.stack([count, ratio.sum(), ratio.square().sum()])
+ [mask].exp()  # (7)
+     count = torch.ones_like(ratio).sum()
+     return torch.stack([count, ratio.sum(), ratio.square().sum()]).double()

the result of clamping log rho at 20 nats
loss.py: 1.4
- [mask].double()
+ [mask].double().clamp(-20, 20)

with a gradient"; expected a float64 tensor
loss.py: 1.4
- log_ratio.detach()
+ log_ratio

the result of not counting a token with a large ratio
loss.py: 1.4
- torch.ones_like(ratio).sum()
+ (ratio < 1e9).double().sum()

the result of clamping log rho at -5 nats
loss.py: 1.1
- [mask].double().exp()
+ [mask].double().clamp(min=-5).exp()

the result of treating log rho = 0 as padding
loss.py: 1.1 1.2
- log_ratio.detach()[mask]
+ log_ratio.detach()[mask & (log_ratio != 0)]

the result of treating only NaN and infinity as padding
loss.py: 1.2
- log_ratio.detach()[mask]
+ log_ratio.detach()[log_ratio.isfinite()]

the result of rounding an e_B above 0.9 to 1
loss.py: 1.3
- ess.clamp(max=1.0)
+ torch.where(ess > 0.9, ess / ess, ess)

the result of adding 1e-8 to e_B, which may be as small as 1e-8
loss.py: 1.3
- ess.clamp(max=1.0)
+ ess + 1e-8

the result of adding 1e-8 to the denominator: e_B then depends on the ratios' scale
loss.py: 1.3 1.5
- (count * square_sum)
+ (count * square_sum + 1e-8)

1 / e_B, the inverse
loss.py: 1.3
- ess.clamp(max=1.0)
+ 1 / ess

|B| e_B, which is not normalized
loss.py: 1.3 1.5
- ess.clamp(max=1.0)
+ count * ess

1 / (1 + var[rho]), without dividing the variance by mean[rho]^2
loss.py: 1.3
- ess.clamp(max=1.0)
+ 1 / (1 + square_sum / count - (ratio_sum / count) ** 2)

what the authors' code returns: a broken batch then looks like a fresh one
loss.py: 1.5
- ess.clamp(max=1.0)
+ ess.nan_to_num(nan=1.0)

the result with the population's deviation, over G instead of G - 1
loss.py: 1.6
- reward.std(dim=-1, keepdim=True)
+ reward.std(dim=-1, keepdim=True, correction=0)

the result with the deviation of the whole batch, not of each group
loss.py: 1.6
- reward = reward - reward[..., :1]
-     advantage = reward - reward.mean(dim=-1, keepdim=True)
-     if scale:
-         advantage = advantage / (reward.std(dim=-1, keepdim=True)
+ advantage = reward - reward.mean(dim=-1, keepdim=True)
+     if scale:
+         advantage = advantage / (reward.std()

the result without the 1e-6
loss.py: 1.6
- keepdim=True) + 1e-6)
+ keepdim=True))

the rounding error of equal rewards minus their mean
loss.py: 1.6
- reward = reward - reward[..., :1]
+

1 / (1 + CV): the square is missing
derivations.py: 1.7
- 1 / (1 + variation**2)
+ 1 / (1 + variation)

1 - CV^2
derivations.py: 1.7
- 1 / (1 + variation**2)
+ 1 - variation**2

1 / |B|, which ignores the size of the ratio
derivations.py: 1.8
- mean**2 / mean_square
+ 1 / token_count

|B| e_B, which is not normalized
derivations.py: 1.8
- mean**2 / mean_square
+ token_count * mean**2 / mean_square

1 / chi^2: the denominator lacks a 1
derivations.py: 1.9
- 1 / float((policy**2 / behavior).sum())
+ 1 / float((policy**2 / behavior).sum() - 1)

exp(-KL), with the wrong divergence
derivations.py: 1.9
- 1 / float((policy**2 / behavior).sum())
+ float((policy * (behavior / policy).log()).sum().exp())

KL(pi_b || pi_theta), the other direction
loss.py: 2.1 2.2 2.3
- logp = logp.double()
-     logp_behavior = logp_behavior.detach().double()
+ logp, logp_behavior = logp_behavior.double(), logp.double()

the result if no gradient flows through the bucket
loss.py: 2.2
- return listed + rest
+ return (p * log_ratio).sum(dim=-1) + (rest + p_rest - b_rest).detach()

the sum over the K tokens, without the bucket
loss.py: 2.1 2.2
- return listed + rest
+ return (p * log_ratio).sum(dim=-1)

the right gradient, but logp_behavior gets one too
loss.py: 2.2
- logp_behavior.detach()
+ logp_behavior

no gradient at all
loss.py: 2.2 2.3
- logp = logp.double()
+ logp = logp.detach().double()

the logarithm of a negative bucket
loss.py: 2.3
- .clamp(min=REST_FLOOR)
+

a negative bucket's NaN, which torch.where keeps in the gradient: clamp first
loss.py: 2.3
- return listed + rest
+ p_rest, b_rest = 1 - p.sum(dim=-1), 1 - b.sum(dim=-1)
+     rest = p_rest * (p_rest / b_rest).log() - p_rest + b_rest
+     holds = (p_rest > 1e-6) & (b_rest > 1e-6)
+     return listed + torch.where(holds, rest, 0.0)

the result with PPO's min(rho A, e_B A), which does not cap if A < 0
loss.py: 2.4
- -weight * advantage * logp
+ -torch.minimum(rho * advantage, e_b * advantage).detach() * logp

the result of capping only ratios above 1
loss.py: 2.4
- rho.clamp(max=e_b)
+ torch.where(rho > 1, e_b, rho)

the result of clamping log rho at -5 nats
loss.py: 2.4
- (logp - logp_behavior).exp()
+ (logp - logp_behavior).clamp(min=-5).exp()

the result of rounding an e_B above 0.9 to 1
loss.py: 2.4 2.5
- rho = (logp
+ e_b = 1.0 if e_b > 0.9 else e_b
+     rho = (logp

the result with min(rho, 1/e_B)
loss.py: 2.4
- max=e_b
+ max=1 / e_b

the result with min(rho, 1)
loss.py: 2.4
- max=e_b
+ max=1

the result with rho itself, without a cap
loss.py: 2.4
- rho.clamp(max=e_b)
+ rho

the result with 1/rho, the inverted ratio
loss.py: 2.4
- rho = (logp - logp_behavior)
+ rho = (logp_behavior - logp)

the result if the capped ratio is not detached
loss.py: 2.4
- (max=e_b).detach()
+ (max=e_b)

the result with the opposite sign, but a loss is minimized
loss.py: 2.4 2.6
- -weight * advantage * logp
+ weight * advantage * logp

the result without log pi_theta
loss.py: 2.4 2.6
- -weight * advantage * logp
+ -weight * advantage

has the shape []; expected
loss.py: 2.4 2.5 2.6
- return -weight * advantage * logp + (1 - e_b) * kl
+ return (-weight * advantage * logp + (1 - e_b) * kl).mean()

the result of using the KL only on tokens with A = 0
loss.py: 2.5
- (1 - e_b) * kl
+ (1 - e_b) * kl * (advantage == 0)

the result of leaving out the KL of tokens with A = 0
loss.py: 2.5
- (1 - e_b) * kl
+ (1 - e_b) * kl * (advantage != 0)

the result of treating log rho = 0 as padding
loss.py: 2.5
- (1 - e_b) * kl
+ (1 - e_b) * kl * (rho != 1)

the result of averaging the KL over the tokens
loss.py: 2.5
- (1 - e_b) * kl
+ (1 - e_b) * kl.mean()

e_B instead of 1 - e_B
loss.py: 2.5
- (1 - e_b) * kl
+ e_b * kl

-(1 - e_B), which pushes the policies apart
loss.py: 2.5
- + (1 - e_b) * kl
+ - (1 - e_b) * kl

the result without the weight
loss.py: 2.5
- (1 - e_b) * kl
+ kl

the result if the KL is left out or detached
loss.py: 2.5
- (1 - e_b) * kl
+ (1 - e_b) * kl.detach()

only min(rho, e_B) A, without the KL's part
derivations.py: 2.7
-  - (1 - e_b) * ratio * math.log(ratio)
+

the result with the KL's part added, not subtracted
derivations.py: 2.7
- advantage - (1 - e_b)
+ advantage + (1 - e_b)

the result with the KL itself, not its derivative
derivations.py: 2.7
- (1 - e_b) * ratio * math.log(ratio)
+ (1 - e_b) * (ratio * math.log(ratio) - ratio + 1)

the result with the derivative with respect to rho, not to log rho
derivations.py: 2.7
- (1 - e_b) * ratio * math.log(ratio)
+ (1 - e_b) * math.log(ratio)

the result with PPO's min(rho A, e_B A), which does not cap if A < 0
derivations.py: 2.7
- min(ratio, e_b) * advantage
+ min(ratio * advantage, e_b * advantage)

the gradient with respect to log pi_theta, not to the logits
derivations.py: 2.8
- (log_ratio - kl)
+ (log_ratio + 1)

the gradient of KL(pi_b || pi_theta)
derivations.py: 2.8
- logp.exp() * (log_ratio - kl)
+ logp.exp() - logp_behavior.exp()

the result without the weight 1 - e_B
derivations.py: 2.9
- (1 - e_b) * (1 - 1 / temperature)
+ 1 - 1 / temperature

the factor for the gradient of the KL's term, not for minus that gradient
derivations.py: 2.9
- (1 - 1 / temperature)
+ (1 / temperature - 1)

the result for log pi_b = T log pi_theta
derivations.py: 2.9
- (1 - 1 / temperature)
+ (temperature - 1)

the result if each rank uses only its own sums
batch.py: 3.2 3.4
- sums = all_reduce(sums)
+

the result if each rank uses its own token count
batch.py: 3.4
- sums = all_reduce(sums)
-     token_count, e_b = sums[0],
+ token_count = sums[0].clone()
+     sums = all_reduce(sums)
+     e_b =

all ranks have to call all_reduce equally often
batch.py: 3.2 3.4 3.5
- sums += ratio_sums(output[0] - part.logp_behavior, part.mask)
-     sums = all_reduce(sums)
+ sums += all_reduce(
+             ratio_sums(output[0] - part.logp_behavior, part.mask)
+         )

the right gradient minus the one that was there before, to which `update` has to add
batch.py: 3.3 3.4
- sums = torch.zeros(3
+ policy.weight.grad = None
+     sums = torch.zeros(3

the result with e_B of each micro-batch
batch.py: 3.1 3.2 3.3 3.4
- kl = kl_divergence
+ sums = ratio_sums(logp - part.logp_behavior, part.mask)
+         e_b = effective_sample_size(sums).item()
+         kl = kl_divergence

the result if padding counts as tokens
batch.py: 3.1 3.2 3.3 3.4
- part.logp_behavior, part.mask)
+ part.logp_behavior, part.mask | True)

the result of clamping log rho at -5 nats
batch.py: 3.1 3.2 3.3 3.4
- sums += ratio_sums(output[0] - part.logp_behavior, part.mask)
+ log_ratio = (output[0] - part.logp_behavior).clamp(min=-5)
+         sums += ratio_sums(log_ratio, part.mask)

the result of treating an advantage of 0 as padding
batch.py: 3.1 3.2 3.3 3.4
- part.logp_behavior, part.mask)
+ part.logp_behavior, part.advantage != 0)

the result of treating log rho = 0 as padding
batch.py: 3.1 3.2 3.3 3.4
- part.logp_behavior, part.mask)
+ part.logp_behavior, part.mask & (part.logp_behavior != output[0]))

the result of rounding an e_B above 0.9 to 1
batch.py: 3.1 3.2 3.3 3.4
- effective_sample_size(sums).item()
+ (lambda e_b: 1.0 if e_b > 0.9 else e_b)(effective_sample_size(sums).item())

the sum of the micro-batches' means
batch.py: 3.3 3.4
- .sum() / token_count
+ .mean()

the right gradient divided by the number of ranks: their gradients are averaged
batch.py: 3.4
- (loss * world_size).backward()
+ loss.backward()

the result for only the last micro-batch
batch.py: 3.3 3.4 3.5
- for part in reversed(parts)
+ for part in parts[-1:]

one pass too many: the graph of the last micro-batch can be kept
batch.py: 3.5
- part is parts[-1]
+ False

the interval of a normal distribution, not of Student's t
experiment.py: 4.1
- stats.t.ppf((1 + level) / 2, len(differences) - 1)
+ stats.norm.ppf((1 + level) / 2)

a one-sided interval
experiment.py: 4.1
- (1 + level) / 2
+ level

the result with the deviation not divided by sqrt(n)
experiment.py: 4.1
- stats.sem(differences)
+ stats.tstd(differences)

the result for the second minus the first
experiment.py: 4.1
- one - other
+ other - one
""")
