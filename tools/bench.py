"""What a training step costs: one table, beside TRL and beside what the machine can do.

    python tools/bench.py
    python tools/bench.py --model models/SmolLM2-135M-Instruct \\
        --trl_python .venv-trl/bin/python --dtypes float32,bfloat16

The first line measures the embedded default; the second one a pretrained model as well
(tools/smollm2.py makes its folder), and TRL's GRPOTrainer beside both. TRL is no
package of this project. An environment for it is made by

    python -m venv .venv-trl
    .venv-trl/bin/pip install -r requirements-cpu.txt trl==1.16.0 accelerate==1.15.0
    .venv-trl/bin/pip uninstall -y torchvision torchaudio torchcodec

What is compared runs in turn. A ratio is the median of those of the turns: neighbors on
the machine disturb it less than they disturb seconds. Each part of each column runs in
a process of its own. --out gets the numbers, where those of other parts stay, and a .md
file beside it the table. ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 before the
command make a CPU with AVX-512 work as one without.
"""

import gc
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings of torch's C++
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import policy as policy_module
from loss import p3o
from policy import Policy, build_policy, sync
from rollout import Engine, Rollouts
from study.runs import ROOT, commit_here, words_of
from support.command import Flags, PositiveCount, Refused, parse_flags, run_script
from support.log import PHASES, Log
from support.machine import init_distributed
from support.models import check_model
from support.tasks import load_task, task_of
from train import (
    Config,
    build_engines,
    load_data,
    problem_indices,
    sample_batch,
    update,
)

# The first steps of a run do not count, nor does the last, which evaluates.
WARM_UP = 2
# Nor do the first updates of a process, which wait for memory.
SETTLING = 5
# A step of a pretrained model, on two cores. It makes one optimizer step, as TRL does.
PRETRAINED = {
    "task": "recipes/sums-and-products",
    "prompts_per_step": 8,
    "group_size": 4,
    "max_response_tokens": 32,
    "minibatches": 1,
    "kv_cache_gb": 0.5,
}
MATRIX = 8192 if torch.cuda.is_available() else 2048  # rows of those multiplied
HEAD_TOKENS = 16_384  # of a micro-batch by default

Numbers = dict[str, Any]  # by the title of their row


class BenchConfig(Flags):
    """A benchmark."""

    model: str = ""
    """a pretrained model, beside the embedded default"""
    dtypes: list[Literal["float32", "bfloat16"]] = ["float32"]
    """of trainer and engine, ours and TRL's"""
    trl_python: str = ""
    """the Python of an environment with TRL; left out, TRL is not measured"""
    parts: list[Literal["steps", "phases", "head"]] = ["steps", "phases", "head"]
    """whole steps; rollout and update alone; the head's memory"""
    rounds: PositiveCount = 3
    """turns of all that is compared"""
    counted: PositiveCount = 5
    """steps that count in each run"""
    out: str = "runs/bench.json"
    """where the numbers go"""


class Failed(Exception):
    """A command that failed, with the last line of what it said."""


def still(model: str, dtype: str, **settings: Any) -> Config:
    """A run that learns next to nothing, so that its responses keep their length."""
    return Config(
        model=model, dtype=dtype, rollout_dtype=dtype, learning_rate=1e-9, **settings
    )


# What is compared


def in_rounds(
    arms: dict[str, Callable[[], float | None]], rounds: int
) -> dict[str, list[float]]:
    """What each arm measures, round by round. Each round begins with another arm."""
    names = list(arms)
    found: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(arms[name]())
    return found


def ratios(numerators: list[float], denominators: list[float]) -> list[float]:
    """The ratio of each round."""
    pairs = zip(numerators, denominators, strict=True)
    return [numerator / denominator for numerator, denominator in pairs]


def cell(numbers: Any) -> str:
    """A median with the least and the most in brackets, or what stands for it."""
    if isinstance(numbers, str):
        return numbers
    median = f"{statistics.median(numbers):.3g}"
    if len(numbers) == 1:
        return median
    return f"{median} [{min(numbers):.3g}, {max(numbers):.3g}]"


# Whole steps


def run_steps(command: list[str]) -> list[tuple[float, str]]:
    """Run a command: the lines that it prints of steps, with their times in seconds.

    Raises Failed.
    """
    lines = []
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=said, text=True
        )
        for line in process.stdout:
            if line.startswith("step "):
                lines.append((time.perf_counter(), line))
        status = process.wait()
        said.seek(0)
        if status != 0:
            raise Failed((said.read().splitlines() or ["it said nothing"])[-1])
    return lines


