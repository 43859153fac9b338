"""The trainer's gradients of one batch, and what leaves the policy, on several ranks.

    torchrun --nproc-per-node N tests/gradient_on_ranks.py FOLDER

FOLDER has model/ and rollouts.pt, the whole batch. Each rank takes its groups of it, as
the trainer deals them. Rank 0 writes gradients-N.pt; idle-N.pt, the gradient of its own
responses alone, where the other ranks have none; furthest-N.pt, the response that every
rank calls furthest from the policy; and gathered-N.pt, the weights as an engine gets
them in bfloat16. All ranks write saved-N/, the model as the trainer
saves it. test_train.py compares them with plain autograd on the whole batch.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from loss import OBJECTIVES, Objective
from policy import Policy, build_policy, full_weights
from rollout import Rollouts, init_distributed
from support.checkpoints import save_model, share_of_rank
from support.flags import find_objective
from support.prompts import check_model
from train import Config, accumulate_gradient, furthest_response

GROUP_SIZE = 4
WHOLE = 10**6  # tokens: the batch is one micro-batch
ROW = 1  # token: every sequence is a micro-batch
# Between them they need all that only the whole batch can tell: e_B, the number of
# tokens, the number of responses, a cutoff, and log pi_prox.
OBJECTIVES_COMPARED = [
    "p3o",
    "grpo",
    "experiments.objectives:gspo",
    "experiments.objectives:m2po",
    "experiments.objectives:decoupled",
]
# (objective, micro_batch_tokens, sharing): responses that share their prompt's sequence
CASES = [(name, tokens, 1) for name in OBJECTIVES_COMPARED for tokens in (300, WHOLE)]
CASES += [("p3o", ROW, 1)]
CASES += [("p3o", tokens, GROUP_SIZE) for tokens in (ROW, 300, WHOLE)]

# By the name of each weight.
Gradient = dict[str, torch.Tensor]


def objective_of(name: str) -> Objective:
    """The objective with its default hyper-parameters."""
    return find_objective(OBJECTIVES, name, {})


def rollouts_of_rank(folder: Path) -> Rollouts:
    """This rank's groups of FOLDER's batch, as train.sample_step deals them."""
    rollouts = torch.load(folder / "rollouts.pt", weights_only=False)
    rank, world = dist.get_rank(), dist.get_world_size()
    return share_of_rank(rollouts, GROUP_SIZE, rank, world)


def gradient_of(
    policy: Policy,
    folder: Path,
    name: str,
    micro_batch_tokens: int,
    sharing: int = 1,
    rows: list[int] | None = None,
) -> tuple[Gradient, dict[str, float]]:
    """The gradient of FOLDER's batch, gathered whole, and statistics. A collective.

    `rows` are those of this rank's responses that are in the batch, by default all.
    """
    policy.sharing = sharing
    rollouts = rollouts_of_rank(folder)
    if rows is None:
        rows = list(range(len(rollouts.text)))
    stats = accumulate_gradient(
        policy,
        rollouts,
        rows,
        objective_of(name),
        Config(micro_batch_tokens=micro_batch_tokens),
        step=1,
    )
    gradient = {}
    for weight_name, weight in policy.model.named_parameters():
        gradient[weight_name] = weight.grad.full_tensor().clone()
    policy.zero_grad()
    return gradient, stats


def main(folder: Path) -> None:
    mesh = init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    policy = build_policy(str(folder / "model"), mesh)
    results = {case: gradient_of(policy, folder, *case) for case in CASES}
    of_rank_0 = None if rank == 0 else []
    idle = gradient_of(policy, folder, "p3o", 300, rows=of_rank_0)
    furthest: list = [None] * world
    dist.all_gather_object(
        furthest, furthest_response(policy, rollouts_of_rank(folder), Config())
    )

    half = build_policy(str(folder / "model"), mesh, dtype="bfloat16")
    # Before any forward pass, and then after one, which leaves the root gathered.
    list(full_weights(half))
    one_row = torch.load(folder / "rollouts.pt", weights_only=False).select([0])
    with torch.no_grad():
        half(one_row)
    gathered = [(name, weight.clone()) for name, weight in full_weights(half)]

    if rank == 0:
        torch.save(results, folder / f"gradients-{world}.pt")
        torch.save(idle, folder / f"idle-{world}.pt")
        torch.save(furthest, folder / f"furthest-{world}.pt")
        torch.save(gathered, folder / f"gathered-{world}.pt")
    tokenizer, _ = check_model("tiny")
    save_model(policy, tokenizer, folder / f"saved-{world}")
    dist.destroy_process_group()
    # Ended here, as the interpreter's own end aborted once: a thread of gloo's may
    # still hold a tensor of the last collective then.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
