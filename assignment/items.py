"""The items of the assignment: what is asked of a student's code, and what is right.

Every item draws its inputs anew in each run. A question is one or several calls of the
student's functions, made in another process, and a check of what came back, made here.
The right values are computed here too, by the repository's own loss.py. An item's
points are given if all of its checks hold. The first one that does not says so in a
sentence (Wrong): what was found, what was expected, and which mistake gives what was
found, if one that is known does.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor

from assignment.starter.toy import MicroBatch, log_probabilities, toy_loss
from loss import (
    KL_ESTIMATORS,
    OBJECTIVES,
    effective_sample_size,
    group_advantage,
    kl_divergence,
)

F64 = torch.float64
# Relative to the largest right value. Every mistake that is known moves it by 1% at
# least.
TOLERANCE = 1e-5
# For inputs in float32 that nearly cancel.
ROUNDING = 1e-4


# What gives a wrong value: the mistake, and the value that it gives.
Mistakes = list[tuple[str, Tensor]]


class Wrong(Exception):
    """What is wrong with an answer, in a sentence for the student."""


# The error, a part of its message, and what a student can do about it.
HINTS = (
    ("OSError", "File too large", "it printed more than 4 MB"),
    (
        "PermissionError",
        "",
        "the grader lets code open no other files and start no processes or sockets",
    ),
    (
        "ImportError",
        "attempted relative import",
        "write `from toy import ...`, as the starter does",
    ),
    (
        "ModuleNotFoundError",
        "",
        "there are torch, numpy, scipy and the files in your folder, whose own name is "
        "no part of an import",
    ),
)


def what_was_raised(answer: dict[str, Any]) -> str:
    """An error that came back: its message, the student's line, and a hint."""
    error, message = str(answer.get("error")), str(answer.get("message", ""))
    said = f"{error}: {message}" if message else error
    if answer.get("where"):
        said += f" ({answer['where']})"
    for kind, part, hint in HINTS:
        if error == kind and part in message:
            return f"{said}: {hint}"
    return said


class Answer:
    """What one call came back with: a value and gradients, or an error."""

    def __init__(self, function: str, answer: dict[str, Any]) -> None:
        self.function = function
        self.answer = answer
        self.error = answer.get("error")
        self.message = str(answer.get("message", ""))
        self._value = answer.get("value")
        self._gradients = answer.get("gradients", [])

    def value(self) -> Any:
        """What the function returned. Wrong if it raised."""
        if self.error is not None:
            raise Wrong(f"{self.function} raised {what_was_raised(self.answer)}")
        return self._value

    def first(self) -> Any:
        """What it returned, or the first of several: the loss of (loss, stats)."""
        value = self.value()
        return value[0] if isinstance(value, list) else value

    def tensor(self, shape: tuple[int, ...] = ()) -> Tensor:
        """The (first) tensor or number returned, as float64."""
        return as_tensor(self.function, self.first(), shape)

    def gradient(self, shape: tuple[int, ...], number: int = 0) -> Tensor:
        """The gradient to an input that required one; zero if there is none."""
        self.value()
        if self._gradients[number] is None:
            return torch.zeros(shape, dtype=F64)
        return as_tensor(
            f"the gradient of {self.function}", self._gradients[number], shape
        )

    def carries_gradient(self) -> bool:
        value = self.first()
        return isinstance(value, dict) and bool(value.get("grad"))

    def kind(self) -> str:
        """ "float64 tensor", or the type of what is no tensor."""
        value = self.first()
        if isinstance(value, dict) and "dtype" in value:
            return f"{value['dtype']} tensor"
        return type(value).__name__


def as_tensor(name: str, value: Any, shape: tuple[int, ...]) -> Tensor:
    """What came back as JSON as a float64 tensor. Wrong if it has another shape."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        found = torch.tensor(value, dtype=F64)
    elif isinstance(value, dict) and "tensor" in value:
        found = torch.tensor(value["tensor"], dtype=F64).view(value["shape"])
    else:
        raise Wrong(f"{name} returned {str(value)[:60]}; expected a tensor")
    if tuple(found.shape) != shape:
        raise Wrong(f"{name} has the shape {list(found.shape)}; expected {list(shape)}")
    return found


class Question(NamedTuple):
    """Calls of one of the student's functions, and the check of their answers."""

    function: str
    calls: list[dict[str, Any]]
    check: Callable[..., None]  # takes an Answer for each call; raises Wrong


class Item(NamedTuple):
    """What points are given for."""

    name: str  # "2.4"
    title: str
    points: int
    file: str  # of the student
    questions: Callable[["Draw"], list[Question]]

    @property
    def part(self) -> int:
        return int(self.name.partition(".")[0])


class Draw:
    """Random inputs: the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        unit = torch.rand(shape, generator=self.generator, dtype=F64)
        return low + (high - low) * unit

    def normal(self, spread: float, *shape: int) -> Tensor:
        return spread * torch.randn(shape, generator=self.generator, dtype=F64)

    def integer(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(torch.randint(low, high + 1, (), generator=self.generator))

    def shuffled(self, values: Tensor) -> Tensor:
        return values[torch.randperm(len(values), generator=self.generator)]

    def mask(self, rows: int, columns: int) -> Tensor:
        """Responses of different lengths: one of a single token, and a longest one."""
        length = [self.integer(2, columns - 1) for _ in range(rows)]
        length[0], length[1] = 1, columns
        return torch.arange(columns) < torch.tensor(length)[:, None]

    def policies(self, *shape: int) -> tuple[Tensor, Tensor]:
        """log pi_theta and log pi_b, of which the last dimension is the vocabulary."""
        behavior = self.normal(1.0, *shape)
        policy = behavior + self.normal(1.0, *shape)
        return policy.log_softmax(dim=-1), behavior.log_softmax(dim=-1)


def given(value: Any, grad: bool = False) -> Any:
    """An input of a call, as runner.py decodes it."""
    if isinstance(value, MicroBatch):
        return {"micro_batch": [given(tensor) for tensor in value]}
    if isinstance(value, list):
        return [given(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    return {
        "tensor": value.flatten().tolist(),
        "dtype": str(value.dtype).removeprefix("torch."),
        "shape": list(value.shape),
        "grad": grad,
    }


def call(*arguments: Any, **keywords: Any) -> dict[str, Any]:
    """A call with these arguments, of which those made by `leaf` get a gradient."""
    return {
        "args": [as_input(value) for value in arguments],
        "kwargs": {name: as_input(value) for name, value in keywords.items()},
    }


class Leaf(NamedTuple):
    """An input to which a gradient is asked for."""

    tensor: Tensor


def as_input(value: Any) -> Any:
    if isinstance(value, Leaf):
        return given(value.tensor, grad=True)
    return given(value)


def number(value: float) -> str:
    """Four digits, as a student would write them."""
    return f"{float(value):.4g}"


def numbers(values: Tensor) -> str:
    return ", ".join(number(value) for value in values.flatten().tolist())


def is_close(found: Tensor, right: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Within the tolerance of the largest right value. NaN is close to nothing."""
    if not torch.isfinite(found).all():
        return False
    return bool((found - right).abs().max() <= tolerance * right.abs().max() + 1e-12)


def expect(
    found: Tensor,
    right: Tensor,
    sentence: str,
    tolerance: float = TOLERANCE,
    mistakes: Mistakes | None = None,
    note: str = "",
) -> None:
    """Wrong, with this beginning of a sentence, where `found` is not right."""
    if is_close(found, right, tolerance):
        return
    said = f"{sentence} {numbers(found)}; expected {numbers(right)}{note}"
    raise Wrong(said + known_mistake(found, mistakes or [], tolerance))


def known_mistake(
    found: Tensor, mistakes: Mistakes, tolerance: float = TOLERANCE
) -> str:
    """A sentence on the first mistake that gives what was found; empty if none does."""
    for mistake, value in mistakes:
        value = torch.as_tensor(value, dtype=F64)
        if torch.isfinite(value).all() and is_close(found, value, tolerance):
            return f". That is {mistake}"
    return ""


def at_most_one(found: Tensor) -> str:
    """What to say of an e_B that cannot be."""
    return ", and no e_B is over 1" if bool((found > 1 + TOLERANCE).any()) else ""


def names_response(message: str, row: int) -> bool:
    """Whether a message has the number of this response, not as a part of another."""
    return re.search(rf"(?<![\d.]){row}(?!\.?\d)", message) is not None


def whole(*shape: int) -> Tensor:
    """A mask without padding."""
    return torch.ones(shape, dtype=torch.bool)


# Part 1: e_B


def ess_mistakes(log_ratio: Tensor, mask: Tensor) -> Mistakes:
    """What gives another e_B of these ratios."""
    ratio = log_ratio[mask].double().exp()
    mean, mean_square = ratio.mean(), (ratio**2).mean()
    ess = mean**2 / mean_square
    of_responses = [
        effective_sample_size(row[of_row][None], whole(1, int(of_row.sum())))
        for row, of_row in zip(log_ratio, mask, strict=True)
        if of_row.any()
    ]
    everything = torch.where(mask, log_ratio, 0.0).double().exp()
    with_padding = log_ratio.double().exp()
    return [
        ("its inverse, mean[rho^2] / mean[rho]^2", 1 / ess),
        ("|B| e_B, which is not normalized", len(ratio) * ess),
        ("mean[rho] / mean[rho^2], without the square above", mean / mean_square),
        (
            "1 / (1 + var[rho]): the variance is not divided by mean[rho]^2",
            1 / (1 + ratio.var(correction=0)),
        ),
        (
            "1 / (1 + CV^2) with the variance of a sample, over |B| - 1",
            1 / (1 + ratio.var() / mean**2),
        ),
        ("the mean of e_B of each response", torch.stack(of_responses).mean()),
        (
            "e_B if padding counts as tokens of ratio 1",
            everything.mean() ** 2 / (everything**2).mean(),
        ),
        (
            "e_B of all entries, padding included",
            with_padding.mean() ** 2 / (with_padding**2).mean(),
        ),
    ]


