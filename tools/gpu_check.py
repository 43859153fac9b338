r"""Checks engine and trainer on this machine's GPUs, and prints numbers with limits.

    make gpu-check
    torchrun --standalone tools/gpu_check.py --size 1.5B
    torchrun --nproc-per-node 8 tools/gpu_check.py \
        --config recipes/gsm8k-8gpu.yaml --rollout_quantization fp8_per_channel

It takes the flags of train.py and makes three steps of its loop, with made-up rewards
and a learning rate that is large enough to change any policy. The engine sleeps while
the policy is updated, and the third step samples with top-p and top-k. After the steps
the engine sleeps and wakes up many times, and a new engine loads the same weights from
the folder of the run (--out_dir). --model has to be a model folder or a name without a
revision. --size replaces the model by a random one of Qwen2.5's architecture. If a
number of the last table is outside its limits, the exit code is 1.

`make gpu-check` does this with the embedded policy and with 1.5 billion parameters,
each without quantization and with fp8. Then it makes a run with fp8 and resumes it.
"""

import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from pandas import DataFrame
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from loss import group_advantage, p3o
from policy import SYNC_LIMITS, full_weights, sync
from rollout import Engine
from support.checkpoints import save_model
from support.command import Refused, Stopped, run_script
from tools.memory import (
    GB,
    RESERVE,
    cache_bytes_per_token,
    engine_bytes,
    memory_of,
    shape_of,
)
from train import Config, Run, sample_batch, update

CUDA = torch.cuda.is_available()
CYCLES = 20  # how often the engine sleeps and wakes up
ARCHITECTURE = "tests/data/configs/Qwen2.5-1.5B-Instruct"


class CheckConfig(Config):
    """Check engine and trainer on this machine's GPUs."""

    size: Literal["", "1.5B"] = ""
    """use a random model of this size instead of --model; only on one rank"""


Rows = dict[str, dict[str, float]]
Checks = dict[str, tuple[float, float, float]]  # the least allowed, the value, the most


