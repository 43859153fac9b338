"""torchrun tests/gradient_on_ranks.py FOLDER: the trainer's gradients on one batch, a saved model.

FOLDER has model/ and rollouts.pt, the whole batch; each rank takes its groups of 4 as the trainer
deals them. Rank 0 of N writes gradients-N.pt and gathered-N.pt, the weights as an engine gets them
in bfloat16, and all ranks saved-N/, the model as the trainer saves it; test_train.py compares them.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from config import Config, load_model_files
from loss import OBJECTIVES
from policy import Policy, build_policy, full_weights
from rollout import init_distributed
from train import accumulate_gradient, save_model

GROUP = 4
WHOLE = 10**6  # tokens: one micro-batch
CASES = [(objective, tokens) for objective in OBJECTIVES for tokens in (300, WHOLE)]
CASES += [("p3o", 1)]  # a row a micro-batch


def gradients_of(policy: Policy, folder: str) -> dict:
    """{(objective, micro_batch_tokens): (gradient of each weight, statistics)}: a collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rollouts = torch.load(f"{folder}/rollouts.pt", weights_only=False)
    rows = [i for i in range(len(rollouts.text)) if i // GROUP % world == rank]
    found = {}
    for objective, tokens in CASES:
        mine = rollouts.rows(rows)
        mine.logp_prox = mine.logp_prox if objective == "decoupled" else None
        cfg = Config(objective=objective, micro_batch_tokens=tokens)
        stats = accumulate_gradient(policy, mine, list(range(len(rows))), cfg)
        weights = policy.model.named_parameters()
        gradient = {name: weight.grad.full_tensor().clone() for name, weight in weights}
        found[objective, tokens] = gradient, stats
        policy.zero_grad()
    return found


if __name__ == "__main__":
    folder, mesh = sys.argv[1], init_distributed()
    world = dist.get_world_size()
    policy = build_policy(Config(model=f"{folder}/model"), mesh)
    found = gradients_of(policy, folder)
    if dist.get_rank() == 0:
        torch.save(found, f"{folder}/gradients-{world}.pt")
    half = build_policy(Config(model=f"{folder}/model", dtype="bfloat16"), mesh)
    list(full_weights(half))  # before any forward pass, and after one that leaves the root gathered
    with torch.no_grad():
        half(torch.load(f"{folder}/rollouts.pt", weights_only=False).rows([0]))
    gathered = [(name, weight.clone()) for name, weight in full_weights(half)]
    if dist.get_rank() == 0:
        torch.save(gathered, f"{folder}/gathered-{world}.pt")
    save_model(policy, load_model_files("tiny")[0], Path(folder, f"saved-{world}"))
    dist.destroy_process_group()
