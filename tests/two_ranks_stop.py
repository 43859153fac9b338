"""Runs of two ranks in which something happens to rank 1 alone, in its second step.

    python tests/two_ranks_stop.py FOLDER CASE ...

The cases are those of FAULTS, and "signal": rank 1 sends itself SIGTERM. Each run
writes into FOLDER/CASE/run. Prints a JSON object, for each case: {"codes": the ranks'
exit codes, "printed": what each of them printed}.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from launch import exit_code
from one_rank_dies import FLAGS, begin_two_ranks

import train

# What there is afterwards was saved at the end, or was not.
UNSAVED = [*FLAGS, "--save_every=0"]

add_reward = train.add_reward


def spoil_an_advantage(rollouts: train.Rollouts, cfg: Any, step: int, *more: Any):
    add_reward(rollouts, cfg, step, *more)
    if step == 2 and os.environ["RANK"] == "1":
        rollouts.advantage[3] = float("nan")


def break_down(rollouts: train.Rollouts, cfg: Any, step: int, *more: Any):
    add_reward(rollouts, cfg, step, *more)
    if step == 2 and os.environ["RANK"] == "1":
        raise RuntimeError("EngineCore encountered an issue")


# What takes the place of train.add_reward.
FAULTS = {"advantage": spoil_an_advantage, "engine": break_down}


def main(folder: Path, cases: list[str]) -> None:
    ends = {}
    for case in cases:
        of_case = folder / case
        of_case.mkdir()
        # The ranks are forked from this process, and have what it has.
        train.add_reward = FAULTS.get(case, add_reward)
        blow = ["SIGTERM", "update", 2] if case == "signal" else None
        ranks = begin_two_ranks(of_case, UNSAVED, nodes=1, blows=[None, blow])
        ends[case] = {
            "codes": [exit_code(rank) for rank in ranks],
            "printed": [(of_case / f"printed-{rank}").read_text() for rank in range(2)],
        }
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
