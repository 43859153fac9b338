r"""Measures the seconds of a training step by phase, and compares it with other code.

    python tools/bench.py
    python tools/bench.py --model models/SmolLM2-135M-Instruct \
        --trl_python .venv-trl/bin/python --dtypes float32,bfloat16

The first command compares a step of the embedded policy (two updates) with that of
a minimal script (one update; tools/bare_step.py). The second command also measures a
pretrained model (tools/smollm2.py makes its folder), and TRL's GRPOTrainer on both
models. TRL needs an environment of its own:

    python -m venv .venv-trl
    .venv-trl/bin/pip install -r requirements-cpu.txt trl==1.16.0 accelerate==1.15.0
    .venv-trl/bin/pip uninstall -y torchvision torchaudio torchcodec

--earlier compares with another commit of this repository (`git worktree add` makes its
folder). Each round runs all programs, starting with a different one, and the table has
the median of each ratio over the rounds. Other programs on the machine change such a
ratio less than they change seconds. --out is a JSON file with the numbers of all
rounds; a .md file beside it has the table. To measure a CPU with AVX-512 as if it had
only AVX2, put ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 before the command.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from cpuinfo import get_cpu_info
from pydantic import PositiveInt

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from study.runs import ROOT, commit_here, table, words_of
from support.command import Flags, Refused, run_script
from support.log import PHASES
from support.models import check_model, model_folder
from support.tasks import load_task, task_of
from train import Config, problem_indices

# The first steps of a run do not count, nor does the last one, which evaluates.
WARM_UP = 2
# The rows of the table, and the metric whose median each shows.
TITLES = {f"{phase}, s": f"{phase}_seconds" for phase in PHASES}
TITLES["tokens of a response"] = "response_tokens"
# A step of a pretrained model that suits two cores. It makes one update, as TRL's does.
PRETRAINED = {
    "task": "recipes/sums-and-products",
    "prompts_per_step": 8,
    "group_size": 4,
    "max_response_tokens": 32,
    "minibatches": 1,
    "kv_cache_gb": 0.5,
}


class BenchConfig(Flags):
    """Measure the seconds of a training step, and compare it with other code."""

    model: str = ""
    """a pretrained model to measure besides the embedded policy"""
    dtypes: list[Literal["float32", "bfloat16"]] = ["float32"]
    """dtypes in which trainer and engine compute, ours and TRL's"""
    trl_python: str = ""
    """the Python of an environment with TRL; without it, TRL is not measured"""
    earlier: str = ""
    """a checkout of another commit to compare with"""
    rounds: PositiveInt = 3
    """runs of each program, in turn"""
    counted: PositiveInt = 5
    """steps to measure in a run"""
    out: str = "runs/bench.json"
    """file for the numbers"""


class Failed(Exception):
    """A command failed; the message is the last line of its stderr."""


# Comparing


