"""The reference of starter/batch.py. train.py does the same with the whole ratios."""

import torch
from torch import Tensor
from toy import Group, MicroBatch, log_probabilities, toy_loss


def batch_quantities(
    log_ratios: list[Tensor], masks: list[Tensor], rank: int, group: Group
) -> tuple[Tensor, int]:
    log_ratio = torch.zeros(0, dtype=torch.float64)  # of this rank's tokens
    for micro_log_ratio, mask in zip(log_ratios, masks, strict=True):
        log_ratio = torch.cat([log_ratio, micro_log_ratio[mask].double()])
    # e_B does not change when all ratios are divided by one number. It has to be the
    # same on all ranks.
    largest = torch.tensor(-torch.inf, dtype=torch.float64)
    if len(log_ratio) > 0:
        largest = log_ratio.max()
    largest = group.all_reduce_max(rank, largest)
    ratio = (log_ratio - largest).exp()
    sums = torch.stack([ratio.sum(), (ratio**2).sum(), torch.tensor(len(ratio))])
    total, total_of_squares, token_count = group.all_reduce_sum(rank, sums)
    ess = total**2 / (token_count * total_of_squares)
    return ess, int(token_count)


def gradient_of_rank(
    weight: Tensor, micro_batches: list[MicroBatch], rank: int, group: Group
) -> Tensor:
    # A pass without gradient first: no weight of a token is known before e_B is.
    log_ratios = [
        log_probabilities(weight, micro) - micro.logp_behavior
        for micro in micro_batches
    ]
    masks = [micro.mask for micro in micro_batches]
    ess, token_count = batch_quantities(log_ratios, masks, rank, group)
    weight = weight.clone().requires_grad_()
    weight.grad = torch.zeros_like(weight)
    for micro in micro_batches:
        logp = log_probabilities(weight, micro)
        loss = toy_loss(logp, micro, ess, token_count)
        # The losses of the ranks add up, but their gradients get averaged.
        (loss * group.size).backward()
    return weight.grad
