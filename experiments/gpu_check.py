"""What engine and trainer do on this machine's GPUs: mismatch, memory and speed.

    make gpu-check
    torchrun --standalone experiments/gpu_check.py --model Qwen/Qwen2.5-1.5B-Instruct \\
        --prompts_per_step 64 --max_response_tokens 256 --kv_cache_gb 8
    torchrun --nproc-per-node 8 experiments/gpu_check.py \\
        --config recipes/gsm8k-8gpu.yaml

It runs two steps of train.py's loop, of one update each, with any flags of train.py and
made-up rewards: the policy only has to change. The first step compiles, so the speed is
that of the second. By default it does so with an engine in rollout_dtype and with one
in fp8, each in processes of its own: on CUDA only one engine that sleeps fits in each.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from experiments.memory import GB
from loss import KL_ESTIMATORS, OBJECTIVES, Objective, group_advantage
from policy import Policy, build_policy, full_weights
from rollout import Engine, Rollouts, init_distributed
from support.checks import check_on_policy, check_run
from support.flags import OneRankFailed, Refused, find_objective, parse_flags
from train import (
    Config,
    Data,
    accumulate_gradient,
    load_data,
    sample_step,
    sharing_of,
)

CUDA = torch.cuda.is_available()
# Dense bf16 TFLOP/s by data sheet. The names are whole: an H100 PCIe is slower than an
# H100 SXM, and an H20 is no H200.
PEAK_TFLOPS = {
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA A100-PCIE-40GB": 312,
}
CAPTIONS = {
    "mismatch": "log pi_theta - log pi_b of a batch: its e_B, its mean ratio, with the "
    "outer 2% of the tokens drawn in too, and its mean and largest size in nats.",
    "speed": """Tokens are those sampled in a rollout, and in an update each response's
with its prompt's. The FLOPs of a pass are 2 x (weights of the layers x tokens + weights
of the head x response tokens) + 4 x layers x heads x head size x pairs of tokens of
which one attends to the other. A rollout has one pass, with each prompt once a group.
An update has three, with each prompt as often as the policy reads it; what it computes
again does not count. Each speed is one reading, that of the second step. The update is
the same for all engines: how far its "times unquantized" is from 1 tells the noise in
that of the rollout.""",
    "phases": """GB of 2^30 bytes after a phase, of the rank with the most. "used" is
