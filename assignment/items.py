"""The items of the assignment: what is asked of a student's code, and what is right.

Every item draws its inputs anew in each run. A question is one or several calls of the
student's functions, made in another process, and a check of what came back, made here.
The right values are computed here too, by the repository's own loss.py. An item's
points are given if all of its checks hold. The first one that does not says so in a
sentence (Wrong).
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


class Wrong(Exception):
    """What is wrong with an answer, in a sentence for the student."""


class Answer:
    """What one call came back with: a value and gradients, or an error."""

    def __init__(self, function: str, answer: dict[str, Any]) -> None:
        self.function = function
        self.error = answer.get("error")
        self.message = str(answer.get("message", ""))
        self._value = answer.get("value")
        self._gradients = answer.get("gradients", [])

    def value(self) -> Any:
        """What the function returned. Wrong if it raised."""
        if self.error is not None:
            said = f": {self.message}" if self.message else ""
            raise Wrong(f"{self.function} raised {self.error}{said}")
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
    found: Tensor, right: Tensor, sentence: str, tolerance: float = TOLERANCE
) -> None:
    """Wrong, with this beginning of a sentence, where `found` is not right."""
    if not is_close(found, right, tolerance):
        raise Wrong(f"{sentence} {numbers(found)}; expected {numbers(right)}")


def names_response(message: str, row: int) -> bool:
    """Whether a message has the number of this response, not as a part of another."""
    return re.search(rf"(?<![\d.]){row}(?!\.?\d)", message) is not None


def whole(*shape: int) -> Tensor:
    """A mask without padding."""
    return torch.ones(shape, dtype=torch.bool)


# Part 1: e_B


def ask_ess(
    log_ratio: Tensor, mask: Tensor, sentence: str, right: float | None = None
) -> Question:
    """What is e_B of these ratios?"""
    if right is None:
        right = float(effective_sample_size(log_ratio, mask))

    def check(answer: Answer) -> None:
        expect(answer.tensor(), torch.tensor(right, dtype=F64), sentence)

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
    ratio = draw.uniform(0.3, 3)
    equal = ratio.log().expand(2, 1).clone()

    def is_one(answer: Answer) -> None:
        found = float(answer.tensor())
        if found != 1:
            raise Wrong(f"two equal ratios give e_B = {found!r}; expected exactly 1")

    log_ratio = draw.normal(0.8, 3, 5)
    factor = draw.uniform(3, 30)
    tokens = draw.integer(20, 40)
    dominant = torch.zeros(1, tokens, dtype=F64)
    dominant[0, draw.integer(0, tokens - 1)] = 30.0
    sentence = f"one of {tokens} tokens has a ratio of e^30, the others 1: your e_B is"
    return [
        Question("effective_sample_size", [call(equal, whole(2, 1))], is_one),
        ask_ess(
            log_ratio + factor.log(),
            whole(3, 5),
            f"with all ratios multiplied by {number(factor)}, which changes nothing, "
            "your e_B is",
        ),
        ask_ess(dominant, whole(1, tokens), sentence),
    ]


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
    return questions


def ess_refuses(draw: Draw) -> list[Question]:
    log_ratio = draw.normal(1.0, 7, 3)
    right = effective_sample_size(log_ratio, whole(7, 3))

    def is_a_constant(answer: Answer) -> None:
        expect(answer.tensor(), right, "your e_B is")
        if answer.carries_gradient():
            raise Wrong("e_B requires a gradient; expected a constant (detach)")

    def refuses_nothing(answer: Answer) -> None:
        if answer.error != "ValueError":
            raise Wrong(
                f"without a token there was {answer.error or 'no error'}; "
                "expected ValueError"
            )

    questions = [
        Question(
            "effective_sample_size", [call(Leaf(log_ratio), whole(7, 3))], is_a_constant
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
                f"{what} in response {row} gave {answer.error or 'no error'}; "
                "expected FloatingPointError"
            )
        if not names_response(answer.message, row):
            raise Wrong(
                f"{what} in response {row}: your message {answer.message!r} does not "
                "have the number of the response"
            )

    return check


def advantages(draw: Draw) -> list[Question]:
    reward = draw.uniform(0, 1, 3, 4)
    reward[1] = reward[1, 0]
    questions = []
    for scale in (True, False):
        right = group_advantage(reward, scale)

        def check(answer: Answer, right: Tensor = right, scale: bool = scale) -> None:
            found = answer.tensor((3, 4))
            group = f"of the rewards {numbers(reward[0])} with scale={scale}"
            expect(found[0], right[0], f"the advantages {group} are")
            if found[1].any():
                raise Wrong("a group of equal rewards has an advantage; expected 0")
            expect(found, right, "the advantages of three groups are")

        questions.append(Question("group_advantage", [call(reward, scale)], check))

    def refuses(answer: Answer) -> None:
        if answer.error != "ValueError":
            raise Wrong(
                f"a group of one gave {answer.error or 'no error'}; expected ValueError"
            )

    alone = call(draw.uniform(0, 1, 3, 1))
    return [*questions, Question("group_advantage", [alone], refuses)]


def ess_derived(draw: Draw) -> list[Question]:
    questions = []
    for _ in range(3):
        variation = float(draw.uniform(0.1, 3))
        tokens = draw.integer(5, 500)
        ratio = float(draw.uniform(3, 300))
        policy, behavior = draw.policies(6)
        chi_squared = float((policy.exp() ** 2 / behavior.exp()).sum() - 1)
        mean = (tokens - 1 + ratio) / tokens
        mean_square = (tokens - 1 + ratio**2) / tokens
        questions += [
            derived(
                "ess_of_variation",
                [variation],
                1 / (1 + variation**2),
                f"at a coefficient of variation of {number(variation)}",
            ),
            derived(
                "ess_with_one_outlier",
                [tokens, ratio],
                mean**2 / mean_square,
                f"for {tokens} tokens, one of ratio {number(ratio)}, the others of 1,",
            ),
            derived(
                "ess_of_policies",
                [policy.exp(), behavior.exp()],
                1 / (1 + chi_squared),
                f"for pi_theta = {numbers(policy.exp())} and "
                f"pi_b = {numbers(behavior.exp())}",
            ),
        ]
    return questions


def derived(function: str, inputs: list[Any], right: Any, where: str) -> Question:
    """What does the student's formula give?"""
    right = torch.as_tensor(right, dtype=F64)

    def check(answer: Answer) -> None:
        found = answer.tensor(tuple(right.shape))
        expect(found, right, f"{where} your {function} is")

    return Question(function, [call(*inputs)], check)


