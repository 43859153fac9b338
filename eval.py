"""Evaluation: pass@k of a policy on one or several tasks, sampled by vLLM.

    python eval.py --model runs/NAME --task tiny --samples 8
    torchrun --nproc-per-node 8 eval.py --model Qwen/Qwen3-4B --task gsm8k math \\
        --max_response_tokens 4096 --kv_cache_gb 8

pass@k is the probability that at least one of k samples is right. From n >= k samples,
c of them right, it is estimated without bias by 1 - C(n - c, k) / C(n, k) (arXiv
2107.03374, equation 1). The same command again goes on where it was killed. A bfloat16
engine rounds differently in batches of another size, which flips single tokens; in
float32, the default on CPU, the counts are the same on any number of ranks.
"""

import os
import sys
from math import comb
from pathlib import Path
from typing import Annotated, Any, Literal

if "--verbose" not in sys.argv:
    # torch reads it when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import numpy as np
import torch
import torch.distributed as dist
from pydantic import BeforeValidator, Field
from scipy.stats import binomtest

from reward import load_task, score
from rollout import Engine, init_distributed, noise_seeds, prompts_of_rank
from support import results
from support.checks import check_tensor_parallel, lock_folder
from support.flags import (
    Count,
    Flags,
    PositiveAmount,
    PositiveCount,
    Probability,
    Refused,
    parse_flags,
)
from support.prompts import Split, check_model, encode_problems
from support.ranks import run_script
from support.tasks import task_of

# Resamples of the bootstrap: they move an end of an interval by about 1% of its width.
RESAMPLES = 10_000


def as_list(given: Any) -> Any:
    """One task as a list of one."""
    return [given] if isinstance(given, str) else given


class EvalConfig(Flags):
    """An evaluation."""

    model: str = "tiny"
    """what to evaluate: a run, a model folder or a hub name"""
    task: Annotated[list[str], BeforeValidator(as_list)] = ["tiny"]
    """one or several tasks, each as train.py takes it"""
    split: Literal["train", "heldout"] = "heldout"
    """of the tasks"""
    samples: Count = 0
    """n, the responses to a problem; 0: 8, or 1 if greedy"""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """of the samples; 0: greedy"""
    top_p: Probability = 1.0
    """of the samples"""
    max_response_tokens: PositiveCount = 64
    """truncate longer responses"""
    limit: Count = 0
    """only the first problems of each task; 0: all"""
    drop_long: bool = False
    """leave out prompts that leave no room for a response"""
    seed: Count = 0
    """of the sampling noise"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """the engine computes in it; auto: bfloat16 on CUDA, else float32"""

    # These decide its speed, where it writes, and of its results only the rounding.
    out_dir: str = ""
    """where it writes; by default a name made from all settings"""
    chunk_responses: PositiveCount = 2048
    """responses of a rank between two savings"""
    rollout_tp: PositiveCount = 1
    """ranks of a node that share an engine (tensor parallelism)"""
    kv_cache_gb: PositiveAmount = 0.25
    """an engine's KV cache on each rank, in GB of 2^30 bytes"""
    max_num_seqs: PositiveCount = 256
    """responses that an engine decodes at the same time"""
    verbose: bool = False
    """show the messages of vLLM and torch"""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased pass@k where c of n samples are right (arXiv 2107.03374).

    ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(
            f"pass_at_k needs 0 <= c <= n and 1 <= k <= n; got {n=}, {c=}, {k=}"
        )
    return 1 - comb(n - c, k) / comb(n, k)


