"""Part 3 of the assignment with one mistake each, which its grader must see.

`Loop` has the two functions of assignment/starter/batch.py, right, in steps. A mistake
is a subclass that replaces a step. MISTAKES has them by what is wrong, with the items
of the assignment that each loses. test_assignment.py makes a submission of each.
"""

import torch
from torch import Tensor

from assignment.starter.toy import Group, MicroBatch, log_probabilities, toy_loss


class Loop:
    """The two functions, and the steps that a mistake replaces."""

    def batch_quantities(
        self, log_ratios: list[Tensor], masks: list[Tensor], rank: int, group: Group
    ) -> tuple[Tensor, int]:
        tokens = [
            self.tokens(log_ratio, mask)
            for log_ratio, mask in zip(log_ratios, masks, strict=True)
        ]
        flat = torch.cat([torch.zeros(0, dtype=torch.float64), *tokens])
        largest = flat.max() if len(flat) else torch.tensor(-torch.inf).double()
        ratio = (flat - self.shift(largest, rank, group)).exp()
        count = torch.tensor(float(len(ratio))).double()
        sums = torch.stack([ratio.sum(), (ratio**2).sum(), count])
        return self.quantities(sums, rank, group)

    def tokens(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return log_ratio[mask].double()

    def shift(self, largest: Tensor, rank: int, group: Group) -> Tensor:
        return group.all_reduce_max(rank, largest)

    def quantities(self, sums: Tensor, rank: int, group: Group) -> tuple[Tensor, int]:
        total, squares, count = group.all_reduce_sum(rank, sums)
        return total**2 / (count * squares), int(count)

    def gradient_of_rank(
        self, weight: Tensor, micro_batches: list[MicroBatch], rank: int, group: Group
    ) -> Tensor:
        log_ratios = [
            log_probabilities(weight, micro) - micro.logp_behavior
            for micro in micro_batches
        ]
        masks = [micro.mask for micro in micro_batches]
        ess, token_count = self.batch_quantities(log_ratios, masks, rank, group)
        gradient = torch.zeros_like(weight)
        for micro in self.used(micro_batches):
            leaf = weight.clone().requires_grad_()
            logp = log_probabilities(leaf, micro)
            loss = toy_loss(logp, micro, ess, self.divisor(token_count, micro))
            (added,) = torch.autograd.grad(loss * self.factor(group), leaf)
            gradient += added
        return self.averaged(gradient, micro_batches)

    def used(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        return micro_batches

    def divisor(self, token_count: int, micro: MicroBatch) -> int:
        return token_count

    def factor(self, group: Group) -> int:
        return group.size

    def averaged(self, gradient: Tensor, micro_batches: list[MicroBatch]) -> Tensor:
        return gradient


class PaddingCounts(Loop):
    """Padding as tokens of ratio 1."""

    def tokens(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, log_ratio, 0.0).flatten().double()


class NoShift(Loop):
    """e^400 squared is more than float64 has."""

    def shift(self, largest: Tensor, rank: int, group: Group) -> Tensor:
        return torch.zeros((), dtype=torch.float64)


class ShiftOfRank(Loop):
    """Each rank divides its ratios by a number of its own, and then they are added."""

    def shift(self, largest: Tensor, rank: int, group: Group) -> Tensor:
        return largest


class EssOfRank(Loop):
    def quantities(self, sums: Tensor, rank: int, group: Group) -> tuple[Tensor, int]:
        total, squares, count = sums
        _, _, token_count = group.all_reduce_sum(rank, sums)
        return total**2 / (count * squares), int(token_count)


class CountOfRank(Loop):
    def quantities(self, sums: Tensor, rank: int, group: Group) -> tuple[Tensor, int]:
        ess, _ = super().quantities(sums, rank, group)
        return ess, int(sums[2])


class MeanOfEss(Loop):
    """The mean of the micro-batches' e_B, as if it were e_B of the batch."""

    def batch_quantities(
        self, log_ratios: list[Tensor], masks: list[Tensor], rank: int, group: Group
    ) -> tuple[Tensor, int]:
        _, token_count = super().batch_quantities(log_ratios, masks, rank, group)
        sums = torch.zeros(2, dtype=torch.float64)
        for log_ratio, mask in zip(log_ratios, masks, strict=True):
            flat = log_ratio[mask].double()
            ratio = (flat - flat.max()).exp()
            ess = ratio.mean() ** 2 / (ratio**2).mean()
            sums += torch.stack([ess, torch.ones_like(ess)])
        total, micro_count = group.all_reduce_sum(rank, sums)
        return total / micro_count, token_count


class RanksForgotten(Loop):
    """The average over ranks makes it too small."""

    def factor(self, group: Group) -> int:
        return 1


class IdleRanksForgotten(Loop):
    """The average is over all ranks, also over those without a micro-batch."""

    def gradient_of_rank(
        self, weight: Tensor, micro_batches: list[MicroBatch], rank: int, group: Group
    ) -> Tensor:
        has_any = torch.tensor(float(len(micro_batches) > 0))
        busy = group.all_reduce_sum(rank, has_any)
        gradient = super().gradient_of_rank(weight, micro_batches, rank, group)
        return gradient * busy / group.size


class LastMicroBatch(Loop):
    """The gradient is replaced where it should grow."""

    def used(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        return micro_batches[-1:]


class MeanOfMicroBatches(Loop):
    """Every micro-batch is divided by its own tokens, and then they are averaged."""

    def divisor(self, token_count: int, micro: MicroBatch) -> int:
        return int(micro.mask.sum())

    def factor(self, group: Group) -> int:
        return 1

    def averaged(self, gradient: Tensor, micro_batches: list[MicroBatch]) -> Tensor:
        return gradient / len(micro_batches)


class CollectiveInTheLoop(Loop):
    """A collective for each micro-batch: ranks with fewer of them do not come."""

    def batch_quantities(
        self, log_ratios: list[Tensor], masks: list[Tensor], rank: int, group: Group
    ) -> tuple[Tensor, int]:
        for mask in masks:
            group.all_reduce_sum(rank, mask.sum())
        return super().batch_quantities(log_ratios, masks, rank, group)


class CollectiveInTheGradient(Loop):
    """The same in the loop of the gradient."""

    def gradient_of_rank(
        self, weight: Tensor, micro_batches: list[MicroBatch], rank: int, group: Group
    ) -> Tensor:
        for micro in micro_batches:
            group.all_reduce_sum(rank, micro.mask.sum())
        return super().gradient_of_rank(weight, micro_batches, rank, group)


class CountOfRankInTheGradient(Loop):
    """The token count of the batch is exchanged, and then not used."""

    def divisor(self, token_count: int, micro: MicroBatch) -> int:
        return 1

    def averaged(self, gradient: Tensor, micro_batches: list[MicroBatch]) -> Tensor:
        return gradient / max(1, sum(int(micro.mask.sum()) for micro in micro_batches))


class TokensGathered(Loop):
    """All log rho of the batch go to every rank."""

    def batch_quantities(
        self, log_ratios: list[Tensor], masks: list[Tensor], rank: int, group: Group
    ) -> tuple[Tensor, int]:
        padded = torch.full((100,), -torch.inf, dtype=torch.float64)
        padded[: sum(len(mask) for mask in masks)] = 0.0
        group.all_reduce_max(rank, padded)
        return super().batch_quantities(log_ratios, masks, rank, group)


class NothingOnAnIdleRank(Loop):
    def averaged(self, gradient: Tensor, micro_batches: list[MicroBatch]) -> Tensor:
        return gradient if micro_batches else None


ALL = {"3.1", "3.2", "3.3", "3.4", "3.5"}

# What is wrong -> (the mistake, the items that it loses)
MISTAKES: dict[str, tuple[type[Loop], set[str]]] = {
    "padding counts": (PaddingCounts, ALL),
    "ratios not divided by the largest": (NoShift, {"3.5"}),
    "each rank divides by its own largest": (ShiftOfRank, {"3.2", "3.4", "3.5"}),
    "e_B of the rank": (EssOfRank, {"3.2", "3.4", "3.5"}),
    "token count of the rank": (CountOfRank, {"3.2", "3.4", "3.5"}),
    "mean of the micro-batches' e_B": (MeanOfEss, ALL),
    "ranks forgotten in the average": (RanksForgotten, {"3.4", "3.5"}),
    "idle ranks forgotten in the average": (IdleRanksForgotten, {"3.5"}),
    "only the last micro-batch": (LastMicroBatch, {"3.3", "3.4"}),
    # Without a micro-batch that is 0 / 0.
    "mean of the micro-batches' means": (MeanOfMicroBatches, {"3.3", "3.4", "3.5"}),
    "a collective in the loop": (CollectiveInTheLoop, {"3.2", "3.4", "3.5"}),
    "a collective in the gradient's loop": (CollectiveInTheGradient, {"3.4", "3.5"}),
    "token count of the rank, in the gradient": (
        CountOfRankInTheGradient,
        {"3.4", "3.5"},
    ),
    "the tokens gathered": (TokensGathered, ALL),
    "no gradient on an idle rank": (NothingOnAnIdleRank, {"3.5"}),
}

# What is wrong -> what the grader says of it, in one of the items
SAID: dict[str, str] = {
    "padding counts": "the number of all entries, padding included",
    "ratios not divided by the largest": "one log rho near 400 nats on each",
    "e_B of the rank": "e_B of this rank alone",
    "token count of the rank": "the number of this rank's tokens",
    "mean of the micro-batches' e_B": "That is the mean of the micro-batches' e_B",
    "ranks forgotten in the average": "the right gradient divided by 2",
    "idle ranks forgotten in the average": "2/3 of the right gradient",
    "only the last micro-batch": "the gradient of the last micro-batch alone",
    "mean of the micro-batches' means": "the mean of the micro-batches' means",
    "a collective in the loop": "call the same collectives, equally often",
    "a collective in the gradient's loop": "call the same collectives, equally often",
    "token count of the rank, in the gradient": "with the token count of each rank",
    "the tokens gathered": "exchange sums, not tokens",
    "no gradient on an idle rank": "the gradient of rank 1 returned None",
}
