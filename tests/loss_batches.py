"""Batches for the tests of losses, and how a loss and the oracle are run on them."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from loss_oracle import oracle
from torch import Tensor

from loss import Batch, Objective

F64 = torch.float64
# float32 has 7 digits; a log-ratio of -3 less -3 keeps about 6 of them.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}


class Responses(NamedTuple):
    """N responses as an objective sees them. Padding is NaN, which must not matter."""

    logp: Tensor  # [N, T] log pi_theta
    logp_behavior: Tensor  # [N, T] log pi_b
    advantage: Tensor  # [N], or [N, T]
    mask: Tensor  # [N, T] bool
    logp_prox: Tensor  # [N, T] log pi_theta before the first update on this batch

    def select(self, chosen: slice) -> "Responses":
        return Responses(*(tensor[chosen] for tensor in self))

    @property
    def log_ratio(self) -> Tensor:
        return self.logp - self.logp_behavior


class Outcome(NamedTuple):
    """What came out of a loss: float64, without graph."""

    value: Tensor  # []
    gradient: Tensor  # [N, T], with respect to logp
    stats: dict[str, Any]


def make_responses(
    seed: int = 0,
    *,
    rows: int = 8,
    columns: int = 7,
    spread: float = 0.6,
    dtype: torch.dtype = F64,
) -> Responses:
    """Responses of 1 to `columns` tokens; `spread` is the deviation of log rho."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, columns)
    length = torch.randint(1, columns + 1, (rows,), generator=generator)
    length[0] = 1
    length[1] = columns
    mask = torch.arange(columns) < length[:, None]
    behavior = -3 * torch.rand(shape, generator=generator, dtype=F64) - 0.1
    logp = behavior + spread * torch.randn(shape, generator=generator, dtype=F64)
    prox = behavior + spread * torch.randn(shape, generator=generator, dtype=F64)
    advantage = torch.randn(rows, generator=generator, dtype=F64)
    return Responses(
        logp=logp.masked_fill(~mask, math.nan).to(dtype),
        logp_behavior=behavior.masked_fill(~mask, math.nan).to(dtype),
        advantage=advantage.to(dtype),
        mask=mask,
        logp_prox=prox.masked_fill(~mask, math.nan).to(dtype),
    )


def one_token_each(ratios: list[float], advantage: float = 1.0) -> Responses:
    """A response of one token for each ratio rho; pi_b has probability 0.2 for it."""
    behavior = torch.full((len(ratios), 1), 0.2, dtype=F64).log()
    logp = behavior + torch.tensor(ratios, dtype=F64).log()[:, None]
    return Responses(
        logp=logp,
        logp_behavior=behavior,
        advantage=torch.full((len(ratios),), advantage, dtype=F64),
        mask=torch.ones(len(ratios), 1, dtype=torch.bool),
        logp_prox=logp,
    )


def two_fresh_responses(
    advantage: list[float], lengths: tuple[int, int] = (1, 3)
) -> Responses:
    """Two responses of such lengths, of log-probability -1 under both policies."""
    logp = torch.full((2, 3), -1.0, dtype=F64)
    return Responses(
        logp=logp,
        logp_behavior=logp,
        advantage=torch.tensor(advantage, dtype=F64),
        mask=torch.arange(3) < torch.tensor(lengths)[:, None],
        logp_prox=logp,
    )


def batch_of(
    responses: Responses, effective_sample_size: Callable[[Tensor, Tensor], Tensor]
) -> Batch:
    """These responses as the whole batch B of an optimizer step."""
    advantage = responses.advantage
    if advantage.dim() == 1:
        advantage = advantage[:, None].expand(responses.mask.shape)
    return Batch(
        log_ratio=responses.log_ratio,
        advantage=advantage,
        mask=responses.mask,
        ess=effective_sample_size(responses.log_ratio, responses.mask),
        token_count=int(responses.mask.sum()),
    )


def run(loss: Callable, responses: Responses, **keywords: Any) -> Outcome:
    """The value of a loss on these responses, its gradient and its statistics."""
    logp = responses.logp.detach().clone().requires_grad_()
    value, stats = loss(
        logp,
        responses.logp_behavior,
        responses.advantage,
        responses.mask,
        **keywords,
    )
    (gradient,) = torch.autograd.grad(value, logp)
    return Outcome(value.detach().to(F64), gradient.to(F64), stats)


def expected(name: str, responses: Responses, **keywords: Any) -> Outcome:
    """The same by the oracle, on the very numbers that the dtype of responses holds."""
    advantage = responses.advantage
    if advantage.dim() == 1:
        advantage = advantage[:, None].expand(responses.mask.shape)
    value, gradient = oracle(
        name,
        responses.logp.tolist(),
        responses.logp_behavior.tolist(),
        advantage.tolist(),
        responses.mask.tolist(),
        **keywords,
    )
    return Outcome(
        torch.tensor(value, dtype=F64), torch.tensor(gradient, dtype=F64), stats={}
    )


def assert_close(
    found: Tensor | float, right: Tensor | float | list, tolerance: float = 1e-6
) -> None:
    """Equal within `tolerance` of the largest right value.

    What is not finite is never equal to anything, and where all is 0 nothing but
    rounding, 1e-15, is allowed.
    """
    found = torch.as_tensor(found, dtype=F64)
    right = torch.as_tensor(right, dtype=F64)
    assert found.shape == right.shape, (found.shape, right.shape)
    assert torch.isfinite(found).all(), found
    allowed = tolerance * right.abs().max() + 1e-15
    assert (found - right).abs().max() <= allowed, (found, right)


def assert_same_outcome(
    found: Outcome, right: Outcome, tolerance: float = 1e-6
) -> None:
    """Value and gradient agree within `tolerance`."""
    assert_close(found.value, right.value, tolerance)
    assert_close(found.gradient, right.gradient, tolerance)


def run_objective(
    objective: Objective, responses: Responses, **keywords: Any
) -> Outcome:
    """`run` with what the trainer hands to every objective of this kind."""
    keywords = objective.hyper_parameters | keywords
    if objective.takes_logp_prox:
        keywords = {"logp_prox": responses.logp_prox} | keywords
    return run(objective.loss, responses, **keywords)
