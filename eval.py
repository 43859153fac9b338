"""Evaluation: pass@k of a policy on one or several tasks, sampled by vLLM.

    python eval.py --model runs/NAME --task tiny --samples 8    # a run, a model folder, a hub name
    torchrun --nproc-per-node 8 eval.py --model Qwen/Qwen2.5-1.5B-Instruct --task gsm8k math

pass@k is the probability that at least one of k samples is right. From n >= k samples, c of them
right, it is estimated without bias by 1 - C(n - c, k) / C(n, k) (arXiv 2107.03374, equation 1).
Every field of EvalConfig (config.py) is a flag. The same command again goes on where it was killed.
A bfloat16 engine rounds differently in batches of another size, which flips single tokens; in
float32, the default on CPU, the counts are the same on any number of ranks.
"""

import os
import random
import sys
from math import comb
from pathlib import Path

if "--verbose" not in sys.argv:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
import numpy as np
import torch.distributed as dist

import results
from config import EvalConfig, Refused, load_evaluation, parse_config
from reward import score
from rollout import Engine, init_distributed

RESAMPLES = 10_000  # of the bootstrap: they move an end of an interval by 1% of its width


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k, c of n samples right; ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n; got n={n}, c={c}, k={k}")
    return 1 - comb(n - c, k) / comb(n, k)


def estimate(correct: dict[str, list[int]], n: int) -> dict:
    """pass@k of each benchmark and of their mean, k = 1..n, from the right samples by problem.

    Intervals are between the 2.5% and 97.5% quantiles of a bootstrap that resamples the problems of
    each benchmark, with replacement, each problem with its n samples. As only the number c of right
    samples counts, a resample is a multinomial draw of how many problems have c = 0, 1, ..., n.
    """
    table = np.array([[pass_at_k(n, c, k) for k in range(1, n + 1)] for c in range(n + 1)])
    noise = np.random.default_rng(0)
    draws = {}  # by benchmark [1 + RESAMPLES, n]: the problems as they are, then the resamples
    for task, counts in correct.items():
        problems = np.bincount(counts, minlength=n + 1)  # [n + 1]
        again = noise.multinomial(len(counts), problems / len(counts), RESAMPLES)
        draws[task] = np.vstack([problems, again]) @ table / len(counts)

    def summary(draws: np.ndarray) -> dict:
        low, high = np.quantile(draws[1:], (0.025, 0.975), axis=0)  # [n] each
        columns = enumerate(zip(draws[0], low, high, strict=True), 1)
        return {str(k): {"value": v, "interval": [a, b]} for k, (v, a, b) in columns}

    return {
        "pass@k": {task: summary(d) for task, d in draws.items()},
        "average": summary(np.mean(list(draws.values()), axis=0)),  # every benchmark counts as one
        "intervals": f"bootstrap, {RESAMPLES} resamples of the problems, seed 0, percentiles",
    }


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
    first: int = 0,
    **sampling,
) -> list[int]:
    """How many of `samples` responses to each problem are right; the same list on every rank.

    Each rank takes every world-th problem, with noise that depends on the problem alone: `first` is
    the place of problems[0] in its task. `sampling` as SamplingParams.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    seeds, own = noise_seeds(seed, first, len(problems), samples), len(problems[rank::world])
    part = slice(rank, None, world) if own else slice(1)  # ranks that share an engine all sample
    texts = engine.sample(prompts[part], samples, seeds[part], **sampling).text
    answers = [problem["answer"] for problem in problems[part] for _ in range(samples)]
    rewards = score(texts, answers, verifier)
    mine = [round(sum(rewards[i * samples : (i + 1) * samples])) for i in range(own)]
    everyone: list = [None] * world
    dist.all_gather_object(everyone, mine)
    correct = [0] * len(problems)
    for r, counts in enumerate(everyone):
        correct[r::world] = counts
    return correct


def main() -> None:
    # What the user can get wrong comes first, before anything slow is built.
    cfg = parse_config(kind=EvalConfig)
    model, benchmarks = load_evaluation(cfg)
    correct = {}
    if int(os.environ.get("RANK", 0)) == 0:
        settings = results.settings_of(cfg, model, benchmarks)
        out = Path(cfg.out_dir or results.default_folder(settings))
        correct = results.begin_or_resume(out / "problems.jsonl", settings)
    init_distributed()
    # Of rank 0: other nodes may not see the folder; the judge's time limit may drop other problems.
    dist.broadcast_object_list(shared := [correct, benchmarks])
    (correct, benchmarks), rank, world = shared, dist.get_rank(), dist.get_world_size()
    prompts = [prompt for b in benchmarks.values() for prompt in b.prompts]
    engine = None
    if sum(map(len, correct.values())) < len(prompts):
        length = max(map(len, prompts)) + cfg.max_response_tokens
        options = dict(tp=cfg.rollout_tp, dtype=cfg.dtype, kv_cache_gb=cfg.kv_cache_gb)
        options |= dict(max_num_seqs=cfg.max_num_seqs, verbose=cfg.verbose)
        engine = Engine(model, length, **options)
    sampling = dict(temperature=cfg.temperature, top_p=cfg.top_p)
    sampling["max_tokens"] = cfg.max_response_tokens
    size = world * max(1, cfg.chunk_responses // cfg.samples)  # problems of a chunk
    for task, (problems, prompts, verifier, _) in benchmarks.items():
        while (first := len(correct[task])) < len(problems):
            chunk = problems[first : first + size], prompts[first : first + size]
            counts = evaluate(engine, *chunk, verifier, cfg.samples, cfg.seed, first, **sampling)
            correct[task] += counts
            if rank == 0:
                results.append(out / "problems.jsonl", task, first, counts)
                share = sum(done := correct[task]) / len(done) / cfg.samples
                print(f"{task}: {len(done)} of {len(problems)}, pass@1 {share:.3f}", flush=True)
    if rank == 0:
        print("\n" + results.write_report(out, settings, estimate(correct, cfg.samples), correct))
        print(f"{out}: results.json, results.md, problems.jsonl")
    engine.close() if engine else dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Refused as error:
        sys.exit(f"eval.py: {error}" if os.environ.get("RANK", "0") == "0" else 1)
    except KeyboardInterrupt:
        sys.exit("eval.py: interrupted; the same command goes on from the last chunk")
