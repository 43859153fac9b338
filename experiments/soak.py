"""The soak: a long run that is killed again and again, beside the same run left alone.

    python experiments/soak.py                                # 95 minutes on two cores
    python experiments/soak.py --steps 30 --kills 3 --save_every 5 --out runs/soak-try

Both runs are the embedded default with more steps, and with evaluations, checkpoints
and the report at the end. They run at the same time, each with half of the cores. The
first is left alone. The second gets SIGKILL at random moments (from --seed), and each
time the same command with --resume goes on. After every step of either the resident
memory of its process and the size of its out_dir are noted.

It asks three things. Is memory flat? Its slope is that of means over blocks of steps,
which are nearly independent, with the 95% interval of Student's t, after the first
tenth of the steps and after the first half. Is what a run leaves
on the disk bounded? And has the killed run the metrics of the other one, all lines bit
for bit, but for the seconds and the memory that they took?

--folder has the runs and their notes; --out gets soak.json and soak.png. The same
command goes on where it was stopped. A run that was left alone begins again, since its
memory is that of one process.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import time
from multiprocessing import Process
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from scipy.stats import linregress, t

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments/results/soak"
LOOK_EVERY = 0.05  # seconds; a step of the default takes one or two
BLOCKS = 20  # of steps, whose means the slope is of
# What differs between two runs of the same thing.
OF_THE_MACHINE = ("_seconds", "_per_second", "peak_memory_gb")


class Kill(NamedTuple):
    """A moment: so long after the line of metrics of a step."""

    step: int
    seconds: float


def moments(seed: int, steps: int, kills: int, save_every: int) -> list[Kill]:
    """The kills in their order: none before the first checkpoint, none at the end."""
    draw = random.Random(seed)
    at_steps = sorted(draw.sample(range(save_every + 1, steps - 3), kills))
    return [Kill(step, draw.uniform(0, 2)) for step in at_steps]


def last_step(out: Path) -> int:
    """The last step with a whole line of metrics; -1 before the first line."""
    metrics = out / "metrics.jsonl"
    if not metrics.exists():
        return -1
    whole = metrics.read_bytes().rpartition(b"\n")[0]
    if not whole:
        return -1
    return json.loads(whole.rpartition(b"\n")[2])["step"]


def resident_bytes(process: int) -> int:
    """Of main memory, by this process; 0 if it has ended."""
    pages = Path(f"/proc/{process}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def bytes_on_disk(out: Path) -> dict[str, int]:
    """Of the logs, which grow by a line a step, and of all other files."""
    sizes = {"logs": 0, "others": 0, "files": 0}
    for path in out.rglob("*"):
        try:
            size = path.stat().st_size
        except FileNotFoundError:  # the run has removed an old checkpoint
            continue
        sizes["logs" if path.suffix == ".jsonl" else "others"] += size
        sizes["files"] += path.is_file()
    return sizes


def half_of_the_cores(half: int) -> str:
    """The first half (0) or the second (1) of this process's cores; one at least."""
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[half::2] or cores
    return ",".join(map(str, mine))


def command_of(
    arguments: argparse.Namespace, out: Path, resume: bool, half: int
) -> list[str]:
    """The run on half of the cores: the default, but for its length."""
    command = [
        "taskset",
        "--cpu-list",
        half_of_the_cores(half),
        sys.executable,
        "train.py",
        f"--steps={arguments.steps}",
        f"--save_every={arguments.save_every}",
        f"--out_dir={out}",
    ]
    return [*command, "--resume"] if resume else command


