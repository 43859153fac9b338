"""Test pass@k against every possible draw, its intervals, and the script eval.py."""

import itertools
import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import refusal_of
from launch import torchrun

import eval
import train
from eval import EvalConfig, estimate, load_benchmarks, pass_at_k
from reward import score
from rollout import Engine, noise_seed

# pass@k


@pytest.mark.parametrize(
    "n, c, k", [(5, 2, 1), (5, 2, 3), (6, 1, 6), (4, 0, 2), (4, 4, 1), (8, 2, 4)]
)
def test_pass_at_k_is_the_share_of_the_draws_of_k_samples_with_a_right_one(n, c, k):
    # Of 8 samples with 2 right ones C(6, 4) / C(8, 4) = 15/70 of the draws of 4 have
    # none. With replacement it would be (1 - 2/8)^4 = 0.316, which is biased.
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    with_a_right_one = sum(any(draw) for draw in draws)
    assert pass_at_k(n, c, k) == pytest.approx(with_a_right_one / len(draws), abs=1e-12)


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(n, c, k)


# Intervals


@pytest.mark.parametrize(
    "counts, n, interval, tolerance",
    [
        # 300 of 1000 problems are right. The standard error is
        # sqrt(0.3 * 0.7 / 1000) = 0.01449. Quantiles of 9,999 resamples have a standard
        # error of 0.027 standard errors, 0.0004.
        ([1] * 300 + [0] * 700, 1, [0.3 - 0.0284, 0.3 + 0.0284], 0.0015),
        # Half of 400 problems are always right, half never. The 8 samples of a problem
        # say the same: the standard error is sqrt(0.25 / 400) = 0.025, and not that of
        # 3200 samples, 0.0088.
        ([8] * 200 + [0] * 200, 8, [0.451, 0.549], 0.003),
        # With the two added problems, 1 of 32 is solved. A resample of 32 has none with
        # probability (31/32)^32 = 0.36, and at most 3 with probability 0.98.
        ([0] * 30, 4, [0, 3 / 32], 1e-9),
        ([4] * 30, 4, [29 / 32, 1], 1e-9),
        # A single problem tells nothing about others: 1 in 27 resamples of the three
        # problems is all 0, and 1 in 27 is all 1.
        ([1], 4, [0, 1], 0),
    ],
    ids=["shares", "whole problems", "none", "all", "a single problem"],
)
def test_an_interval_tells_how_sure_the_problems_make_us_and_not_the_samples(
    counts, n, interval, tolerance
):
    by_k = estimate({"task": counts}, n)["task"]
    assert list(by_k) == [str(k) for k in (1, 2, 4, 8) if k <= n]
    for estimated in by_k.values():
        assert estimated["interval"] == pytest.approx(interval, abs=tolerance)
    right = sum(counts) / n / len(counts)
    assert by_k["1"]["value"] == pytest.approx(right, abs=1e-12)


@pytest.mark.parametrize("problems, share", [(10, 0.1), (30, 0.9), (30, 0.4)])
def test_an_interval_contains_the_true_share_in_about_95_percent_of_all_cases(
    problems, share
):
    # Without the two added problems it would be 0.65 of the cases for 10 and 0.1.
    covered = 0.0
    for solved in range(problems + 1):
        counts = [1] * solved + [0] * (problems - solved)
        low, high = estimate({"task": counts}, 1)["task"]["1"]["interval"]
        if low <= share <= high:
            chance = math.comb(problems, solved) * share**solved
            covered += chance * (1 - share) ** (problems - solved)
    assert 0.92 < covered < 0.995


# On the engine


def evaluate_here(run_here: Any, out: Path, *flags: str) -> dict[str, Any]:
    """Run eval.py with these flags on one rank; return its results.json."""
    run_here(eval, f"--out_dir={out}", *flags)
    return json.loads((out / "results.json").read_text())


def test_the_script_samples_as_its_flags_say_and_writes_counts_and_pass_at_k(
    run_here, tmp_path, asked, prompts, capsys, monkeypatch
):
    own = tmp_path / "sums"
    shutil.copytree("tiny", own, ignore=shutil.ignore_patterns("*.safetensors"))
    lines = (own / "heldout.jsonl").read_text().splitlines()
    (own / "heldout.jsonl").write_text("\n".join(lines[100:109]))
    # People who use vLLM on a CPU export it. Here the field decides.
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4000")
    flags = "--samples=3 --limit=20 --temperature=0.7 --top_p=0.9 --seed=4"
    flags = f"--task=tiny,{own}", "--max_response_tokens=50", *flags.split()
    result = evaluate_here(run_here, tmp_path / "out", *flags)
    assert json.loads((tmp_path / "out/config.json").read_text())["limit"] == 20
    sampling = {"n": 3, "temperature": 0.7, "top_p": 0.9, "max_tokens": 50}
    counts = list(result["correct"].values())
    expected = prompts[:20], prompts[100:109]
    for call, correct, task_prompts in zip(asked, counts, expected, strict=True):
        assert call.pop("prompts") == task_prompts
        assert len(correct) == len(task_prompts)
        seeds = [noise_seed(4, problem, 3) for problem in range(len(task_prompts))]
        assert call == sampling | {"seeds": seeds}
    assert result["pass@k"] == estimate(result["correct"], 3)
    printed = capsys.readouterr().out
    assert f"tiny: pass@1 {result['pass@k']['tiny']['1']['value']:.3f} [" in printed
    samples = [json.loads(line) for line in open(tmp_path / "out/samples.jsonl")]
    assert [sample["rewards"].count(1.0) for sample in samples] == sum(counts, [])
    for sample in samples:
        rewards = score(sample["responses"], [sample["answer"]] * 3, "exact")
        assert rewards == sample["rewards"]
    cut = statistics.mean(cut for sample in samples[:20] for cut in sample["truncated"])
    # The verifier of tiny expects no mark.
    shares = f"tiny: {cut:.0%} of the responses are cut at max_response_tokens, and 0%"
    assert f"{shares} lack a \\boxed{{}} or #### that the verifier needs\n" in printed


