r"""Evaluation: pass@k of a policy on one or several tasks, sampled by vLLM.

    python eval.py --model runs/NAME --task tiny --samples 8
    torchrun --nproc-per-node 8 eval.py --model Qwen/Qwen3-4B --task gsm8k,math \
        --max_response_tokens 4096 --kv_cache_gb 8

pass@k is the probability that at least one of k samples is correct (has reward 1). If c
of n samples are correct (n >= k), its unbiased estimate (arXiv 2107.03374, equation 1)
is

    1 - C(n - c, k) / C(n, k)

The script writes out_dir/{config.json, results.json, samples.jsonl}. In float32, the
default on a CPU, the results hardly ever depend on the number of ranks. In bfloat16
they may, because rounding depends on the batch size and can change tokens.
"""

from support.command import run_script
from support.config import EvalConfig

if __name__ == "__main__":
    EvalConfig.refuse_wrong_flags()  # before the imports below, which take seconds

import json
import os
import time
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from reward import check_verifier, compute_rewards
from rollout import Engine, noise_seed, prompts_of_rank
from support.checkpoints import check_free, take_folder
from support.log import append_row
from support.machine import init_distributed
from support.models import check_model
from support.tasks import Dataset, check_same_on_ranks, load_split


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from n samples, of which c are correct.

    The source is arXiv 2107.03374. Raises ValueError unless 0 <= c <= n and
    1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(
            f"pass_at_k needs 0 <= c <= n and 1 <= k <= n; got {n=}, {c=}, {k=}"
        )
    return 1 - comb(n - c, k) / comb(n, k)


def with_interval(passes: list[float]) -> dict[str, Any]:
    """Return the mean of pass@k over the problems of a task, with a 95% interval.

    `passes` has the pass@k of each problem. The interval is scipy's percentile
    bootstrap over these problems and two added ones, one solved and one not. Without
    them, the interval would have width 0 if all problems are solved or none is, and
    with few problems it would miss the true value far more often than in 5% of all
    cases. With hundreds of problems the two change almost nothing.
    """
    # Imported here because it takes half a second and train.py does not need it.
    from scipy.stats import bootstrap

    result = bootstrap(
        [[*passes, 0, 1]], np.mean, method="percentile", rng=0, batch=100
    )
    return {"value": np.mean(passes), "interval": [*result.confidence_interval]}


def estimate(correct: dict[str, list[int]], n: int) -> dict[str, dict]:
    """Return pass@k of each task, for k = 1, 2, 4, ... and n.

    For each problem of a task, `correct` has the number of correct samples, out of n.
    """
    ks = [2**i for i in range(n.bit_length()) if 2**i < n] + [n]
    return {
        task: {str(k): with_interval([pass_at_k(n, c, k) for c in counts]) for k in ks}
        for task, counts in correct.items()
    }


