"""Seconds of whole training steps, of train.py and of TRL's GRPOTrainer in turn.

experiments/bench.py runs this and writes what it finds. Each arm is a command in a
process of its own, which prints a line a step. A step lasts from one line to the next,
for both trainers. The arms run one after the other, REPEATS times round, so that
neighbors on a shared machine disturb all of them alike.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from experiments.speed import SIZES, ratios, spread
from reward import load_task
from support.log import PHASES
from support.probe import PROBE_EVERY
from support.tasks import task_of, with_instruction
from train import Config, problem_numbers

ROOT = Path(__file__).resolve().parents[1]
TRL_STEP = ROOT / "experiments/trl_step.py"
REPEATS = 3
# Steps that are not counted: what is done once is in them.
WARM_UP = 2
# Steps that are counted, of the embedded default and of a pretrained model: one in
# PROBE_EVERY has the probe of the sync.
COUNTED_OF_TINY, COUNTED = 3 * PROBE_EVERY, PROBE_EVERY

# Arms that are compared with each other.
TWO_RANKS = "tiny, 2 ranks of a core each"
ONE_CORE = "tiny, 1 core"
ALL_CORES = "tiny, float32"
HALF_THE_BATCH = "tiny, 1 core, half the batch"
RETURNED = "tiny, float32, freed memory returned"
SCALING = {
    "1 rank, 1 core / all cores": (ONE_CORE, ALL_CORES),
    "1 rank / 2 ranks, the same batch (at best 2)": (ONE_CORE, TWO_RANKS),
    "1 rank, half the batch / 2 ranks (at best 1)": (HALF_THE_BATCH, TWO_RANKS),
}
MALLOC = {
    "a step, freed memory kept / returned to the system": (ALL_CORES, RETURNED),
}

Arm = Callable[[], dict[str, Any]]


class Failed(Exception):
    """A command that failed; says how."""


def lines_of(command: list[str]) -> list[tuple[float, str]]:
    """Run a command: the lines that it prints of steps, each with its time in seconds.

    Raises Failed, with the last line that names an error.
    """
    lines = []
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
        )
        for line in process.stdout:
            if line.startswith("step "):
                lines.append((time.perf_counter(), line))
        status = process.wait()
        said.seek(0)
        complaints = [line.strip() for line in said if "Error" in line]
    if status != 0:
        raise Failed((complaints or [f"exit status {status}"])[-1])
    return lines


def seconds_between(lines: list[tuple[float, str]]) -> list[float]:
    return [later - earlier for (earlier, _), (later, _) in itertools.pairwise(lines)]


def run_train(
    counted: int,
    settings: dict[str, Any],
    ranks: int = 1,
    cores: int = 0,
    script: str = "train.py",
) -> dict[str, Any]:
    """The seconds of each step of train.py, or a script like it, and of its phases.

    On all cores, or on the first `cores` of them.
    """
    # The last step does not count either, as it evaluates.
    steps = WARM_UP + counted + 1
    flags = [f"--{name}={value}" for name, value in settings.items()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", script),
            *(f"--steps={steps}", f"--out_dir={out}", "--eval_every=0"),
            *("--eval_problems=8", *flags),
        ]
        if cores > 0:
            chosen = sorted(os.sched_getaffinity(0))[:cores]
            command = ["taskset", "--cpu-list", ",".join(map(str, chosen)), *command]
        lines = lines_of(command)
        rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    # The first line is of step 0, before training.
    seconds = seconds_between(lines)[WARM_UP:-1]
    rows = rows[1 + WARM_UP : -1]
    found: dict[str, Any] = {
        "seconds": seconds,
        "tokens of a response": statistics.mean(row["response_tokens"] for row in rows),
    }
    for phase in PHASES:
        found[phase] = [row[f"{phase}_seconds"] for row in rows]
    # The log, and the probe of the sync.
    found["elsewhere"] = [
        of_step - sum(row[f"{phase}_seconds"] for phase in PHASES)
        for of_step, row in zip(seconds, rows, strict=True)
    ]
    return found


def prompts_of_run(cfg: Config, steps: int) -> list[str]:
    """What the user says in each prompt of a run of train.py, step by step."""
    instruction = task_of(cfg.task).instruction
    problems = load_task(cfg.task, "train")
    prompts = []
    for step in range(1, steps + 1):
        for number in problem_numbers(cfg, step, len(problems)):
            prompts.append(with_instruction(problems[number]["prompt"], instruction))
    return prompts


def run_trl(counted: int, settings: dict[str, Any], generator: str) -> dict[str, Any]:
    """The seconds of each step of TRL's GRPOTrainer, and of its rollout and sync.

    It has the settings of train.py. `generator` is transformers or vllm.
    """
    cfg = Config(**settings)
    # As many steps as train.py has, so that the last one is left out here too.
    steps = WARM_UP + counted + 1
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.json"
        file.write_text(json.dumps(prompts_of_run(cfg, steps)))
        sizes = (cfg.prompts_per_step, cfg.group_size, cfg.max_response_tokens, steps)
        command = [sys.executable, str(TRL_STEP), cfg.model, str(file)]
        command += [*map(str, sizes), cfg.dtype, generator]
        lines = lines_of(command)
    return trl_steps(lines)


def trl_steps(lines: list[tuple[float, str]]) -> dict[str, Any]:
    """What trl_step.py's lines, with their times, tell of the steps that are counted.

    Such as "step 1 tokens 34.5 rollout 0.5 sync 0.1"; the first line is of step 1.
    """
    counted = [line.split() for _, line in lines[WARM_UP:-1]]
    steps = [dict(zip(words[::2], words[1::2], strict=True)) for words in counted]
    return {
        "seconds": seconds_between(lines)[WARM_UP - 1 : -1],
        "rollout": [float(step["rollout"]) for step in steps],
        "sync": [float(step["sync"]) for step in steps],
        "tokens of a response": statistics.mean(
            float(step["tokens"]) for step in steps
        ),
    }


def dtypes(dtype: str) -> dict[str, str]:
    """The settings of a run of train.py that computes and samples in the dtype."""
    return {"dtype": dtype, "rollout_dtype": dtype}


def arms_beside_trl(
    counted: int, settings: dict[str, Any], trl: bool
) -> dict[str, Arm]:
    """train.py in both dtypes, and TRL with either of its generators in the same ones.

    Both trainers have weights in float32, and compute and generate in the dtype.
    """
    arms: dict[str, Arm] = {}
    for dtype in ("float32", "bfloat16"):
        in_dtype = settings | dtypes(dtype)
        name = Path(settings["model"]).name
        arms[f"{name}, {dtype}"] = partial(run_train, counted, in_dtype)
        if trl:
            for generator in ("transformers", "vllm"):
                arm = partial(run_trl, counted, in_dtype, generator)
                arms[f"TRL with {generator}, {dtype}"] = arm
    return arms


def arms_of_tiny(cores: int, trl: bool) -> dict[str, Arm]:
    """The embedded default beside TRL, how it scales from a rank of one core to two,
    and what it costs to return freed memory.

    It makes two optimizer steps a step, TRL one. Strong scaling has the same batch for
    both, weak scaling half of it for one rank.
    """
    # It learns next to nothing, so that its responses stay as long as they are.
    arms = arms_beside_trl(
        COUNTED_OF_TINY, {"model": "tiny", "learning_rate": 1e-9}, trl
    )
    if torch.cuda.is_available():
        return arms
    run = partial(run_train, COUNTED_OF_TINY)
    settings = {"learning_rate": 1e-9} | dtypes("float32")
    arms[RETURNED] = partial(run, settings, script="experiments/returned_memory.py")
    if cores > 1:
        half = settings | {"prompts_per_step": 16}
        arms[TWO_RANKS] = partial(run, settings, ranks=2, cores=2)
        arms[ONE_CORE] = partial(run, settings, cores=1)
        arms[HALF_THE_BATCH] = partial(run, half, cores=1)
    return arms


def arms_of_model(model: str, trl: bool) -> dict[str, Arm]:
    """A pretrained model, beside TRL."""
    sizes = SIZES["cuda" if torch.cuda.is_available() else "cpu"]
    return arms_beside_trl(COUNTED, sizes | {"model": model}, trl)


def measure_steps(model: str, trl: bool) -> dict[str, Any]:
    """All arms of a model, and the ratios of those that belong together, of each round.

    "tiny" is the embedded default.
    """
    if model == "tiny":
        arms = arms_of_tiny(len(os.sched_getaffinity(0)), trl)
    else:
        arms = arms_of_model(model, trl)
    runs: dict[str, list[dict]] = {name: [] for name in arms}
    failed: dict[str, str] = {}
    for number in range(REPEATS):
        # No arm is always the first one.
        for name in arms if number % 2 == 0 else reversed(arms):
            if name in failed:
                continue
            try:
                runs[name].append(arms[name]())
            except Failed as error:
                failed[name] = str(error)
            print(f"{name}: {runs[name][-1:]}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"rounds": REPEATS, "failed": failed, "arms": {}}
    seconds = {}
    for name, of_arm in runs.items():
        if name in failed:
            continue
        found["arms"][name] = summary(of_arm)
        # The median: the one step in PROBE_EVERY that has the probe does not count.
        seconds[name] = [statistics.median(run["seconds"]) for run in of_arm]
    beside_trl = pairs_beside_trl(list(seconds), Path(model).name)
    found["ratios"] = compare(seconds, SCALING | MALLOC | beside_trl)
    return found


def pairs_beside_trl(arms: list[str], model: str) -> dict[str, tuple[str, str]]:
    """Our arm and TRL's in the same dtype, by the title of their ratio."""
    pairs = {}
    for name in arms:
        if name.startswith("TRL"):
            dtype = name.split(", ")[-1]
            pairs[f"{model}, {dtype} / {name}"] = (f"{model}, {dtype}", name)
    return pairs


def compare(
    values: dict[str, list[float]], pairs: dict[str, tuple[str, str]]
) -> dict[str, dict[str, float]]:
    """The ratios of arms that belong together, from a value of each round.

    What lacks an arm, as it failed, has no ratio.
    """
    return {
        title: ratios(values[one], values[other])
        for title, (one, other) in pairs.items()
        if one in values and other in values
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the runs of an arm: the spread of what each step has, else the median."""
    found: dict[str, Any] = {}
    steps: dict[str, list[float]] = {}
    for name, value in runs[0].items():
        if isinstance(value, list):
            steps[name] = [of_step for run in runs for of_step in run[name]]
            found[name] = spread(steps[name])
        else:
            found[name] = statistics.median(run[name] for run in runs)
    if "sync" in steps:
        found["share of the sync"] = ratios(steps["sync"], steps["seconds"])
    return found