def seconds_of_steps(lines: list[tuple[float, str]]) -> list[float]:
    """From each line to the next, for the steps that count."""
    times = [when for when, _ in lines]
    between = [later - earlier for earlier, later in itertools.pairwise(times)]
    return between[WARM_UP - 1 : -1]


def run_train(
    cfg: Config, counted: int, ranks: int = 1, cores: list[int] | None = None
) -> dict[str, float]:
    """Medians over the steps of a run of train.py: their seconds, by phase, and memory.

    On these cores only, if any are given. Raises Failed.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    if cores:
        launcher = ["taskset", "--cpu-list", ",".join(map(str, cores)), *launcher]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        flags = cfg.model_dump(exclude_defaults=True)
        steps = WARM_UP + counted + 1
        flags |= {"steps": steps, "out_dir": out, "eval_every": 0, "eval_problems": 8}
        command = [*launcher, f"--nproc-per-node={ranks}", "train.py", *words_of(flags)]
        # The first line is of step 0, before training.
        lines = run_steps(command)[1:]
        rows = [json.loads(line) for line in open(out / "metrics.jsonl")]
    rows = rows[1 + WARM_UP : -1]
    found = {"a step": statistics.median(seconds_of_steps(lines))}
    for name in [f"{phase}_seconds" for phase in PHASES] + ["response_tokens"]:
        found[name.removesuffix("_seconds")] = statistics.median(
            row[name] for row in rows
        )
    found["memory"] = rows[-1]["peak_memory_gb"]
    return found


def run_trl(
    cfg: Config, counted: int, trl_python: str, generator: str
) -> dict[str, float]:
    """The same of tools/trl_step.py, with the prompts of our run in their order.

    `generator` is "transformers" or "vllm". Raises Failed.
    """
    steps = WARM_UP + counted + 1
    problems = load_task(cfg.task, "train")
    instruction = task_of(cfg.task).instruction
    prompts = []
    places = range(steps * cfg.prompts_per_step)
    for number in problem_indices(cfg.seed, len(problems), places):
        problem = problems[number]["prompt"]
        prompts.append(f"{instruction}\n\n{problem}" if instruction else problem)
    job = {"prompts": prompts, "steps": steps, "generator": generator}
    job |= cfg.model_dump(include={"model", "dtype", "prompts_per_step", "group_size"})
    job["max_tokens"] = cfg.max_response_tokens
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(job | {"folder": folder}))
        lines = run_steps([trl_python, "tools/trl_step.py", str(file)])
    return steps_of_trl(lines)


def steps_of_trl(lines: list[tuple[float, str]]) -> dict[str, float]:
    """Medians over the lines of TRL, as "step 3 tokens 34.5 rollout 0.5 sync 0.1"."""
    found = {"a step": statistics.median(seconds_of_steps(lines))}
    words = [line.split() for _, line in lines[WARM_UP:-1]]
    for name, place in (("response_tokens", 3), ("rollout", 5), ("sync", 7)):
        found[name] = statistics.median(float(line[place]) for line in words)
    return found


def steps(column: Config, bench: BenchConfig) -> Numbers:
    """Seconds of whole steps, and the ratio to TRL's with either of its generators."""
    arms = {"ours": partial(run_train, column, bench.counted)}
    if bench.trl_python:
        for generator in ("transformers", "vllm"):
            arms[generator] = partial(
                run_trl, column, bench.counted, bench.trl_python, generator
            )
    failed = {}

    def attempt(name: str) -> dict[str, float] | None:
        try:
            return arms[name]() if name not in failed else None
        except Failed as error:
            failed[name] = f"failed: {error}"
            return None

    runs = in_rounds({name: partial(attempt, name) for name in arms}, bench.rounds)
    if "ours" in failed:
        raise Refused(f"train.py {failed['ours']}")
    ours = {name: [run[name] for run in runs["ours"]] for name in runs["ours"][0]}
    found: Numbers = {"a step, s": ours["a step"]}
    for phase in PHASES:
        found[f"its {phase}, s"] = ours[phase]
    found["its sync, share of the step"] = ratios(ours["sync"], ours["a step"])
    found["tokens of a response"] = ours["response_tokens"]
    found["memory of the process, GB"] = ours["memory"]
    for generator in list(arms)[1:]:
        title = f"TRL with {generator}"
        ratio = f"a step / TRL's with {generator}"
        if generator in failed:
            found[ratio] = failed[generator]
            continue
        theirs = runs[generator]
        of_step = [run["a step"] for run in theirs]
        found[ratio] = ratios(ours["a step"], of_step)
        found[f"{title}: a step, s"] = of_step
        found[f"{title}: its rollout, s"] = [run["rollout"] for run in theirs]
        found[f"{title}: its sync, s"] = [run["sync"] for run in theirs]
        found[f"{title}: tokens of a response"] = [
            run["response_tokens"] for run in theirs
        ]
    return found