the device's, by all programs: as torch keeps what it frees, it is about the peak of a
rollout or update. "allocated" is torch's, then and at most. It counts an engine that
sleeps, whose memory is free.""",
}
MISMATCH = (
    "ess",
    "ess_central",
    "ratio",
    "ratio_central",
    "mismatch_mean",
    "mismatch_max",
)

Row = dict[str, float]


class CheckConfig(Config):
    """A check of this machine: a run of train.py, of two steps."""

    engines: list[Literal["none", "fp8_per_channel"]] = ["none", "fp8_per_channel"]
    """the values of rollout_quantization to check, one after the other"""
    out: str = ""
    """write the numbers to this JSON file too"""


@dataclass
class Work:
    """What was done in a phase, by one rank or by all of them."""

    tokens: int
    flops: float


def work_of_step(
    policy: Policy, rollouts: Rollouts, group_size: int
) -> tuple[Work, Work]:
    """The work of the rollout and of the update, as CAPTIONS["speed"] counts it."""
    model = policy.model
    layers = model.base_model.layers
    linear = 0
    for module in layers.modules():
        if isinstance(module, torch.nn.Linear):
            linear += module.weight.numel()
    width = len(layers) * layers[0].self_attn.q_proj.out_features
    head = model.get_output_embeddings().weight.numel()

    def flops_of_layers(length: torch.Tensor) -> float:
        """Of one pass over sequences of these lengths, [N]."""
        pairs = length.double().square() / 2
        return float((2 * linear * length + 4 * width * pairs).sum())

    prompt = rollouts.prompt_length  # [N]
    response = rollouts.mask.sum(dim=1)  # [N]
    sampled = int(response.sum())
    one_pass = flops_of_layers(prompt + response) + 2 * head * sampled
    # The engine computes a prompt once for its group.
    repeated = flops_of_layers(prompt) - flops_of_layers(prompt[::group_size])
    rollout = Work(tokens=sampled, flops=one_pass - repeated)
    # The policy shares a prompt in the whole group, or not at all.
    pass_of_update = one_pass if policy.sharing == 1 else one_pass - repeated
    update = Work(tokens=int((prompt + response).sum()), flops=3 * pass_of_update)
    return rollout, update


def speed_of(work: Work, seconds: float, ranks: int, device: str) -> Row:
    """Rates of the `work` that all ranks did in so many seconds."""
    reached = work.flops / seconds / ranks / 1e12
    speed = {
        "tokens": work.tokens,
        "tokens/s": work.tokens / seconds,
        "TFLOP/s a device": reached,
    }
    if device in PEAK_TFLOPS:
        speed["% of peak"] = 100 * reached / PEAK_TFLOPS[device]
    return speed


@contextmanager
def phase(phases: dict[str, Row], name: str) -> Iterator[None]:
    """Time a with-block, read the memory after it; the largest numbers of all ranks."""
    if CUDA:
        # A kernel runs on after the call that launched it has returned.
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    if CUDA:
        torch.cuda.synchronize()
    row = {"seconds": time.perf_counter() - start, **memory_now()}
    most = torch.tensor(list(row.values()), dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    phases[name] = dict(zip(row, most.tolist(), strict=True))


def memory_now() -> Row:
    """The memory of this rank, in GB of 2^30 bytes."""
    if CUDA:
        free, total = torch.cuda.mem_get_info()
        return {
            "used": (total - free) / GB,
            "allocated": torch.cuda.memory_allocated() / GB,
            "allocated at most": torch.cuda.max_memory_allocated() / GB,
        }
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    kilobytes_at_most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "RSS": pages * resource.getpagesize() / GB,
        "RSS at most": kilobytes_at_most * 1024 / GB,
    }


def check_engine(cfg: CheckConfig, data: Data, objective: Objective) -> dict[str, Any]:
    """Two steps of the loop with the engine of cfg, by all ranks together."""
    mesh = init_distributed()
    world = dist.get_world_size()
    phases: dict[str, Row] = {}
    mismatch: dict[str, Row] = {}
    with phase(phases, "engine loaded"):
        engine = Engine(
            cfg.model,
            data.longest,
            tp=cfg.rollout_tp,
            quantization=cfg.rollout_quantization,
            dtype=cfg.rollout_dtype,
            top_logprobs=cfg.top_logprobs,
            kv_cache_gb=cfg.kv_cache_gb,
            max_num_seqs=cfg.max_num_seqs,
            can_sleep=True,
            verbose=cfg.verbose,
        )
    with phase(phases, "engine asleep"):
        engine.sleep()
    with phase(phases, "policy built"):
        policy = build_policy(
            cfg.model,
            mesh,
            dtype=cfg.dtype,
            temperature=cfg.policy_temperature,
            gradient_checkpointing=cfg.gradient_checkpointing,
            sharing=sharing_of(cfg, data.longest),
        )
    # AdamW's first step moves every weight by the learning rate, and so an output of a
    # layer by up to its width times that. Divided by the width the rate changes any
    # policy, and breaks none.
    learning_rate = 0.02 / policy.model.config.hidden_size
    optimizer = torch.optim.AdamW(policy.parameters(), learning_rate, weight_decay=0.0)
    with phase(phases, "sync 0"):
        engine.load_weights(full_weights(policy), version="0")

    def gradient(rollouts: Rollouts, step: int) -> Row:
        rows = list(range(len(rollouts.text)))
        stats = accumulate_gradient(policy, rollouts, rows, objective, cfg, step)
        return {name: stats[name] for name in MISMATCH}

    for step, when in ((1, "as loaded"), (2, "after sync 1")):
        with phase(phases, f"rollout {step}"):
            rollouts = sample_step(engine, cfg, step, data.train.prompts)
        engine.sleep()
        # Made up: the responses of a group have different rewards.
        reward = torch.arange(len(rollouts.text)).float().view(-1, cfg.group_size)
        rollouts.advantage = group_advantage(reward, cfg.scale_advantage).flatten()
        with phase(phases, f"update {step}"):
            mismatch[when] = gradient(rollouts, step)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            # The changed policy on what the old weights sampled: what a sync that does
            # nothing would look like.
            mismatch["without sync 1"] = gradient(rollouts, step)
            optimizer.zero_grad()
        # After the last step too: vLLM does not close an engine that sleeps.
        with phase(phases, f"sync {step}"):
            engine.load_weights(full_weights(policy), version=str(step))

    device = torch.cuda.get_device_name() if CUDA else "CPU"
    speed = {}
    works = work_of_step(policy, rollouts, cfg.group_size)
    for name, work in zip(("rollout", "update"), works, strict=True):
        everyone: list = [None] * world
        dist.all_gather_object(everyone, work)
        of_all = Work(
            tokens=sum(of_rank.tokens for of_rank in everyone),
            flops=sum(of_rank.flops for of_rank in everyone),
        )
        seconds = phases[f"{name} 2"]["seconds"]
        speed[name] = speed_of(of_all, seconds, world, device)
    engine.close()
    return {
        "device": device,
        "ranks": world,
        "engines": {
            cfg.rollout_quantization: {
                "mismatch": mismatch,
                "speed": speed,
                "phases": phases,
            }
        },
    }


def check_in_other_processes(cfg: CheckConfig) -> dict[str, Any]:
    """The results of `check_engine`, for each engine that came to an end."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    results: dict[str, Any] = {"engines": {}}
    for engine in cfg.engines:
        with tempfile.NamedTemporaryFile() as file:
            # The same flags, of which the last two replace those that were given.
            command = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", ranks, *sys.argv),
                *("--engines", engine, "--out", file.name),
            ]
            subprocess.run(command, stdout=subprocess.DEVNULL)
            text = Path(file.name).read_text()
        if text:
            found = json.loads(text)
            results["device"] = found["device"]
            results["ranks"] = found["ranks"]
            results["engines"] |= found["engines"]
    return results