def ask_ess(
    log_ratio: Tensor, mask: Tensor, sentence: str, right: float | None = None
) -> Question:
    """What is e_B of these ratios?"""
    if right is None:
        right = float(effective_sample_size(log_ratio, mask))

    def check(answer: Answer) -> None:
        found = answer.tensor()
        expect(
            found,
            torch.tensor(right, dtype=F64),
            sentence,
            mistakes=ess_mistakes(log_ratio, mask),
            note=at_most_one(found),
        )

    return Question("effective_sample_size", [call(log_ratio, mask)], check)


def ess_of_a_batch(draw: Draw) -> list[Question]:
    questions = []
    for ratios in (draw.uniform(0.2, 4, 1, 3), draw.uniform(0.2, 4, 2, 2)):
        sentence = f"for the ratios {numbers(ratios)} your e_B is"
        questions.append(ask_ess(ratios.log(), whole(*ratios.shape), sentence))
    for spread in (0.3, 1.0):
        log_ratio = draw.normal(spread, 6, 8)
        sentence = f"for 48 tokens with a standard deviation of log rho of {spread} "
        questions.append(ask_ess(log_ratio, whole(6, 8), sentence + "your e_B is"))
    return questions


def ess_without_padding(draw: Draw) -> list[Question]:
    questions = []
    for junk in (0.0, math.nan, math.inf, 3.0):
        mask = draw.mask(4, 6)
        log_ratio = draw.normal(1.0, 4, 6) - 1.0
        log_ratio = log_ratio.masked_fill(~mask, junk)
        sentence = f"with {junk} in the padding, which is no token, your e_B is"
        questions.append(ask_ess(log_ratio, mask, sentence))
    return questions


def ess_identities(draw: Draw) -> list[Question]:
    log_ratio = draw.normal(0.8, 3, 5)
    factor = draw.uniform(3, 30)
    tokens = draw.integer(20, 40)
    dominant = torch.zeros(1, tokens, dtype=F64)
    dominant[0, draw.integer(0, tokens - 1)] = 30.0
    sentence = f"one of {tokens} tokens has a ratio of e^30, the others 1: your e_B is"
    return [
        *[ask_equal_ratios(draw, count) for count in (2, 3, 7, 49)],
        ask_ess(
            log_ratio + factor.log(),
            whole(3, 5),
            f"with all ratios multiplied by {number(factor)}, which changes nothing, "
            "your e_B is",
        ),
        ask_ess(dominant, whole(1, tokens), sentence),
    ]


def ask_equal_ratios(draw: Draw, count: int) -> Question:
    """What is e_B of so many equal ratios?"""
    log_ratio = draw.uniform(0.3, 3).log().expand(count, 1).clone()

    def check(answer: Answer) -> None:
        found = float(answer.tensor())
        if found != 1:
            raise Wrong(
                f"{count} equal ratios give e_B = {found!r}; expected exactly 1. "
                "Divided by the largest of them, they are all 1"
            )

    inputs = call(log_ratio, whole(count, 1))
    return Question("effective_sample_size", [inputs], check)


def ess_of_extreme_ratios(draw: Draw) -> list[Question]:
    questions = []
    for dtype in (torch.float64, torch.float32):
        for sign in (1, -1):
            nats = sign * draw.uniform(60, 80)
            log_ratio = draw.normal(0.1, 2, 4).to(dtype)
            log_ratio[1, 2] = nats
            # The right e_B is of the very numbers that the dtype holds.
            right = float(effective_sample_size(log_ratio.double(), whole(2, 4)))
            sentence = f"with one log rho of {number(nats)}, in {dtype}, your e_B is"
            questions.append(ask_ess(log_ratio, whole(2, 4), sentence, right))
    for dtype, padding in ((torch.float32, 0.0), (torch.float64, 900.0)):
        mask = draw.mask(2, 4)
        log_ratio = (draw.normal(0.1, 2, 4) - 79).to(dtype)
        log_ratio = log_ratio.masked_fill(~mask, padding)
        right = float(effective_sample_size(log_ratio.double(), mask))
        sentence = (
            f"with all log rho near -79 and {padding} in the padding, which must "
        )
        sentence += f"not be what you divide by, in {dtype}, your e_B is"
        questions.append(ask_ess(log_ratio, mask, sentence, right))
    return questions


def ess_refuses(draw: Draw) -> list[Question]:
    log_ratio = draw.normal(1.0, 7, 3)
    rounded = log_ratio.float()
    right = effective_sample_size(rounded, whole(7, 3))

    def is_a_constant(answer: Answer) -> None:
        expect(answer.tensor(), right, "your e_B is")
        if answer.carries_gradient():
            raise Wrong("e_B requires a gradient; expected a constant (detach)")
        if answer.kind() != "float64 tensor":
            raise Wrong(
                f"e_B of ratios in float32 is a {answer.kind()}; expected a float64 "
                "tensor"
            )

    def refuses_nothing(answer: Answer) -> None:
        if answer.error != "ValueError":
            raise Wrong(
                f"without a token there was {answer.error or 'no error'}; "
                "expected ValueError"
            )

    questions = [
        Question(
            "effective_sample_size", [call(Leaf(rounded), whole(7, 3))], is_a_constant
        ),
        Question(
            "effective_sample_size", [call(log_ratio, ~whole(7, 3))], refuses_nothing
        ),
    ]
    for bad in (math.nan, math.inf):
        row = draw.integer(4, 6)
        broken = log_ratio.clone()
        broken[row, 1] = bad
        check = refuses_response(row, f"a log rho of {bad}")
        questions.append(
            Question("effective_sample_size", [call(broken, whole(7, 3))], check)
        )
    return questions


def refuses_response(row: int, what: str) -> Callable[[Answer], None]:
    """The check that an error names the response with what cannot be used."""

    def check(answer: Answer) -> None:
        if answer.error not in ("FloatingPointError", "ValueError"):
            raise Wrong(
                f"{what} in response {row}, counted from 0, gave "
                f"{answer.error or 'no error'}; expected FloatingPointError"
            )
        if not names_response(answer.message, row):
            raise Wrong(
                f"{what} in response {row}, counted from 0: your message "
                f"{answer.message!r} does not have that number"
            )

    return check


def advantage_mistakes(reward: Tensor, scale: bool) -> Mistakes:
    """What gives another advantage of the responses [G] to one prompt."""
    centered = reward - reward.mean()
    other = "is not divided" if scale else "is divided"
    return [
        (
            "with the population's deviation, over G and not over G - 1",
            centered / (reward.std(correction=0) + 1e-6),
        ),
        ("without the 1e-6 that is added to the deviation", centered / reward.std()),
        (f"what it is if it {other}", group_advantage(reward[None], not scale)[0]),
        ("divided by the variance", centered / (reward.var() + 1e-6)),
    ]


def advantages(draw: Draw) -> list[Question]:
    reward = draw.uniform(0, 1, 3, 4)
    reward[1] = reward[1, 0]
    # So near to each other that the 1e-6 of the deviation shows.
    reward[2] = 0.5 + 1e-5 * reward[2]
    questions = []
    for scale in (True, False):
        right = group_advantage(reward, scale)

        def check(answer: Answer, right: Tensor = right, scale: bool = scale) -> None:
            found = answer.tensor((3, 4))
            for group in (0, 2):
                expect(
                    found[group],
                    right[group],
                    f"of the rewards {digits(reward[group])} with scale={scale} the "
                    "advantages are",
                    mistakes=advantage_mistakes(reward[group], scale),
                )
            are_zero(found[1:2], reward[1:2])

        questions.append(Question("group_advantage", [call(reward, scale)], check))
    # The mean of equal numbers in float32 often differs from them in the last digit.
    equal = draw.uniform(0.1, 1, 32, 1).float().expand(32, 7).clone()

    def all_are_zero(answer: Answer) -> None:
        are_zero(answer.tensor((32, 7)), equal)

    def refuses(answer: Answer) -> None:
        if answer.error != "ValueError":
            raise Wrong(
                f"a group of one gave {answer.error or 'no error'}; expected ValueError"
            )

    alone = call(draw.uniform(0, 1, 3, 1))
    questions.append(Question("group_advantage", [call(equal)], all_are_zero))
    return [*questions, Question("group_advantage", [alone], refuses)]


def are_zero(advantage: Tensor, reward: Tensor) -> None:
    """Wrong where a group of equal rewards has another advantage than 0."""
    for found, equal in zip(advantage, reward, strict=True):
        if found.any():
            raise Wrong(
                f"{len(equal)} rewards of {digits(equal[0])} have the advantages "
                f"{numbers(found)}; expected exactly 0"
            )


def digits(values: Tensor) -> str:
    """As many digits as tell rewards apart."""
    return ", ".join(f"{value:.8g}" for value in values.flatten().tolist())


