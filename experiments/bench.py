"""Seconds of a training step by phase, how near they are to what is possible, the KL.

    python experiments/bench.py
    python experiments/bench.py --smollm2 models/SmolLM2-135M-Instruct --trl

The first line measures the embedded default, the second one SmolLM2 as well (the folder
is made by experiments/smollm2.py), beside TRL's GRPOTrainer (pip install trl==1.16.0).
Seconds depend on the machine, and ratios hardly: with and without the KL run in turn,
and their ratio is the median of those of each turn. The results go to
experiments/results/bench.json, where a part that did not run stays as it was.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any, Literal

# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
from torch.distributed import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.memory import LISTED_BYTES, TOP_BYTES, TOP_WORK_BYTES, peak_bytes
from experiments.speed import (
    VOCABULARIES,
    measure_head,
    measure_machine,
    measure_speed,
)
from loss import OBJECTIVES
from policy import build_policy, full_weights
from rollout import Engine, Rollouts, init_distributed
from support.flags import Flags, Refused, parse_flags
from support.log import PHASES
from train import Config, accumulate_gradient, add_reward, load_data, sample_step

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments/results/bench.json"
TRL_STEP = ROOT / "experiments/trl_step.py"
# Steps that are not counted: they compile.
WARM_UP = 2
# A step with SmolLM2 has 32 responses of at most 32 tokens. It learns next to nothing,
# so that its responses stay as long as they are.
SMOLLM2 = {
    "task": "recipes/sums-and-products",
    "prompts_per_step": 8,
    "group_size": 4,
    "max_response_tokens": 32,
    "learning_rate": 1e-9,
    "kv_cache_gb": 1.0,
}
LISTED = 20  # K, beside 0
# Qwen3-4B with responses of 4,096 tokens.
ON_PAPER = {"vocabulary": 151_936, "hidden": 2560, "tokens": 4096}


class BenchConfig(Flags):
    """A benchmark."""

    smollm2: str = ""
    """its model folder; left out, only the embedded policy is measured"""
    trl: bool = False
    """also measure TRL's GRPOTrainer with SmolLM2"""
    parts: list[Literal["steps", "kl", "speed"]] = ["steps", "kl", "speed"]
    """what to measure"""


def seconds_of_steps(steps: int, settings: dict[str, Any], ranks: int = 1) -> dict:
    """Median seconds of each phase of train.py with these settings, on all cores."""
    flags = [f"--{name}={value}" for name, value in settings.items()]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc-per-node={ranks}", "train.py"),
            *(f"--steps={steps}", f"--out_dir={out}", "--eval_every=0"),
            *("--eval_problems=8", *flags),
        ]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = (out / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][1 + WARM_UP :]  # line 0 is before
    found = {}
    for phase in PHASES:
        found[phase] = statistics.median(row[f"{phase}_seconds"] for row in rows)
    totals = [sum(row[f"{phase}_seconds"] for phase in PHASES) for row in rows]
    found["step"] = statistics.median(totals)
    # Neighbors on a shared machine disturb this one least.
    found["fastest step"] = min(totals)
    found["sync share"] = found["sync"] / found["step"]
    found["tokens"] = statistics.mean(row["response_tokens"] for row in rows)
    return found


def measure_steps(cfg: BenchConfig) -> dict[str, Any]:
    """The steps of the embedded default, and of SmolLM2 beside TRL."""
    cores = len(os.sched_getaffinity(0))
    found: dict[str, Any] = {"cores": cores, "tiny": seconds_of_steps(30, {})}
    if cores > 1:
        found["tiny, a rank a core"] = seconds_of_steps(30, {}, ranks=cores)
    if not cfg.smollm2:
        return found
    settings = SMOLLM2 | {"model": Path(cfg.smollm2).resolve()}
    for dtype in ("bfloat16", "float32"):
        of_dtype = seconds_of_steps(6, settings | {"dtype": dtype})
        found[f"smollm2 {dtype}"] = of_dtype
    if cfg.trl:
        # In bfloat16 it was slower on this CPU.
        seconds = seconds_of_trl(cfg.smollm2)
        found["trl float32"] = {"step": seconds}
        for dtype in ("bfloat16", "float32"):
            step = found[f"smollm2 {dtype}"]["step"]
            found[f"trl / smollm2 {dtype}"] = seconds / step
    return found


def seconds_of_trl(model: str) -> float:
    """Median seconds of a step of TRL's GRPOTrainer, in a process of its own."""
    sizes = [SMOLLM2[name] for name in ("prompts_per_step", "group_size")]
    sizes.append(SMOLLM2["max_response_tokens"])
    command = [sys.executable, TRL_STEP, model, SMOLLM2["task"], *map(str, sizes)]
    printed = subprocess.check_output(command, cwd=ROOT, text=True)
    return float(printed.split()[-1])


class Clock:
    """The seconds of a with-block: by the clock, and of this process's processor time.

    On a CPU that many programs share, only the processor time is to be compared.
    """

    def __enter__(self) -> "Clock":
        self.start = time.perf_counter()
        self.processor_start = time.process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = time.perf_counter() - self.start
        self.processor_seconds = time.process_time() - self.processor_start


def compare_clocks(without: list[Clock], with_kl: list[Clock]) -> dict[str, Any]:
    """Medians over the turns, and how many times longer each turn was with the KL."""
    ratios = []
    for clock_without, clock_with in zip(without, with_kl, strict=True):
        ratios.append(clock_with.processor_seconds / clock_without.processor_seconds)
    found: dict[str, Any] = {}
    for name, clocks in (("K = 0", without), (f"K = {LISTED}", with_kl)):
        found[name] = {
            "seconds": statistics.median(clock.seconds for clock in clocks),
            "processor seconds": statistics.median(
                clock.processor_seconds for clock in clocks
            ),
        }
    found["ratio of processor seconds"] = statistics.median(ratios)
    found["ratios"] = sorted(ratios)
    return found


