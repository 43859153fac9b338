"""What engine and trainer do on this machine's GPUs: a table of what passes, and JSON.

    make gpu-check
    torchrun --standalone tools/gpu_check.py --size 1.5B
    torchrun --nproc-per-node 8 tools/gpu_check.py \\
        --config recipes/gsm8k-8gpu.yaml --rollout_quantization fp8_per_channel

It takes the flags of train.py, and makes three steps of its loop: made-up rewards, a
learning rate that changes any policy, and the engine asleep while the policy is
updated. The third has top-p and top-k. With --size it does so with a random model of
Qwen2.5's shape, made on the spot. Then the engine sleeps and wakes up many times, and
another one loads the same weights from the disk. The last table has limits. If a number
is not within its own, the exit code is 1. `make gpu-check` does this with the
embedded policy and with 1.5 billion parameters, without quantization and with fp8, and
then makes a run with fp8, which it resumes.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings of torch's C++
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from loss import group_advantage, p3o
from policy import SYNC_LIMITS, Policy, build_policy, full_weights, sync
from rollout import Engine
from support.checkpoints import save_model
from support.command import Stopped, parse_flags, run_script
from support.log import Log, peak_memory_gb
from support.machine import init_distributed
from tools.bench import seconds_of, update_flops
from tools.memory import (
    GB,
    RESERVE,
    cache_bytes_per_token,
    engine_bytes,
    memory_of,
    shape_of,
)
from train import Config, build_engines, load_data, sample_batch, update

CUDA = torch.cuda.is_available()
SHAPE = "tests/data/configs/Qwen2.5-1.5B-Instruct"
SMALL = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "vocab_size": 2000,
    "hidden_size": 128,
    "num_attention_heads": 4,
}


CYCLES = 20  # how often the engine sleeps and wakes up


class CheckConfig(Config):
    """A check of this machine: three steps of train.py, and more."""

    size: Literal["", "small", "1.5B"] = ""
    """a random model of this size in place of --model"""
    out: str = ""
    """a JSON file, to which the numbers are added too"""


Rows = dict[str, dict[str, float]]


def random_model(size: str) -> str:
    """The folder of a random model with the tokenizer of tiny. A collective."""
    folder = os.path.join(tempfile.gettempdir(), f"p3o-{size}")
    if dist.get_rank() == 0:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(SHAPE, **SMALL if size == "small" else {})
        with torch.device("cuda" if CUDA else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained("tiny").save_pretrained(folder)
    dist.barrier()
    return folder


@contextmanager
def phase(rows: Rows, name: str) -> Iterator[None]:
    """Time a with-block, and read the memory of this rank after it."""
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
        # By all programs. What a sleeping engine has lent out is free.
        row["GB in use"] = (total - free) / GB
        row["GB added"] = peak_memory_gb() - before / GB
    row["seconds"] = time.perf_counter() - start


def product_flops(policy: Policy) -> float:
    """Operations a second of a matrix product on the policy's device, in its dtype."""
    size = 8192 if CUDA else 1024
    device = next(policy.parameters()).device
    matrix = torch.randn(size, size, dtype=policy.dtype, device=device)
    return 2 * size**3 / min(seconds_of(lambda: matrix @ matrix) for _ in range(5))


def limited(
    value: float, most: float = math.inf, least: float = -math.inf
) -> dict[str, float]:
    """A row of the checks: a number, and the limits between which it passes."""
    return {"value": value, "least": least, "most": most}