def ess_derived(draw: Draw) -> list[Question]:
    questions = []
    for _ in range(3):
        questions += [
            ess_of_variation(draw),
            ess_with_one_outlier(draw),
            ess_of_policies(draw),
        ]
    return questions


def ess_of_variation(draw: Draw) -> Question:
    variation = float(draw.uniform(0.1, 3))
    return derived(
        "ess_of_variation",
        [variation],
        1 / (1 + variation**2),
        f"at a coefficient of variation of {number(variation)}",
        [
            ("1 / (1 + CV): the square is missing", 1 / (1 + variation)),
            ("1 + CV^2, its inverse", 1 + variation**2),
            ("1 - CV^2", 1 - variation**2),
        ],
    )


def ess_with_one_outlier(draw: Draw) -> Question:
    tokens = draw.integer(5, 500)
    ratio = float(draw.uniform(3, 300))
    mean = (tokens - 1 + ratio) / tokens
    mean_square = (tokens - 1 + ratio**2) / tokens
    right = mean**2 / mean_square
    return derived(
        "ess_with_one_outlier",
        [tokens, ratio],
        right,
        f"for {tokens} tokens, one of ratio {number(ratio)}, the others of 1,",
        [
            ("1 / |B|, to which it tends", 1 / tokens),
            ("|B| e_B, which is not normalized", tokens * right),
            ("its inverse", 1 / right),
            (
                "with |B| ratios of 1 beside the outlier, not |B| - 1",
                (tokens + ratio) ** 2 / ((tokens + 1) * (tokens + ratio**2)),
            ),
        ],
    )


def ess_of_policies(draw: Draw) -> Question:
    logp, logp_behavior = draw.policies(6)
    policy, behavior = logp.exp(), logp_behavior.exp()
    mean_square = (policy**2 / behavior).sum()  # 1 + chi^2
    kl = (policy * (logp - logp_behavior)).sum()
    return derived(
        "ess_of_policies",
        [policy, behavior],
        1 / mean_square,
        f"for pi_theta = {numbers(policy)} and pi_b = {numbers(behavior)}",
        [
            ("its inverse, 1 + chi^2", mean_square),
            ("1 / chi^2: 1 is missing below", 1 / (mean_square - 1)),
            ("with pi_theta and pi_b exchanged", 1 / (behavior**2 / policy).sum()),
            ("exp(-KL): the divergence is another one", (-kl).exp()),
            ("1 / (1 + KL): the divergence is another one", 1 / (1 + kl)),
            (
                "over tokens that are drawn evenly, and not from pi_b",
                effective_sample_size((logp - logp_behavior)[None], whole(1, 6)),
            ),
        ],
    )


def derived(
    function: str, inputs: list[Any], right: Any, where: str, mistakes: Mistakes
) -> Question:
    """What does the student's formula give?"""
    right = torch.as_tensor(right, dtype=F64)

    def check(answer: Answer) -> None:
        found = answer.tensor(tuple(right.shape))
        note = at_most_one(found) if function.startswith("ess") else ""
        sentence = f"{where} your {function} is"
        expect(found, right, sentence, mistakes=mistakes, note=note)

    return Question(function, [call(*inputs)], check)


# Part 2: the objective, its KL and its gradient


def kl_mistakes(logp: Tensor, logp_behavior: Tensor) -> Mistakes:
    """What gives another KL over K tokens and the rest."""
    p, b = logp.exp(), logp_behavior.exp()
    log_ratio = logp - logp_behavior
    alone = "the sum over the K tokens alone: the bucket is missing"
    other = "KL(pi_b || pi_theta), the other direction"
    return [
        (other, kl_divergence(logp_behavior, logp)),
        (alone, (p * log_ratio).sum(dim=-1)),
        (alone, (p * log_ratio - p + b).sum(dim=-1)),
        (f"{other}, and without the bucket", (-b * log_ratio).sum(dim=-1)),
        (f"{other}, and without the bucket", (p - b - b * log_ratio).sum(dim=-1)),
    ]


def kl_values(draw: Draw) -> list[Question]:
    questions = []
    for listed in (1, 4, 7):
        policy, behavior = draw.policies(2, 3, 9)
        logp, logp_behavior = policy[..., :listed], behavior[..., :listed]
        right = kl_divergence(logp, logp_behavior)
        mistakes = kl_mistakes(logp, logp_behavior)

        def check(
            answer: Answer,
            listed: int = listed,
            right: Tensor = right,
            mistakes: Mistakes = mistakes,
        ) -> None:
            sentence = (
                f"over {listed} of 9 tokens and the rest, the KL of 6 positions is"
            )
            expect(answer.tensor((2, 3)), right, sentence, mistakes=mistakes)

        questions.append(Question("kl_divergence", [call(logp, logp_behavior)], check))
    return questions


def kl_gradient_mistakes(logp: Tensor, logp_behavior: Tensor) -> Mistakes:
    """What gives another gradient of the KL to logp."""
    p, b = logp.exp(), logp_behavior.exp()
    rest = 1 - p.sum(dim=-1, keepdim=True)
    rest_behavior = 1 - b.sum(dim=-1, keepdim=True)
    listed = p * (logp - logp_behavior)
    no_rest = (
        "what it is if no gradient goes through the rest, whose probability is one "
        "less the sum of the listed ones and moves with them"
    )
    return [
        (no_rest, listed + p),
        (no_rest, listed),
        ("the gradient of KL(pi_b || pi_theta)", p * rest_behavior / rest - b),
        ("no gradient at all: logp is detached", torch.zeros_like(p)),
    ]


def kl_gradients(draw: Draw) -> list[Question]:
    questions = []
    for listed in (1, 4, 7):
        policy, behavior = draw.policies(2, 9)
        logp = policy[..., :listed].requires_grad_()
        logp_behavior = behavior[..., :listed]
        (right,) = torch.autograd.grad(kl_divergence(logp, logp_behavior).sum(), logp)
        mistakes = kl_gradient_mistakes(logp.detach(), logp_behavior)

        def check(
            answer: Answer, right: Tensor = right, mistakes: Mistakes = mistakes
        ) -> None:
            shape = tuple(right.shape)
            sentence = "the gradient of the KL to logp is"
            expect(answer.gradient(shape, 0), right, sentence, mistakes=mistakes)
            if answer.gradient(shape, 1).any():
                raise Wrong("there is a gradient to logp_behavior; expected none")

        inputs = call(Leaf(logp.detach()), Leaf(logp_behavior))
        questions.append(Question("kl_divergence", [inputs], check))
    return questions


def kl_of_rounded(draw: Draw) -> list[Question]:
    policy, behavior = draw.policies(32, 9)
    right = (policy.exp() * (policy - behavior)).sum(dim=-1)

    def check(answer: Answer) -> None:
        found = answer.tensor((32,))
        if not torch.isfinite(found).all():
            raise Wrong(
                "where all tokens are listed, the rest of float32 logarithms is as "
                "often below 0 as above, and your KL is not finite"
            )
        expect(
            found[:3],
            right[:3],
            "with all 9 tokens listed in float32, the KL of three positions is",
            ROUNDING,
        )
        expect(found, right, "with all 9 tokens listed in float32", ROUNDING)
        if not torch.isfinite(answer.gradient((32, 9))).all():
            raise Wrong("with all 9 tokens listed in float32 a gradient is not finite")

    def is_zero(answer: Answer) -> None:
        largest = float(answer.tensor((32,)).abs().max())
        if not largest < 1e-9:
            raise Wrong(
                f"the KL of a policy to itself is {number(largest)}; expected 0"
            )

    rounded = call(Leaf(policy.float()), behavior.float())
    same = call(behavior.float()[:, :4], behavior.float()[:, :4])
    return [
        Question("kl_divergence", [rounded], check),
        Question("kl_divergence", [same], is_zero),
    ]


