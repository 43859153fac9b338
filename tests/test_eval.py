"""pass@k against every possible draw; evaluation on a real engine, as a function and a script."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from config import load_model_files, load_prompts
from eval import evaluate, pass_at_k
from reward import score

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "n, c, k", [(5, 2, 1), (5, 2, 3), (6, 1, 6), (4, 0, 2), (4, 4, 1), (8, 3, 4)]
)
def test_pass_at_k_is_the_share_of_the_draws_of_k_samples_with_a_right_one(n, c, k):
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_1_is_the_share_of_right_samples_and_is_not_1_minus_the_power_of_the_others():
    assert pass_at_k(8, 2, 1) == 2 / 8
    # (1 - 2/8)^4 = 0.316 would be biased: without replacement it is C(6, 4) / C(8, 4) = 15/70.
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - 15 / 70)


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(n, c, k)


def test_evaluate_counts_the_right_samples_of_each_problem(engine, policy):
    problems, prompts = load_prompts("tiny", "heldout", load_model_files("tiny")[0], room=64)
    correct = evaluate(engine, problems[:64], prompts[:64], "exact", samples=4, max_tokens=64)
    assert len(correct) == 64 and set(correct) <= set(range(5))
    # The embedded policy solves about half: standard error sqrt(0.25 / 64) = 0.06 at most.
    assert 0.3 < sum(correct) / 256 < 0.8
    again = evaluate(engine, problems[:64], prompts[:64], "exact", samples=4, max_tokens=64)
    assert correct == again  # the noise is a function of the seed and the problem
    other = evaluate(engine, problems[:64], prompts[:64], "exact", samples=4, seed=1, max_tokens=64)
    assert correct != other


def test_over_long_prompts_are_refused_or_dropped_and_counted(capsys):
    tokenizer, _ = load_model_files("tiny")
    # "478+805" is 9 tokens with <bos> and ':'; four digits make 11.
    with pytest.raises(ValueError, match="of 512 heldout prompts of tiny have over 9 tokens"):
        load_prompts("tiny", "heldout", tokenizer, room=9)
    problems, prompts = load_prompts("tiny", "heldout", tokenizer, room=9, drop=True)
    assert {len(prompt) for prompt in prompts} == {9}
    assert f"dropped: {512 - len(problems)} of 512" in capsys.readouterr().out


def test_greedy_samples_are_scored_as_they_read(engine, policy):
    problems, prompts = load_prompts("tiny", "heldout", load_model_files("tiny")[0], room=64)
    texts = engine.sample(prompts[:32], 1, [0] * 32, temperature=0, max_tokens=64).text
    right = [text.split()[-1] == p["answer"] for text, p in zip(texts, problems, strict=False)]
    assert score(texts, [p["answer"] for p in problems[:32]], "exact") == right


def test_eval_as_a_script_prints_a_table_and_writes_its_settings_and_counts(tmp_path):
    out = tmp_path / "eval.json"
    command = [sys.executable, ROOT / "eval.py", "--samples=4", "--limit=32", f"--out={out}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    assert len(result["correct"]) == 32 and result["temperature"] == 1.0
    expected = sum(c / 4 for c in result["correct"]) / 32
    assert result["pass@k"]["1"] == pytest.approx(expected)
    assert f"pass@1     {expected:.4f}" in done.stdout and "pass@4" in done.stdout