def kl_cost(cfg: Config, mesh: DeviceMesh, turns: int) -> dict[str, Any]:
    """A rollout and its gradient with K = 0 and with K = LISTED, in turn.

    Both sample the same responses with the same noise. The gradient is an update
    without the optimizer's step, which has nothing to do with K.
    """
    data = load_data(cfg)
    policy = build_policy(cfg.model, mesh, dtype=cfg.dtype)
    engines = {}
    for listed in (0, LISTED):
        engines[listed] = Engine(
            cfg.model,
            data.longest,
            top_logprobs=listed,
            kv_cache_gb=cfg.kv_cache_gb,
        )
        engines[listed].load_weights(full_weights(policy), version="0")
    rows = list(range(cfg.prompts_per_step * cfg.group_size))

    def gradient(rollouts: Rollouts) -> None:
        accumulate_gradient(policy, rollouts, rows, OBJECTIVES["p3o"], cfg, step=1)
        policy.zero_grad()

    clocks: dict[tuple[str, int], list[Clock]] = {
        (phase, listed): []
        for phase in ("rollout", "gradient")
        for listed in (0, LISTED)
    }
    last_rollouts: dict[int, Rollouts] = {}
    for turn in range(1, WARM_UP + turns + 1):
        # Neither of the two is always the first one.
        for listed in (0, LISTED) if turn % 2 else (LISTED, 0):
            with Clock() as of_rollout:
                rollouts = sample_step(engines[listed], cfg, turn, data.train.prompts)
            add_reward(rollouts, cfg, turn, data.train.problems)
            with Clock() as of_gradient:
                gradient(rollouts)
            last_rollouts[listed] = rollouts
            if turn > WARM_UP:
                clocks["rollout", listed].append(of_rollout)
                clocks["gradient", listed].append(of_gradient)
    found: dict[str, Any] = {
        "vocabulary": policy.model.config.vocab_size,
        "responses": len(rows),
        "tokens": int(last_rollouts[0].mask.sum()),
        "turns": turns,
    }
    for phase in ("rollout", "gradient"):
        found[phase] = compare_clocks(clocks[phase, 0], clocks[phase, LISTED])
    for listed in (0, LISTED):
        rollouts = last_rollouts[listed]
        found[f"K = {listed}"] = {
            "bytes of the rollouts": tensor_bytes(rollouts),
            "peak bytes of the gradient": peak_bytes(partial(gradient, rollouts)),
        }
    return found


def tensor_bytes(rollouts: Rollouts) -> int:
    """Bytes of the tensors of a batch."""
    tensors = [value for value in vars(rollouts).values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in tensors)


def kl_on_paper() -> dict[str, Any]:
    """What K listed tokens take for one long response of a model with a large head."""
    tokens = ON_PAPER["tokens"]
    vocabulary = ON_PAPER["vocabulary"]
    found: dict[str, Any] = dict(ON_PAPER)
    for name, listed in ((f"K = {LISTED}", LISTED), ("K = vocabulary", vocabulary)):
        found[name] = {
            "bytes in vLLM's lists": tokens * listed * LISTED_BYTES,
            "bytes in the rollouts": tokens * listed * TOP_BYTES,
            "bytes at work in the loss": tokens * listed * TOP_WORK_BYTES,
        }
    # The head and its two gradients, and once more its product (Policy.forward).
    found["FLOPs of the head"] = tokens * 4 * 2 * ON_PAPER["hidden"] * vocabulary
    # About 30 operations on each listed token, forward and backward.
    found[f"FLOPs of the KL, K = {LISTED}"] = tokens * LISTED * 30
    return found


def measure_all_speeds(smollm2: str, mesh: DeviceMesh) -> dict[str, Any]:
    """experiments/speed.py for each model and dtype."""
    machine = measure_machine()
    found: dict[str, Any] = {"machine": machine}
    for vocabulary in VOCABULARIES:
        found[f"head of {vocabulary:,} tokens"] = measure_head(vocabulary)
    configs = {"tiny float32": Config(dtype="float32")}
    if smollm2:
        for dtype in ("float32", "bfloat16"):
            settings = SMOLLM2 | {"model": smollm2, "dtype": dtype}
            configs[f"smollm2 {dtype}"] = Config(**settings)
    engines: list[Engine] = []
    for name, cfg in configs.items():
        found[name] = measure_speed(cfg, mesh, machine, engines)
    return found


def save(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    cfg = parse_flags(BenchConfig)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    # First what runs in processes of its own: engines here would take their memory.
    if "steps" in cfg.parts:
        results["steps"] = measure_steps(cfg)
        save(results)
    if cfg.parts == ["steps"]:
        print(RESULTS.read_text())
        return
    mesh = init_distributed()
    if "speed" in cfg.parts:
        results["speed"] = measure_all_speeds(cfg.smollm2, mesh)
        save(results)
    if "kl" in cfg.parts:
        exact_kl = results.setdefault("exact KL", {})
        exact_kl["on paper"] = kl_on_paper()
        exact_kl["tiny"] = kl_cost(Config(), mesh, turns=10)
        save(results)
        if cfg.smollm2:
            settings = SMOLLM2 | {"model": cfg.smollm2, "dtype": "bfloat16"}
            exact_kl["smollm2"] = kl_cost(Config(**settings), mesh, turns=4)
            save(results)
    print(RESULTS.read_text())


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(f"bench.py: {error}")