def tokens_of_ratio(draw: Draw, ratio: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log pi_theta and log pi_b of one-token responses of these ratios, and a mask."""
    logp_behavior = draw.uniform(-3, -0.5, len(ratio), 1)
    return ratio.log()[:, None] + logp_behavior, logp_behavior, whole(len(ratio), 1)


def stale_ratios(draw: Draw, tokens: int) -> Tensor:
    """Half of them far below 1 and half far above: e_B is not near 1."""
    low = draw.uniform(0.05, 0.4, tokens // 2)
    high = draw.uniform(1.5, 6, tokens - tokens // 2)
    return draw.shuffled(torch.cat([low, high]))


# Other terms of a token than sg(min(rho, e_B)) log pi_theta, as functions of rho, of
# e_B, both with a gradient, and of log pi_theta.
WRONG_TERMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "min(rho, 1/e_B)": lambda rho, ess, logp: rho.clamp(max=1 / ess).detach() * logp,
    "min(rho, 1)": lambda rho, ess, logp: rho.clamp(max=1.0).detach() * logp,
    "rho: there is no cap": lambda rho, ess, logp: rho.detach() * logp,
    "max(rho, e_B)": lambda rho, ess, logp: torch.maximum(rho, ess).detach() * logp,
    "e_B, whatever rho is": lambda rho, ess, logp: ess.detach() * logp,
    "min(1/rho, e_B): the ratio is inverted": lambda rho, ess, logp: (
        torch.minimum(1 / rho, ess).detach() * logp
    ),
    "what comes out if the capped ratio is not detached": lambda rho, ess, logp: (
        torch.minimum(rho, ess.detach()) * logp
    ),
    "what comes out if e_B is not detached": lambda rho, ess, logp: (
        torch.minimum(rho.detach(), ess) * logp
    ),
    "what comes out if neither rho nor e_B is detached": lambda rho, ess, logp: (
        torch.minimum(rho, ess) * logp
    ),
    "the gradient of min(rho, e_B) A, without log pi_theta": lambda rho, ess, logp: (
        torch.minimum(rho, ess.detach())
    ),
}


def weight_mistakes(logp: Tensor, logp_behavior: Tensor, advantage: Tensor) -> Mistakes:
    """The weights of one-token responses that wrong terms give."""
    mistakes = []
    for mistake, term in WRONG_TERMS.items():
        leaf = logp.clone().requires_grad_()
        rho = (leaf - logp_behavior).exp()
        ess = rho.mean() ** 2 / (rho**2).mean()
        loss = (-term(rho, ess, leaf) * advantage[:, None]).sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        mistakes.append((mistake, -gradient.flatten() / advantage))
    return mistakes


def caps(draw: Draw) -> list[Question]:
    """The weight of a token is half the difference that the sign of A makes.

    So nothing that the KL adds to the gradient counts here.
    """
    questions = []
    for tokens in (2, 5):
        ratio = stale_ratios(draw, tokens)
        logp, logp_behavior, mask = tokens_of_ratio(draw, ratio)
        advantage = draw.uniform(0.5, 2, tokens)
        ess = float(effective_sample_size(logp - logp_behavior, mask))
        mistakes = weight_mistakes(logp, logp_behavior, advantage)

        def check(
            plus: Answer,
            minus: Answer,
            tokens: int = tokens,
            ratio: Tensor = ratio,
            advantage: Tensor = advantage,
            ess: float = ess,
            mistakes: Mistakes = mistakes,
        ) -> None:
            shape = (tokens, 1)
            difference = (plus.gradient(shape) - minus.gradient(shape)).flatten()
            weight = -tokens / 2 * difference / advantage
            for found, rho in zip(weight.tolist(), ratio.tolist(), strict=True):
                right = min(rho, ess)
                if not abs(found - right) <= TOLERANCE * right:
                    raise Wrong(
                        f"at rho = {number(rho)}, e_B = {number(ess)} your weight is "
                        f"{number(found)}; expected {number(right)}"
                        f"{known_mistake(weight, mistakes)}. The weight is the "
                        "gradient to log pi_theta, divided by -A"
                    )

        calls = [
            call(Leaf(logp), logp_behavior, sign * advantage, mask) for sign in (1, -1)
        ]
        questions.append(Question("p3o_loss", calls, check))
    return questions


def kl_term(draw: Draw) -> list[Question]:
    questions = []
    for tokens in (3, 6):
        ratio = stale_ratios(draw, tokens)
        logp, logp_behavior, mask = tokens_of_ratio(draw, ratio)
        kl = draw.uniform(0.1, 2, tokens, 1)
        ess = effective_sample_size(logp - logp_behavior, mask)
        estimate = KL_ESTIMATORS["is"](logp - logp_behavior).mean()
        mistakes = [
            ("e_B KL, with e_B in place of 1 - e_B", ess * kl.mean()),
            ("-(1 - e_B) KL: it pushes away", (ess - 1) * kl.mean()),
            ("KL without a weight", kl.mean()),
            ("what is left without the KL", torch.zeros(())),
            (
                "(1 - e_B) times the estimate: the KL that is given is not looked at",
                (1 - ess) * estimate,
            ),
        ]

        def check(
            answer: Answer,
            tokens: int = tokens,
            kl: Tensor = kl,
            ess: Tensor = ess,
            mistakes: Mistakes = mistakes,
        ) -> None:
            where = f"with A = 0, e_B = {number(ess)} and a mean KL of "
            where += f"{number(kl.mean())} the loss is"
            right = (1 - ess) * kl.mean()
            expect(answer.tensor(), right, where, mistakes=mistakes)
            found = answer.gradient((tokens, 1))
            right = (1 - ess).expand(tokens, 1) / tokens
            expect(found, right, "the gradient to the KL that was given is")

        no_advantage = torch.zeros(tokens, dtype=F64)
        inputs = call(logp, logp_behavior, no_advantage, mask, kl=Leaf(kl))
        questions.append(Question("p3o_loss", [inputs], check))
    return [*questions, ask_stats(draw)]


def ask_stats(draw: Draw) -> Question:
    """What is in the dictionary? Each response has three tokens and one of padding."""
    mask = whole(3, 4)
    mask[:, 3] = False
    log_ratio = stale_ratios(draw, 12).log().view(3, 4)
    ess = effective_sample_size(log_ratio, mask)
    capped = (log_ratio.exp() > ess).double()
    # A ratio of 1, which padding gets where it is set to 0, is over e_B.
    of_entries = [torch.where(mask, capped, junk).mean() for junk in (0.0, 1.0)]
    logp_behavior = draw.uniform(-3, -0.5, 3, 4)
    logp = (logp_behavior + log_ratio).masked_fill(~mask, math.nan)
    kl = draw.uniform(0.1, 2, 3, 4)
    advantage = draw.uniform(-2, 2, 3, 4).masked_fill(~mask, math.nan)

    def check(answer: Answer) -> None:
        loss = answer.tensor()
        if not torch.isfinite(loss):
            raise Wrong(f"with NaN in the padding of all inputs the loss is {loss}")
        stats = stats_of(answer)
        expect(stats["loss"], loss, "in the dictionary, loss is")
        sentence = "in the dictionary, kl_loss, the mean of the given KL, is"
        expect(stats["kl_loss"], kl[mask].mean(), sentence)
        expect(
            stats["capped"],
            capped[mask].mean(),
            "in the dictionary, capped, the share of tokens with rho > e_B, is",
            mistakes=[
                ("a share of all entries, padding included", share)
                for share in of_entries
            ],
        )
        sentence = "in the dictionary, policy_loss + (1 - e_B) kl_loss is"
        expect(stats["policy_loss"] + (1 - ess) * stats["kl_loss"], loss, sentence)

    inputs = call(
        Leaf(logp),
        logp_behavior.masked_fill(~mask, math.nan),
        advantage,
        mask,
        kl=kl.masked_fill(~mask, math.nan),
        ess=float(ess),
    )
    return Question("p3o_loss", [inputs], check)


def stats_of(answer: Answer) -> dict[str, Tensor]:
    """The dictionary of p3o_loss. Wrong if it is none, or has no such numbers."""
    value = answer.value()
    is_pair = isinstance(value, list) and len(value) == 2
    if not is_pair or not isinstance(value[1], dict) or "dict" not in value[1]:
        raise Wrong("p3o_loss does not return the loss and a dictionary of statistics")
    stats = {}
    for name in ("loss", "policy_loss", "kl_loss", "capped"):
        number = value[1]["dict"].get(name)
        if number is None:
            raise Wrong(f"the dictionary of p3o_loss has no {name!r}")
        if isinstance(number, dict) and number.get("grad"):
            raise Wrong(f"{name} in the dictionary carries a gradient; detach it")
        stats[name] = as_tensor(f"{name} in the dictionary", number, ())
    return stats


def estimate_mistakes(log_ratio: Tensor, name: str, ess: float) -> Mistakes:
    """What gives another KL term from log rho than the estimate of this name."""
    right = KL_ESTIMATORS[name]
    mistakes = [
        (f"with the estimate {other!r}", KL_ESTIMATORS[other](log_ratio).mean())
        for other in KL_ESTIMATORS
        if other != name
    ]
    mistakes += [
        ("with -log rho as the estimate", -log_ratio.mean()),
        ("with log rho as the estimate", log_ratio.mean()),
        ("with (log rho)^2 / 2 as the estimate", (log_ratio**2).mean() / 2),
        ("with log rho clamped at 10 nats", right(log_ratio.clamp(-10, 10)).mean()),
    ]
    kl = right(log_ratio).mean()
    return [
        *[(mistake, (1 - ess) * value) for mistake, value in mistakes],
        ("e_B KL, with e_B in place of 1 - e_B", ess * kl),
        ("-(1 - e_B) KL: it pushes away", (ess - 1) * kl),
        ("KL without a weight", kl),
        ("what is left without the KL", torch.zeros(())),
    ]


def estimators(draw: Draw) -> list[Question]:
    questions = []
    far = torch.cat([draw.uniform(0.4, 3, 3), torch.tensor([math.exp(-12)])])
    for ratio, keywords in (
        (stale_ratios(draw, 4), {}),
        (stale_ratios(draw, 4), {"kl_estimator": "is"}),
        (stale_ratios(draw, 4), {"kl_estimator": "k3"}),
        (far, {"kl_estimator": "k3"}),
    ):
        logp, logp_behavior, mask = tokens_of_ratio(draw, ratio)
        ess = float(effective_sample_size(logp - logp_behavior, mask))
        leaf = logp.clone().requires_grad_()
        name = keywords.get("kl_estimator", "is")
        kl = KL_ESTIMATORS[name](leaf - logp_behavior).mean()
        (right,) = torch.autograd.grad((1 - ess) * kl, leaf)
        mistakes = estimate_mistakes(logp - logp_behavior, name, ess)

        def check(
            answer: Answer,
            name: str = name,
            ratio: Tensor = ratio,
            ess: float = ess,
            kl: float = float(kl.detach()),
            right: Tensor = right,
            mistakes: Mistakes = mistakes,
        ) -> None:
            where = f"with A = 0, e_B = {number(ess)}, rho = {numbers(ratio)} and the "
            where += f"KL estimated by {name!r}"
            loss = torch.tensor((1 - ess) * kl)
            expect(answer.tensor(), loss, f"{where} the loss is", mistakes=mistakes)
            found = answer.gradient(tuple(right.shape))
            expect(found, right, f"{where} the gradient to logp is")

        no_advantage = torch.zeros(4, dtype=F64)
        inputs = call(
            Leaf(logp), logp_behavior, no_advantage, mask, ess=ess, **keywords
        )
        questions.append(Question("p3o_loss", [inputs], check))
    return questions


def means(draw: Draw) -> list[Question]:
    """rho = 1: the loss is the mean of -A log pi_theta, whatever cap and KL are."""
    questions = []
    for junk in (-0.5, math.nan):
        mask = draw.mask(4, 6)
        logp = draw.uniform(-3, -0.5, 4, 6)
        advantage = draw.uniform(-2, 2, 4)
        of_tokens = torch.where(mask, -advantage[:, None] * logp, 0.0)
        right = of_tokens.sum() / mask.sum()
        mistakes = [
            (
                "the mean of the responses' means",
                (of_tokens.sum(dim=1) / mask.sum(dim=1)).mean(),
            ),
            ("the sum divided by all entries, padding included", of_tokens.mean()),
            ("the sum, divided by nothing", of_tokens.sum()),
            ("the sum divided by the number of responses", of_tokens.sum() / 4),
        ]
        logp = logp.masked_fill(~mask, junk)

        def check(
            answer: Answer,
            right: Tensor = right,
            mask: Tensor = mask,
            junk: float = junk,
            mistakes: Mistakes = mistakes,
        ) -> None:
            length = mask.sum(dim=1).tolist()
            sentence = f"of fresh responses of {length} tokens the loss is"
            expect(answer.tensor(), right, sentence, mistakes=mistakes)
            in_padding = answer.gradient((4, 6))[~mask]
            if in_padding.any():
                raise Wrong(
                    f"with {junk} in the padding of logp and logp_behavior, the "
                    f"gradient to logp there is {numbers(in_padding[:3])}; "
                    "expected 0. Put a number there before any arithmetic"
                )

        inputs = call(Leaf(logp), logp, advantage, mask)
        questions.append(Question("p3o_loss", [inputs], check))
    return questions


def advantage_of_tokens(draw: Draw) -> list[Question]:
    questions = []
    for shape in ((3,), (3, 4)):
        logp = draw.uniform(-3, -0.5, 3, 4)
        advantage = draw.uniform(-2, 2, *shape)
        of_tokens = advantage if advantage.dim() == 2 else advantage[:, None]
        right = (-of_tokens * logp).mean()

        def check(
            answer: Answer, right: Tensor = right, shape: tuple[int, ...] = shape
        ) -> None:
            sentence = f"of a fresh batch with an advantage {list(shape)} the loss is"
            expect(answer.tensor(), right, sentence)

        inputs = call(logp, logp, advantage, whole(3, 4))
        questions.append(Question("p3o_loss", [inputs], check))
    return questions


def whole_batch_quantities(draw: Draw) -> list[Question]:
    """What ess and token_count decide.

    First of the policy's part: all ratios are below the cap, and half the difference by
    A leaves the KL out.
    """
    ratio = draw.shuffled(
        torch.cat([draw.uniform(0.4, 0.5, 1), torch.full((7,), 0.02)])
    )
    logp, logp_behavior, mask = tokens_of_ratio(draw, ratio)
    advantage = draw.uniform(0.5, 2, 8)
    ess = float(draw.uniform(0.6, 0.9))
    token_count = draw.integer(20, 60)
    of_tokens = -advantage * logp.flatten()
    total = (ratio * of_tokens).sum()
    own_ess = effective_sample_size(logp - logp_behavior, mask)
    own_total = (ratio.clamp(max=float(own_ess)) * of_tokens).sum()
    mistakes = [
        ("with e_B of these 8 tokens: ess is not looked at", own_total / token_count),
        ("divided by these 8 tokens: token_count is not looked at", total / 8),
        ("with neither ess nor token_count looked at", own_total / 8),
        ("the sum, which is not divided by token_count", total),
    ]

    def check(plus: Answer, minus: Answer) -> None:
        found = (plus.tensor() - minus.tensor()) / 2
        sentence = (
            f"for 8 tokens of a batch with token_count={token_count} and "
            f"ess={number(ess)}, the sum of -min(rho, e_B) A log pi_theta over the "
            "tokens, divided by token_count, is"
        )
        expect(found, total / token_count, sentence, mistakes=mistakes)

    def adds_nothing(answer: Answer) -> None:
        found = float(answer.tensor())
        if found != 0:
            raise Wrong(
                f"a micro-batch without tokens adds {number(found)}; expected 0"
            )

    keywords = {"ess": ess, "token_count": token_count}
    calls = [
        call(logp, logp_behavior, sign * advantage, mask, **keywords)
        for sign in (1, -1)
    ]
    empty = call(logp, logp_behavior, advantage, ~mask, **keywords)
    return [
        Question("p3o_loss", calls, check),
        *parts_of_the_whole_batch(draw),
        Question("p3o_loss", [empty], adds_nothing),
    ]


def parts_of_the_whole_batch(draw: Draw) -> list[Question]:
    """The KL and the statistics are of the whole batch as well.

    What they are is asked in 2.5 and 2.6. Here they are only compared with themselves,
    for another ess and for twice the token_count.
    """
    ratio = stale_ratios(draw, 6)
    logp, logp_behavior, mask = tokens_of_ratio(draw, ratio)
    kl = draw.uniform(0.1, 2, 6, 1)
    ess, other_ess = float(draw.uniform(0.2, 0.4)), float(draw.uniform(0.6, 0.9))
    token_count = draw.integer(20, 60)
    instead = f"and token_count={2 * token_count} in place of {token_count}"

    def check_kl(answer: Answer, of_twice: Answer, of_other_ess: Answer) -> None:
        loss = answer.tensor()
        expect(
            of_twice.tensor(),
            loss / 2,
            f"with A = 0 {instead} the loss, which is the KL's part, is",
            mistakes=[("what it was: the KL is not divided by token_count", loss)],
        )
        expect(
            of_other_ess.tensor(),
            loss * (1 - other_ess) / (1 - ess),
            f"with A = 0 and ess={number(other_ess)} in place of {number(ess)} the "
            "loss, which is the KL's part, is",
            mistakes=[
                ("what it was: the KL is not weighed by the ess that is given", loss),
                (
                    "with the KL weighed by e_B in place of 1 - e_B",
                    loss * other_ess / ess,
                ),
            ],
        )

    def check_stats(answer: Answer, of_twice: Answer) -> None:
        try:
            stats, stats_of_twice = stats_of(answer), stats_of(of_twice)
        except Wrong:
            return  # That is said, and costs its points, in 2.5.
        for name, value in stats.items():
            expect(
                stats_of_twice[name],
                value / 2,
                f"with A other than 0 {instead}, {name} in the dictionary is",
                mistakes=[("what it was: it is not divided by token_count", value)],
            )

    def ask(advantage: Tensor, **keywords: Any) -> dict[str, Any]:
        return call(logp, logp_behavior, advantage, mask, **keywords)

    nothing = torch.zeros(6, dtype=F64)
    advantage = draw.uniform(-2, 2, 6)
    once = {"ess": ess, "token_count": token_count}
    twice = {"ess": ess, "token_count": 2 * token_count}
    other = {"ess": other_ess, "token_count": token_count}
    of_kl = [ask(nothing, **keywords) for keywords in (once, twice, other)]
    of_given_kl = [ask(nothing, kl=kl, **keywords) for keywords in (once, twice, other)]
    of_stats = [ask(advantage, kl=kl, **keywords) for keywords in (once, twice)]
    return [
        Question("p3o_loss", of_given_kl, check_kl),
        Question("p3o_loss", of_kl, check_kl),
        Question("p3o_loss", of_stats, check_stats),
    ]


def constants(draw: Draw) -> list[Question]:
    ratio = stale_ratios(draw, 5)
    logp, logp_behavior, mask = tokens_of_ratio(draw, ratio)
    advantage = draw.uniform(0.5, 2, 5)
    ess = float(effective_sample_size(logp - logp_behavior, mask))

    def check(own: Answer, same: Answer, minus: Answer) -> None:
        gradient = own.gradient((5, 1), 0)
        if is_close(gradient, minus.gradient((5, 1), 0)):
            raise Wrong("the gradient to logp is the same for A and -A")
        expect(
            gradient,
            same.gradient((5, 1), 0),
            "with e_B from the batch and with the same number as ess the gradients to "
            "logp differ, so e_B is no constant:",
        )
        if own.gradient((5,), 1).any():
            raise Wrong("there is a gradient to the advantage; expected a constant")

    calls = [
        call(Leaf(logp), logp_behavior, Leaf(advantage), mask),
        call(Leaf(logp), logp_behavior, Leaf(advantage), mask, ess=ess),
        call(Leaf(logp), logp_behavior, Leaf(-advantage), mask),
    ]
    return [Question("p3o_loss", calls, check)]


def loss_refuses(draw: Draw) -> list[Question]:
    logp, logp_behavior, mask = tokens_of_ratio(draw, draw.uniform(0.4, 3, 7))
    advantage = draw.uniform(0.5, 2, 7)
    kl = draw.uniform(0.1, 1, 7, 1)
    row = draw.integer(4, 6)

    def works(plus: Answer, minus: Answer) -> None:
        if is_close(plus.tensor(), minus.tensor()):
            raise Wrong("the loss is the same for A and -A")

    def refuses_nothing(answer: Answer) -> None:
        if answer.error != "ValueError":
            raise Wrong(
                "without a token and without token_count there was "
                f"{answer.error or 'no error'}; expected ValueError"
            )

    def broken(tensor: Tensor, value: float) -> Tensor:
        tensor = tensor.clone()
        tensor[row] = value
        return tensor

    calls = [call(logp, logp_behavior, sign * advantage, mask) for sign in (1, -1)]
    questions = [
        Question("p3o_loss", calls, works),
        Question(
            "p3o_loss", [call(logp, logp_behavior, advantage, ~mask)], refuses_nothing
        ),
    ]
    for what, tensors in (
        ("log pi_theta = nan", (broken(logp, math.nan), advantage, kl)),
        ("an advantage of nan", (logp, broken(advantage, math.nan), kl)),
        ("a KL of inf", (logp, advantage, broken(kl, math.inf))),
    ):
        inputs = call(tensors[0], logp_behavior, tensors[1], mask, kl=tensors[2])
        check = refuses_response(row, what)
        questions.append(Question("p3o_loss", [inputs], check))
    far = broken(logp, -800.0)
    inputs = call(far, logp_behavior, advantage, mask, kl_estimator="k3")
    check = refuses_response(row, "a log rho near -800, of which k3 is not finite,")
    return [*questions, Question("p3o_loss", [inputs], check)]


def gradient_derived(draw: Draw) -> list[Question]:
    questions = []
    for _ in range(3):
        questions += [weight_derived(draw), kl_gradient_derived(draw)]
    return questions


def weight_derived(draw: Draw) -> Question:
    ratio, ess = float(draw.uniform(0.1, 5)), float(draw.uniform(0.1, 0.9))
    advantage = float(draw.uniform(-2, 2))
    capped = min(ratio, ess) * advantage
    log_ratio = math.log(ratio)
    pull = (1 - ess) * ratio * log_ratio
    kl = ratio * log_ratio - ratio + 1
    return derived(
        "token_weight",
        [ratio, advantage, ess],
        capped - pull,
        f"at rho = {number(ratio)}, A = {number(advantage)}, e_B = {number(ess)}, "
        f"where the cap gives {number(capped)} and the KL {number(-pull)},",
        [
            ("the part of the cap alone", capped),
            ("with the KL's part added, not subtracted", capped + pull),
            ("with the KL itself, not its derivative", capped - (1 - ess) * kl),
            ("with the derivative to rho, not to log rho", capped - pull / ratio),
            ("with the KL's part not weighed by 1 - e_B", capped - pull / (1 - ess)),
            (
                "with the KL's part weighed by e_B",
                capped - ess * ratio * log_ratio,
            ),
            ("the gradient of the loss, not minus it", pull - capped),
            ("with the part of k3", capped - (1 - ess) * (1 - 1 / ratio)),
            ("with rho A: there is no cap", ratio * advantage - pull),
        ],
    )


def kl_gradient_derived(draw: Draw) -> Question:
    policy, behavior = draw.policies(5)
    p, log_ratio = policy.exp(), policy - behavior
    right = p * (log_ratio - (p * log_ratio).sum())
    mistakes = [
        ("the gradient to log pi_theta, not to the logits", p * (log_ratio + 1)),
        ("the gradient to log pi_theta without 1", p * log_ratio),
        ("the gradient of KL(pi_b || pi_theta)", p - behavior.exp()),
        ("minus the gradient", -right),
    ]
    where = f"for pi_theta = {numbers(p)} and pi_b = {numbers(behavior.exp())}"

    def check(answer: Answer) -> None:
        found = answer.tensor((5,))
        total = float(found.sum())
        note = ""
        if not abs(total) < 1e-6:
            note = f". Yours sum to {number(total)}; those to logits sum to 0"
        sentence = f"{where} your kl_gradient is"
        expect(found, right, sentence, mistakes=mistakes, note=note)

    return Question("kl_gradient", [call(policy, behavior)], check)


# Part 3: the trainer


def micro_batches_of_ranks(
    draw: Draw, weight: Tensor, sizes: list[list[int]]
) -> list[list[MicroBatch]]:
    """For each rank its micro-batches, of so many responses each."""
    ranks = []
    for rank_sizes in sizes:
        micros = []
        for rows in rank_sizes:
            columns = draw.integer(3, 6)
            mask = draw.mask(rows, columns) if rows > 1 else whole(1, columns)
            features = draw.normal(1.0, rows, columns, len(weight))
            logits = features @ (weight + draw.normal(0.7, *weight.shape))
            logp_behavior = logits.log_softmax(dim=-1)
            tokens = (draw.uniform(0, 1, rows, columns) * weight.shape[1]).long()
            logp_behavior = logp_behavior.gather(-1, tokens[..., None])[..., 0]
            micros.append(
                MicroBatch(
                    features=features,
                    tokens=tokens,
                    logp_behavior=logp_behavior.masked_fill(~mask, math.nan),
                    advantage=draw.normal(1.0, rows),
                    mask=mask,
                )
            )
        ranks.append(micros)
    return ranks


def on_ranks(arguments: list[list[Any]]) -> dict[str, Any]:
    """One call on several ranks at a time, each with its arguments."""
    return {"ranks": [given(of_rank) for of_rank in arguments]}


def of_ranks(answer: Answer, sizes: list[list[int]]) -> list[Any]:
    """What the ranks returned. Wrong if one of them raised."""
    values = answer.value()
    failed = [
        (rank, value)
        for rank, value in enumerate(values)
        if isinstance(value, dict) and "error" in value
    ]
    # A rank that fails leaves the others waiting; it is the one to tell of.
    failed.sort(key=lambda pair: pair[1]["error"] == "MissingRank")
    if failed:
        rank, value = failed[0]
        idle = "" if sizes[rank] else ", which has no micro-batch,"
        raise Wrong(
            f"for {division(sizes)}, {answer.function} on rank {rank}{idle} raised "
            f"{what_was_raised(value)}"
        )
    return values


def division(sizes: list[list[int]]) -> str:
    """How a batch is divided: "2 ranks with 1 and 3 micro-batches"."""
    counts = [str(len(of_rank)) for of_rank in sizes]
    if len(counts) == 1:
        return f"1 rank with {counts[0]} micro-batch{'' if counts == ['1'] else 'es'}"
    listed = f"{', '.join(counts[:-1])} and {counts[-1]}"
    return f"{len(counts)} ranks with {listed} micro-batches"


def ess_of(log_ratio: list[Tensor]) -> Tensor:
    """e_B of the tokens in these tensors of any shape; NaN without any."""
    flat = torch.cat([torch.zeros(0, dtype=F64), *[x.flatten() for x in log_ratio]])
    if len(flat) == 0:
        return torch.tensor(math.nan, dtype=F64)
    return effective_sample_size(flat[None], whole(1, len(flat)))


def quantity_mistakes(
    tokens: list[list[Tensor]], masks: list[list[Tensor]], rank: int
) -> Mistakes:
    """What gives this rank another e_B of log rho, by rank and micro-batch."""
    micros = [micro for of_rank in tokens for micro in of_rank]
    means = torch.stack([ess_of([micro]) for micro in micros])
    counts = torch.tensor([float(len(micro)) for micro in micros])
    padding = [
        torch.zeros(int((~mask).sum()), dtype=F64) for of in masks for mask in of
    ]
    by_rank = torch.stack([ess_of(of_rank) for of_rank in tokens])
    of_own = torch.stack([*[ess_of([micro]) for micro in tokens[rank]], by_rank[rank]])
    return [
        ("the mean of the micro-batches' e_B", means.mean()),
        (
            "the mean of the micro-batches' e_B, weighed by their tokens",
            (means * counts).sum() / counts.sum(),
        ),
        ("the mean of this rank's micro-batches' e_B", of_own[:-1].mean()),
        ("e_B of this rank alone", by_rank[rank]),
        ("the mean of the ranks' e_B", by_rank.mean()),
        ("e_B of the first micro-batch", means[0]),
        ("e_B of the last micro-batch", means[-1]),
        ("e_B if padding counts as tokens of ratio 1", ess_of(micros + padding)),
    ]


def ask_quantities(
    log_ratios: list[list[Tensor]], masks: list[list[Tensor]], where: str = ""
) -> Question:
    """What are e_B and the token count of the batch with these micro-batches?"""
    tokens = [
        [log_ratio[mask] for log_ratio, mask in zip(*of_rank, strict=True)]
        for of_rank in zip(log_ratios, masks, strict=True)
    ]
    right = ess_of([micro for of_rank in tokens for micro in of_rank])
    sizes = [[len(micro) for micro in of_rank] for of_rank in masks]

    def check(answer: Answer) -> None:
        for rank, value in enumerate(of_ranks(answer, sizes)):
            if not (isinstance(value, list) and len(value) == 2):
                raise Wrong("batch_quantities returns e_B and the token count")
            idle = "" if sizes[rank] else ", which has no micro-batch,"
            subject = f"for {division(sizes)}{where}, %s on rank {rank}{idle} is"
            count = as_tensor("the token count", value[1], ())
            check_count(count, subject % "the token count", masks, rank)
            expect(
                as_tensor("e_B", value[0], ()),
                right,
                subject % "e_B",
                mistakes=quantity_mistakes(tokens, masks, rank),
            )

    arguments = [list(pair) for pair in zip(log_ratios, masks, strict=True)]
    return Question("batch_quantities", [on_ranks(arguments)], check)


def check_count(
    found: Tensor, subject: str, masks: list[list[Tensor]], rank: int
) -> None:
    """Wrong where this is not the number of all tokens, exactly."""
    by_rank = [sum(int(mask.sum()) for mask in of_rank) for of_rank in masks]
    entries = sum(mask.numel() for of_rank in masks for mask in of_rank)
    micro_counts = sum(len(of_rank) for of_rank in masks)
    if float(found) == sum(by_rank):
        return
    mistakes = [
        ("the number of this rank's tokens", torch.tensor(by_rank[rank])),
        ("the number of all entries, padding included", torch.tensor(entries)),
        ("the number of micro-batches", torch.tensor(micro_counts)),
    ]
    raise Wrong(
        f"{subject} {number(found)}; expected {sum(by_rank)}"
        f"{known_mistake(found, mistakes)}"
    )


def random_log_ratios(
    draw: Draw, sizes: list[list[int]]
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """log rho and the mask of each micro-batch of each rank; the last are stale."""
    log_ratios: list[list[Tensor]] = []
    masks: list[list[Tensor]] = []
    spread = 0.2
    for rank_sizes in sizes:
        log_ratios.append([])
        masks.append([])
        for rows in rank_sizes:
            mask = draw.mask(rows, 5)
            log_ratio = draw.normal(spread, rows, 5) + spread
            log_ratios[-1].append(log_ratio.masked_fill(~mask, math.nan))
            masks[-1].append(mask)
            spread += 0.4
    return log_ratios, masks


def quantities_of_micro_batches(draw: Draw) -> list[Question]:
    return [
        ask_quantities(*random_log_ratios(draw, sizes))
        for sizes in ([[6]], [[2, 4]], [[3, 2, 5]])
    ]


def quantities_of_ranks(draw: Draw) -> list[Question]:
    return [
        ask_quantities(*random_log_ratios(draw, sizes))
        for sizes in ([[3], [4]], [[2, 3], [5, 2], [4, 4]], [[2], [2, 3, 4]])
    ]


def extreme_quantities(draw: Draw) -> list[Question]:
    log_ratios, masks = random_log_ratios(draw, [[2, 3], [4]])
    log_ratios[0][1][0, 0] = draw.uniform(380, 400)
    log_ratios[1][0][0, 0] = log_ratios[0][1][0, 0] - 0.5
    where = " and one log rho near 400 nats on each"
    return [
        ask_quantities(log_ratios, masks, where),
        ask_quantities(*random_log_ratios(draw, [[2, 3], [], [2]])),
        ask_gradient(draw, [[3], [], [2]]),
    ]


class Share(NamedTuple):
    """A micro-batch, with e_B and the divisor of the sum over its tokens."""

    micro: MicroBatch
    ess: Tensor
    divisor: float


def gradient_of_shares(weight: Tensor, shares: list[Share]) -> Tensor:
    """The gradient of the sum of the losses."""
    leaf = weight.clone().requires_grad_()
    loss = sum(
        toy_loss(log_probabilities(leaf, micro), micro, ess, divisor)
        for micro, ess, divisor in shares
    )
    return torch.autograd.grad(loss, leaf)[0]


def log_ratio_of(weight: Tensor, micro: MicroBatch) -> Tensor:
    """log rho of the tokens of a micro-batch."""
    return (log_probabilities(weight, micro) - micro.logp_behavior)[micro.mask]


def tokens_in(micros: list[MicroBatch]) -> int:
    return sum(int(micro.mask.sum()) for micro in micros)


def gradient_mistakes(
    weight: Tensor, ranks: list[list[MicroBatch]], ess: Tensor
) -> Mistakes:
    """What gives another average of the ranks' gradients."""
    every = [micro for micros in ranks for micro in micros]
    count = tokens_in(every)
    size = len(ranks)
    busy = sum(len(micros) > 0 for micros in ranks)
    right = [Share(micro, ess, count) for micro in every]
    wrong = {
        "with e_B of each micro-batch": [
            Share(micro, ess_of([log_ratio_of(weight, micro)]), count)
            for micro in every
        ],
        "with e_B of each rank": [
            Share(micro, ess_of([log_ratio_of(weight, m) for m in micros]), count)
            for micros in ranks
            for micro in micros
        ],
        "with the token count of each rank": [
            Share(micro, ess, tokens_in(micros) * size)
            for micros in ranks
            for micro in micros
        ],
        "with the token count of each rank, not averaged": [
            Share(micro, ess, tokens_in(micros)) for micros in ranks for micro in micros
        ],
        "the mean of the micro-batches' means": [
            Share(micro, ess, tokens_in([micro]) * size * len(micros))
            for micros in ranks
            for micro in micros
        ],
        "the sum of the micro-batches' means": [
            Share(micro, ess, tokens_in([micro]) * size) for micro in every
        ],
        "the gradient of the last micro-batch alone": [
            Share(micros[-1], ess, count) for micros in ranks if micros
        ],
    }
    mistakes = [
        (mistake, gradient_of_shares(weight, shares))
        for mistake, shares in wrong.items()
    ]
    whole_gradient = gradient_of_shares(weight, right)
    forgotten = f"the right gradient divided by {size}: the ranks' gradients are "
    forgotten += "averaged, not added"
    if size > 1:
        mistakes.append((forgotten, whole_gradient / size))
    if busy < size:
        not_counted = f"{busy}/{size} of the right gradient: the average is over all "
        not_counted += "ranks, also over one without a micro-batch"
        mistakes.append((not_counted, whole_gradient * busy / size))
    return [*mistakes, ("with a gradient through e_B", with_live_ess(weight, every))]


def with_live_ess(weight: Tensor, micros: list[MicroBatch]) -> Tensor:
    """The gradient of the batch if e_B is not detached."""
    leaf = weight.clone().requires_grad_()
    ratio = torch.cat([log_ratio_of(leaf, micro) for micro in micros]).exp()
    ess = ratio.mean() ** 2 / (ratio**2).mean()
    loss = sum(
        toy_loss(log_probabilities(leaf, micro), micro, ess, tokens_in(micros))
        for micro in micros
    )
    return torch.autograd.grad(loss, leaf)[0]


def ask_gradient(draw: Draw, sizes: list[list[int]]) -> Question:
    """What is the gradient of the whole batch, divided among ranks like this?"""
    weight = draw.normal(0.5, 3, 4)
    ranks = micro_batches_of_ranks(draw, weight, sizes)
    every = [micro for micros in ranks for micro in micros]
    ess = ess_of([log_ratio_of(weight, micro) for micro in every])
    shares = [Share(micro, ess, tokens_in(every)) for micro in every]
    right = gradient_of_shares(weight, shares)

    def check(answer: Answer) -> None:
        gradients = [
            as_tensor(f"the gradient of rank {rank}", value, (3, 4))
            for rank, value in enumerate(of_ranks(answer, sizes))
        ]
        for rank, gradient in enumerate(gradients):
            if not sizes[rank] and gradient.any():
                raise Wrong(
                    f"on rank {rank}, which has no micro-batch, the gradient has the "
                    f"first row {numbers(gradient[0])}; expected 0"
                )
        found = torch.stack(gradients).mean(dim=0)
        if not is_close(found, right):
            what = "the gradient"
            if len(sizes) > 1:
                what = "the average of the ranks' gradients"
            raise Wrong(
                f"for {division(sizes)}, {what} has the first row "
                f"{numbers(found[0])}; expected {numbers(right[0])}"
                f"{known_mistake(found, gradient_mistakes(weight, ranks, ess))}"
            )

    arguments = [[weight, micros] for micros in ranks]
    return Question("gradient_of_rank", [on_ranks(arguments)], check)


def gradient_of_micro_batches(draw: Draw) -> list[Question]:
    return [ask_gradient(draw, sizes) for sizes in ([[6]], [[2, 3]], [[1, 4, 2]])]


def gradient_of_ranks(draw: Draw) -> list[Question]:
    divisions = ([[3], [4]], [[2, 3], [5, 1], [4, 4]], [[2], [2, 3, 4]])
    return [ask_gradient(draw, sizes) for sizes in divisions]


# Part 4: the experiment


def interval_of(first: Tensor, second: Tensor, level: float) -> Tensor:
    """The difference, low and high, by Student's t."""
    differences = first - second
    if bool((differences == differences[0]).all()):
        # Without a spread the interval has no width; scipy has NaN for it.
        return differences[:1].expand(3)
    result = stats.ttest_rel(first.numpy(), second.numpy())
    low, high = result.confidence_interval(level)
    return torch.tensor([float(differences.mean()), low, high], dtype=F64)


def interval_mistakes(first: Tensor, second: Tensor, level: float) -> Mistakes:
    """What gives another interval."""
    differences = first - second
    mean, deviation, count = differences.mean(), differences.std(), len(first)
    error = deviation / math.sqrt(count)
    quantile = stats.t.ppf((1 + level) / 2, count - 1)
    normal = stats.norm.ppf((1 + level) / 2)
    one_sided = stats.t.ppf(level, count - 1)
    unpaired = stats.ttest_ind(first.numpy(), second.numpy())
    low, high = unpaired.confidence_interval(level)

    def around(half_width: Tensor) -> Tensor:
        return torch.stack([mean, mean - half_width, mean + half_width])

    return [
        ("of a normal distribution, not of Student's t", around(normal * error)),
        ("the interval of one side", around(one_sided * error)),
        (
            "of the deviation, which is not divided by sqrt(n)",
            around(quantile * deviation),
        ),
        (
            "with the deviation of a population, over n",
            around(quantile * error * math.sqrt((count - 1) / count)),
        ),
        (
            "with n degrees of freedom, not n - 1",
            around(stats.t.ppf((1 + level) / 2, count) * error),
        ),
        ("unpaired", torch.stack([mean, torch.tensor(low), torch.tensor(high)])),
        ("of the second less the first", interval_of(second, first, level)),
        ("at the level 0.95, whatever is asked", interval_of(first, second, 0.95)),
    ]


def intervals(draw: Draw) -> list[Question]:
    questions = []
    for level in (0.95, 0.8):
        seeds = draw.integer(4, 9)
        first, second = draw.uniform(0, 1, seeds), draw.uniform(0, 1, seeds)
        right = interval_of(first, second, level)
        mistakes = interval_mistakes(first, second, level)

        def check(
            answer: Answer,
            right: Tensor = right,
            level: float = level,
            seeds: int = seeds,
            mistakes: Mistakes = mistakes,
        ) -> None:
            value = answer.value()
            if not (isinstance(value, list) and len(value) == 3):
                raise Wrong("paired_interval returns the difference, low and high")
            found = torch.stack(
                [as_tensor("paired_interval", each, ()) for each in value]
            )
            sentence = f"of {seeds} seeds at the level {level} difference, low and "
            expect(found, right, f"{sentence}high are", mistakes=mistakes)

        inputs = call(first.tolist(), second.tolist(), level)
        questions.append(Question("paired_interval", [inputs], check))
    return questions


LONGEST_RESULTS = 1_000_000  # bytes
FEWEST_SEEDS = 5


def check_results(path: Path) -> None:
    """The form of results.json, and whether its numbers follow from each other."""
    if not path.is_file() or path.stat().st_size > LONGEST_RESULTS:
        raise Wrong("there is no results.json, or it is over a megabyte")
    try:
        results = json.loads(path.read_text())
    except (ValueError, RecursionError, OSError) as error:
        raise Wrong(f"results.json is not JSON: {str(error)[:100]}") from error
    if not isinstance(results, dict):
        raise Wrong("results.json is not an object with the fields of the handout")
    missing = [
        name
        for name in ("question", "prediction", "conclusion")
        if not isinstance(results.get(name), str) or len(results[name]) < 40
    ]
    if missing:
        raise Wrong(
            f"{', '.join(missing)} in results.json: each has to be a sentence of 40 "
            "letters or more"
        )
    arms = results.get("arms")
    if not isinstance(arms, dict) or len(arms) != 2:
        raise Wrong("'arms' in results.json does not have two arms")
    for name, arm in arms.items():
        check_arm(name, arm)
    (first_name, first), (second_name, second) = arms.items()
    if first["seeds"] != second["seeds"]:
        raise Wrong("the arms do not have the same seeds, so they cannot be paired")
    if all(
        len(set(arm["values"])) == 1 and arm["values"][0] not in (0, 1)
        for arm in arms.values()
    ):
        raise Wrong(
            "in both arms all values are equal: was each run given a --seed of its own?"
        )
    check_flags([first["flags"], second["flags"]])
    difference, low, high = interval_of(
        torch.tensor(first["values"], dtype=F64),
        torch.tensor(second["values"], dtype=F64),
        level=0.95,
    ).tolist()
    comparison = results.get("comparison")
    if not isinstance(comparison, dict):
        raise Wrong("'comparison' in results.json is missing")
    for name, right in (
        ("difference", difference),
        ("low", low),
        ("high", high),
    ):
        found = comparison.get(name)
        if not isinstance(found, int | float) or not abs(found - right) <= 1e-4:
            raise Wrong(
                f"{name} in results.json is {found}; from the values of "
                f"{first_name!r} and {second_name!r} it is {right:.4f}"
            )


def check_arm(name: str, arm: Any) -> None:
    """One arm of an experiment: its flags, seeds and values."""
    if not isinstance(arm, dict) or not {"flags", "seeds", "values"} <= arm.keys():
        raise Wrong(f"arm {name!r} needs flags, seeds and values")
    seeds, values, flags = arm["seeds"], arm["values"], arm["flags"]
    if not (isinstance(flags, list) and all(isinstance(flag, str) for flag in flags)):
        raise Wrong(f"the flags of arm {name!r} are no list of strings")
    if not isinstance(seeds, list) or len(seeds) < FEWEST_SEEDS:
        raise Wrong(f"arm {name!r} has fewer than {FEWEST_SEEDS} seeds")
    if len({json.dumps(seed) for seed in seeds}) < len(seeds):
        raise Wrong(f"arm {name!r} has a seed twice")
    if not isinstance(values, list) or len(values) != len(seeds):
        raise Wrong(f"arm {name!r} has not one value for each seed")
    for value in values:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= 1:
            raise Wrong(f"arm {name!r} has the value {value}, which is no accuracy")


def check_flags(flags_of_arms: list[list[str]]) -> None:
    """train.py takes the flags, they are two settings, and one has a mismatch."""
    # Not at the top of the file: the trainer takes seconds to import.
    from support.checkpoints import MAY_DIFFER
    from support.checks import should_be_on_policy
    from support.flags import Refused, parse_flags
    from train import Config

    default = Config()
    mismatched = False
    settings = []
    for flags in flags_of_arms:
        # A recipe is a file, which the grader does not open for a student.
        if any(flag.startswith("--config") for flag in flags):
            raise Wrong("give flags, not a --config file")
        if any(flag.startswith("--seed") for flag in flags):
            raise Wrong("leave --seed out of the flags: the seeds stand beside them")
        try:
            cfg = parse_flags(Config, flags)
        except (Refused, SystemExit) as error:
            raise Wrong(f"train.py refuses the flags: {error}") from error
        # One in a module of the student's cannot be looked up here.
        if ":" not in cfg.objective and cfg.objective not in OBJECTIVES:
            raise Wrong(
                f"train.py has no objective {cfg.objective!r}: there are "
                f"{', '.join(OBJECTIVES)}, and those of a module, as module:name"
            )
        # Not what only says where and how fast it runs.
        settings.append(cfg.model_dump(exclude=MAY_DIFFER - {"steps"}))
        mismatched = mismatched or (
            not should_be_on_policy(cfg)
            or cfg.passes > default.passes
            or cfg.minibatches > default.minibatches
        )
    if settings[0] == settings[1]:
        raise Wrong("the arms have the same settings: nothing is compared")
    if not mismatched:
        raise Wrong(
            "no arm has a mismatch: another temperature than policy_temperature, "
            "top_p, top_k, rollout_quantization, a lag, or more passes or minibatches "
            "than by default"
        )


def no_questions(draw: Draw) -> list[Question]:
    """results.json is not code: check_results reads it."""
    return []


ITEMS = [
    Item("1.1", "e_B of a batch", 5, "loss.py", ess_of_a_batch),
    Item("1.2", "e_B sees tokens alone", 3, "loss.py", ess_without_padding),
    Item("1.3", "identities of e_B", 3, "loss.py", ess_identities),
    Item("1.4", "e_B of extreme ratios", 3, "loss.py", ess_of_extreme_ratios),
    Item("1.5", "e_B is a constant, or an error", 2, "loss.py", ess_refuses),
    Item("1.6", "the advantage", 3, "loss.py", advantages),
    Item("1.7", "e_B derived", 6, "derivations.py", ess_derived),
    Item("2.1", "the KL", 4, "loss.py", kl_values),
    Item("2.2", "the gradient of the KL", 4, "loss.py", kl_gradients),
    Item("2.3", "the KL of rounded numbers", 2, "loss.py", kl_of_rounded),
    Item("2.4", "the cap", 5, "loss.py", caps),
    Item("2.5", "the weight of the KL", 3, "loss.py", kl_term),
    Item("2.6", "the KL estimated", 3, "loss.py", estimators),
    Item("2.7", "a mean over tokens", 2, "loss.py", means),
    Item("2.8", "the advantage of a token", 2, "loss.py", advantage_of_tokens),
    Item("2.9", "what the batch decides", 3, "loss.py", whole_batch_quantities),
    Item("2.10", "constants in the gradient", 2, "loss.py", constants),
    Item("2.11", "errors of the loss", 2, "loss.py", loss_refuses),
    Item("2.12", "the gradient derived", 3, "derivations.py", gradient_derived),
    Item("3.1", "e_B over micro-batches", 4, "batch.py", quantities_of_micro_batches),
    Item("3.2", "e_B over ranks", 5, "batch.py", quantities_of_ranks),
    Item("3.3", "the gradient, one rank", 4, "batch.py", gradient_of_micro_batches),
    Item("3.4", "the gradient over ranks", 5, "batch.py", gradient_of_ranks),
    Item("3.5", "extremes and an idle rank", 2, "batch.py", extreme_quantities),
    Item("4.1", "a paired interval", 2, "experiment.py", intervals),
    Item("4.2", "the form of results.json", 3, "results.json", no_questions),
]
PARTS = {
    1: "e_B and its identities",
    2: "the objective, its KL and its gradient",
    3: "the trainer's batch",
    4: "an experiment",
}
