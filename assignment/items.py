"""The items of the assignment: what is asked of a student's code, and what is right.

An item calls one function of the student's with inputs that are drawn anew in each run,
in another process (runner.py), and compares what comes back with what the function
of the reference gives for the same inputs: its value, or its gradient to the inputs
that ask for one. Where a known mistake (mistakes.py) gives all that was found, the
sentence on what is wrong names it.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from assignment.mistakes import MISTAKES, Mistake, functions_of
from assignment.runner import answer_of
from assignment.starter.toy import FEATURES, VOCABULARY, random_ranks

F64 = torch.float64
# What toy.run_ranks returns, in this order.
RESULTS = ("e_B", "gradient", "passes")

# The beginning of a sentence on the inputs, and the inputs.
Case = tuple[str, list[Any]]
Cases = Iterator[Case]


class Item(NamedTuple):
    """What points are given for."""

    name: str  # "2.4"
    points: int
    title: str
    file: str  # of the student
    function: str  # in it
    draw: Callable[["Draw"], Cases]
    of_gradient: bool = False  # compare the gradients, not the value
    to_logits: bool = False  # compare the value, and the gradient to logits
    kind: str = ""  # that the value has to have, as "float64 tensor"
    result: str = ""  # of toy.run_ranks, which runs `update`: one of RESULTS
    # Relative to the largest right value. Known mistakes move it by 1% at least.
    tolerance: float = 1e-5
    each: bool = False  # relative to each right value, not to the largest


class Draw:
    """Random inputs: the same ones for the same seed."""

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
        """From low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def policies(self, *shape: int) -> tuple[Tensor, Tensor]:
        """log pi_theta and log pi_b, of which the last dimension is the vocabulary."""
        behavior = self.normal(1.0, *shape)
        policy = behavior + self.normal(1.0, *shape)
        return policy.log_softmax(dim=-1), behavior.log_softmax(dim=-1)


def listed(values: Any) -> str:
    """A few numbers, as a student would write them."""
    numbers = torch.as_tensor(values, dtype=F64).flatten().tolist()
    return ", ".join(f"{number:.4g}" for number in numbers)


# The comparison


def what_is_wrong(item: Item, cases: list[Case], answers: list[dict]) -> str:
    """The first wrong answer to the cases, in a sentence; empty if all are right.

    The answers are of the student's process, and may be anything.
    """
    found = []
    for (sentence, arguments), answer in zip(cases, answers, strict=False):
        if "error" in answer:
            return f"{item.function} raised {answer['error']}"
        try:
            found.append(found_in(item, arguments, answer))
            kind = answer["value"]["kind"] if item.kind else ""
        except Exception:  # What came back may have any form.
            shown = f"{answer.get('value')}"[:60]
            return f"{sentence} {item.function} returned {shown}; expected numbers"
        if kind != item.kind:
            return f"{sentence} {item.function} is a {kind}; expected a {item.kind}"
    if len(found) < len(cases):
        return f"{item.function} gave no answer"
    noun = f"your {item.function}"
    if item.of_gradient:
        noun = f"the gradient of {noun}"
    if item.result:
        noun = f"the {item.result} of {noun}"
    for (sentence, arguments), of_case in zip(cases, found, strict=True):
        right = right_of(item, arguments)
        difference = first_difference(item, of_case, right, item.tolerance)
        if difference:
            return f"{sentence} {noun} {difference}{known_mistake(item, cases, found)}"
    return ""


def found_in(item: Item, arguments: list[Any], answer: dict) -> list[Tensor]:
    """What an item looks at in an answer."""
    value = answer["value"]
    if item.result:
        value = value[RESULTS.index(item.result)]
    gradients = [as_tensor(gradient) for gradient in answer["gradients"]]
    if item.to_logits:
        # Right functions may differ in the gradient to log pi_theta, by a multiple of
        # pi_theta. To the logits this is nothing.
        (gradient,) = gradients
        mean = gradient.sum(dim=-1, keepdim=True)
        gradients = [gradient - arguments[0].detach().double().exp() * mean]
        return [as_tensor(value), *gradients]
    return gradients if item.of_gradient else [as_tensor(value)]


def as_tensor(value: Any) -> Tensor:
    """Numbers that came back as JSON. Raises ValueError or TypeError for others."""
    if isinstance(value, dict):
        value = value["tensor"]
    if isinstance(value, list) and any(isinstance(each, dict) for each in value):
        return torch.stack([as_tensor(each) for each in value])
    return torch.tensor(value, dtype=F64)


def right_of(
    item: Item, arguments: list[Any], mistake: Mistake | None = None
) -> list[Tensor]:
    """What an item looks at in the reference's answer, or in that of a mistake."""
    function = functions_of(item.file, mistake)[item.function]
    return found_in(item, arguments, answer_of(item.function, function, arguments))