def estimate(correct: dict[str, list[int]], n: int) -> dict[str, Any]:
    """pass@k of each task and of their mean, from the right samples of each problem.

    Intervals are the 2.5% and 97.5% quantiles of a bootstrap that resamples the
    problems of each task, each with its n samples. As only the number c of right
    samples counts, a resample is a multinomial draw of how many problems have c = 0, 1,
    ..., n. Where all problems have the same pass@k, 0 or 1, every resample is the same;
    the interval is then the exact binomial one, of that many problems all wrong or all
    right. For the mean over tasks that many is the smallest task's number of problems.
    """
    pass_table = np.array(
        [[pass_at_k(n, c, k) for k in range(1, n + 1)] for c in range(n + 1)]
    )  # [n + 1, n]: by c and k
    noise = np.random.default_rng(0)
    values, resamples = {}, {}
    for task, counts in correct.items():
        problems_with = np.bincount(counts, minlength=n + 1)  # [n + 1]: problems by c
        share = problems_with / len(counts)
        drawn = noise.multinomial(len(counts), share, RESAMPLES)
        # Whole numbers of problems add up without rounding, so that where every problem
        # is solved the value is 1, and not 1 - 1e-16.
        values[task] = problems_with @ pass_table / len(counts)  # [n]: by k
        resamples[task] = drawn @ pass_table / len(counts)  # [RESAMPLES, n]

    def with_interval(value: np.ndarray, drawn: np.ndarray, problems: int) -> dict:
        low, high = np.quantile(drawn, (0.025, 0.975), axis=0)  # [n] each
        summary = {}
        for k in range(1, n + 1):
            interval = [low[k - 1], high[k - 1]]
            if value[k - 1] in (0, 1):
                right = round(problems * value[k - 1])
                interval = list(binomtest(right, problems).proportion_ci())
            summary[str(k)] = {"value": value[k - 1], "interval": interval}
        return summary

    tasks = list(correct)
    fewest = min(len(counts) for counts in correct.values())
    return {
        "pass@k": {
            task: with_interval(values[task], resamples[task], len(correct[task]))
            for task in tasks
        },
        "average": with_interval(  # every task counts as one
            np.mean([values[task] for task in tasks], axis=0),
            np.mean([resamples[task] for task in tasks], axis=0),
            fewest,
        ),
        "intervals": (
            f"95%: bootstrap, {RESAMPLES} resamples of the problems, seed 0, "
            "percentiles; exact binomial where all problems are alike"
        ),
    }


def evaluate(
    engine: Engine,
    problems: list[dict[str, str]],
    prompts: list[list[int]],
    verifier: str,
    *,
    samples: int = 1,
    seed: int = 0,
    first: int = 0,
    **sampling: Any,
) -> list[int]:
    """How many of `samples` responses to each problem are right, on every rank.

    The ranks share the problems, with noise that depends on the problem's place alone:
    `first` is that of problems[0] among all problems of the evaluation. `sampling` are
    vLLM's SamplingParams. A collective.
    """
    seeds = noise_seeds(seed, first, len(problems), samples)
    mine = prompts_of_rank(len(problems))
    # Ranks that share an engine all have to sample. One without problems of its own
    # takes the first.
    asked = mine or [0]
    rollouts = engine.sample(
        [prompts[i] for i in asked], samples, [seeds[i] for i in asked], **sampling
    )
    answers = []
    for i in asked:
        answers += [problems[i]["answer"]] * samples
    rewards = score(rollouts.text, answers, verifier)
    counts = {}
    for place, i in enumerate(mine):
        of_problem = rewards[place * samples : (place + 1) * samples]
        counts[i] = round(sum(of_problem))
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, counts)
    all_counts: dict[int, int] = {}
    for rank_counts in everyone:
        all_counts |= rank_counts
    return [all_counts[i] for i in range(len(problems))]


