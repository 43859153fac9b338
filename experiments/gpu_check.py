"""What engine and trainer do on this machine's GPUs: mismatch, memory, speed; fp8 beside bf16.

    make gpu-check
    torchrun --standalone experiments/gpu_check.py --model Qwen/Qwen2.5-1.5B-Instruct \
        --prompts 64 --max_response_tokens 256 --kv_cache_gb 8 --out runs/gpu-check.json
    torchrun --nproc-per-node 8 experiments/gpu_check.py --config recipes/gsm8k-8gpu.yaml

Two steps of train.py's loop, of one update each, with any flags of train.py and made-up rewards:
the policy only has to change. The first step compiles, so the speed is that of the second.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if "--verbose" not in sys.argv:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
import torch
import torch.distributed as dist

from config import Config, Refused, check_config, load_model_files, load_prompts, parse_config
from eval import noise_seeds
from loss import group_advantage
from memory import GB
from policy import build_policy, full_weights
from rollout import QUANTIZATIONS, Engine, Rollouts, init_distributed
from train import accumulate_gradient, check_on_policy, problems_of_step

CUDA = torch.cuda.is_available()
# Dense bf16 TFLOP/s by data sheet. Whole names: an H100 PCIe is slower, and an H20 is no H200.
PEAK = {"NVIDIA H100 80GB HBM3": 989, "NVIDIA H200": 989, "NVIDIA A100 80GB PCIe": 312}
PEAK |= {f"NVIDIA A100-{kind}GB": 312 for kind in ("SXM4-40", "SXM4-80", "PCIE-40")}
CAPTIONS = {
    "mismatch": "log pi_theta - log pi_b: its e_B, mean ratio, mean and largest size, in nats.",
    "speed": """Tokens: sampled in a rollout, all in an update. FLOPs of a pass: 2 x (weights of the
layers x tokens + weights of the head x response tokens) + 4 x layers x heads x head size x pairs of
tokens of which one attends to the other. Passes: 1 in a rollout (prompts once a group), 3 in an
update (what is computed again does not count). Each is one reading, the second: the update is the
same for all engines: how far its "times unquantized" is from 1 tells the noise in a rollout's.""",
    "phases": """GB of 2^30 bytes after a phase, of the rank with the most. used: of the device, by
all programs; as torch keeps what it frees, about the peak of a rollout or update. allocated: by
torch, then and at most; it counts an engine that sleeps, whose memory is free.""",
}


def work(model: torch.nn.Module, rollouts: Rollouts, group_size: int) -> list[list[float]]:
    """[tokens, FLOPs] of the rollout and of the update, as the caption says."""
    layers = model.base_model.layers
    linear = sum(m.weight.numel() for m in layers.modules() if isinstance(m, torch.nn.Linear))
    width = len(layers) * layers[0].self_attn.q_proj.out_features

    def flops(length: torch.Tensor) -> float:  # of the layers, on sequences of these lengths
        return float((2 * linear * length + 4 * width * length.double() ** 2 / 2).sum())

    prompt, response = rollouts.prompt_length, rollouts.mask.sum(1)  # [N] each
    whole, sampled = prompt + response, int(response.sum())
    once = flops(whole) + 2 * sampled * model.get_output_embeddings().weight.numel()
    again = flops(prompt) - flops(prompt[::group_size])  # the prompt, but once a group
    return [[sampled, once - again], [int(whole.sum()), 3 * once]]


def speeds(done: list, phases: dict, ranks: int, device: str) -> dict[str, dict[str, float]]:
    """Rates of the second rollout and update, given the `work` of all ranks in them."""
    speed = {}
    for name, (tokens, flops) in zip(("rollout", "update"), done, strict=True):
        seconds = phases[f"{name} 2"]["seconds"]
        reached = flops / seconds / ranks / 1e12
        speed[name] = {"tokens": tokens, "tokens/s": tokens / seconds, "TFLOP/s a device": reached}
        speed[name] |= {"% of peak": 100 * reached / PEAK[device]} if device in PEAK else {}
    return speed


