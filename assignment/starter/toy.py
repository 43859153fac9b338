"""A policy and several ranks for part 3, small enough to understand at a glance.

There is nothing to do in this file, and the grader uses its own copy of it. Example:

    weight = torch.randn(FEATURES, VOCABULARY, dtype=torch.float64)
    # Rank 0 has one micro-batch, with 3 responses. Rank 1 has two, with 2 and 4.
    ranks = random_ranks([[3], [2, 4]], weight)
    run_ranks(update, weight, ranks)         # `update` is yours, in batch.py
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

FEATURES, VOCABULARY = 3, 5
MAX_ALL_REDUCES = 20


class Part(NamedTuple):
    """A micro-batch: N responses of at most T tokens. Padding is 0 in all tensors."""

    features: Tensor  # [N, T, D], what the policy sees before each token
    tokens: Tensor  # [N, T], the sampled tokens, int64
    logp_behavior: Tensor  # [N, T], log pi_b of the sampled tokens
    top_logp_behavior: Tensor  # [N, T, K], log pi_b of K tokens, here of all
    advantage: Tensor  # [N, T]
    mask: Tensor  # [N, T] bool, True for tokens and False for padding


class Policy:
    """pi_theta: the softmax of features @ weight. It counts its forward passes."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.clone().requires_grad_()
        self.weight.grad = torch.zeros_like(weight)
        self.passes = 0

    def __call__(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return log pi_theta of the sampled and of K tokens, [N, T] and [N, T, K]."""
        self.passes += 1
        top_logp = (part.features @ self.weight).log_softmax(dim=-1)
        top_logp = top_logp * part.mask[..., None]
        logp = top_logp.gather(-1, part.tokens[..., None]).squeeze(-1)
        return logp, top_logp


class WaitsForOthers(BaseException):
    """Raised by all_reduce if the sum over the ranks is not known yet."""


def run_rank(
    update: Callable[..., float],
    weight: Tensor,
    parts: list[Part],
    totals: list[Tensor],
    world_size: int,
) -> list[Any]:
    """Run `update` on one rank, and return [e_B, the rank's gradient, its passes].

    totals has what all_reduce returns, call by call. At the first call beyond these,
    the rank is interrupted, and the result is [the call's tensor].
    """
    known = iter(totals)

    def all_reduce(tensor: Tensor) -> Tensor:
        for total in known:
            return total.clone()
        raise WaitsForOthers(tensor)

    policy = Policy(weight)
    # `update` has to add to the gradient that it finds.
    policy.weight.grad = torch.ones_like(weight)
    parts = [Part(*part) for part in parts]
    try:
        e_b = float(update(policy, parts, all_reduce, world_size))
    except WaitsForOthers as waits:
        return [waits.args[0].detach().clone()]
    return [e_b, policy.weight.grad - 1, policy.passes]


def run_ranks(
    update: Callable[..., float],
    weight: Tensor,
    ranks: list[list[Part]],
    run: Callable[..., list[Any]] = run_rank,
) -> tuple[list[float], Tensor, list[int]]:
    """Run `update` on all ranks; return what they computed.

    Returns e_B of each rank, the average of the ranks' gradients, and the number of
    forward passes of each rank. A real all_reduce waits. Here the ranks take turns: a
    rank that calls all_reduce is interrupted. Once all ranks have called it, each
    starts again from the beginning, and the call returns the sum.
    """
    totals: list[Tensor] = []
    while len(totals) <= MAX_ALL_REDUCES:
        results = [run(update, weight, parts, totals, len(ranks)) for parts in ranks]
        if len({len(result) for result in results}) > 1:
            raise RuntimeError("all ranks have to call all_reduce equally often")
        if len(results[0]) == 1:
            totals.append(torch.stack([sums for (sums,) in results]).sum(dim=0))
            continue
        e_b, gradients, passes = zip(*results, strict=True)
        # FSDP, like DDP, averages the gradients of the ranks.
        return list(e_b), sum(gradients) / len(ranks), list(passes)
    raise RuntimeError(f"all_reduce was called more than {MAX_ALL_REDUCES} times")


def random_ranks(
    sizes: list[list[int]], weight: Tensor, seed: int = 0, staleness: float = 0.2
) -> list[list[Part]]:
    """Draw each rank's micro-batches; sizes has the number of responses of each.

    The logits of pi_b are those of the policy with this weight, [FEATURES, VOCABULARY],
    plus noise. For response n = 0, 1, ... the noise has the standard deviation
    n * staleness, so the first response is fresh. The second response has an advantage
    of 0. Tokens are drawn uniformly, not from pi_b.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ranks, responses = [], 0
    for rank_sizes in sizes:
        ranks.append([])
        for rows in rank_sizes:
            number = torch.arange(responses, responses + rows)[:, None]
            responses += rows
            length = torch.randint(3, 7, (rows, 1), generator=generator)
            mask = torch.arange(6) < length
            features = normal(rows, 6, FEATURES) * mask[..., None]
            noise = staleness * number[..., None] * normal(rows, 6, VOCABULARY)
            top_logp_behavior = (features @ weight + noise).log_softmax(dim=-1)
            top_logp_behavior = top_logp_behavior * mask[..., None]
            tokens = torch.randint(VOCABULARY, (rows, 6), generator=generator) * mask
            logp_behavior = top_logp_behavior.gather(-1, tokens[..., None]).squeeze(-1)
            advantage = normal(rows, 1) * mask * (number != 1)
            ranks[-1].append(
                Part(
                    features, tokens, logp_behavior, top_logp_behavior, advantage, mask
                )
            )
    return ranks