def evaluate(
    engine: Engine,
    dataset: Dataset,
    *,
    samples: int = 1,
    seed: int = 0,
    **sampling: Any,
) -> list[dict[str, list]]:
    """Sample responses to each problem; return them with rewards and truncation.

    Each problem gets a dictionary of lists, with one entry per sample. The
    ranks share the problems, and all of them return the whole result. For a given
    seed and number of samples, the noise depends only on the problem. `sampling` has
    further fields of vLLM's SamplingParams. A collective.
    """
    # Every rank has to sample something, because ranks may share an engine, and
    # Rollouts cannot be empty. So a rank without problems of its own repeats the first
    # problem.
    indices = prompts_of_rank(len(dataset.prompts)) or [0]
    rollouts = engine.sample(
        [dataset.prompts[i] for i in indices],
        samples,
        [noise_seed(seed, i, samples) for i in indices],
        **sampling,
    )
    columns = {
        "responses": rollouts.text,
        "rewards": compute_rewards(dataset, indices, rollouts.text),
        "truncated": rollouts.truncated.tolist(),
    }
    own = [
        {name: column[first : first + samples] for name, column in columns.items()}
        for first in range(0, len(rollouts.text), samples)
    ]
    ranks = dist.get_world_size()
    gathered = [None] * ranks
    dist.all_gather_object(gathered, own)
    # Rank r of w has the problems r, r + w, ...
    return [gathered[i % ranks][i // ranks] for i in range(len(dataset.prompts))]


def heldout_accuracy(
    engine: Engine, heldout: Dataset, policy_temperature: float, max_tokens: int
) -> dict[str, float]:
    """Return the shares of problems solved by sampled and by greedy responses.

    Sampled accuracy may rise merely because a policy becomes more certain. Greedy
    accuracy shows whether the policy has learned. Responses are truncated at
    max_tokens. A collective.
    """
    accuracies = {}
    for name, temperature in (("pass@1", policy_temperature), ("greedy", 0.0)):
        results = evaluate(
            engine, heldout, temperature=temperature, max_tokens=max_tokens
        )
        accuracies[f"heldout_{name}"] = np.mean(
            [result["rewards"] == [1.0] for result in results]
        )
    return accuracies


def load_benchmarks(cfg: EvalConfig) -> dict[str, Dataset]:
    """Return the problems of each task.

    Raises Refused if out_dir, the model or a task cannot be used.
    """
    check_free(cfg.out_dir)
    tokenizer, context_length = check_model(cfg.model, cfg.rollout_tp)
    benchmarks = {}
    for task in cfg.task:
        benchmarks[task] = load_split(
            task,
            tokenizer,
            cfg.split,
            limit=cfg.limit,
            room=context_length - cfg.max_response_tokens,
            drop_long=cfg.drop_long,
            verifier=cfg.verifier,
        )
        check_verifier(benchmarks[task])
    return benchmarks


def main() -> None:
    cfg = EvalConfig.from_flags()
    # The user's input is checked before anything slow is built.
    benchmarks = load_benchmarks(cfg)
    out = Path(cfg.out_dir or time.strftime(f"runs/eval-%Y%m%d-%H%M%S-{os.getpid()}"))
    init_distributed()
    check_same_on_ranks(cfg, benchmarks)
    is_first = dist.get_rank() == 0
    if is_first:
        take_folder(out, cfg)
    longest_prompt = max(
        len(prompt) for dataset in benchmarks.values() for prompt in dataset.prompts
    )
    engine = Engine(
        cfg.model,
        longest_prompt + cfg.max_response_tokens,
        tp=cfg.rollout_tp,
        dtype=cfg.dtype,
        kv_cache_gb=cfg.kv_cache_gb,
        max_num_seqs=cfg.max_num_seqs,
        verbose=cfg.verbose,
    )
    engine.show_progress = is_first
    correct = {}
    for task, dataset in benchmarks.items():
        results = evaluate(
            engine,
            dataset,
            samples=cfg.samples,
            seed=cfg.seed,
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            max_tokens=cfg.max_response_tokens,
        )
        correct[task] = [each["rewards"].count(1.0) for each in results]
        if is_first:
            write_samples(out, task, dataset, results)
    if is_first:
        estimates = estimate(correct, cfg.samples)
        path = out / "results.json"
        path.write_text(json.dumps({"pass@k": estimates, "correct": correct}, indent=1))
        for task, by_k in estimates.items():
            for k, passed in by_k.items():
                low, high = passed["interval"]
                print(f"{task}: pass@{k} {passed['value']:.3f} [{low:.3f}, {high:.3f}]")
        print(
            f"{path} has the number of correct responses to each problem, and "
            "samples.jsonl has all responses"
        )


def write_samples(
    out: Path, task: str, dataset: Dataset, results: list[dict[str, list]]
) -> None:
    """Append the results of `evaluate` to samples.jsonl, and print two percentages.

    They say how many of the responses were truncated, and how many lack the mark that
    the verifier expects. They are printed before the intervals, which take a while to
    compute.
    """
    for problem, result in zip(dataset.problems, results, strict=True):
        append_row(out / "samples.jsonl", {"task": task, **problem, **result})
    truncated = np.mean([result["truncated"] for result in results])
    unmarked = np.mean(
        [dataset.is_unmarked(text) for each in results for text in each["responses"]]
    )
    print(
        f"{task}: {truncated:.0%} of the responses are cut at max_response_tokens, and "
        f"{unmarked:.0%} lack a \\boxed{{}} or #### that the verifier needs"
    )


if __name__ == "__main__":
    run_script(main)
