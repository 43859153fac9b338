"""Runs of two ranks that share an engine: one is killed, then two are side by side.

    python tests/shared_engines_die.py FOLDER

On CPU the ranks exchange tensors through shared memory. Both ranks of the first run
send themselves SIGKILL. Then the same command runs again, and beside it another run.
Prints a JSON object: {"killed": exit codes, "again": exit codes, "beside": exit codes,
"printed": what the last two runs printed, "left": the names of vLLM's segments of
shared memory that are there after the kill and were not before}.
"""

import json
import sys
from pathlib import Path

from launch import exit_code
from one_rank_dies import FLAGS, begin_two_ranks

from support.shared_memory import SEGMENTS

SHARED = [*FLAGS, "--steps=2", "--rollout_tp=2"]


def segments() -> set[str]:
    """The names of vLLM's segments. (Python's own are gone with its processes.)"""
    return {path.name for path in SEGMENTS.glob("*cpushm*")}


def main(folder: Path) -> None:
    before = segments()
    first, other = folder / "first", folder / "other"
    for of_run in first, other:
        of_run.mkdir()
    kill = ["SIGKILL", "rollout", 1]
    ranks = begin_two_ranks(first, SHARED, nodes=1, blows=[kill, kill])
    killed = [exit_code(rank) for rank in ranks]
    left = sorted(segments() - before)
    again = begin_two_ranks(first, SHARED, nodes=1, blows=[None, None])
    beside = begin_two_ranks(other, SHARED, nodes=1, blows=[None, None])
    ends = {
        "killed": killed,
        "again": [exit_code(rank) for rank in again],
        "beside": [exit_code(rank) for rank in beside],
        "left": left,
        "printed": "".join(
            (of_run / "printed-0").read_text() for of_run in (first, other)
        ),
    }
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