def live(command: list[str], out: Path, notes: Path, life: int, kill: Kill | None):
    """One process, to its end or to the kill; a note for each of its steps.

    Raises RuntimeError where it ends otherwise, with what it printed.
    """
    noted = last_step(out)
    printed = out.with_name(f"{out.name}-{life}.txt")
    with open(printed, "w") as output, open(notes, "a") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                time.sleep(LOOK_EVERY)
                step = last_step(out)
                if step <= noted:
                    # --resume has taken back the lines that no checkpoint has.
                    noted = step
                    continue
                noted = step
                note = {"life": life, "step": step} | bytes_on_disk(out)
                note["resident"] = resident_bytes(process.pid)
                file.write(json.dumps(note) + "\n")
                file.flush()
                if kill is not None and step >= kill.step:
                    time.sleep(kill.seconds)
                    process.kill()
                    process.wait()
        finally:
            process.kill()
            process.wait()
    expected = 0 if kill is None else -signal.SIGKILL
    if process.returncode != expected:
        raise RuntimeError(
            f"life {life} ended with {process.returncode}:\n{printed.read_text()}"
        )


def read_notes(path: Path) -> list[dict[str, Any]]:
    """The notes of a run; a line that was cut does not count."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def leave_alone(arguments: argparse.Namespace, folder: Path) -> None:
    """The first run, in one process."""
    out, notes = folder / "alone", folder / "alone.jsonl"
    if last_step(out) == arguments.steps:
        return
    shutil.rmtree(out, ignore_errors=True)
    notes.unlink(missing_ok=True)
    command = command_of(arguments, out, resume=False, half=0)
    live(command, out, notes, life=0, kill=None)


def kill_again_and_again(arguments: argparse.Namespace, folder: Path) -> list[Kill]:
    """The second run, in as many processes as it takes."""
    out, notes = folder / "killed", folder / "killed.jsonl"
    kills = moments(
        arguments.seed, arguments.steps, arguments.kills, arguments.save_every
    )
    # A kill is in the notes as the life after it.
    lives = folder / "lives.jsonl"
    for life in range(len(read_notes(lives)), len(kills) + 1):
        kill = kills[life] if life < len(kills) else None
        resume = any((out / "checkpoints").glob("step-*"))
        command = command_of(arguments, out, resume, half=1)
        live(command, out, notes, life, kill)
        checkpoints = sorted(path.name for path in (out / "checkpoints").iterdir())
        with open(lives, "a") as file:
            row = {"life": life, "step": last_step(out), "checkpoints": checkpoints}
            file.write(json.dumps(row) + "\n")
    return kills


def rows_of(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics, without what differs from run to run."""
    rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    return [
        {
            name: value
            for name, value in row.items()
            if not name.endswith(OF_THE_MACHINE)
        }
        for row in rows
    ]


def first_difference(alone: Path, killed: Path) -> str | None:
    """Where two runs differ first, in words; None where they do not."""
    expected, rows = rows_of(alone), rows_of(killed)
    if len(expected) != len(rows):
        return f"{len(rows)} lines, not {len(expected)}"
    for of_alone, of_killed in zip(expected, rows, strict=True):
        for name, value in of_alone.items():
            if of_killed.get(name) != value:
                return f"step {of_alone['step']}: {name} {of_killed.get(name)}, {value}"
    return None