def test_an_answer_that_is_marked_nowhere_is_counted_and_rewards_outlast_the_intervals(
    run_here, tmp_path, capsys, monkeypatch
):
    (tmp_path / "t.jsonl").write_text('{"prompt": "1+2", "answer": "3"}\n')
    (tmp_path / "task.json").write_text('{"instruction": null}')
    monkeypatch.setattr(eval, "estimate", Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        evaluate_here(run_here, tmp_path / "out", f"--task={tmp_path / 't.jsonl'}")
    # tiny ends with only the sum.
    assert "100% lack a \\boxed{} or #### that" in capsys.readouterr().out
    [sample] = map(json.loads, open(tmp_path / "out/samples.jsonl"))
    assert (sample["rewards"], sample["truncated"]) == ([0.0], [False])


@pytest.mark.parametrize("script", [train, eval])
def test_an_out_dir_is_checked_before_an_engine_is_built_and_a_failed_start_is_no_run(
    script, run_here, tmp_path, monkeypatch
):
    monkeypatch.setattr(Engine, "__init__", dict)  # which cannot build one
    with pytest.raises(OSError, match="Not a directory: .*README.md/run"):
        run_here(script, "--out_dir=README.md/run")
    for _ in range(2):  # an empty folder, and one with a config.json
        with pytest.raises(TypeError):
            run_here(script, f"--out_dir={tmp_path}")
    (tmp_path / "config.json").write_text("{}")  # of another program
    assert "exists: choose" in refusal_of(script, f"--out_dir={tmp_path}")


def test_the_engine_has_the_settings_of_the_evaluation(
    run_here, tmp_path, prompts, monkeypatch
):
    def build(engine, *given, **options):
        raise LookupError(*given, options)

    monkeypatch.setattr(Engine, "__init__", build)
    settings = {"dtype": "bfloat16", "kv_cache_gb": 0.05, "max_num_seqs": 9}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    with pytest.raises(LookupError) as given:
        run_here(eval, f"--out_dir={tmp_path / 'out'}", "--verbose", *flags)
    longest = max(map(len, prompts)) + 64  # max_response_tokens
    assert given.value.args == ("tiny", longest, settings | {"tp": 1, "verbose": True})


def test_prompts_without_room_for_a_response_can_be_left_out():
    # The context is 128, and 236 of the 512 problems have at most 9 tokens.
    benchmarks = load_benchmarks(EvalConfig(max_response_tokens=119, drop_long=True))
    assert len(benchmarks["tiny"].prompts) == 236


@pytest.mark.slow
def test_two_ranks_count_what_one_rank_counts_with_an_engine_each_or_a_shared_one(
    run_here, tmp_path
):
    # Of a single problem the second rank has none, and has to take part.
    for limit in 7, 1:
        flags = ["--samples=4", f"--limit={limit}"]
        one = evaluate_here(run_here, tmp_path / f"one-{limit}", *flags)
        for tp in 1, 2:
            out = tmp_path / f"two-{limit}-{tp}"
            more = [f"--rollout_tp={tp}", f"--out_dir={out}"]
            torchrun(2, "eval.py", *flags, *more)
            two = json.loads((out / "results.json").read_text())
            assert two["correct"] == one["correct"]
            assert two["pass@k"] == one["pass@k"]


# What the user can get wrong


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("--task=math500 --split=train", "the task 'math500' has no split 'train'"),
        ("--temperature=2.5", "temperature is '2.5'"),
        ("--temperature=0 --samples=4", "at temperature 0 all samples are equal: give"),
        # "478+805" is 9 tokens with <bos> and ':'; four digits make 11. The context
        # is 128.
        ("--max_response_tokens=119", "heldout prompts of tiny have over 9 tokens"),
        ("--out_dir=tests", "out_dir tests exists"),
    ],
)
def test_bad_input_is_one_sentence_before_an_engine_is_built(flags, sentence):
    assert sentence in refusal_of(eval, *flags.split())
