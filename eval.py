"""Evaluation: pass@k of a policy on a task, sampled by vLLM.

    python eval.py --model runs/NAME --task tiny --samples 8    # a run, a model folder, a hub name
    torchrun --nproc-per-node 8 eval.py --model Qwen/Qwen2.5-1.5B-Instruct --task gsm8k

pass@k is the probability that at least one of k samples is right. From n >= k samples, c of them
right, it is estimated without bias by 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, equation 1).
"""

import argparse
import json
import os
import random
import sys
from math import comb
from pathlib import Path

if "--verbose" not in sys.argv:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
import torch.distributed as dist

from config import load_model_files, load_prompts
from reward import score, task_of
from rollout import Engine, init_distributed


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k, c of n samples right; ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n; got n={n}, c={c}, k={k}")
    return 1 - comb(n - c, k) / comb(n, k)


def noise_seeds(seed: int, first: int, count: int, spacing: int) -> list[int]:
    """Seeds of the sampling noise of prompts first, first + 1, ...: all different within a run.

    The engine adds j for response j of a prompt, hence the spacing. A hash of the run's own seed
    places the whole range: the ranges of runs 0, 1, ... would otherwise overlap.
    """
    base = random.Random(seed).getrandbits(31)
    return [base + (first + i) * spacing for i in range(count)]


def evaluate(
    engine: Engine,
    problems: list[dict[str, str]],
    prompts: list[list[int]],
    verifier: str,
    samples: int = 1,
    seed: int = 0,
    **sampling,
) -> list[int]:
    """How many of `samples` responses to each problem are right; the same list on every rank.

    Each rank takes every world-th problem, with noise that depends on the problem alone.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    if len(problems) < world:
        raise ValueError(f"{len(problems)} problems cannot be shared by {world} ranks: use fewer")
    seeds = noise_seeds(seed, 0, len(problems), samples)[rank::world]
    rollouts = engine.sample(prompts[rank::world], samples, seeds, **sampling)
    answers = [problem["answer"] for problem in problems[rank::world] for _ in range(samples)]
    rewards = score(rollouts.text, answers, verifier)
    mine = [round(sum(rewards[i : i + samples])) for i in range(0, len(rewards), samples)]
    everyone: list = [None] * world
    dist.all_gather_object(everyone, mine)
    correct = [0] * len(problems)
    for r, counts in enumerate(everyone):
        correct[r::world] = counts
    return correct


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="a run, a model folder or a hub name")
    parser.add_argument("--task", default="tiny")
    parser.add_argument("--split", default="heldout", choices=("train", "heldout"))
    parser.add_argument("--samples", type=int, default=8, help="n, responses to each problem")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--max_response_tokens", type=int, default=64)
    parser.add_argument("--limit", type=int, default=0, help="only the first problems; 0 is all")
    parser.add_argument("--kv_cache_gb", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file to write; default eval-TASK.json beside the model")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    run = Path(args.model, "model")
    model = str(run) if run.is_dir() else args.model
    tokenizer, context = load_model_files(model)
    room = context - args.max_response_tokens
    problems, prompts = load_prompts(args.task, args.split, tokenizer, room)
    problems, prompts = problems[: args.limit or None], prompts[: args.limit or None]

    init_distributed()
    length = max(map(len, prompts)) + args.max_response_tokens
    engine = Engine(model, length, kv_cache_gb=args.kv_cache_gb, verbose=args.verbose)
    sampling = dict(
        temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_response_tokens
    )
    verifier = task_of(args.task).verifier
    correct = evaluate(engine, problems, prompts, verifier, args.samples, args.seed, **sampling)
    if dist.get_rank() == 0:
        ks = sorted({min(2**i, args.samples) for i in range(args.samples.bit_length() + 1)})
        table = {k: sum(pass_at_k(args.samples, c, k) for c in correct) / len(correct) for k in ks}
        print(f"{args.task} {args.split}, {len(problems)} problems, {args.samples} samples each")
        for k, value in table.items():
            print(f"pass@{k:<6}{value:.4f}")
        out = Path(args.out or f"eval-{Path(args.task).name}.json")
        result = vars(args) | {"pass@k": table, "correct": correct}
        out.write_text(json.dumps(result, indent=1) + "\n")
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"eval.py: {error}")
