"""Part 3, given: a policy, a loss and a process group, small enough to see through.

There is nothing to do in this file, and what you change in it is not looked at. The
trainer of part 3 knows of a loss only that it is a sum over tokens divided by the
token_count of the whole batch, and that it takes the e_B of the whole batch.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_NUMBERS = 6  # that a rank brings to a collective
SAME_COLLECTIVES = "all ranks have to call the same collectives, equally often"


class MicroBatch(NamedTuple):
    """Some responses of one rank.

    In the padding logp_behavior may hold anything, NaN included; features and tokens
    are finite and in range there, so that log_probabilities may be called as it is.
    """

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


class MissingRank(RuntimeError):
    """A rank waits in a collective that another rank will not enter."""


class Group:
    """A process group of `size` ranks, each a thread (`run_on_ranks`).

    Every rank has to take part in every collective, in the same order. A collective
    takes a few numbers: the tokens of a batch are too many.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        # What each rank brought, by the number of the collective.
        self.brought: list[dict[int, Tensor]] = []
        self.kinds: list[str] = []
        self.entered = [0] * size  # collectives, by rank
        self.gone: set[int] = set()  # ranks that have returned or raised

    def all_reduce_sum(self, rank: int, tensor: Tensor) -> Tensor:
        """The sum of the ranks' tensors, which have one shape, on every rank."""
        return torch.stack(self.exchange(rank, tensor, "all_reduce_sum")).sum(dim=0)

    def all_reduce_max(self, rank: int, tensor: Tensor) -> Tensor:
        """The largest of the ranks' tensors, entry by entry, on every rank."""
        return torch.stack(self.exchange(rank, tensor, "all_reduce_max")).amax(dim=0)

    def exchange(self, rank: int, tensor: Tensor, kind: str) -> list[Tensor]:
        """The tensors that all ranks brought to this collective, in their order."""
        tensor = torch.as_tensor(tensor).detach().clone()
        if tensor.numel() > MOST_NUMBERS:
            raise ValueError(
                f"{kind} was given {tensor.numel()} numbers, and takes {MOST_NUMBERS} "
                "at most: exchange sums, not tokens"
            )
        with self.changed:
            number = self.entered[rank]
            self.entered[rank] += 1
            if number == len(self.brought):
                self.brought.append({})
                self.kinds.append(kind)
            if self.kinds[number] != kind:
                raise MissingRank(
                    f"rank {rank} calls {kind} where another rank calls "
                    f"{self.kinds[number]}: {SAME_COLLECTIVES}"
                )
            self.brought[number][rank] = tensor
            self.changed.notify_all()
            # However long another rank takes: only one that is gone never comes.
            self.changed.wait_for(lambda: self.is_over(number))
            missing = set(range(self.size)) - self.brought[number].keys()
        if missing:
            other = min(missing & self.gone)
            raise MissingRank(
                f"rank {rank} waits in its collective number {number + 1}, but rank "
                f"{other} was done after {self.entered[other]}: {SAME_COLLECTIVES}"
            )
        return [self.brought[number][other] for other in range(self.size)]

    def is_over(self, number: int) -> bool:
        """Whether all ranks have entered this collective, or one of them never will."""
        missing = set(range(self.size)) - self.brought[number].keys()
        return not missing or bool(missing & self.gone)

    def leave(self, rank: int) -> None:
        """This rank has returned or raised, and enters no more collectives."""
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


def run_on_ranks(function: Callable[..., Any], arguments: list[list[Any]]) -> list[Any]:
    """function(*arguments[rank], rank, group) on all ranks, each in a thread.

    Returns what each rank returned, or the error that it raised.
    """
    group = Group(len(arguments))
    results: list[Any] = [None] * group.size

    def run(rank: int) -> None:
        try:
            results[rank] = function(*arguments[rank], rank, group)
        except BaseException as error:
            results[rank] = error
        finally:
            group.leave(rank)

    threads = [
        threading.Thread(target=run, args=[rank], daemon=True)
        for rank in range(group.size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