def random_model() -> str:
    """Make a random model with tiny's tokenizer; return its folder.

    Raises Refused if there are several ranks, each of which would write the folder.
    """
    if os.getenv("WORLD_SIZE", "1") != "1":
        raise Refused("--size works on one rank only: give a --model instead")
    folder = os.path.join(tempfile.gettempdir(), "p3o-random")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(ARCHITECTURE)
    # Initializing the weights on a CPU would take half a minute.
    with torch.device("cuda" if CUDA else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained("tiny").save_pretrained(folder)
    return folder


@contextmanager
def phase(rows: Rows, name: str) -> Iterator[None]:
    """Add a row with the seconds of a with-block and the GPU memory it took."""
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    yield
    row = rows[name] = {}
    if CUDA:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        # This counts all programs on the GPU, but not what a sleeping engine released.
        row["GB in use"] = (total - free) / GB
        row["GB added"] = (torch.cuda.max_memory_allocated() - before) / GB
    row["seconds"] = time.perf_counter() - start


def check(cfg: CheckConfig) -> tuple[Rows, Rows, Checks]:
    """Make three steps of the loop and the other measurements.

    Returns the numbers of each phase, the statistics of each update, and the checks.
    """
    if cfg.size:
        cfg.model = random_model()
    shape = shape_of(cfg.model)  # Some models are refused here, before anything slow.
    phases: Rows = {}
    statistics: Rows = {}
    run = Run(cfg)
    engine, policy, optimizer = run.engine, run.policy, run.optimizer
    # AdamW's first step moves every weight by the learning rate, so a layer's output
    # moves by up to its width times the learning rate.
    rate = 0.02 / policy.model.config.hidden_size
    optimizer.param_groups[0]["lr"] = rate
    with phase(phases, "sync 0"):
        sync(engine, policy, 0, [])
    # With this top-k the engine lists all tokens that can be sampled.
    cut = {"top_p": 0.9, "top_k": cfg.top_logprobs}
    steps = {"at the start": {}, "after the sync": {}, "with top-p and top-k": cut}
    for step, (when, settings) in enumerate(steps.items(), 1):
        cfg = cfg.model_copy(update=settings)
        with phase(phases, f"rollout {step}"):
            rollouts = sample_batch(engine, cfg, step, run.train, run.log)
        engine.sleep()
        # Made-up rewards, different within each group.
        reward = torch.arange(len(rollouts.text)).float().view(-1, cfg.group_size)
        rollouts.advantage = group_advantage(reward).view(-1, 1) * rollouts.mask
        rows = torch.arange(len(rollouts.text))
        with phase(phases, f"update {step}"):
            stats = update(policy, optimizer, p3o, rollouts, rows, cfg, step)
        statistics[when] = stats
        if step == 1:
            # The policy has changed, but the rollouts are those of the old weights.
            statistics["without a sync"] = update(
                policy, optimizer, p3o, rollouts, rows, cfg, step
            )
        with phase(phases, f"sync {step}"):
            engine.wake_up()
            sync(engine, policy, step, [])
    for cycle in range(CYCLES):
        with phase(phases, f"asleep {cycle}"):
            engine.sleep()
        with phase(phases, f"awake {cycle}"):
            engine.wake_up()
            sync(engine, policy, step, [])

    before, _, after, _ = [row["logprob_abs_diff"] for row in statistics.values()]
    quantized = cfg.rollout_quantization != "none"
    limit = max(SYNC_LIMITS[torch.bfloat16], SYNC_LIMITS[cfg.rollout_quantization])
    removed = rollouts.top_logp_behavior[rollouts.mask].isneginf().float().mean()
    checks = {
        # A value below 0.001 shows that the engine does not use fp8. The embedded
        # policy has 0.0022 with fp8, and 0.0004 with bfloat16.
        "mean |log rho| at the start": (1e-3 * quantized, before, limit),
        "mean |log rho| after the sync": (0, after, limit),
        # Rounding may make it slightly negative.
        "KL with top-p and top-k": (-1e-6, stats["mismatch_kl"], limit**2),
        "share of listed tokens that top-p removes": (0.01, removed.item(), 1),
    }
    if CUDA:
        checks |= memory_checks(phases, cfg, int(os.environ["LOCAL_WORLD_SIZE"]))
    # After a sync the engine must compute exactly what a new engine computes from the
    # saved weights. With fp8 the checks above may miss a wrong sync, because rounding
    # can move the policy by more than a step does.
    save_model(policy.model, full_weights(policy), run.out / "model")
    dist.barrier()
    length = engine.llm.model_config.max_model_len
    fresh = Engine(
        str(run.out),
        length,
        tp=cfg.rollout_tp,
        quantization=cfg.rollout_quantization,
        dtype=cfg.rollout_dtype,
        # Enough for one sequence of the maximum length.
        kv_cache_gb=0.25 + length * cache_bytes_per_token(shape) / GB,
        max_num_seqs=cfg.max_num_seqs,
    )
    synced, read = [
        each.sample(run.train.prompts[:1], 8, [0], max_tokens=32)
        for each in (engine, fresh)
    ]
    apart = math.inf
    if torch.equal(synced.tokens, read.tokens):
        apart = (synced.logp_behavior - read.logp_behavior).abs().max().item()
    checks["log pi_b minus a new engine's"] = 0, apart, 1e-3
    return phases, statistics, checks


def memory_checks(phases: Rows, cfg: Config, ranks: int) -> Checks:
    """Return checks of the GPU memory, in GB, against what tools/memory.py counts.

    `ranks` is the number of GPUs of a node.
    """
    shape = shape_of(cfg.model)
    counted = memory_of(cfg, shape, ranks)
    rollout, update = counted["rollout"], counted["update"]
    needed = (sum(rollout.values()) + RESERVE) / GB
    added = sum(update[name] for name in update if name not in rollout) / GB
    released = engine_bytes(cfg, shape, cfg.rollout_quantization) / GB
    *_, asleep, awake = [row["GB in use"] for row in phases.values()]
    growth = asleep - phases["asleep 0"]["GB in use"]
    return {
        "GB in use in a rollout": (0, phases["rollout 2"]["GB in use"], needed),
        # The count of activations is off by up to 30%, and NCCL needs memory too.
        "GB that an update adds": (0, phases["update 2"]["GB added"], 1.3 * added + 1),
        "GB that sleep releases": (0.9 * released, awake - asleep, math.inf),
        "GB more in the last sleep than in the first": (-math.inf, growth, 0.1),
    }


def main() -> None:
    cfg = CheckConfig.from_flags()
    name = f"{cfg.size or cfg.model}, {cfg.rollout_quantization}"
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    if not CUDA:
        print("This machine has no GPU, so nothing about CUDA is checked.")
    *tables, checks = check(cfg)
    if os.environ["RANK"] != "0":
        return
    tables.append(DataFrame(checks, index=["least", "value", "most"]))
    print(f"{name} on {device}, rank 0")
    for part in tables:
        print()
        print(DataFrame(part).T.to_string(float_format="%.4g", na_rep=""))
    failed = [
        title
        for title, (least, value, most) in checks.items()
        if not least <= value <= most  # NaN fails
    ]
    if failed:
        raise Stopped(f"{name}: these are outside their limits: {', '.join(failed)}")
    print("All numbers are within their limits.")


if __name__ == "__main__":
    run_script(main)
