"""The items of the assignment: what a student's code is asked, and what is right.

An item calls one of the student's functions in another process (runner.py), with inputs
that are drawn anew in each run. The value, or its gradient with respect to the inputs
that require a gradient, is compared with that of the reference for the same inputs. If
a known mistake (mistakes.py) explains all answers, the message names it.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assignment.mistakes import MISTAKES, Mistake, functions_of
from assignment.runner import answer_of
from assignment.starter.toy import FEATURES, VOCABULARY, Part, random_ranks, run_ranks

F64 = torch.float64
FLOAT64 = "float64 tensor"  # the kind of a value; see runner.py
# The results of toy.run_ranks, in order.
RESULTS = ("e_B", "gradient", "passes")

# The inputs in words, with which a message begins, and the inputs themselves.
Case = tuple[str, list[Any]]
Cases = Iterator[Case]


class Item(NamedTuple):
    """A row of the handout's tables, for which points are given."""

    name: str  # such as "2.4"
    points: int
    title: str
    file: str  # the student's file
    function: str  # in that file
    draw: Callable[["Draw"], Cases]
    options: list[str]  # how answers are compared; see TABLE


class Draw:
    """Draws random inputs, which are the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        unit = torch.rand(shape, generator=self.generator, dtype=F64)
        return low + (high - low) * unit

    def number(self, low: float, high: float) -> float:
        return self.uniform(low, high).item()

    def normal(self, spread: float, *shape: int) -> Tensor:
        return spread * torch.randn(shape, generator=self.generator, dtype=F64)

    def integer(self, low: int, high: int) -> int:
        """Draw from low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def policies(self, *shape: int, spread: float = 1.0) -> tuple[Tensor, Tensor]:
        """Draw log pi_theta and log pi_b; the last dimension is the vocabulary."""
        behavior = self.normal(spread, *shape)
        policy = behavior + self.normal(spread, *shape)
        return policy.log_softmax(dim=-1), behavior.log_softmax(dim=-1)

    def ratios(self, e_b: float) -> Tensor:
        """Draw the log rho of six ratios.

        They are e^-25, e^-8, one below e_B, one between e_B and 1, 1, and one above 1.
        """
        below, between = e_b * self.number(0.1, 0.5), self.number(0.3, 0.7)
        between = e_b + between * (1 - e_b)
        above = self.number(0.4, 1.8)
        return torch.tensor(
            [-25, -8, math.log(below), math.log(between), 0, above], dtype=F64
        )


# Intervals of e_B. Its lowest value is one over the number of tokens.
E_B = ((1e-8, 1e-6), (0.2, 0.4), (0.6, 0.9), (0.91, 0.99))


def listed(values: Any) -> str:
    """Return a few numbers as text, each with up to four significant digits."""
    numbers = torch.as_tensor(values, dtype=F64).flatten().tolist()
    return ", ".join(f"{number:.4g}" for number in numbers)


def legible(text: str) -> str:
    """Return the text as one line that any terminal can show."""
    return "".join(c if c.isprintable() else " " for c in text)[:500]


def quoted(text: Any) -> str:
    """Return text that a student's code chose, marked as such by double quotes."""
    shown = legible(f"{text}"[:300]).replace('"', "'")
    return f'"{shown}"'


# The comparison


def what_is_wrong(item: Item, cases: list[Case], answers: list[dict]) -> str:
    """Return the first thing wrong with the answers, as a sentence; "" if nothing is.

    The answers come from the student's process and may be anything.
    """
    found = []
    for (sentence, arguments), answer in zip(cases, answers, strict=False):
        if "error" in answer:
            error = f"{answer['error']}: {answer.get('message')}"
            line = f" ({answer['line']})" if answer.get("line") else ""
            return f"{item.function} raised {quoted(error + line)}"
        if "wrong" in answer:
            return f"{item.function} does not work: {quoted(answer['wrong'])}"
        try:
            found.append(found_in(item, arguments, answer))
            kind = answer["value"]["kind"] if "float64" in item.options else FLOAT64
        except Exception:  # The answer may have any form.
            shown = quoted(f"{answer.get('value')}"[:60])
            return f"{sentence}: {item.function} returned {shown}; expected numbers"
        if kind != FLOAT64:
            shown = quoted(kind)
            return f"{sentence}: {item.function} gave a {shown}; expected a {FLOAT64}"
    if len(found) < len(cases):
        return f"{item.function} gave no answer"
    noun = f"your {item.function}"
    for result in RESULTS:
        if result in item.options:
            noun = f"the {result} of {noun}"
    for (sentence, arguments), values in zip(cases, found, strict=True):
        right = right_values(item, arguments)
        # The largest error that passes. Known mistakes move a value by 1% or more.
        tolerance = 1e-4 if "logits" in item.options else 1e-5
        difference = first_difference(item, values, right, tolerance)
        if difference:
            return f"{sentence}: {noun} {difference}{known_mistake(item, cases, found)}"
    return ""