# Rollout and update alone


def seconds_of(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare_rollouts(
    engine: Engine, cfg: Config, prompts: list[list[int]], rounds: int
) -> Numbers:
    """Engine.sample beside its vLLM, driven directly, for the same responses.

    vLLM is asked for the same log-probabilities, or for none. Both have the settings
    of Engine, so this tells what Engine adds to vLLM, and not what they cost.
    """
    from vllm import SamplingParams

    noise = dict(max_tokens=cfg.max_response_tokens)
    listed = dict(logprobs=engine.top_logprobs, flat_logprobs=True)

    def ours() -> None:
        engine.sample(prompts, cfg.group_size, [0] * len(prompts), **noise)

    def vllm(**more: Any) -> None:
        engine.llm.reset_prefix_cache()
        engine.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            SamplingParams(n=cfg.group_size, seed=0, detokenize=False, **noise, **more),
            use_tqdm=False,
        )

    acts = {"ours": ours, "vLLM": partial(vllm, **listed), "bare": vllm}
    for act in acts.values():
        act()  # once without being timed
    found = in_rounds(
        {name: partial(seconds_of, act) for name, act in acts.items()}, 2 * rounds
    )
    return {
        "rollout, our speed / vLLM's": ratios(found["vLLM"], found["ours"]),
        "the same, vLLM without log-probabilities": ratios(
            found["bare"], found["ours"]
        ),
    }


def update_flops(policy: Policy, rollouts: Rollouts) -> int:
    """Operations of the updates on a batch: 6 for each weight and token.

    Padding, attention, and what is computed twice do not count. The head counts for the
    tokens of responses, to which it is applied.
    """
    layers = policy.model.base_model.layers
    in_layers = sum(weight.numel() for weight in layers.parameters())
    head = policy.model.get_output_embeddings().weight.numel()
    responses = int(rollouts.mask.sum())
    tokens = int(rollouts.prompt_length.sum()) + responses
    return 6 * (in_layers * tokens + head * responses)


def compare_updates(
    policy: Policy, rollouts: Rollouts, cfg: Config, rounds: int
) -> Numbers:
    """The optimizer steps of a pass beside the machine's large matrix products."""
    optimizer = torch.optim.AdamW(policy.parameters(), cfg.learning_rate, fused=True)
    device = next(policy.parameters()).device
    dtype = getattr(torch, cfg.dtype)
    matrix = torch.randn(MATRIX, MATRIX, dtype=dtype, device=device)

    def updates() -> None:
        for rows in torch.arange(len(rollouts.text)).chunk(cfg.minibatches):
            update(policy, optimizer, p3o, rollouts, rows, cfg, step=1)

    def products() -> None:
        for _ in range(10):
            matrix @ matrix

    for _ in range(SETTLING):
        updates()
    acts = {"updates": updates, "products": products}
    found = in_rounds(
        {name: partial(seconds_of, act) for name, act in acts.items()}, 2 * rounds
    )
    rates = [10 * 2 * MATRIX**3 / seconds / 1e9 for seconds in found["products"]]
    flops = update_flops(policy, rollouts)
    reached = [flops / seconds / 1e9 for seconds in found["updates"]]
    return {
        "the machine's large matrix products, GFLOP/s": rates,
        "update, share of these": ratios(reached, rates),
    }


def phases(column: Config, bench: BenchConfig) -> Numbers:
    """What one rollout and one update of train.py reach of what they could."""
    tokenizer, train, _, max_model_len = load_data(column)
    mesh = init_distributed()
    engine, _ = build_engines(column, max_model_len)
    policy = build_policy(column.model, mesh, column.dtype)
    sync(engine, policy, 0, [])
    log = Log(Path(), tokenizer, column.group_size, column.steps, done=0)
    rollouts = sample_batch(engine, column, 1, train, log)
    prompts = train.prompts[: column.prompts_per_step]
    found = compare_rollouts(engine, column, prompts, bench.rounds)
    engine.sleep()
    return found | compare_updates(policy, rollouts, column, bench.rounds)


