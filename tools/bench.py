"""Measures the seconds of a training step by phase, and compares it with TRL's.

    python tools/bench.py
    python tools/bench.py --model models/SmolLM2-135M-Instruct \\
        --trl_python .venv-trl/bin/python --dtypes float32,bfloat16

The first command measures the embedded default. The second one also measures a
pretrained model (tools/smollm2.py makes its folder), and compares both with TRL's
GRPOTrainer. TRL needs an environment of its own:

    python -m venv .venv-trl
    .venv-trl/bin/pip install -r requirements-cpu.txt trl==1.16.0 accelerate==1.15.0
    .venv-trl/bin/pip uninstall -y torchvision torchaudio torchcodec

Ours and TRL's runs alternate, and a ratio is the median of the ratios of all rounds, so
that other load on the machine affects it less than it affects seconds. --out is a JSON
file with the numbers of all rounds; a .md file beside it has the table. To measure a
CPU with AVX-512 as if it had only AVX2, put ONEDNN_MAX_CPU_ISA=AVX2
ATEN_CPU_CAPABILITY=avx2 before the command.
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
from typing import Any, Literal

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hide warnings of torch's C++
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study.runs import ROOT, commit_here, table, words_of
from support.command import Flags, PositiveCount, Refused, parse_flags, run_script
from support.log import PHASES
from support.models import check_model
from support.tasks import load_task, task_of
from train import Config, problem_indices

# The first steps of a run do not count, nor does the last one, which evaluates.
WARM_UP = 2
# A step of a pretrained model that suits two cores. Like TRL it makes one update.
PRETRAINED = {
    "task": "recipes/sums-and-products",
    "prompts_per_step": 8,
    "group_size": 4,
    "max_response_tokens": 32,
    "minibatches": 1,
    "kv_cache_gb": 0.5,
}


class BenchConfig(Flags):
    """Measure the seconds of a training step, and compare it with TRL's."""

    model: str = ""
    """a pretrained model to measure besides the embedded default"""
    dtypes: list[Literal["float32", "bfloat16"]] = ["float32"]
    """dtypes in which trainer and engine compute, ours and TRL's"""
    trl_python: str = ""
    """the Python of an environment with TRL; without it, TRL is not measured"""
    rounds: PositiveCount = 3
    """runs of each kind; ours and TRL's alternate"""
    counted: PositiveCount = 5
    """steps of a run that count"""
    out: str = "runs/bench.json"
    """file for the numbers"""


class Failed(Exception):
    """A command failed; the message is the last line that it printed."""


# Comparing