def found_in(item: Item, arguments: list[Any], answer: dict) -> list[Tensor]:
    """Return the tensors in an answer that the item compares."""
    value = answer["value"]
    if item.function == "update":
        return [as_tensor(value[RESULTS.index(item.options[0])])]
    gradients = [as_tensor(gradient) for gradient in answer["gradients"]]
    if "logits" in item.options:
        # With respect to log pi_theta, the gradients of two right functions may
        # differ by a multiple of pi_theta. With respect to the logits, they are equal.
        (gradient,) = gradients
        mean = gradient.sum(dim=-1, keepdim=True)
        gradients = [gradient - arguments[0].detach().double().exp() * mean]
        return [as_tensor(value), *gradients]
    return gradients if "gradient" in item.options else [as_tensor(value)]


def as_tensor(value: Any) -> Tensor:
    """Return the numbers of an answer. Raises ValueError or TypeError for others."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, dict):
        value = value["tensor"]
    if isinstance(value, list) and any(isinstance(x, dict | Tensor) for x in value):
        return torch.stack([as_tensor(each) for each in value])
    return torch.tensor(value, dtype=F64)


def right_values(
    item: Item, arguments: list[Any], mistake: Mistake | None = None
) -> list[Tensor]:
    """Return what the item compares for the reference, or for a mistake in it."""
    function = functions_of(item.file, mistake)[item.function]
    if item.function == "update":
        answer = {"value": run_ranks(function, *arguments), "gradients": []}
    else:
        answer = answer_of(function, arguments)
    return found_in(item, arguments, answer)


def first_difference(
    item: Item, found: list[Tensor], right: list[Tensor], tolerance: float
) -> str:
    """Return the end of a sentence that says where two lists differ, or ""."""
    if len(found) != len(right):
        return f"has {len(found)} gradients; expected {len(right)}"
    for index, (one, other) in enumerate(zip(found, right, strict=True)):
        if one.shape != other.shape:
            return f"has the shape {list(one.shape)}; expected {list(other.shape)}"
        size = other.nan_to_num().abs()
        size = size if "each" in item.options else size.max()
        is_close = (one - other).abs() <= tolerance * size + 1e-12
        is_close |= (one == other) | (one.isnan() & other.isnan())
        if not is_close.all():
            entry = tuple((~is_close).nonzero()[0].tolist())
            where = f"at {list(entry)} " if entry else ""
            if "logits" in item.options and index:
                where = f"in its gradient with respect to the logits {where}"
            return f"{where}is {listed(one[entry])}; expected {listed(other[entry])}"
    return ""


def known_mistake(item: Item, cases: list[Case], found: list[list[Tensor]]) -> str:
    """Return a sentence on the first known mistake that explains all answers."""
    for mistake in MISTAKES:
        if item.name in mistake.items.split():
            try:
                wrong = [right_values(item, each, mistake) for _, each in cases]
            except RuntimeError:  # A mistake may raise an error.
                continue
            pairs = zip(found, wrong, strict=True)
            if not any(first_difference(item, *pair, 1e-4) for pair in pairs):
                return f". That is {mistake.said}"
    return ""


# Part 1: e_B


def stale_batches(draw: Draw) -> Cases:
    for spread, mean in ((0.3, 0), (1.0, 0), (1.0, -12)):
        log_ratio = draw.normal(spread, 2, 4) + mean
        if mean == 0:
            log_ratio[0, 0], log_ratio[1, 1] = 0.0, -8.0
        mask = torch.ones(log_ratio.shape, dtype=torch.bool)
        yield f"for the log rho {listed(log_ratio)}", [log_ratio, mask]


def padded_batches(draw: Draw) -> Cases:
    for padding in (0.0, draw.number(0.5, 2), math.nan, math.inf):
        mask = torch.arange(6) < torch.tensor([[6], [1], [draw.integer(2, 5)]])
        log_ratio = draw.normal(1.0, 3, 6).masked_fill(~mask, padding)
        log_ratio[0, 0] = 0.0
        lengths = listed(mask.sum(dim=1))
        sentence = f"for responses of {lengths} tokens, with {padding} in the padding"
        yield sentence, [log_ratio, mask]


def far_batches(draw: Draw) -> Cases:
    log_ratio = draw.normal(0.1, 2, 4)
    log_ratio[1, 2] = draw.number(60, 80)
    sentence = f"for a log rho of {listed(log_ratio[1, 2])} in float32"
    mask = torch.ones(2, 4, dtype=torch.bool)
    yield sentence, [log_ratio.float().requires_grad_(), mask]


def sums_of_batches(draw: Draw) -> Cases:
    outlier = torch.tensor([draw.number(10, 100)], dtype=F64)
    for copies, ratio in (
        (1, draw.uniform(0.2, 4, 9)),
        (1, draw.uniform(0.8, 1.25, 9)),  # e_B is above 0.9
        (1, draw.normal(1.0, 50).exp()),
        (1, 3 * torch.ones(7, dtype=F64)),
        (1e8, outlier),  # one of 1e8 tokens; e_B is 1e-8, its lowest value
        (1, 1e-6 * draw.uniform(0.2, 4, 9)),
    ):
        ratio = draw.number(2, 9) * ratio
        total, squares = ratio.sum().item(), ratio.square().sum().item()
        sums = torch.tensor([copies * len(ratio), total, squares], dtype=F64)
        yield f"for the sums {listed(sums)}", [sums]


def unknown_sums(draw: Draw) -> Cases:
    count = draw.integer(5, 9)
    # Only the first has an e_B. The square of 1e173 is too large for float64.
    pairs = [(count, count), (0, 0), (math.nan, math.nan), (1e173, math.inf)]
    for total, squares in pairs:
        sums = torch.tensor([count if total else 0, total, squares], dtype=F64)
        yield f"for the sums {listed(sums)}", [sums]


def rewards(draw: Draw) -> Cases:
    reward = draw.uniform(-3, 5, 3, 4)
    # So close to each other that the 1e-6 added to the deviation matters.
    near = 0.5 + 1e-5 * draw.uniform(0, 1, 1, 4)
    # The float32 mean of equal numbers often differs from them in the last digit.
    equal = draw.uniform(0.1, 1, 32, 1).float().expand(32, 7).clone()
    equal[0, 0] = 0.0
    digits = ", ".join(f"{value:.8f}" for value in near.flatten().tolist())
    yield f"for the rewards {listed(reward)}", [reward]
    yield f"with scale=False, for the rewards {listed(reward)}", [reward, False]
    yield f"for the rewards {digits}", [near]
    yield "for float32 groups of which all but one have equal rewards", [equal]


def variations(draw: Draw) -> Cases:
    for low, high in ((0.1, 0.3), (0.5, 1.5), (2, 9), (1e4, 1e5)):
        value = draw.number(low, high)
        yield f"at a CV of {value:.4g}", [value]


def outliers(draw: Draw) -> Cases:
    for most, low, high in (
        (9, 0.1, 0.5),
        (50, 3, 30),
        (500, 30, 300),
        (9**9, 1e9, 1e10),
    ):
        tokens, ratio = draw.integer(most // 2, most), draw.number(low, high)
        sentence = f"for {tokens} tokens, one of ratio {ratio:.4g}, the others of 1"
        yield sentence, [tokens, ratio]


def two_policies(draw: Draw) -> Cases:
    for sentence, logarithms in policies_in_nats(draw):
        yield sentence, [each.exp() for each in logarithms]


def policies_in_nats(draw: Draw) -> Cases:
    for spread in (0.1, 1.0, 5.0):
        logp, logp_behavior = draw.policies(6, spread=spread)
        sentence = f"for log pi_theta = {listed(logp)} and log pi_b = "
        yield sentence + listed(logp_behavior), [logp, logp_behavior]


# Part 2: the objective, its KL and its gradient


def lists_of_tokens(draw: Draw) -> Cases:
    for count in (1, 4, 7):
        logp, logp_behavior = [each[..., :count] for each in draw.policies(2, 3, 9)]
        # Log ratios near 8 and -8; the bucket holds what these tokens lose.
        logp_behavior[0, 0, 0] -= 8
        logp[0, 1, 0] -= 8
        arguments = [logp.requires_grad_(), logp_behavior.requires_grad_()]
        yield f"over {count} of 9 tokens and a bucket", arguments
    small_rest = torch.tensor([[0.6, 0.3995], [0.5, 0.4999]], dtype=F64).log()
    arguments = [each.clone().requires_grad_() for each in small_rest]
    yield "over two tokens and a bucket of 5e-4 (pi_theta) and 1e-4 (pi_b)", arguments


def rounded_lists(draw: Draw) -> Cases:
    sentence = "with all 9 tokens in float32, so the bucket is a rounding error"
    logp, logp_behavior = [each.float() for each in draw.policies(32, 9)]
    yield sentence, [logp.requires_grad_(), logp_behavior]


def cap_batches(draw: Draw) -> Cases:
    return p3o_batches(draw, 0)


def kl_batches(draw: Draw) -> Cases:
    return p3o_batches(draw, 3)


def p3o_batches(draw: Draw, argument: int) -> Cases:
    """Draw arguments of p3o, of which one (by its index) requires a gradient."""
    for interval in E_B:
        e_b = draw.number(*interval)
        log_ratio = draw.ratios(e_b)
        logp_behavior = draw.uniform(-3, -0.5, 3, 6) - log_ratio.clamp(min=0)
        # Every ratio occurs with a positive, a negative and no advantage.
        advantage = [[draw.number(0.5, 2)], [-draw.number(2, 5)], [0.0]]
        advantage = torch.tensor(advantage, dtype=F64).expand(3, 6)
        kl = draw.uniform(0.1, 2, 3, 6) * torch.tensor([1, 1, 1, 1, 1, 12])
        tensors = [logp_behavior + log_ratio, logp_behavior, advantage, kl]
        tensors[argument].requires_grad_()
        sentence = (
            f"for e_B = {e_b:.4g}, log rho = {listed(log_ratio)} in each row and "
            f"A = {listed(advantage[:, 0])} by row"
        )
        yield sentence, [*tensors, e_b]


def fresh_batch(draw: Draw) -> Cases:
    logp, advantage = draw.uniform(-3, -0.5, 3, 4), draw.uniform(-2, 2, 3, 4)
    nothing = torch.zeros(3, 4, dtype=F64)
    yield "for rho = 1 and e_B = 1", [logp, logp, advantage, nothing, 1.0]


def tokens_to_weigh(draw: Draw) -> Cases:
    for interval in E_B:
        e_b = draw.number(*interval)
        for ratio in draw.ratios(e_b).exp().tolist():
            for advantage in (draw.number(0.5, 2), -draw.number(2, 5), 0.0):
                sentence = f"at rho = {ratio:.4g}, A = {advantage:.4g}, e_B = {e_b:.4g}"
                yield sentence, [ratio, advantage, e_b]


def temperatures(draw: Draw) -> Cases:
    for temperature in (draw.number(0.1, 0.8), 1.0, draw.number(1.3, 9)):
        for interval in E_B:
            e_b = draw.number(*interval)
            sentence = f"at T = {temperature:.4g}, e_B = {e_b:.4g}"
            yield sentence, [temperature, e_b]


# Part 3: the trainer's batch


def one_rank(draw: Draw) -> Cases:
    return batches(draw, [[2, 4]], [[3, 2, 5]])


def several_ranks(draw: Draw) -> Cases:
    return batches(draw, [[3], [4]], [[2], [3, 4], [2, 5, 1]])


def batches(draw: Draw, *sizes: list[list[int]]) -> Cases:
    """Draw the arguments of toy.run_ranks after `update`.

    sizes has, for each rank, the number of responses in each of its micro-batches.
    """
    for rank_sizes, staleness in zip(sizes, (0.02, 0.15), strict=True):
        weight = draw.normal(1.0, FEATURES, VOCABULARY)
        seed = draw.integer(0, 2**40)
        ranks = random_ranks(rank_sizes, weight, seed, staleness)
        add_unlikely_token(ranks[-1][-1], weight)
        # Plain tuples, because the student's process cannot import this module's class.
        plain = [[tuple(part) for part in parts] for parts in ranks]
        yield f"for the micro-batches {rank_sizes}", [weight, plain]


def add_unlikely_token(part: Part, weight: Tensor) -> None:
    """Give the last response a first token with a log rho of about -8."""
    logits = part.features[-1, 0] @ weight
    # Scaled so that the least likely token has a probability of about e^-12.
    part.features[-1, 0] *= 12 / (logits.max() - logits.min())
    token = logits.argmin()
    logits = part.features[-1, 0] @ weight
    logits[token] += 8
    part.tokens[-1, 0] = token
    part.top_logp_behavior[-1, 0] = logits.log_softmax(dim=-1)
    part.logp_behavior[-1, 0] = part.top_logp_behavior[-1, 0, token]


# Part 4: the experiment


def paired_values(draw: Draw) -> Cases:
    for seeds, level in ((2, 0.95), (draw.integer(4, 9), 0.8), (40, 0.95)):
        first, second = draw.uniform(0, 1, 2, seeds).tolist()
        sentence = f"for {seeds} seeds at the level {level}"
        yield sentence, [first, second, level]


def nothing(draw: Draw) -> Cases:
    """Draw no inputs, for the item that runs no code."""
    yield from ()


# A row has the item's name, its points, the student's file and function, the function
# that draws the inputs, options and, after the colon, the item's title. Without options
# the values are compared, and errors are relative to the largest right value. The
# options are:
#   each      errors are relative to each right value
#   float64   the value has to be a float64 tensor without a gradient
#   gradient  only the gradients are compared
#   logits    the gradient with respect to the logits is compared, too
#   e_B, gradient, passes (of `update`): this result of toy.run_ranks is compared
TABLE = """
1.1 4 loss.py ratio_sums stale_batches each: the sums of the ratios
1.2 3 loss.py ratio_sums padded_batches: padding does not count
1.3 4 loss.py effective_sample_size sums_of_batches: e_B
1.4 3 loss.py ratio_sums far_batches each float64: a log rho of 80 nats in float32
1.5 2 loss.py effective_sample_size unknown_sums: NaN if there is no e_B
1.6 3 loss.py group_advantage rewards: the advantage
1.7 2 derivations.py ess_of_variation variations: e_B and the variation
1.8 2 derivations.py ess_with_one_outlier outliers: e_B with one outlier
1.9 2 derivations.py ess_of_policies two_policies: e_B and the divergence
2.1 5 loss.py kl_divergence lists_of_tokens: the KL
2.2 5 loss.py kl_divergence lists_of_tokens gradient: the gradient of the KL
2.3 3 loss.py kl_divergence rounded_lists logits: the KL of rounded probabilities
2.4 6 loss.py p3o cap_batches each gradient: the cap
2.5 4 loss.py p3o kl_batches each gradient: the weight of the KL
2.6 3 loss.py p3o fresh_batch: a fresh batch
2.7 3 derivations.py token_weight tokens_to_weigh: the weight of a token
2.8 3 derivations.py kl_gradient policies_in_nats: the KL's logit gradient
2.9 3 derivations.py entropy_bonus temperatures: the KL as an entropy bonus
3.1 4 batch.py update one_rank e_B: e_B over micro-batches
3.2 5 batch.py update several_ranks e_B: e_B over ranks
3.3 4 batch.py update one_rank gradient: the gradient over micro-batches
3.4 5 batch.py update several_ranks gradient: the gradient over ranks
3.5 2 batch.py update several_ranks passes: 2 n - 1 passes
4.1 2 experiment.py paired_interval paired_values: the interval of a paired difference
4.2 3 results.json - nothing: the form of results.json
"""


def read_item(row: str) -> Item:
    words, title = row.split(": ")
    name, points, file, function, draw, *options = words.split()
    return Item(name, int(points), title, file, function, globals()[draw], options)


ITEMS = [read_item(row) for row in TABLE.strip().splitlines()]