@contextmanager
def phase(phases: dict[str, dict[str, float]], name: str) -> Iterator[None]:
    """Time what runs inside, and read the memory after it; of all ranks, the largest numbers."""
    if CUDA:
        torch.cuda.synchronize()  # a kernel runs on after the call that launched it has returned
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    yield
    if CUDA:
        torch.cuda.synchronize()
    row = {"seconds": time.perf_counter() - start}
    if CUDA:
        free, total = torch.cuda.mem_get_info()
        row |= {"used": (total - free) / GB, "allocated": torch.cuda.memory_allocated() / GB}
        row |= {"allocated at most": torch.cuda.max_memory_allocated() / GB}
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        row |= {"RSS": pages * resource.getpagesize() / GB}
        row |= {"RSS at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB}
    most = torch.tensor(list(row.values()), dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    phases[name] = dict(zip(row, most.tolist(), strict=True))


def check(cfg: Config, prompts: list[list[int]]) -> dict:
    """Two steps of the loop with the engine of cfg, by all ranks together."""
    mesh, phases, stats = init_distributed(), {}, {}
    rank, world = dist.get_rank(), dist.get_world_size()
    options = dict(dtype=cfg.rollout_dtype, kv_cache_gb=cfg.kv_cache_gb, verbose=cfg.verbose)
    options |= dict(quantization=cfg.rollout_quantization, max_num_seqs=cfg.max_num_seqs)
    options |= dict(tp=cfg.rollout_tp)
    with phase(phases, "engine loaded"):
        longest = max(map(len, prompts)) + cfg.max_response_tokens
        engine = Engine(cfg.model, longest, can_sleep=True, **options)
    with phase(phases, "engine asleep"):
        engine.sleep()
    with phase(phases, "policy built"):
        policy = build_policy(cfg, mesh)
    # AdamW's first step moves every weight by the learning rate, and so an output of a layer by up
    # to its width times that: divided by the width it changes any policy, and breaks none.
    rate = 0.02 / policy.model.config.hidden_size
    optimizer = torch.optim.AdamW(policy.parameters(), rate, weight_decay=0.0)
    with phase(phases, "sync 0"):
        engine.load_weights(full_weights(policy), version="0")
    sampling = dict(max_tokens=cfg.max_response_tokens, temperature=cfg.temperature)
    sampling |= dict(top_p=cfg.top_p, top_k=cfg.top_k)
    for step in 1, 2:
        mine = [prompts[i] for i in problems_of_step(cfg, step, len(prompts))[rank::world]]
        first, count = step * cfg.prompts_per_step, cfg.prompts_per_step
        seeds = noise_seeds(cfg.seed, first, count, cfg.group_size)[rank::world]
        with phase(phases, f"rollout {step}"):
            rollouts = engine.sample(mine, cfg.group_size, seeds, **sampling)
        engine.sleep()
        rewards = torch.arange(len(rollouts.text)).float().view(-1, cfg.group_size)
        rollouts.advantage = group_advantage(rewards, cfg.scale_advantage).flatten()
        batch = policy, rollouts, list(range(len(rollouts.text))), cfg
        with phase(phases, f"update {step}"):
            stats["as loaded" if step == 1 else "after sync 1"] = accumulate_gradient(*batch)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:  # the changed policy on what the old weights sampled: the scale of the rest
            stats["without sync 1"] = accumulate_gradient(*batch)
            optimizer.zero_grad()
        with phase(phases, f"sync {step}"):  # after the last step too: vLLM is not closed asleep
            engine.load_weights(full_weights(policy), version=str(step))
    done = torch.tensor(work(policy.model, rollouts, cfg.group_size), dtype=torch.float64)
    dist.all_reduce(done)
    device = torch.cuda.get_device_name() if CUDA else "CPU"
    engine.close()
    kept = "ess", "ratio", "mismatch_mean", "mismatch_max"
    mismatch = {when: {name: found[name] for name in kept} for when, found in stats.items()}
    speed = speeds(done.tolist(), phases, world, device)
    found = dict(mismatch=mismatch, speed=speed, phases=phases)
    return dict(device=device, ranks=world, engines={cfg.rollout_quantization: found})


def report(results: dict) -> str:
    """Markdown tables of what `check` found."""
    device, engines, config = results["device"], results["engines"], results["config"]
    peak = f"{PEAK[device]} TFLOP/s in dense bf16" if device in PEAK else "unknown"
    lines = [f"{config['model']} on {results['ranks']} x {device}, its peak {peak}."]
    for section, caption in CAPTIONS.items():
        columns = list(next(iter(next(iter(engines.values()))[section].values())))
        lines += ["", caption, "", f"| {section} | {' | '.join(columns)} |"]
        lines.append("|---" * (1 + len(columns)) + "|")
        for engine, found in engines.items():
            label = engine.replace("none", config["rollout_dtype"])
            for name, row in found[section].items():
                cells = " | ".join(f"{value:.5g}" for value in row.values())
                lines.append(f"| {label}: {name} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Check each engine in processes of its own: on CUDA one engine that sleeps fits in each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    both = ["none", "fp8_per_channel"]
    parser.add_argument("--engines", nargs="+", default=both, choices=QUANTIZATIONS)
    parser.add_argument("--prompts", help="prompts_per_step of train.py, whose flags are all taken")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file too")
    args, flags = parser.parse_known_args()
    first = os.environ.get("RANK", "0") == "0"
    if first and not CUDA:
        print("The device is a CPU: this run checks nothing of CUDA.\n", flush=True)
    cfg = parse_config(flags + ([f"--prompts_per_step={args.prompts}"] if args.prompts else []))
    cfg.rollout_quantization = args.engines[0]
    check_config(cfg)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        tokenizer, context = load_model_files(cfg.model, cfg.rollout_tp)
        room = min(cfg.max_prompt_tokens or context, context - cfg.max_response_tokens)
        drop = cfg.max_prompt_tokens > 0
        prompts = load_prompts(cfg.task, "train", tokenizer, room, drop).prompts
    except ValueError as error:
        raise Refused(str(error)) from error
    results: dict = {"engines": {}}
    if len(args.engines) == 1:
        results = check(cfg, prompts)
    elif first:  # starts all ranks anew: the other ones that torchrun started have nothing to do
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", os.environ.get("LOCAL_WORLD_SIZE", "1"), *sys.argv]
        for engine in args.engines:
            with tempfile.NamedTemporaryFile() as file:
                flags = [f"--engines={engine}", f"--out={file.name}"]
                subprocess.run([*command, *flags], stdout=subprocess.DEVNULL)
                found = json.load(file) if os.path.getsize(file.name) else {"engines": {}}
            results |= found | {"engines": results["engines"] | found["engines"]}
    if not first:
        return
    engines = results["engines"]
    if "none" in engines:
        unquantized = engines["none"]["speed"]
        for found in engines.values():
            for name, row in found["speed"].items():
                row["times unquantized"] = row["tokens/s"] / unquantized[name]["tokens/s"]
    results["config"] = asdict(cfg)
    if engines:
        print(report(results))
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    if failed := [engine for engine in args.engines if engine not in engines]:
        raise Refused(f"no result of {', '.join(failed)}: its error is above")
    if "none" in engines:
        for when in "as loaded", "after sync 1":
            check_on_policy(cfg, engines["none"]["mismatch"][when])


if __name__ == "__main__":
    try:
        main()
    except (Refused, FloatingPointError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"gpu_check.py: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
