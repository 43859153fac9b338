"""Run `update` of train.py on one stale batch on N ranks, and save the weights.

    torchrun --nproc-per-node N tests/gradient_on_ranks.py FOLDER

FOLDER has model/ and rollouts.pt, the whole batch. Each rank takes its own groups, as
in the trainer. Rank 0 writes the results to ranks-N.pt, and all ranks write saved/, the
model as the trainer saves it. test_train.py compares the results with plain autograd on
the whole batch.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from loss import p3o, reinforce
from policy import Policy, build_policy, full_weights
from rollout import Rollouts
from support.checkpoints import save_model
from support.machine import init_distributed
from train import Config, update

GROUP_SIZE = 4
UNLIMITED = 10**6  # tokens: a rank's share of the batch is one micro-batch
ONE_RESPONSE = 1  # token: every response is a micro-batch
MICRO_BATCHES = [ONE_RESPONSE, 300, UNLIMITED]


def gradient_of(
    policy: Policy,
    rollouts: Rollouts,
    objective: Callable = p3o,
    **settings: Any,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the gradient that `update` hands to the optimizer, and its statistics.

    The gradient of all weights is one vector. The weights do not change.
    """
    found = []

    def record(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients = [weight.grad.full_tensor() for weight in policy.parameters()]
        found.append(torch.cat([gradient.flatten() for gradient in gradients]))

    optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(record)
    cfg = Config(**{"max_grad_norm": 1e9} | settings)
    rows = torch.arange(len(rollouts.text))
    policy.zero_grad()  # An earlier update may have been stopped.
    stats = update(policy, optimizer, objective, rollouts, rows, cfg, step=7)
    [gradient] = found
    return gradient, stats


def with_nan(rollouts: Rollouts, name: str) -> Rollouts:
    """Return the batch with a NaN at one response token."""
    broken = rollouts.select(torch.arange(len(rollouts.text)), torch.device("cpu"))
    getattr(broken, name)[2, 0] = torch.nan
    return broken


def main(folder: Path) -> None:
    mesh = init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = torch.load(folder / "rollouts.pt", weights_only=False)
    group = torch.arange(len(whole.text)) // GROUP_SIZE
    rollouts = whole.select((group % world == rank).nonzero()[:, 0], mesh.device_type)
    policy = build_policy(str(folder / "model"), mesh)
    results = {"weights": [(n, w.clone()) for n, w in full_weights(policy)]}
    results["mesh"] = tuple(mesh.shape)
    for tokens in MICRO_BATCHES:
        results[tokens] = gradient_of(policy, rollouts, micro_batch_tokens=tokens)
    half = build_policy(str(folder / "model"), mesh, "bfloat16")
    results["bfloat16"] = gradient_of(half, rollouts)
    for name in "logp_behavior", "advantage":
        # Only the last rank has such a number.
        batch = with_nan(rollouts, name) if rank == world - 1 else rollouts
        try:
            gradient_of(policy, batch, reinforce)
            message = "no error"
        except FloatingPointError as error:
            message = str(error)
        results[name] = [None] * world
        dist.all_gather_object(results[name], message)
    if rank == 0:
        torch.save(results, folder / f"ranks-{world}.pt")
    save_model(policy.model, full_weights(policy), folder / "saved")
    dist.destroy_process_group()
    # Exit here, because the interpreter once aborted in its own shutdown: a thread of
    # gloo may still hold a tensor of the last collective.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
