"""Part 3: one optimizer step on a batch that no process sees as a whole.

The batch B is divided among ranks, and the share of each rank into micro-batches.
toy.py has the policy, and ranks on which you can try `update`. From your loss.py, use
only the functions that are imported below: the grader replaces the file with the
reference's, so that a mistake in yours costs no points in this part.
"""

from collections.abc import Callable

from torch import Tensor
from toy import Part, Policy

from loss import effective_sample_size, kl_divergence, p3o, ratio_sums  # noqa: F401


def update(
    policy: Policy,
    parts: list[Part],
    all_reduce: Callable[[Tensor], Tensor],
    world_size: int,
) -> float:
    """Add the gradient of P3O (12) to policy.weight.grad, and return e_B of the batch.

    parts are the micro-batches of this rank, at least one; other ranks may have more or
    fewer. policy(part) returns log pi_theta of the sampled tokens, [N, T], and of the K
    tokens of the KL, [N, T, K]. all_reduce(tensor) returns the sum of the tensors that
    the world_size ranks gave it; all ranks have to call it equally often. After
    `update` the gradients of the ranks are averaged, as in FSDP and DDP. The average of
    what the ranks have added has to be the gradient of (12). If e_B is NaN, return it:
    the trainer then stops and uses no gradient.

    The weight of a token depends on e_B of the whole batch. So each micro-batch needs
    one forward pass for e_B and a second one for the gradient. Memory can hold the
    graph of one micro-batch, which then needs no second pass. So n micro-batches take
    2 n - 1 forward passes.
    """
    raise NotImplementedError("part 3, the update, is not written yet")