# Part 2: the objective, its KL and its gradient


def kl_values(draw: Draw) -> list[Question]:
    questions = []
    for listed in (1, 4, 7):
        policy, behavior = draw.policies(2, 3, 9)
        logp, logp_behavior = policy[..., :listed], behavior[..., :listed]
        right = kl_divergence(logp, logp_behavior)
        reversed_kl = kl_divergence(logp_behavior, logp)

        def check(
            answer: Answer,
            listed: int = listed,
            right: Tensor = right,
            reversed_kl: Tensor = reversed_kl,
        ) -> None:
            found = answer.tensor((2, 3))
            if is_close(found, reversed_kl):
                raise Wrong("this is KL(pi_b || pi_theta), the other direction")
            sentence = (
                f"over {listed} of 9 tokens and the rest, the KL of 6 positions is"
            )
            expect(found, right, sentence)

        questions.append(Question("kl_divergence", [call(logp, logp_behavior)], check))
    return questions


def kl_gradients(draw: Draw) -> list[Question]:
    questions = []
    for listed in (1, 4, 7):
        policy, behavior = draw.policies(2, 9)
        logp = policy[..., :listed].requires_grad_()
        logp_behavior = behavior[..., :listed]
        (right,) = torch.autograd.grad(kl_divergence(logp, logp_behavior).sum(), logp)
        rest = 1 - logp.detach().exp().sum(dim=-1, keepdim=True)
        rest_behavior = 1 - logp_behavior.exp().sum(dim=-1, keepdim=True)
        through_rest = logp.detach().exp() * (rest / rest_behavior).log()

        def check(
            answer: Answer,
            right: Tensor = right,
            through_rest: Tensor = through_rest,
        ) -> None:
            found = answer.gradient(tuple(right.shape))
            if is_close(found, right + through_rest):
                raise Wrong(
                    "no gradient goes through the rest: its probability is one less "
                    "the sum of the listed ones, and moves with them"
                )
            expect(found, right, "the gradient of the KL to logp is")

        inputs = call(Leaf(logp.detach()), logp_behavior)
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

        def check(
            plus: Answer,
            minus: Answer,
            tokens: int = tokens,
            ratio: Tensor = ratio,
            advantage: Tensor = advantage,
            ess: float = ess,
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

        def check(
            answer: Answer, tokens: int = tokens, kl: Tensor = kl, ess: Tensor = ess
        ) -> None:
            where = f"with A = 0, e_B = {number(ess)} and a mean KL of "
            where += f"{number(kl.mean())} the loss is"
            expect(answer.tensor(), (1 - ess) * kl.mean(), where)
            found = answer.gradient((tokens, 1))
            right = (1 - ess).expand(tokens, 1) / tokens
            expect(found, right, "the gradient to the KL that was given is")

        no_advantage = torch.zeros(tokens, dtype=F64)
        inputs = call(logp, logp_behavior, no_advantage, mask, kl=Leaf(kl))
        questions.append(Question("p3o_loss", [inputs], check))
    return questions


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

        def check(
            answer: Answer,
            name: str = name,
            ratio: Tensor = ratio,
            ess: float = ess,
            kl: float = float(kl.detach()),
            right: Tensor = right,
        ) -> None:
            where = f"with A = 0, e_B = {number(ess)}, rho = {numbers(ratio)} and the "
            where += f"KL estimated by {name!r}"
            expect(
                answer.tensor(), torch.tensor((1 - ess) * kl), f"{where} the loss is"
            )
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
        right = (-advantage[:, None] * logp)[mask].mean()
        logp = logp.masked_fill(~mask, junk)

        def check(answer: Answer, right: Tensor = right, mask: Tensor = mask) -> None:
            length = mask.sum(dim=1).tolist()
            sentence = f"of fresh responses of {length} tokens the loss is"
            expect(answer.tensor(), right, sentence)

        inputs = call(logp, logp, advantage, mask)
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
    """All ratios are below the cap; half the difference by A leaves the KL out."""
    ratio = draw.shuffled(
        torch.cat([draw.uniform(0.4, 0.5, 1), torch.full((7,), 0.02)])
    )
    logp, logp_behavior, mask = tokens_of_ratio(draw, ratio)
    advantage = draw.uniform(0.5, 2, 8)
    ess = float(draw.uniform(0.6, 0.9))
    token_count = draw.integer(20, 60)
    right = (-ratio * advantage * logp.flatten()).sum() / token_count

    def check(plus: Answer, minus: Answer) -> None:
        found = (plus.tensor() - minus.tensor()) / 2
        sentence = (
            f"for 8 tokens of a batch of token_count={token_count} with "
            f"ess={number(ess)} and all ratios below it, the part of the loss that "
            "has the sign of A is"
        )
        expect(found, right, sentence)

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
        Question("p3o_loss", [empty], adds_nothing),
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
    return questions


def gradient_derived(draw: Draw) -> list[Question]:
    questions = []
    for _ in range(3):
        ratio, ess = float(draw.uniform(0.1, 5)), float(draw.uniform(0.1, 0.9))
        advantage = float(draw.uniform(-2, 2))
        pull = (1 - ess) * ratio * math.log(ratio)
        policy, behavior = draw.policies(5)
        kl = (policy.exp() * (policy - behavior)).sum()
        questions += [
            derived(
                "token_weight",
                [ratio, advantage, ess],
                min(ratio, ess) * advantage - pull,
                f"at rho = {number(ratio)}, A = {number(advantage)}, "
                f"e_B = {number(ess)}",
            ),
            derived(
                "kl_gradient",
                [policy, behavior],
                policy.exp() * (policy - behavior - kl),
                f"for pi_theta = {numbers(policy.exp())} and "
                f"pi_b = {numbers(behavior.exp())}",
            ),
        ]
    return questions


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


def of_ranks(answer: Answer) -> list[Any]:
    """What the ranks returned. Wrong if one of them raised."""
    values = answer.value()
    failed = [v for v in values if isinstance(v, dict) and "error" in v]
    # A rank that fails leaves the others waiting; it is the one to tell of.
    failed.sort(key=lambda value: value["error"] == "TimeoutError")
    if failed:
        raise Wrong(
            f"{answer.function} raised {failed[0]['error']}: {failed[0]['message']}"
        )
    return values


def ask_quantities(
    log_ratios: list[list[Tensor]], masks: list[list[Tensor]]
) -> Question:
    """What are e_B and the token count of the batch with these micro-batches?"""
    flat = torch.cat(
        [
            log_ratio[mask]
            for of_rank, masks_of_rank in zip(log_ratios, masks, strict=True)
            for log_ratio, mask in zip(of_rank, masks_of_rank, strict=True)
        ]
    )[None]
    right = effective_sample_size(flat, whole(*flat.shape))

    def check(answer: Answer) -> None:
        for rank, value in enumerate(of_ranks(answer)):
            if not (isinstance(value, list) and len(value) == 2):
                raise Wrong("batch_quantities returns e_B and the token count")
            where = f"with micro-batches {[len(each) for each in log_ratios]} a rank, "
            count = float(as_tensor("the token count", value[1], ()))
            if count != flat.numel():
                raise Wrong(
                    f"{where}the token count on rank {rank} is {number(count)}; "
                    f"expected {flat.numel()}"
                )
            found = as_tensor("e_B", value[0], ())
            expect(found, right, f"{where}e_B on rank {rank} is")

    arguments = [list(pair) for pair in zip(log_ratios, masks, strict=True)]
    return Question("batch_quantities", [on_ranks(arguments)], check)


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
    idle_log_ratios, idle_masks = random_log_ratios(draw, [[2, 3], [], [2]])
    return [
        ask_quantities(log_ratios, masks),
        ask_quantities(idle_log_ratios, idle_masks),
    ]


def ask_gradient(draw: Draw, sizes: list[list[int]]) -> Question:
    """What is the gradient of the whole batch, divided among ranks like this?"""
    weight = draw.normal(0.5, 3, 4)
    ranks = micro_batches_of_ranks(draw, weight, sizes)
    leaf = weight.clone().requires_grad_()
    log_ratio = []
    for micro in [micro for micros in ranks for micro in micros]:
        logp = log_probabilities(weight, micro)
        log_ratio.append((logp - micro.logp_behavior)[micro.mask])
    flat = torch.cat(log_ratio)[None]
    ess = effective_sample_size(flat, whole(*flat.shape))
    loss = sum(
        toy_loss(log_probabilities(leaf, micro), micro, ess, flat.numel())
        for micros in ranks
        for micro in micros
    )
    (right,) = torch.autograd.grad(loss, leaf)

    def check(answer: Answer) -> None:
        gradients = [
            as_tensor("the gradient of a rank", value, (3, 4))
            for value in of_ranks(answer)
        ]
        found = torch.stack(gradients).mean(dim=0)
        if is_close(found * len(ranks), right) and len(ranks) > 1:
            raise Wrong(
                f"the average over {len(ranks)} ranks is the right gradient divided by "
                f"{len(ranks)}: the ranks' gradients are averaged, not added"
            )
        error = float((found - right).norm() / right.norm())
        if not is_close(found, right):
            raise Wrong(
                f"with responses {sizes} in the micro-batches of the ranks, the "
                f"average of the ranks' gradients is off by {error:.2g} of its norm; "
                f"its first row is {numbers(found[0])}, expected {numbers(right[0])}"
            )

    arguments = [[weight, micros] for micros in ranks]
    return Question("gradient_of_rank", [on_ranks(arguments)], check)


def gradient_of_micro_batches(draw: Draw) -> list[Question]:
    return [ask_gradient(draw, sizes) for sizes in ([[6]], [[2, 3]], [[1, 4, 2]])]


def gradient_of_ranks(draw: Draw) -> list[Question]:
    divisions = ([[3], [4]], [[2, 3], [5, 1], [4, 4]], [[2], [2, 3, 4]])
    return [ask_gradient(draw, sizes) for sizes in divisions]


# Part 4: the experiment


def intervals(draw: Draw) -> list[Question]:
    questions = []
    for level in (0.95, 0.8):
        seeds = draw.integer(4, 9)
        first, second = draw.uniform(0, 1, seeds), draw.uniform(0, 1, seeds)
        result = stats.ttest_rel(first.numpy(), second.numpy())
        interval = result.confidence_interval(level)
        difference = float((first - second).mean())
        right = torch.tensor([difference, interval.low, interval.high], dtype=F64)

        def check(answer: Answer, right: Tensor = right, level: float = level) -> None:
            value = answer.value()
            if not (isinstance(value, list) and len(value) == 3):
                raise Wrong("paired_interval returns the difference, low and high")
            found = torch.stack(
                [as_tensor("paired_interval", each, ()) for each in value]
            )
            expect(found, right, f"at the level {level}: difference, low and high are")

        inputs = call(first.tolist(), second.tolist(), level)
        questions.append(Question("paired_interval", [inputs], check))
    return questions


LONGEST_RESULTS = 1_000_000  # bytes
FEWEST_SEEDS = 5
MISMATCHES = (
    "temperature",
    "top_p",
    "top_k",
    "rollout_quantization",
    "lag",
    "passes",
    "minibatches",
)


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
    for name in ("question", "prediction", "conclusion"):
        text = results.get(name)
        if not isinstance(text, str) or len(text) < 40:
            raise Wrong(
                f"{name!r} in results.json is no sentence of 40 letters or more"
            )
    arms = results.get("arms")
    if not isinstance(arms, dict) or len(arms) != 2:
        raise Wrong("'arms' in results.json does not have two arms")
    for name, arm in arms.items():
        check_arm(name, arm)
    (first_name, first), (second_name, second) = arms.items()
    if first["seeds"] != second["seeds"]:
        raise Wrong("the arms do not have the same seeds, so they cannot be paired")
    if first["flags"] == second["flags"]:
        raise Wrong("the arms have the same flags: nothing is compared")
    check_flags([first["flags"], second["flags"]])
    result = stats.ttest_rel(first["values"], second["values"])
    interval = result.confidence_interval(0.95)
    pairs = zip(first["values"], second["values"], strict=True)
    difference = sum(one - other for one, other in pairs) / len(first["values"])
    comparison = results.get("comparison")
    if not isinstance(comparison, dict):
        raise Wrong("'comparison' in results.json is missing")
    for name, right in (
        ("difference", difference),
        ("low", interval.low),
        ("high", interval.high),
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
    if len(set(values)) == 1:
        raise Wrong(f"all values of arm {name!r} are equal: are these runs of seeds?")


def check_flags(flags_of_arms: list[list[str]]) -> None:
    """train.py takes the flags, and an arm has a mismatch."""
    # Not at the top of the file: the trainer takes seconds to import.
    from support.flags import Refused, parse_flags
    from train import Config

    mismatched = False
    for flags in flags_of_arms:
        # A recipe is a file, which the grader does not open for a student.
        if any(flag.startswith("--config") for flag in flags):
            raise Wrong("give flags, not a --config file")
        try:
            cfg = parse_flags(Config, flags)
        except (Refused, SystemExit) as error:
            raise Wrong(f"train.py refuses the flags: {error}") from error
        for name in MISMATCHES:
            default = Config.model_fields[name].default
            mismatched = mismatched or getattr(cfg, name) != default
    if not mismatched:
        raise Wrong(f"no arm has a mismatch: one of {', '.join(MISMATCHES)}")


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