def slope_of(notes: list[dict[str, Any]], first: float) -> dict[str, float]:
    """How resident memory grows after step `first`: MB of 2^20 bytes per 1,000 steps.

    With the ends of its 95% interval.
    """
    after = [note for note in notes if note["step"] > first and note["resident"] > 0]
    blocks = np.array_split(
        np.array([[note["step"], note["resident"] / 2**20] for note in after]),
        min(BLOCKS, len(after) // 2),
    )
    means = np.array([block.mean(axis=0) for block in blocks])  # [blocks, 2]
    line = linregress(means[:, 0], means[:, 1])
    margin = t.ppf(0.975, len(means) - 2) * line.stderr
    return {
        "mb_per_1000_steps": 1000 * line.slope,
        "low": 1000 * (line.slope - margin),
        "high": 1000 * (line.slope + margin),
        "intercept_mb": line.intercept,
    }


def means_of_100_steps(notes: list[dict[str, Any]]) -> list[float]:
    """Mean resident memory in MB of 2^20 bytes of steps 1 to 100, 101 to 200, ..."""
    blocks: dict[int, list[float]] = {}
    for note in notes:
        if note["step"] > 0 and note["resident"] > 0:
            block = blocks.setdefault((note["step"] - 1) // 100, [])
            block.append(note["resident"] / 2**20)
    return [round(statistics.mean(block), 1) for block in blocks.values()]


def summary(arguments: argparse.Namespace, folder: Path, kills: list[Kill]) -> dict:
    """What the soak has found, for soak.json."""
    alone = read_notes(folder / "alone.jsonl")
    killed = read_notes(folder / "killed.jsonl")
    lives = read_notes(folder / "lives.jsonl")
    model = "model/model.safetensors"
    return {
        "command": f"python {' '.join(sys.argv)}",
        "steps": arguments.steps,
        "kills": [kill._asdict() for kill in kills],
        "killed_at": [life["step"] for life in lives[:-1]],
        "steps_done_again": len(killed) - len({note["step"] for note in killed}),
        # Allocators and caches fill in the first steps.
        "resident_slope": slope_of(alone, 0.1 * arguments.steps),
        "resident_slope_of_second_half": slope_of(alone, 0.5 * arguments.steps),
        "resident_mb_of_100_steps": means_of_100_steps(alone),
        "resident_mb_at_most": {
            "alone": max(note["resident"] for note in alone) / 2**20,
            "killed": max(note["resident"] for note in killed) / 2**20,
        },
        "disk_mb_at_most": {
            "alone": max(note["others"] for note in alone) / 2**20,
            "killed": max(note["others"] for note in killed) / 2**20,
        },
        "files_at_most": max(note["files"] for note in alone + killed),
        "log_bytes_per_step": alone[-1]["logs"] / arguments.steps,
        "first_difference_of_metrics": first_difference(
            folder / "alone", folder / "killed"
        ),
        "same_model": (folder / "alone" / model).read_bytes()
        == (folder / "killed" / model).read_bytes(),
    }


def draw(folder: Path, found: dict[str, Any], path: Path) -> None:
    """Memory, disk, and accuracy by step; the kills as vertical lines."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.4), layout="constrained")
    memory, disk, accuracy = axes
    for name, color in (("alone", "tab:blue"), ("killed", "tab:orange")):
        notes = read_notes(folder / f"{name}.jsonl")
        steps = [note["step"] for note in notes]
        dots = {"marker": ".", "markersize": 3, "linestyle": "", "color": color}
        resident = [note["resident"] / 2**20 for note in notes]
        memory.plot(steps, resident, label=name, **dots)
        disk.plot(steps, [note["others"] / 2**20 for note in notes], **dots)
        rows = [row for row in rows_of(folder / name) if "heldout_greedy" in row]
        accuracy.plot(
            [row["step"] for row in rows],
            [row["heldout_greedy"] for row in rows],
            color=color,
            linestyle="-" if name == "alone" else "--",
            label=name,
        )
    slope = found["resident_slope_of_second_half"]
    memory.set(
        title=f"resident memory, MB: {slope['mb_per_1000_steps']:+.1f} "
        f"[{slope['low']:+.1f}, {slope['high']:+.1f}] per 1,000 steps of the 2nd half",
        ylim=(0, None),
    )
    memory.title.set_fontsize(8)
    disk.set_title("out_dir without its logs, MB", fontsize=9)
    disk.set_ylim(0, None)
    accuracy.set_title("greedy held-out accuracy", fontsize=9)
    accuracy.set_ylim(0, 1.02)
    for axis in axes:
        axis.set_xlabel("step")
        for step in found["killed_at"]:
            axis.axvline(step, color="0.8", linewidth=0.8, zorder=0)
    for axis in (memory, accuracy):
        axis.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--save_every", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/soak"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    # An exception, so that it ends the run that it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    alone = Process(target=leave_alone, args=(arguments, folder))
    alone.start()
    try:
        kills = kill_again_and_again(arguments, folder)
        alone.join()
    finally:
        alone.terminate()
    if alone.exitcode != 0:
        sys.exit(f"soak: the run in {folder}/alone failed, as is said above")
    found = summary(arguments, folder, kills)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "soak.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(folder, found, arguments.out / "soak.png")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