def first_difference(
    item: Item, found: list[Tensor], right: list[Tensor], tolerance: float
) -> str:
    """Where two lists of tensors differ, in the end of a sentence; empty if nowhere."""
    if len(found) != len(right):
        return f"has {len(found)} gradients; expected {len(right)}"
    for place, (one, other) in enumerate(zip(found, right, strict=True)):
        if one.shape != other.shape:
            return f"has the shape {list(one.shape)}; expected {list(other.shape)}"
        size = other.nan_to_num().abs()
        size = size if item.each else size.max()
        is_close = (one - other).abs() <= tolerance * size + 1e-12
        is_close |= (one == other) | (one.isnan() & other.isnan())
        if not is_close.all():
            entry = tuple((~is_close).nonzero()[0].tolist())
            where = f"at {list(entry)} " if entry else ""
            if item.to_logits and place:
                where = f"in its gradient to the logits {where}"
            return f"{where}is {listed(one[entry])}; expected {listed(other[entry])}"
    return ""


def known_mistake(item: Item, cases: list[Case], found: list[list[Tensor]]) -> str:
    """A sentence on the first mistake that gives all that was found, if one does."""
    for mistake in MISTAKES:
        if mistake.file == item.file and item.name in mistake.items.split():
            try:
                of_mistake = [right_of(item, each, mistake) for _, each in cases]
            except RuntimeError:  # A mistake may end in an error.
                continue
            pairs = zip(found, of_mistake, strict=True)
            if not any(first_difference(item, *pair, 1e-4) for pair in pairs):
                return f". That is {mistake.said}"
    return ""


# Part 1: e_B


def stale_batches(draw: Draw) -> Cases:
    for log_ratio in (draw.normal(0.3, 1, 3), draw.normal(1.0, 2, 4)):
        mask = torch.ones(log_ratio.shape, dtype=torch.bool)
        yield f"for the log rho {listed(log_ratio)}", [log_ratio, mask]


def padded_batches(draw: Draw) -> Cases:
    for padding in (0.0, math.nan, math.inf):
        mask = torch.arange(6) < torch.tensor([[6], [1], [draw.integer(2, 5)]])
        log_ratio = draw.normal(1.0, 3, 6).masked_fill(~mask, padding)
        lengths = listed(mask.sum(dim=1))
        sentence = f"for responses of {lengths} tokens, with {padding} in the padding,"
        yield sentence, [log_ratio, mask]


def far_batches(draw: Draw) -> Cases:
    log_ratio = draw.normal(0.1, 2, 4)
    log_ratio[1, 2] = draw.number(60, 80)
    sentence = f"for a log rho of {listed(log_ratio[1, 2])} in float32"
    mask = torch.ones(2, 4, dtype=torch.bool)
    yield sentence, [log_ratio.float().requires_grad_(), mask]


def sums_of_batches(draw: Draw) -> Cases:
    for ratio in (
        draw.uniform(0.2, 4, 9),
        draw.normal(1.0, 50).exp(),
        3 * torch.ones(7, dtype=F64),
    ):
        ratio = draw.number(2, 9) * ratio
        total, squares = ratio.sum().item(), ratio.square().sum().item()
        sums = torch.tensor([len(ratio), total, squares], dtype=F64)
        yield f"for the sums {listed(sums)}", [sums]


def unknown_sums(draw: Draw) -> Cases:
    count = draw.integer(5, 9)
    # The first has an e_B. The square of 1e173 has no place in float64.
    of_ratios = [(count, count), (0, 0), (math.nan, math.nan), (1e173, math.inf)]
    for total, squares in of_ratios:
        sums = torch.tensor([count if total else 0, total, squares], dtype=F64)
        yield f"for the sums {listed(sums)}", [sums]


def rewards(draw: Draw) -> Cases:
    reward = draw.uniform(0, 1, 3, 4)
    # So near to each other that the 1e-6 of the deviation shows.
    near = 0.5 + 1e-5 * draw.uniform(0, 1, 1, 4)
    # The mean of equal numbers in float32 often differs from them in the last digit.
    equal = draw.uniform(0.1, 1, 32, 1).float().expand(32, 7).clone()
    equal[0, 0] = 0.0
    digits = ", ".join(f"{value:.8f}" for value in near.flatten().tolist())
    yield f"for the rewards {listed(reward)}", [reward]
    yield f"with scale=False, for the rewards {listed(reward)}", [reward, False]
    yield f"for the rewards {digits}", [near]
    yield "for groups of equal rewards but one, in float32,", [equal]