def in_rounds(arms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Return what each arm measures in each round. Every round starts with another."""
    names = list(arms)
    found: dict[str, list[Any]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(arms[name]())
    return found


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Return the ratio of each round."""
    pairs = zip(numerators, denominators, strict=True)
    return [numerator / denominator for numerator, denominator in pairs]


def cell(numbers: list[float] | str) -> str:
    """Return the median, with the least and the most in brackets; a text unchanged."""
    if isinstance(numbers, str):
        return numbers
    median = f"{statistics.median(numbers):.3g}"
    if len(numbers) == 1:
        return median
    return f"{median} [{min(numbers):.3g}, {max(numbers):.3g}]"


# Running


def run_steps(command: list[str]) -> list[tuple[float, str]]:
    """Run a command; return the time in seconds and the text of each "step" line.

    Raises Failed if the command fails.
    """
    lines = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        for line in process.stdout:
            if line.startswith("step "):
                lines.append((time.perf_counter(), line))
        status = process.wait()
        errors.seek(0)
        if status != 0:
            raise Failed((errors.read().splitlines() or ["no message"])[-1])
    return lines


def step_seconds(lines: list[tuple[float, str]]) -> float:
    """Return the median seconds from one line to the next, of the steps that count."""
    times = [when for when, _ in lines]
    between = [later - earlier for earlier, later in itertools.pairwise(times)]
    return statistics.median(between[WARM_UP - 1 : -1])


def run_train(cfg: Config, counted: int) -> dict[str, float]:
    """Return medians over the steps of a run of train.py: seconds, tokens and memory.

    Raises Failed if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        flags = cfg.model_dump(exclude_defaults=True)
        steps = WARM_UP + counted + 1
        flags |= {"steps": steps, "out_dir": out, "eval_every": 0, "eval_problems": 8}
        # The first line is that of step 0, before training.
        lines = run_steps([sys.executable, "train.py", *words_of(flags)])[1:]
        rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    rows = rows[1 + WARM_UP : -1]
    found = {"a step, s": step_seconds(lines)}
    names = {f"its {phase}, s": f"{phase}_seconds" for phase in PHASES}
    names["tokens of a response"] = "response_tokens"
    names["memory of the process, GB"] = "peak_memory_gb"
    for title, metric in names.items():
        found[title] = statistics.median(row[metric] for row in rows)
    return found


def run_trl(
    cfg: Config, counted: int, trl_python: str, generator: str
) -> dict[str, float]:
    """Run tools/trl_step.py on the prompts of our run, and return the same medians.

    `generator` is "transformers" or "vllm". Raises Failed if the run fails.
    """
    steps = WARM_UP + counted + 1
    problems = load_task(cfg.task, "train")
    instruction = task_of(cfg.task).instruction
    prompts = []
    groups = range(steps * cfg.prompts_per_step)
    for number in problem_indices(cfg.seed, len(problems), groups):
        problem = problems[number]["prompt"]
        prompts.append(f"{instruction}\n\n{problem}" if instruction else problem)
    job = {"prompts": prompts, "steps": steps, "generator": generator}
    job |= cfg.model_dump(include={"model", "dtype", "prompts_per_step", "group_size"})
    job["max_tokens"] = cfg.max_response_tokens
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job | {"folder": folder}))
        return trl_medians(run_steps([trl_python, "tools/trl_step.py", str(file)]))


def trl_medians(lines: list[tuple[float, str]]) -> dict[str, float]:
    """Return medians over lines like "step 3 tokens 34.5 rollout 0.5 sync 0.1"."""
    found = {"a step, s": step_seconds(lines)}
    words = [line.split() for _, line in lines[WARM_UP:-1]]
    titles = {"tokens of a response": 3, "its rollout, s": 5, "its sync, s": 7}
    for title, column in titles.items():
        found[title] = statistics.median(float(line[column]) for line in words)
    return found


def measure(cfg: Config, bench: BenchConfig) -> dict[str, list[float] | str]:
    """Return the numbers of each round by row of the table: ours and TRL's.

    Raises Refused if train.py fails. If TRL fails, its row has the reason.
    """
    failed = {}

    def attempt(name: str, run: Callable[[], Any]) -> dict[str, float] | None:
        try:
            return None if name in failed else run()
        except Failed as error:
            failed[name] = f"failed: {error}"
            return None

    arms = {"ours": partial(attempt, "ours", partial(run_train, cfg, bench.counted))}
    if bench.trl_python:
        for generator in ("transformers", "vllm"):
            run = partial(run_trl, cfg, bench.counted, bench.trl_python, generator)
            arms[generator] = partial(attempt, generator, run)
    runs = in_rounds(arms, bench.rounds)
    if "ours" in failed:
        raise Refused(f"train.py {failed['ours']}")
    found: dict[str, Any] = {
        title: [run[title] for run in runs["ours"]] for title in runs["ours"][0]
    }
    for generator in list(arms)[1:]:
        ratio = f"a step / TRL's with {generator}"
        if generator in failed:
            found[ratio] = failed[generator]
            continue
        theirs = {
            title: [run[title] for run in runs[generator]]
            for title in runs[generator][0]
        }
        found[ratio] = ratios(found["a step, s"], theirs["a step, s"])
        found |= {f"TRL with {generator}: {name}": theirs[name] for name in theirs}
    return found


def machine() -> str:
    """Return the GPU, or the processor with its cores and vector instructions."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [line for line in open("/proc/cpuinfo") if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else "an unknown processor"
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {name} with {torch.backends.cpu.get_cpu_capability()}"


def report(made_with: str, columns: dict[str, dict[str, Any]]) -> str:
    """Return the page: how it was measured, and a column for each model and dtype."""
    titles = dict.fromkeys(title for found in columns.values() for title in found)
    rows = [["", *columns]]
    for title in titles:
        found = [column.get(title, "") for column in columns.values()]
        rows.append([title, *map(cell, found)])
    return f"# The benchmark\n\n{made_with}\n\n{table(rows)}"


def main() -> None:
    bench = parse_flags(BenchConfig)
    if bench.trl_python and not Path(bench.trl_python).is_file():
        raise Refused(f"--trl_python: there is no file {bench.trl_python}")
    check_model(bench.model or "tiny")
    made_with = f"`python {' '.join(sys.argv)}`, commit {commit_here()}, {machine()}"
    out = Path(bench.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = {}
    models = {"tiny": {}} | ({bench.model: PRETRAINED} if bench.model else {})
    for dtype, (model, settings) in itertools.product(bench.dtypes, models.items()):
        # At this learning rate the policy, and so the length of responses, stays as it
        # is.
        flags = settings | {"dtype": dtype, "rollout_dtype": dtype}
        cfg = Config(model=model, learning_rate=1e-9, **flags)
        columns[f"{Path(model).name}, {dtype}"] = measure(cfg, bench)
        found = {"made with": made_with, "columns": columns}
        out.write_text(json.dumps(found, indent=1) + "\n")
        out.with_suffix(".md").write_text(report(made_with, columns))
    print(report(made_with, columns))


if __name__ == "__main__":
    run_script(main)