def load_benchmarks(cfg: EvalConfig) -> tuple[str, dict[str, Split]]:
    """The model's folder or hub name, and the problems of each task. Raises Refused.

    Sets what the user left to us: samples and dtype.
    """
    if 0 < cfg.temperature < 0.01:
        raise Refused(
            f"temperature is {cfg.temperature}: give 0 (greedy), or at least the 0.01 "
            "that vLLM would use instead"
        )
    if cfg.dtype == "auto":
        cfg.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    if cfg.samples == 0:
        cfg.samples = 8 if cfg.temperature else 1
    if cfg.samples > 1 and not cfg.temperature:
        raise Refused(
            f"greedy samples are all the same: samples is {cfg.samples}, 1 says it all"
        )
    if cfg.top_p < 1 and not cfg.temperature:
        raise Refused(f"top_p is {cfg.top_p}, which greedy decoding does not look at")
    if len(set(cfg.task)) < len(cfg.task):
        raise Refused(f"a task is given twice: {' '.join(cfg.task)}")
    check_tensor_parallel(cfg.rollout_tp)
    of_run = Path(cfg.model, "model")
    model = str(of_run) if of_run.is_dir() else cfg.model
    try:
        tokenizer, context = check_model(model, cfg.rollout_tp)
        benchmarks = {}
        for task in cfg.task:
            benchmarks[task] = encode_problems(
                load_task(task, cfg.split)[: cfg.limit or None],
                tokenizer,
                instruction=task_of(task).instruction,
                room=context - cfg.max_response_tokens,
                drop_long=cfg.drop_long,
                name=f"{cfg.split} prompts of {task}",
            )
    except ValueError as error:
        if model == cfg.model and Path(model, "metrics.jsonl").exists():
            raise Refused(
                f"{model} is a run that has left no model: finish it with --resume, or "
                "train again"
            ) from error
        raise Refused(str(error)) from error
    return model, benchmarks


def main() -> None:
    # What the user can get wrong comes first, before anything slow is built.
    cfg = parse_flags(EvalConfig)
    model, benchmarks = load_benchmarks(cfg)
    correct: dict[str, list[int]] = {}
    if os.environ.get("RANK", "0") == "0":
        settings = results.settings_of(cfg.model_dump(), model, benchmarks)
        out = Path(cfg.out_dir or results.default_folder(settings))
        lock = lock_folder(out)
        correct = results.begin_or_resume(out / "problems.jsonl", settings)
    init_distributed()
    # Rank 0's: other nodes may not see the folder, and could leave out other problems.
    shared = [correct, benchmarks]
    dist.broadcast_object_list(shared)
    correct, benchmarks = shared
    rank, world = dist.get_rank(), dist.get_world_size()
    problem_count = sum(len(split.problems) for split in benchmarks.values())
    engine = None
    if sum(len(counts) for counts in correct.values()) < problem_count:
        longest_prompt = max(
            len(p) for split in benchmarks.values() for p in split.prompts
        )
        engine = Engine(
            model,
            longest_prompt + cfg.max_response_tokens,
            tp=cfg.rollout_tp,
            dtype=cfg.dtype,
            kv_cache_gb=cfg.kv_cache_gb,
            max_num_seqs=cfg.max_num_seqs,
            verbose=cfg.verbose,
        )
    problems_per_rank = max(1, cfg.chunk_responses // cfg.samples)
    chunk = world * problems_per_rank  # problems between savings
    before = 0  # problems of the tasks before this one
    for task, split in benchmarks.items():
        for first in range(len(correct[task]), len(split.problems), chunk):
            counts = evaluate(
                engine,
                split.problems[first : first + chunk],
                split.prompts[first : first + chunk],
                task_of(task).verifier,
                samples=cfg.samples,
                seed=cfg.seed,
                first=before + first,
                temperature=cfg.temperature,
                top_p=cfg.top_p,
                max_tokens=cfg.max_response_tokens,
            )
            correct[task] += counts
            if rank == 0:
                results.append(out / "problems.jsonl", task, first, counts)
                done = correct[task]
                pass_at_1 = sum(done) / len(done) / cfg.samples
                progress = f"{task}: {len(done)} of {len(split.problems)}"
                print(f"{progress}, pass@1 {pass_at_1:.3f}", flush=True)
        before += len(split.problems)
    if rank == 0:
        report = results.write_report(
            out, settings, estimate(correct, cfg.samples), correct
        )
        print(f"\n{report}\n{out}: results.json, results.md, problems.jsonl")
        lock.close()
    if engine is not None:
        engine.close()
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        sys.exit(run_script(main))
    except KeyboardInterrupt:
        sys.exit("eval.py: interrupted; the same command goes on from the last chunk")
