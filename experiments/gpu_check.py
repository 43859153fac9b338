"""What engine and trainer do on this machine's GPUs: the sync, memory, seconds.

    make gpu-check
    torchrun --nproc-per-node 8 experiments/gpu_check.py \\
        --config recipes/gsm8k-8gpu.yaml --rollout_quantization fp8_per_channel

It takes the flags of train.py, and two steps of its loop: made-up rewards, a learning
rate that changes any policy, and the engine asleep while the policy is updated. Between
them the weights are synced, so three mismatches tell whether the sync works: before the
first update, after it without a sync, and after the sync. `make gpu-check` does this
without quantization and with fp8, and then makes a run with fp8, which it resumes.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings of torch's C++
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from loss import group_advantage, p3o
from policy import build_policy, full_weights
from support.command import Refused, parse_flags, run_script
from support.log import Log, peak_memory_gb
from support.machine import init_distributed
from train import (
    Config,
    build_engines,
    load_data,
    sample_batch,
    update,
)

GB = 2**30
CUDA = torch.cuda.is_available()


class CheckConfig(Config):
    """A check of this machine: two steps of train.py."""

    out: str = ""
    """write the numbers to this JSON file too"""


Rows = dict[str, dict[str, float]]


@contextmanager
def phase(rows: Rows, name: str) -> Iterator[None]:
    """Time a with-block, and read the memory after it, on this rank."""
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    row = rows[name] = {}
    if CUDA:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        # By all programs. What a sleeping engine has lent out is free.
        row["GB in use"] = (total - free) / GB
    row["GB at most"] = peak_memory_gb()
    row["seconds"] = time.perf_counter() - start


def check_mismatch(before: float, without: float, after: float) -> None:
    """Raises Refused where the new weights seem not to have come into the engine.

    These are mean |log rho|. After the sync it has to be nearer to what it was at the
    start than to what it was without a sync. An fp8 engine has some at any time.
    """
    if after - before > without - after:
        raise Refused(
            f"after the sync mean |log rho| is {after:.4f}; it was {before:.4f} at the "
            f"start, and {without:.4f} before the sync: the engine does not compute "
            "with the new weights"
        )


def two_steps(cfg: CheckConfig) -> tuple[Rows, Rows]:
    """The phases of two steps, and the mismatch before and after the sync."""
    tokenizer, train, _, max_model_len = load_data(cfg)
    mesh = init_distributed()
    log = Log(Path(), tokenizer, cfg.group_size, cfg.steps, done=0)
    phases: Rows = {}
    mismatch: Rows = {}
    with phase(phases, "engines built"):
        engine, _ = build_engines(cfg, max_model_len)
    with phase(phases, "engine asleep"):
        engine.sleep()
    with phase(phases, "policy built"):
        policy = build_policy(
            cfg.model,
            mesh,
            cfg.dtype,
            cfg.policy_temperature,
            cfg.gradient_checkpointing,
        )
    # AdamW's first step moves every weight by the learning rate, and so an output of a
    # layer by up to its width times that.
    rate = 0.02 / policy.model.config.hidden_size
    optimizer = torch.optim.AdamW(policy.parameters(), rate, fused=True)
    with phase(phases, "sync 0"):
        engine.load_weights(full_weights(policy), version="0")
    for step, when in ((1, "at the start"), (2, "after the sync")):
        with phase(phases, f"rollout {step}"):
            rollouts = sample_batch(engine, cfg, step, train, log)
        engine.sleep()
        # The responses of a group have different rewards.
        reward = torch.arange(len(rollouts.text)).float().view(-1, cfg.group_size)
        rollouts.advantage = group_advantage(reward).view(-1, 1) * rollouts.mask
        rows = torch.arange(len(rollouts.text))
        with phase(phases, f"update {step}"):
            stats = update(policy, optimizer, p3o, rollouts, rows, cfg, step)
        mismatch[when] = stats
        if step == 1:
            # The changed policy on what the old weights sampled.
            again = update(policy, optimizer, p3o, rollouts, rows, cfg, step)
            mismatch["without a sync"] = again
        with phase(phases, f"sync {step}"):
            engine.load_weights(full_weights(policy), version=str(step))
    return phases, mismatch


def table(rows: Rows) -> str:
    """The rows with their names, and the numbers with theirs."""
    lines = []
    for name, row in rows.items():
        numbers = "".join(f"  {title} {value:.4g}" for title, value in row.items())
        lines.append(f"{name:16}{numbers}")
    return "\n".join(lines)


def main() -> None:
    cfg = parse_flags(CheckConfig)
    if not CUDA:
        print("The device is a CPU: this checks nothing of CUDA.", flush=True)
    phases, mismatch = two_steps(cfg)
    if os.environ["RANK"] == "0":
        device = torch.cuda.get_device_name() if CUDA else "CPU"
        print(f"{cfg.model} on {device}, {cfg.rollout_quantization}, of rank 0")
        print(f"{table(phases)}\n\n{table(mismatch)}")
        if cfg.out:
            found = {"device": device, "phases": phases, "mismatch": mismatch}
            Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
            Path(cfg.out).write_text(json.dumps(found, indent=1) + "\n")
    names = ("at the start", "without a sync", "after the sync")
    check_mismatch(*[mismatch[name]["mismatch_mean"] for name in names])


if __name__ == "__main__":
    run_script(main)