# The head


def peak_bytes(act: Callable[[], object]) -> int:
    """The most that torch allocates at once in act() on the CPU."""
    gc.disable()  # What it frees in the middle would be subtracted.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        act()
    gc.enable()
    events = record.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    allocations.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in allocations))


def random_rollouts(responses: int, length: int, vocabulary: int) -> Rollouts:
    """Made-up responses of `length` tokens, each to a prompt of one, with K = 20."""
    shape = (responses, length)
    listed = min(20, vocabulary)
    return Rollouts(
        tokens=torch.randint(vocabulary, (responses, 1 + length)),
        prompt_length=torch.ones(responses, dtype=torch.int64),
        mask=torch.ones(shape, dtype=torch.bool),
        logp_behavior=torch.zeros(shape),
        top_tokens=torch.randint(vocabulary, (*shape, listed)),
        top_logp_behavior=torch.full((*shape, listed), -4.0),
        truncated=torch.zeros(responses, dtype=torch.bool),
        text=[""] * responses,
        weight_version="0",
    )


def head(column: Config, bench: BenchConfig) -> Numbers:
    """Peak memory of log pi_theta with its gradient, by a model that is all head.

    In chunks, as policy.py computes it, and with the logits of all HEAD_TOKENS at once,
    which for SmolLM2 take 9 GB. On the CPU: the bytes are those of any device.
    """
    config = AutoConfig.from_pretrained(column.model)
    config.num_hidden_layers = 0
    dtype = getattr(torch, column.dtype)
    policy = Policy(AutoModelForCausalLM.from_config(config, dtype=dtype))
    rollouts = random_rollouts(HEAD_TOKENS // 64, 64, config.vocab_size)

    def gradient() -> None:
        policy.zero_grad()
        policy(rollouts)[0].sum().backward()

    in_chunks = peak_bytes(gradient)
    with mock.patch.object(policy_module, "CHUNK", HEAD_TOKENS):
        at_once = peak_bytes(gradient)
    return {
        f"peak memory of the head, {HEAD_TOKENS:,} tokens, GB": [in_chunks / 2**30],
        "peak memory of the head / that of all logits at once": [in_chunks / at_once],
    }


# The table


def machine() -> str:
    """Its GPU, or its processor, cores and vector instructions."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    names = [line for line in open("/proc/cpuinfo") if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else "a processor"
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {name} with {torch.backends.cpu.get_cpu_capability()}"


def report(results: dict[str, Any]) -> str:
    """How each part was measured, and a table with a column for a model and dtype."""
    lines = ["# The benchmark", ""]
    columns, rows = [], []
    for part, found in results.items():
        lines.append(f"- {part}: {found['made with']}")
        for column, numbers in found["columns"].items():
            columns += [column] if column not in columns else []
            rows += [title for title in numbers if title not in rows]
    lines += ["", f"|  | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
    for title in rows:
        cells = [title]
        for column in columns:
            of_column = [
                found["columns"].get(column, {}).get(title, "")
                for found in results.values()
            ]
            cells.append("".join(cell(numbers) for numbers in of_column if numbers))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    bench = parse_flags(BenchConfig)
    if bench.trl_python and not Path(bench.trl_python).is_file():
        raise Refused(f"--trl_python: there is no {bench.trl_python}")
    check_model(bench.model or "tiny")
    columns = {}
    for dtype in bench.dtypes:
        columns[f"tiny, {dtype}"] = still("tiny", dtype)
        if bench.model:
            name = Path(bench.model).name
            columns[f"{name}, {dtype}"] = still(bench.model, dtype, **PRETRAINED)
    made_with = f"`python {' '.join(sys.argv)}`, commit {commit_here()}, {machine()}"
    out = Path(bench.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(out.read_text()) if out.exists() else {}
    measure = {"steps": steps, "phases": phases, "head": head}
    spawn = multiprocessing.get_context("spawn")
    for part in bench.parts:
        found = {}
        for column, cfg in columns.items():
            with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
                found[column] = process.submit(measure[part], cfg, bench).result()
        results[part] = {"made with": made_with, "columns": found}
        out.write_text(json.dumps(results, indent=1) + "\n")
        out.with_suffix(".md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    run_script(main)