def variations(draw: Draw) -> Cases:
    for _ in range(3):
        value = draw.number(0.1, 3)
        yield f"at a CV of {value:.4g}", [value]


def outliers(draw: Draw) -> Cases:
    for _ in range(3):
        tokens, ratio = draw.integer(5, 500), draw.number(3, 300)
        sentence = f"for {tokens} tokens, one of ratio {ratio:.4g}, the others of 1,"
        yield sentence, [tokens, ratio]


def two_policies(draw: Draw) -> Cases:
    policy, behavior = [each.exp() for each in draw.policies(6)]
    sentence = f"for pi_theta = {listed(policy)} and pi_b = {listed(behavior)}"
    yield sentence, [policy, behavior]


PART_1 = [
    Item(
        "1.1",
        4,
        "the sums of the ratios",
        "loss.py",
        "ratio_sums",
        stale_batches,
    ),
    Item(
        "1.2",
        3,
        "padding is no token",
        "loss.py",
        "ratio_sums",
        padded_batches,
    ),
    Item("1.3", 4, "e_B", "loss.py", "effective_sample_size", sums_of_batches),
    Item(
        "1.4",
        3,
        "log rho of 80 nats in float32, and no gradient",
        "loss.py",
        "ratio_sums",
        far_batches,
        kind="float64 tensor",
        each=True,
    ),
    Item(
        "1.5",
        2,
        "no e_B where there is none",
        "loss.py",
        "effective_sample_size",
        unknown_sums,
    ),
    Item("1.6", 3, "the advantage", "loss.py", "group_advantage", rewards),
    Item(
        "1.7",
        2,
        "e_B and the variation",
        "derivations.py",
        "ess_of_variation",
        variations,
    ),
    Item(
        "1.8",
        2,
        "e_B with one outlier",
        "derivations.py",
        "ess_with_one_outlier",
        outliers,
    ),
    Item(
        "1.9",
        2,
        "e_B and the divergence",
        "derivations.py",
        "ess_of_policies",
        two_policies,
    ),
]


# Part 2: the objective, its KL and its gradient


def lists_of_tokens(draw: Draw) -> Cases:
    for count in (1, 4, 7):
        logp, logp_behavior = [each[..., :count] for each in draw.policies(2, 3, 9)]
        arguments = [logp.requires_grad_(), logp_behavior.requires_grad_()]
        yield f"over {count} of 9 tokens and the rest,", arguments
    small_rest = torch.tensor([[0.6, 0.3995], [0.5, 0.4999]], dtype=F64).log()
    arguments = [each.clone().requires_grad_() for each in small_rest]
    yield "over two tokens and a rest of 5e-4 and 1e-4,", arguments


def rounded_lists(draw: Draw) -> Cases:
    sentence = (
        "with all 9 tokens in float32, where the rest is as often below 0 as above,"
    )
    logp, logp_behavior = [each.float() for each in draw.policies(32, 9)]
    yield sentence, [logp.requires_grad_(), logp_behavior]


def tokens_of_a_batch(draw: Draw, of_kl: bool) -> Cases:
    """Arguments of p3o of which A or the KL is 0, and the other is not."""
    for e_b in (draw.number(0.2, 0.4), draw.number(0.6, 0.9)):
        # Ratios far below and far above e_B.
        ratio = torch.stack([draw.uniform(0.02, 0.15, 2), draw.uniform(1.5, 6, 2)])
        logp_behavior = draw.uniform(-3, -0.5, 2, 2)
        logp = logp_behavior + ratio.log()
        # Each of these ratios with an advantage of either sign.
        advantage = draw.uniform(0.5, 2, 2, 2) * torch.tensor([1, -1])
        kl = draw.uniform(0.1, 2, 2, 2)
        sentence = f"for e_B = {e_b:.4g}, rho = {listed(ratio)}, "
        if of_kl:
            advantage = torch.zeros(2, 2, dtype=F64)
            sentence += f"A = 0 and a KL of {listed(kl)}"
            kl.requires_grad_()
        else:
            kl = torch.zeros(2, 2, dtype=F64)
            sentence += f"A = {listed(advantage)} and a KL of 0"
            logp.requires_grad_()
        yield sentence, [logp, logp_behavior, advantage, kl, e_b]


def fresh_batch(draw: Draw) -> Cases:
    logp, advantage = draw.uniform(-3, -0.5, 3, 4), draw.uniform(-2, 2, 3, 4)
    nothing = torch.zeros(3, 4, dtype=F64)
    yield "for rho = 1 and e_B = 1", [logp, logp, advantage, nothing, 1.0]


