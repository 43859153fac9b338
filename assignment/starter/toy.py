"""Part 3, given: a policy, a loss and a process group, small enough to see through.

There is nothing to do in this file, and what you change in it is not looked at. The
trainer of part 3 knows of a loss only that it is a sum over tokens divided by the
token_count of the whole batch, and that it takes the e_B of the whole batch.
"""

import threading
from typing import NamedTuple

import torch
from torch import Tensor


class MicroBatch(NamedTuple):
    """Some responses of one rank. Padding may hold anything."""

    features: Tensor  # [N, T, D] what the policy sees before each token
    tokens: Tensor  # [N, T] int64, the sampled tokens
    logp_behavior: Tensor  # [N, T] log pi_b of them
    advantage: Tensor  # [N]
    mask: Tensor  # [N, T] bool: which entries are tokens


def log_probabilities(weight: Tensor, micro_batch: MicroBatch) -> Tensor:
    """log pi_theta of the sampled tokens, [N, T], with its graph to weight [D, V]."""
    logp = (micro_batch.features @ weight).log_softmax(dim=-1)  # [N, T, V]
    return logp.gather(-1, micro_batch.tokens[..., None]).squeeze(-1)


def toy_loss(
    logp: Tensor, micro_batch: MicroBatch, ess: Tensor, token_count: int
) -> Tensor:
    """A loss with a cap and a pull: the sum over tokens, divided by token_count."""
    logp = torch.where(micro_batch.mask, logp, 0.0)
    logp_behavior = torch.where(micro_batch.mask, micro_batch.logp_behavior, 0.0)
    policy_loss = -ess * micro_batch.advantage[:, None] * logp
    pull = (1 - ess) * (logp - logp_behavior) ** 2 / 2
    return (policy_loss + pull).sum() / token_count


class Group:
    """A process group of `size` ranks, each a thread. Every rank has to take part in
    every collective, in the same order; else all of them fail with TimeoutError."""

    def __init__(self, size: int, patience: float = 5.0) -> None:
        self.size = size
        self.patience = patience  # seconds
        self.barrier = threading.Barrier(size)
        self.tensors: dict[int, Tensor] = {}

    def all_reduce_sum(self, rank: int, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors, which have one shape, on every rank."""
        return torch.stack(self.gather(rank, tensor)).sum(dim=0)

    def all_reduce_max(self, rank: int, tensor: Tensor) -> Tensor:
        """The largest of the ranks' tensors, entry by entry, on every rank."""
        return torch.stack(self.gather(rank, tensor)).amax(dim=0)

    def gather(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.tensors[rank] = torch.as_tensor(tensor).detach().clone()
        self.wait(rank)  # until all have brought theirs
        gathered = [self.tensors[other] for other in range(self.size)]
        self.wait(rank)  # until all have read, and the next collective may begin
        return gathered

    def wait(self, rank: int) -> None:
        try:
            self.barrier.wait(self.patience)
        except threading.BrokenBarrierError:
            raise TimeoutError(
                f"rank {rank} waited in a collective that another rank did not enter: "
                "do all ranks call the same ones, equally often?"
            ) from None
