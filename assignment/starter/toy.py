"""Part 3, given: a policy and ranks, small enough to see through.

There is nothing to do in this file, and the grader takes its own copy. An example:

    ranks = random_ranks([[3], [2, 4]])      # rank 0 has one micro-batch, rank 1 two
    weight = torch.randn(3, 5, dtype=torch.float64)
    run_ranks(update, weight, ranks)         # `update` is yours, in batch.py
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FEATURES, VOCABULARY = 3, 5


class Part(NamedTuple):
    """A micro-batch: N responses of at most T tokens. Padding is 0 in all tensors."""

    features: Tensor  # [N, T, D], what the policy sees before each token
    tokens: Tensor  # [N, T], the sampled tokens, int64
    logp_behavior: Tensor  # [N, T], log pi_b of the sampled tokens
    top_logp_behavior: Tensor  # [N, T, K], log pi_b of K tokens, here of all
    advantage: Tensor  # [N, T]
    mask: Tensor  # [N, T] bool, which entries are tokens


class Policy:
    """pi_theta: linear in its weight [D, V], and a softmax. It counts its passes."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.clone().requires_grad_()
        self.weight.grad = torch.zeros_like(weight)
        self.passes = 0

    def __call__(self, part: Part) -> tuple[Tensor, Tensor]:
        """log pi_theta of the sampled tokens, [N, T], and of K tokens, [N, T, K]."""
        self.passes += 1
        top_logp = (part.features @ self.weight).log_softmax(dim=-1)
        top_logp = top_logp * part.mask[..., None]
        logp = top_logp.gather(-1, part.tokens[..., None]).squeeze(-1)
        return logp, top_logp


class WaitsForOthers(BaseException):
    """A rank has called all_reduce, and the others have yet to."""


def run_ranks(
    update: Callable[..., float], weight: Tensor, ranks: list[list[Part]]
) -> tuple[list[float], Tensor, list[int]]:
    """`update` on each rank: its e_B, the average gradient, its passes.

    A real all_reduce waits. Here the ranks take turns: one that calls it is left, and
    runs again from its start when all have, with the sum at hand.
    """
    totals: list[Tensor] = []  # what all_reduce has returned so far
    while True:
        brought, e_b, policies = [], [], []
        for parts in ranks:
            known = iter(totals)

            def all_reduce(tensor: Tensor, known=known) -> Tensor:
                for total in known:
                    return total.clone()
                raise WaitsForOthers(tensor)

            policy = Policy(weight)
            # A gradient that is there before: `update` adds to it.
            policy.weight.grad = torch.ones_like(weight)
            parts = [Part(*part) for part in parts]
            try:
                e_b.append(float(update(policy, parts, all_reduce, len(ranks))))
                policies.append(policy)
            except WaitsForOthers as waits:
                brought.append(waits.args[0].detach().clone())
        if not brought:
            # FSDP, like DDP, averages the gradients of the ranks.
            added = [policy.weight.grad - 1 for policy in policies]
            return e_b, sum(added) / len(ranks), [policy.passes for policy in policies]
        if policies:
            raise RuntimeError("all ranks have to call all_reduce equally often")
        totals.append(torch.stack(brought).sum(dim=0))


def random_ranks(sizes: list[list[int]], seed: int = 0) -> list[list[Part]]:
    """For each rank its micro-batches, of so many responses each, the later the staler.

    For a weight of normal numbers with the shape [FEATURES, VOCABULARY].
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ranks, staleness = [], 0.2
    for sizes_of_rank in sizes:
        ranks.append([])
        for rows in sizes_of_rank:
            length = torch.randint(1, 7, (rows, 1), generator=generator)
            mask = torch.arange(6) < length
            features = normal(rows, 6, FEATURES) * mask[..., None]
            logits = staleness * normal(rows, 6, VOCABULARY)
            staleness += 0.4
            top_logp_behavior = logits.log_softmax(dim=-1) * mask[..., None]
            tokens = torch.randint(VOCABULARY, (rows, 6), generator=generator) * mask
            logp_behavior = top_logp_behavior.gather(-1, tokens[..., None]).squeeze(-1)
            advantage = normal(rows, 1) * mask
            ranks[-1].append(
                Part(
                    features, tokens, logp_behavior, top_logp_behavior, advantage, mask
                )
            )
    return ranks