def in_rounds(arms: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """Call each arm, a function that measures a program, once per round.

    Returns what each arm measured in each round. The rounds start with different arms.
    """
    found: dict[str, list[Any]] = {name: [] for name in arms}
    order = deque(arms)
    for _ in range(rounds):
        for name in order:
            found[name].append(arms[name]())
        order.rotate(-1)
    return found


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """Return the ratio of each round."""
    pairs = zip(numerators, denominators, strict=True)
    return [numerator / denominator for numerator, denominator in pairs]


def cell(numbers: list[float] | str) -> str:
    """Return the median, with the range in brackets. A text is returned unchanged."""
    if isinstance(numbers, str):
        return numbers
    median = f"{statistics.median(numbers):.3g}"
    if len(numbers) == 1:
        return median
    return f"{median} [{min(numbers):.3g}, {max(numbers):.3g}]"


# Running


def run_steps(
    command: list[str], checkout: str | Path = ROOT
) -> tuple[list[tuple[float, str]], float]:
    """Run a command; return each "step" line that it prints, with its time of arrival.

    The times are in seconds. Also returns the most main memory that the process used,
    in GB of 2^30 bytes. Raises Failed if the command fails.
    """
    lines = []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, cwd=checkout, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        for line in process.stdout:
            if line.startswith("step "):
                lines.append((time.perf_counter(), line))
        _, status, usage = os.wait4(process.pid, 0)
        errors.seek(0)
        if status != 0:
            raise Failed((errors.read().splitlines() or ["no message"])[-1])
    return lines, usage.ru_maxrss / 2**20


def medians(
    lines: list[tuple[float, str]], rows: list[dict[str, Any]]
) -> dict[str, float]:
    """Return medians over the steps that count.

    `lines` are those of run_steps and `rows` the metrics of the same steps.
    """
    times = [when for when, _ in lines]
    seconds = [later - earlier for earlier, later in itertools.pairwise(times)]
    found = {"step, s": statistics.median(seconds[WARM_UP - 1 : -1])}
    for title, name in TITLES.items():
        if name in rows[0]:
            found[title] = statistics.median(row[name] for row in rows[WARM_UP:-1])
    return found


def run_train(cfg: Config, counted: int, checkout: str | Path) -> dict[str, float]:
    """Return medians over the steps of a run of train.py, and its peak memory.

    Raises Failed if the run fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        flags = cfg.model_dump(exclude_defaults=True)
        steps = WARM_UP + counted + 1
        flags |= {"steps": steps, "out_dir": out, "eval_every": 0, "eval_problems": 8}
        command = [sys.executable, "train.py", *words_of(flags)]
        lines, memory = run_steps(command, checkout)
        rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    # The first line and row are those of step 0.
    return medians(lines[1:], rows[1:]) | {"peak memory, GB": memory}


def run_other(
    cfg: Config, counted: int, python: str, script: str, generator: str
) -> dict[str, float]:
    """Run a script of tools/ on our run's prompts; return medians of what it prints.

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
        lines, memory = run_steps([python, f"tools/{script}", str(file)])
    rows = [json.loads(line.removeprefix("step ")) for _, line in lines]
    return medians(lines, rows) | {"peak memory, GB": memory}


def measure(cfg: Config, bench: BenchConfig) -> dict[str, list[float] | str]:
    """Return each row of the table, ours first, with its numbers in each round.

    If the other code fails, its row has the reason. Raises Refused if our train.py
    fails.
    """
    failed: dict[str, str] = {}

    def attempt(name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return None if name in failed else run(cfg, bench.counted, *arguments)
        except Failed as error:
            failed[name] = f"failed: {error}"
            return None

    others = {
        "bare": (sys.executable, "bare_step.py", "transformers"),
        "TRL with transformers": (bench.trl_python, "trl_step.py", "transformers"),
        "TRL with vllm": (bench.trl_python, "trl_step.py", "vllm"),
    }
    arms = {"ours": partial(attempt, "ours", run_train, ROOT)}
    if bench.earlier:
        arms["earlier"] = partial(attempt, "earlier", run_train, bench.earlier)
    for name, (python, *job) in others.items():
        if python:
            arms[name] = partial(attempt, name, run_other, python, *job)
    measured = in_rounds(arms, bench.rounds)
    if "ours" in failed:
        raise Refused(f"train.py {failed['ours']}")
    ours = measured.pop("ours")
    found: dict[str, Any] = {title: [run[title] for run in ours] for title in ours[0]}
    for name, theirs in measured.items():
        if name in failed:
            found[f"step / {name}"] = failed[name]
            continue
        numbers = {title: [run[title] for run in theirs] for title in theirs[0]}
        for title in ("step, s", "update, s"):
            if title in numbers:
                found[f"{title[:-3]} / {name}"] = ratios(found[title], numbers[title])
        found |= {f"{name}: {title}": values for title, values in numbers.items()}
    return found


def machine() -> str:
    """Return the GPU, or the processor with its cores and vector instructions."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = get_cpu_info().get("brand_raw", "an unknown processor")
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {name} with {torch.backends.cpu.get_cpu_capability()}"


def report(made_with: str, columns: dict[str, dict[str, Any]]) -> str:
    """Return the page: command and machine, and a column for each model and dtype."""
    titles = dict.fromkeys(title for found in columns.values() for title in found)
    rows = [["", *columns]]
    for title in titles:
        found = [column.get(title, "") for column in columns.values()]
        rows.append([title, *map(cell, found)])
    return f"# The benchmark\n\n{made_with}\n\n{table(rows)}"


def main() -> None:
    bench = BenchConfig.from_flags()
    if bench.trl_python and not Path(bench.trl_python).is_file():
        raise Refused(f"--trl_python: there is no file {bench.trl_python}")
    check_model(bench.model or "tiny")
    made_with = f"`python {' '.join(sys.argv)}`, commit {commit_here()}, {machine()}"
    out = Path(bench.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    columns = {}
    models = {"tiny": {}}
    if bench.model:  # The path is absolute, as --earlier runs in another folder.
        models[str(Path(model_folder(bench.model)).resolve())] = PRETRAINED
    for dtype, (model, settings) in itertools.product(bench.dtypes, models.items()):
        # This learning rate is so small that neither the policy nor the length of its
        # responses changes.
        flags = settings | {"dtype": dtype, "rollout_dtype": dtype}
        cfg = Config(model=model, learning_rate=1e-9, **flags)
        columns[f"{Path(model).name}, {dtype}"] = measure(cfg, bench)
        found = {"made with": made_with, "columns": columns}
        out.write_text(json.dumps(found, indent=1) + "\n")
        out.with_suffix(".md").write_text(report(made_with, columns))
    print(report(made_with, columns))


if __name__ == "__main__":
    run_script(main)
