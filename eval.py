"""Evaluation: pass@k of a model on a task, sampled by vLLM.

    python eval.py --model runs/NAME --task tiny --samples 8        # a run, a model folder or a hub name
    torchrun --nproc-per-node 8 eval.py --model Qwen/Qwen2.5-1.5B-Instruct --task gsm8k

pass@k is the probability that at least one of k samples is right. From n >= k samples of which c are right it is
estimated without bias by 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374, equation 1).
"""

import argparse
import json
import os
import random
import sys
from math import comb
from pathlib import Path

import torch.distributed as dist

from reward import encode_prompt, load_task, score, task_of
from rollout import Engine, init_distributed


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k from c right answers among n samples; raises ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1 - comb(n - c, k) / comb(n, k)


def noise_seeds(seed: int, first: int, count: int, spacing: int) -> list[int]:
    """Seeds of the sampling noise of prompts first, first + 1, ...: distinct for all prompts and responses of a run.

    The engine gives response j of a prompt the seed + j, hence the spacing; the run's own seed places the whole range
    by a hash, because the ranges of neighboring seeds 0, 1, ... would otherwise overlap.
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
    """How many of the `samples` responses to each problem are right: [problems], the same on every rank.

    Each rank samples every world-th problem with noise that depends on the problem alone, so the result does not
    depend on the number of ranks (to the engine's rounding).
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    seeds = noise_seeds(seed, 0, len(problems), samples)[rank::world]
    rollouts = engine.sample(prompts[rank::world], samples, seeds, **sampling)
    answers = [problem["answer"] for problem in problems[rank::world] for _ in range(samples)]
    rewards = score(rollouts.text, answers, verifier)
    mine = [int(sum(rewards[i : i + samples])) for i in range(0, len(rewards), samples)]
    everyone: list = [None] * world
    dist.all_gather_object(everyone, mine)
    correct = [0] * len(problems)
    for r, counts in enumerate(everyone):
        correct[r::world] = counts
    return correct