def tokens_to_weigh(draw: Draw) -> Cases:
    for low, high, sign in ((0.05, 0.3, 1), (0.5, 0.9, -1), (1.5, 5, 1), (1.5, 5, -1)):
        ratio, advantage = draw.number(low, high), sign * draw.number(0.5, 2)
        e_b = draw.number(0.35, 0.9)
        sentence = f"at rho = {ratio:.4g}, A = {advantage:.4g}, e_B = {e_b:.4g}"
        yield sentence, [ratio, advantage, e_b]


def policies_in_nats(draw: Draw) -> Cases:
    logp, logp_behavior = draw.policies(5)
    sentence = f"for log pi_theta = {listed(logp)} and log pi_b = "
    yield sentence + listed(logp_behavior), [logp, logp_behavior]


def temperatures(draw: Draw) -> Cases:
    for temperature in (draw.number(0.4, 0.8), draw.number(1.3, 3)):
        e_b = draw.number(0.2, 0.8)
        sentence = f"at T = {temperature:.4g}, e_B = {e_b:.4g}"
        yield sentence, [temperature, e_b]


PART_2 = [
    Item("2.1", 5, "the KL", "loss.py", "kl_divergence", lists_of_tokens),
    Item(
        "2.2",
        5,
        "the gradient of the KL",
        "loss.py",
        "kl_divergence",
        lists_of_tokens,
        of_gradient=True,
    ),
    Item(
        "2.3",
        3,
        "the KL of rounded numbers",
        "loss.py",
        "kl_divergence",
        rounded_lists,
        to_logits=True,
        tolerance=1e-4,
    ),
    Item(
        "2.4",
        6,
        "the cap",
        "loss.py",
        "p3o",
        lambda draw: tokens_of_a_batch(draw, of_kl=False),
        of_gradient=True,
    ),
    Item(
        "2.5",
        4,
        "the weight of the KL",
        "loss.py",
        "p3o",
        lambda draw: tokens_of_a_batch(draw, of_kl=True),
        of_gradient=True,
    ),
    Item("2.6", 3, "a fresh batch", "loss.py", "p3o", fresh_batch),
    Item(
        "2.7",
        3,
        "the weight of a token",
        "derivations.py",
        "token_weight",
        tokens_to_weigh,
    ),
    Item(
        "2.8",
        3,
        "the KL's gradient to the logits",
        "derivations.py",
        "kl_gradient",
        policies_in_nats,
    ),
    Item(
        "2.9",
        3,
        "the KL as an entropy bonus",
        "derivations.py",
        "entropy_bonus",
        temperatures,
    ),
]


# Part 3: the trainer's batch

# Micro-batches: for each rank, so many responses in each.
Sizes = list[list[int]]
ONE_RANK: list[Sizes] = [[[6]], [[2, 4]], [[3, 2, 5]]]
SEVERAL_RANKS: list[Sizes] = [[[3], [4]], [[2, 3], [5]], [[2], [3, 4], [2, 5, 1]]]


def batches(sizes: list[Sizes], draw: Draw) -> Cases:
    """What toy.run_ranks takes after `update`."""
    for ranks in sizes:
        weight = draw.normal(1.0, FEATURES, VOCABULARY)
        parts = random_ranks(ranks, seed=draw.integer(0, 2**40))
        # As plain tuples: the student's process has no class of this module.
        plain = [[tuple(part) for part in of_rank] for of_rank in parts]
        yield f"for the micro-batches {ranks}", [weight, plain]


def of_update(name: str, points: int, title: str, sizes: list[Sizes], result: str):
    """An item on what `update` does, of which toy.run_ranks tells."""
    draw = partial(batches, sizes)
    return Item(name, points, title, "batch.py", "update", draw, result=result)


PART_3 = [
    of_update("3.1", 4, "e_B over micro-batches", ONE_RANK, "e_B"),
    of_update("3.2", 5, "e_B over ranks", SEVERAL_RANKS, "e_B"),
    of_update("3.3", 4, "the gradient over micro-batches", ONE_RANK, "gradient"),
    of_update("3.4", 5, "the gradient over ranks", SEVERAL_RANKS, "gradient"),
    of_update("3.5", 2, "2 n - 1 passes", ONE_RANK + SEVERAL_RANKS, "passes"),
]


# Part 4: the experiment


def paired_values(draw: Draw) -> Cases:
    for level in (0.95, 0.8):
        first, second = draw.uniform(0, 1, 2, draw.integer(4, 9)).tolist()
        sentence = f"for {len(first)} seeds at the level {level}"
        yield sentence, [first, second, level]


PART_4 = [
    Item(
        "4.1",
        2,
        "the interval of a paired difference",
        "experiment.py",
        "paired_interval",
        paired_values,
    ),
]

ITEMS = [*PART_1, *PART_2, *PART_3, *PART_4]