def check(cfg: CheckConfig) -> dict[str, Rows]:
    """Three steps of train.py, and what else is measured."""
    mesh = init_distributed()
    if cfg.size:
        cfg.model = random_model(cfg.size)
    tokenizer, train, _, length = load_data(cfg)
    log = Log(Path(), tokenizer, cfg.group_size, cfg.steps, done=0)
    phases: Rows = {}
    statistics: Rows = {}
    with phase(phases, "engines built"):
        engine, evaluator = build_engines(cfg, length)
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
        engine.wake_up()
        sync(engine, policy, 0, [])
    # All tokens that this leaves are listed.
    cut = {"top_p": 0.9, "top_k": cfg.top_logprobs}
    steps = {"at the start": {}, "after the sync": {}, "with top-p and top-k": cut}
    for step, (when, settings) in enumerate(steps.items(), 1):
        cfg = cfg.model_copy(update=settings)
        with phase(phases, f"rollout {step}"):
            rollouts = sample_batch(engine, cfg, step, train, log)
        engine.sleep()
        # The responses of a group have different rewards.
        reward = torch.arange(len(rollouts.text)).float().view(-1, cfg.group_size)
        rollouts.advantage = group_advantage(reward).view(-1, 1) * rollouts.mask
        rows = torch.arange(len(rollouts.text))
        with phase(phases, f"update {step}"):
            stats = update(policy, optimizer, p3o, rollouts, rows, cfg, step)
        statistics[when] = stats
        if step == 1:
            # The changed policy on what the old weights sampled.
            statistics["without a sync"] = update(
                policy, optimizer, p3o, rollouts, rows, cfg, step
            )
        # The third rollout compiles the kernels of top-p and top-k.
        sampled = phases[f"rollout {step}"]["tokens"] = int(rollouts.mask.sum())
        prompts = int(rollouts.prompt_length.sum())
        phases[f"update {step}"]["tokens"] = sampled + prompts
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
    limit = SYNC_LIMITS["fp8" if quantized else "16 bits or TF32"]
    listed = rollouts.top_logp_behavior[rollouts.mask]
    flops = update_flops(policy, rollouts) / phases["update 3"]["seconds"]
    checks = {
        # Less than 0.001 is no fp8: the embedded policy has 0.0022 there, and 0.0004 in
        # bfloat16.
        "mean |log rho| at the start": limited(before, limit, 1e-3 * quantized),
        "mean |log rho| after the sync": limited(after, limit),
        "KL with top-p and top-k": limited(stats["mismatch_kl"], limit**2),
        "tokens that these cut off": limited(
            listed.isneginf().float().mean().item(), least=0.01
        ),
        "update, of the matrix product": limited(
            flops / product_flops(policy),
            # An H200 got 0.26.
            least=0.15 if cfg.size == "1.5B" else 0,
        ),
    }
    if CUDA:
        checks |= memory_checks(phases, cfg, mesh.size(-1))
    # A sync brings what an engine reads from the disk. This shows it in fp8 too, where
    # a step can move the policy by less than the rounding does.
    folder = Path(tempfile.gettempdir(), "p3o-after")
    save_model(policy.model, full_weights(policy), tokenizer, folder)
    dist.barrier()
    fresh = Engine(
        str(folder),
        length,
        tp=cfg.rollout_tp,
        quantization=cfg.rollout_quantization,
        dtype=cfg.rollout_dtype,
        # Room for one sequence of the greatest length.
        kv_cache_gb=max(
            0.25, 1.1 * length * cache_bytes_per_token(shape_of(cfg.model)) / GB
        ),
        max_num_seqs=cfg.max_num_seqs,
    )
    synced, read = [
        each.sample(train.prompts[:1], 8, [0], max_tokens=32)
        for each in (engine, fresh)
    ]
    apart = math.inf
    if torch.equal(synced.tokens, read.tokens):
        apart = (synced.logp_behavior - read.logp_behavior).abs().max().item()
    checks["log pi_b less a fresh engine's"] = limited(apart, 1e-3)
    return {"phases": phases, "statistics": statistics, "checks": checks}


def memory_checks(phases: Rows, cfg: Config, ranks: int) -> Rows:
    """Memory on CUDA in GB, beside what memory.py counts for these ranks of a node."""
    shape = shape_of(cfg.model)
    counted = memory_of(cfg, shape, ranks)
    rollout, update = counted["rollout"], counted["update"]
    added = sum(update[name] for name in update if name not in rollout)
    lent = engine_bytes(cfg, shape, cfg.rollout_quantization)
    *_, asleep, awake = [row["GB in use"] for row in phases.values()]
    return {
        "GB in use in a rollout": limited(
            phases["rollout 2"]["GB in use"], (sum(rollout.values()) + RESERVE) / GB
        ),
        # Activations are counted to 30%, and NCCL takes some.
        "GB that an update adds": limited(
            phases["update 2"]["GB added"], 1.3 * added / GB + 1
        ),
        "GB that sleep lends": limited(awake - asleep, least=0.9 * lent / GB),
        "GB more in the last sleep": limited(
            asleep - phases["asleep 0"]["GB in use"], 0.1
        ),
    }


def table(rows: Rows) -> str:
    """The rows with their names, and the numbers with theirs."""
    lines = []
    for name, row in rows.items():
        numbers = "".join(f"  {title} {value:.4g}" for title, value in row.items())
        lines.append(f"{name:32}{numbers}")
    return "\n".join(lines)


def main() -> None:
    cfg = parse_flags(CheckConfig)
    name = f"{cfg.size or cfg.model}, {cfg.rollout_quantization}"
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    if not CUDA:
        print("The device is a CPU: this checks nothing of CUDA.")
    found = check(cfg)
    if os.environ["RANK"] != "0":
        return
    out = Path(cfg.out)
    if cfg.out:
        out.parent.mkdir(parents=True, exist_ok=True)
        runs = json.loads(out.read_text()) if out.exists() else {}
        runs[name] = {"device": device, "torch": torch.__version__, **found}
        out.write_text(json.dumps(runs, indent=1) + "\n")
    failed = [
        title
        for title, row in found["checks"].items()
        if not row["least"] <= row["value"] <= row["most"]  # NaN is not
    ]
    print(f"{name} on {device}, of rank 0")
    for part in found.values():
        print(f"\n{table(part)}")
    if failed:
        raise Stopped(f"{name}: not within its limits is {', '.join(failed)}")
    print("All are within their limits.")


if __name__ == "__main__":
    run_script(main)
