"""Batches for the tests of losses, and functions that run a loss and the oracle."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from loss_oracle import p3o
from torch import Tensor

F64 = torch.float64
# float32 has 7 digits. The difference of two log-probabilities keeps about 6 of them.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}


class Batch(NamedTuple):
    """The arguments of an objective and the mask, [N, T] each. Padding is 0."""

    logp: Tensor  # log pi_theta
    logp_behavior: Tensor  # log pi_b
    advantage: Tensor
    kl: Tensor  # any numbers; they do not depend on the ratios
    mask: Tensor  # bool

    @property
    def log_ratio(self) -> Tensor:
        return self.logp - self.logp_behavior

    def rows(self, chosen: slice) -> "Batch":
        return Batch(*(tensor[chosen] for tensor in self))


class Outcome(NamedTuple):
    """The loss of a batch and its gradients: float64, without a graph."""

    value: Tensor  # []
    to_logp: Tensor  # [N, T], the gradient with respect to logp
    to_kl: Tensor  # [N, T]


def make_batch(
    seed: int = 0, *, spread: float = 0.6, dtype: torch.dtype = F64
) -> Batch:
    """Return 8 responses of 1 to 7 tokens; `spread` is the deviation of log rho.

    All tokens of a response have the same advantage; in the third response it is 0.
    """
    generator = torch.Generator().manual_seed(seed)
    options = {"generator": generator, "dtype": F64}
    mask = torch.arange(7) < torch.tensor([1, 7, 4, 2, 6, 3, 5, 7])[:, None]
    behavior = -3 * torch.rand(mask.shape, **options) - 0.1
    logp = behavior + spread * torch.randn(mask.shape, **options)
    advantage = torch.randn(8, 1, **options)
    advantage[2] = 0
    tensors = [logp, behavior, advantage, torch.rand(mask.shape, **options)]
    return Batch(*((tensor * mask).to(dtype) for tensor in tensors), mask)


def batches(dtype: torch.dtype) -> Iterator[Batch]:
    """Yield batches from nearly fresh to stale, then some with a token 80 nats off.

    float32 can represent e^80 but not its square.
    """
    for seed, spread in enumerate((0.02, 0.3, 0.6, 1.5)):
        yield make_batch(seed, spread=spread, dtype=dtype)
    for logp, logp_behavior in ((-1.0, -81.0), (-81.0, -1.0)):
        for advantage in (1.0, 0.0, -1.0):
            batch = make_batch(14, dtype=dtype)
            batch.logp[3, 0] = logp
            batch.logp_behavior[3, 0] = logp_behavior
            batch.advantage[3] = advantage * batch.mask[3]
            yield batch


def one_token_each(ratios: list[float], advantage: float = 1.0) -> Batch:
    """Return a response of one token for each ratio, with pi_b = 0.2 and a KL of 0."""
    ratio = torch.tensor(ratios, dtype=F64)[:, None]
    behavior = torch.full_like(ratio, 0.2).log()
    return Batch(
        logp=behavior + ratio.log(),
        logp_behavior=behavior,
        advantage=torch.full_like(ratio, advantage),
        kl=torch.zeros_like(ratio),
        mask=torch.ones_like(ratio, dtype=torch.bool),
    )


def run(
    objective: Callable[..., Tensor],
    batch: Batch,
    e_b: float,
    token_count: int | None = None,
    **hyper_parameters: float,
) -> Outcome:
    """Return the loss of a batch and its gradients, as `update` in train.py does.

    `token_count` is |B| if these responses are only one micro-batch of B.
    """
    logp = batch.logp.clone().requires_grad_()
    kl = batch.kl.clone().requires_grad_()
    loss = objective(
        logp, batch.logp_behavior, batch.advantage, kl, e_b, **hyper_parameters
    )
    assert loss.shape == batch.mask.shape
    value = loss[batch.mask].sum() / (token_count or batch.mask.sum())
    to_logp, to_kl = torch.autograd.grad(
        value, [logp, kl], allow_unused=True, materialize_grads=True
    )
    return Outcome(value.detach().to(F64), to_logp.to(F64), to_kl.to(F64))


def expected(batch: Batch, e_b: float) -> Outcome:
    """Return the same for P3O by the oracle, from the numbers that the dtype holds."""
    mask = batch.mask
    tokens = zip(*(tensor[mask].tolist() for tensor in batch[:4]), strict=True)
    terms = torch.tensor([p3o(*token, e_b) for token in tokens], dtype=F64)
    value, *gradients = (terms / len(terms)).T  # [tokens] each
    zeros = torch.zeros(mask.shape, dtype=F64)
    return Outcome(value.sum(), *(zeros.masked_scatter(mask, x) for x in gradients))


def assert_close(
    found: Tensor | float, right: Tensor | float | list, tolerance: float = 1e-6
) -> None:
    """Assert that values differ by at most `tolerance` times the largest right value.

    All values must be finite. If all right values are 0, only 1e-15 is allowed.
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
    """Assert that value and gradients agree within `tolerance`."""
    for ours, theirs in zip(found, right, strict=True):
        assert_close(ours, theirs, tolerance)
