"""python tests/loss_on_ranks.py FOLDER [FILE]: losses of batches that ranks share.

FILE is a loss file, of which P3O is taken; without it all other objectives of the
repository are. Four processes join a gloo group. In groups of 1, 2 and 4 each takes its
rows of a batch, gathers the whole batch for what only that can tell, and computes its
own loss, as the trainer does. Rank 0 writes {(size of the group, batch, objective):
(sum of the losses, gradient [N, T])} to FOLDER/results.pt.
"""

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import ROOT, load_module
from loss_batches import Responses, batch_of, make_responses, run_objective
from torch import Tensor

from experiments import objectives
from loss import OBJECTIVES, Objective, effective_sample_size, token_count_and_ess_of

RANKS = 4
SIZES = (1, 2, 4)
# The repository's objectives but P3O, by the names that the oracle has for them.
OTHER_OBJECTIVES: dict[str, Objective] = {
    "reinforce": OBJECTIVES["reinforce"],
    "grpo": OBJECTIVES["grpo"],
    "dapo": objectives.dapo,
    "gspo": objectives.gspo,
    "cispo": objectives.cispo,
    "tis": objectives.tis,
    "decoupled": objectives.decoupled,
    "m2po": objectives.m2po,
}


def batches() -> dict[str, Responses]:
    """Two batches of 8 responses. In one of them half of the ranks have no tokens."""
    responses = make_responses(13, spread=0.8)
    first_half = torch.arange(8)[:, None] < 4
    return {
        "all ranks": responses,
        "half of them": responses._replace(mask=responses.mask & first_half),
    }


def run_ranks(folder: Path, file: str | None = None) -> dict:
    """Run this script in a process of its own; what rank 0 wrote."""
    command = [sys.executable, __file__, str(folder)]
    if file is not None:
        command.append(file)
    ended = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return torch.load(folder / "results.pt")


def gather(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks of the group, in the order of the ranks."""
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine.contiguous(), group=group)
    return torch.cat(everyone)


def work(rank: int, folder: Path, file: str | None) -> None:
    """What one of the RANKS processes does."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    losses = OTHER_OBJECTIVES
    ess_of = effective_sample_size
    if file is not None:
        module = load_module(Path(file))
        losses = {"p3o": Objective(module.p3o_loss, token_count_and_ess_of)}
        ess_of = module.effective_sample_size
    results = {}
    for size in SIZES:
        group = dist.new_group(list(range(size)))
        if rank >= size:
            continue
        for batch_name, responses in batches().items():
            share = len(responses.mask) // size
            mine = responses.select(slice(rank * share, (rank + 1) * share))
            everyone = Responses(*(gather(tensor, group) for tensor in mine))
            batch = batch_of(everyone, ess_of)
            for name, objective in losses.items():
                quantities = objective.batch_quantities(
                    batch, **objective.hyper_parameters
                )
                outcome = run_objective(objective, mine, **quantities)
                dist.all_reduce(outcome.value, group=group)
                gradient = gather(outcome.gradient, group)
                results[size, batch_name, name] = (outcome.value, gradient)
    if rank == 0:
        torch.save(results, folder / "results.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    folder = Path(sys.argv[1])
    file = sys.argv[2] if len(sys.argv) > 2 else None
    # A forked process has torch imported already.
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=work, args=(rank, folder, file)) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
