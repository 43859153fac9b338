"""A run that is killed again and again, beside the same run left alone.

    python study/soak.py                     # an hour and a half on two cores
    python study/soak.py --steps 30 --kills 3 --seconds 40 --folder runs/soak-try

Both are the embedded default with more steps, and with checkpoints. The second one gets
SIGKILL at random moments, in the start of a life, a step or a save, and each time the
same command goes on with --resume. Then the metrics of both have to be equal, line by
line and bit for bit, but for the seconds and the memory that they took. It also tells
how the memory of the run left alone grew.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings of torch's C++
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study.runs import ROOT, commit_here
from support.checkpoints import checkpoints
from support.command import (
    Count,
    Flags,
    PositiveAmount,
    PositiveCount,
    Refused,
    parse_flags,
    run_script,
)

# What differs between two runs of the same thing.
OF_THE_MACHINE = ("_seconds", "peak_memory_gb")


class SoakConfig(Flags):
    """A soak."""

    steps: PositiveCount = 2000
    """of both runs"""
    kills: PositiveCount = 20
    """of the second run"""
    seconds: PositiveAmount = 120.0
    """the longest life before a kill; each has a random part of it"""
    save_every: PositiveCount = 20
    """steps between checkpoints"""
    seed: Count = 0
    """of the moments"""
    folder: str = "runs/soak"
    """of the two runs, and of soak.json"""


def live(cfg: SoakConfig, out: Path, seconds: float | None = None) -> bool:
    """One life of a run, to its end or for so many seconds. Whether it came to its end.

    Raises Refused where it ends otherwise, with the last line of what it printed.
    """
    command = [sys.executable, "train.py", f"--steps={cfg.steps}"]
    command += [f"--save_every={cfg.save_every}", f"--out_dir={out}"]
    if checkpoints(out):
        command.append("--resume")
    else:
        shutil.rmtree(out, ignore_errors=True)
    printed = out.with_suffix(".txt")
    with open(printed, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise Refused(f"{out} failed: {printed.read_text().splitlines()[-1]}")
    return True


def metrics(out: Path) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl."""
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def first_difference(alone: list[dict], killed: list[dict]) -> str | None:
    """Where the metrics of two runs differ first, in words; None where they do not."""
    if len(alone) != len(killed):
        return f"{len(killed)} lines, not {len(alone)}"
    for expected, found in zip(alone, killed, strict=True):
        for name, value in expected.items():
            if not name.endswith(OF_THE_MACHINE) and found.get(name) != value:
                return f"step {expected['step']}: {name} {found.get(name)}, not {value}"
    return None


def main() -> None:
    cfg = parse_flags(SoakConfig)
    folder = Path(cfg.folder).resolve()
    if folder.exists():
        raise Refused(f"--folder {folder} exists: choose another")
    folder.mkdir(parents=True)
    start = time.time()
    live(cfg, folder / "alone")
    alone = metrics(folder / "alone")

    moments = random.Random(cfg.seed)
    killed_at = []
    for _ in range(cfg.kills):
        if live(cfg, folder / "killed", moments.uniform(0, cfg.seconds)):
            raise Refused(
                f"the run ended after {len(killed_at)} kills: give more steps, or a "
                "smaller --seconds"
            )
        rows = metrics(folder / "killed")
        killed_at.append(rows[-1]["step"] if rows else None)
    live(cfg, folder / "killed")
    tenth = alone[max(1, cfg.steps // 10)]
    found = {
        "command": f"python {' '.join(sys.argv)}",
        "commit": commit_here(),
        "minutes": round((time.time() - start) / 60, 1),
        # None: before the run had written anything.
        "step_before_each_kill": killed_at,
        "first_difference": first_difference(alone, metrics(folder / "killed")),
        "peak_memory_gb_after_a_tenth": tenth["peak_memory_gb"],
        "peak_memory_gb": alone[-1]["peak_memory_gb"],
    }
    text = json.dumps(found, indent=1)
    (folder / "soak.json").write_text(text + "\n")
    print(text)
    if found["first_difference"]:
        raise Refused(f"the killed run differs: {found['first_difference']}")


if __name__ == "__main__":
    run_script(main)