def compare_with_unquantized(engines: dict[str, Any]) -> None:
    """Add to each speed how many times that of the unquantized engine it is."""
    if "none" not in engines:
        return
    unquantized = {
        name: row["tokens/s"] for name, row in engines["none"]["speed"].items()
    }
    for found in engines.values():
        for name, row in found["speed"].items():
            row["times unquantized"] = row["tokens/s"] / unquantized[name]


def check_sync(engine: str, mismatch: dict[str, Row]) -> None:
    """Raises Refused where the new weights seem not to have come into the engine.

    Its mismatch after the sync is then near that which the old weights would have, and
    not near that of the start. An fp8 engine has some at any time.
    """
    loaded, without, after = (
        mismatch[when]["mismatch_mean"]
        for when in ("as loaded", "without sync 1", "after sync 1")
    )
    if after - loaded > without - after:
        raise Refused(
            f"{engine}: after the sync mean |log rho| is {after:.4f}; it was "
            f"{loaded:.4f} at the start, and would be {without:.4f} without a sync: "
            "are the weights that vLLM computes with those that it was given?"
        )


def report(results: dict[str, Any]) -> str:
    """Markdown tables of what `check_engine` found."""
    device = results["device"]
    engines = results["engines"]
    config = results["config"]
    peak = "unknown"
    if device in PEAK_TFLOPS:
        peak = f"{PEAK_TFLOPS[device]} TFLOP/s in dense bf16"
    lines = [f"{config['model']} on {results['ranks']} x {device}, its peak {peak}."]
    for section, caption in CAPTIONS.items():
        tables = {engine: found[section] for engine, found in engines.items()}
        first_table = next(iter(tables.values()))
        columns = list(next(iter(first_table.values())))
        lines += ["", caption, "", f"| {section} | {' | '.join(columns)} |"]
        lines.append("|---" * (1 + len(columns)) + "|")
        for engine, rows in tables.items():
            label = config["rollout_dtype"] if engine == "none" else engine
            for name, row in rows.items():
                cells = " | ".join(f"{value:.5g}" for value in row.values())
                lines.append(f"| {label}: {name} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Check each engine; refuse one that should agree with the trainer and does not,
    or that a sync does not reach.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    cfg = parse_flags(CheckConfig)
    if is_first and not CUDA:
        print("The device is a CPU: this checks nothing of CUDA.\n", flush=True)
    objective = find_objective(OBJECTIVES, cfg.objective, cfg.objective_args)
    check_run(cfg, objective, KL_ESTIMATORS)
    data = load_data(cfg)
    if cfg.out:
        Path(cfg.out).parent.mkdir(parents=True, exist_ok=True)
    if len(cfg.engines) == 1:
        cfg.rollout_quantization = cfg.engines[0]
        results = check_engine(cfg, data, objective)
    elif is_first:
        # It starts all ranks anew. The others that torchrun started have nothing to do.
        results = check_in_other_processes(cfg)
    if not is_first:
        return
    engines = results["engines"]
    compare_with_unquantized(engines)
    results["config"] = cfg.model_dump()
    if engines:
        print(report(results))
    if cfg.out:
        Path(cfg.out).write_text(json.dumps(results, indent=1) + "\n")
    failed = [engine for engine in cfg.engines if engine not in engines]
    if failed:
        raise Refused(f"no result of {', '.join(failed)}: its error is above")
    if "none" in engines:
        unquantized = cfg.model_copy(update={"rollout_quantization": "none"})
        for step, when in ((1, "as loaded"), (2, "after sync 1")):
            stats = engines["none"]["mismatch"][when]
            # It refuses, so that it asks for no response to show.
            check_on_policy(
                unquantized, stats, step, is_first=True, furthest_response=str
            )
    for engine, found in engines.items():
        check_sync(engine, found["mismatch"])


if __name__ == "__main__":
    try:
        main()
    except (Refused, FloatingPointError, OneRankFailed) as error:
        rank = int(os.environ.get("RANK", 0))
        # All ranks refuse alike; only what one rank alone found out is its own to say.
        if rank == 0 or isinstance(error, OneRankFailed):
            print(f"gpu_check.py: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
