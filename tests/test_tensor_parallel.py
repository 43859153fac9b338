"""Ranks that share an engine, and nodes: whole runs do what one rank alone does.

To rounding: in bfloat16 a sum over ranks rounds differently, which flips single
samples. Hence float32.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TWO_STEPS
from launch import read_metrics, torchrun, torchrun_on_nodes
from transformers import AutoModelForCausalLM, AutoTokenizer

from eval import EvalConfig, load_benchmarks
from loss import KL_ESTIMATORS, OBJECTIVES
from support.checks import check_run
from support.flags import Refused
from support.prompts import check_model
from train import Config


def assert_same_run(
    rows: list[dict[str, Any]], expected_rows: list[dict[str, Any]]
) -> None:
    """Two runs' lines of metrics say the same."""
    for name in "heldout_pass@1", "heldout_greedy":
        before, expected_before = rows[0][name], expected_rows[0][name]
        assert before == expected_before
        # One answer of 31 may be another after two updates that were rounded in another
        # order.
        after, expected_after = rows[-1][name], expected_rows[-1][name]
        assert after == pytest.approx(expected_after, abs=1.1 / 31)
    for row, expected in zip(rows[1:], expected_rows[1:], strict=True):
        for name in "reward", "response_tokens", "groups_with_signal":
            assert row[name] == pytest.approx(expected[name], rel=1e-6)
        for name in "ess", "grad_norm", "entropy":
            assert row[name] == pytest.approx(expected[name], rel=1e-3)
        # Each part of the engine has its part of the new weights: log pi_b is that of
        # the trainer.
        assert row["mismatch_max"] < 1e-3


def test_two_ranks_that_share_an_engine_do_what_one_rank_does(one_rank, tmp_path):
    out = tmp_path / "two"
    torchrun(2, "train.py", *TWO_STEPS, "--rollout_tp=2", f"--out_dir={out}")
    assert_same_run(read_metrics(out), one_rank)


@pytest.mark.slow
def test_rollout_tp_is_the_number_of_ranks_that_share_an_engine():
    # Ranks with an engine each would do what one rank does just as well.
    for rollout_tp in 1, 2:
        printed = torchrun(2, "tests/shared_engine_on_ranks.py", str(rollout_tp))
        assert json.loads(printed.splitlines()[-1]) == [rollout_tp, rollout_tp]


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """The tiny policy with 200 tokens, the added ones as improbable as padding.

    Its own 20 would all be in the first rank's part of the embedding and of the head.
    """
    folder = tmp_path_factory.mktemp("wide")
    model = AutoModelForCausalLM.from_pretrained("tiny")
    padding = model.get_input_embeddings().weight[0].detach().clone()
    model.resize_token_embeddings(200, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[20:] = padding
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained("tiny").save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_two_nodes_of_two_ranks_that_share_an_engine_do_what_one_rank_does(
    wide, train_here, tmp_path
):
    # The weights are sharded within a node and replicated across (HSDP). Each node has
    # an engine, split over its two ranks.
    flags = [*TWO_STEPS, f"--model={wide}"]
    one = train_here(*flags)
    out = tmp_path / "four"
    torchrun_on_nodes(2, 2, "train.py", *flags, "--rollout_tp=2", f"--out_dir={out}")
    assert_same_run(read_metrics(out), one)
    assert AutoModelForCausalLM.from_pretrained(out / "model").vocab_size == 200


@pytest.mark.slow
def test_an_evaluation_by_four_ranks_that_share_an_engine_counts_what_one_rank_counts(
    wide, tmp_path
):
    # Six problems on four ranks, then two: two ranks without one have to take part.
    flags = [f"--model={wide}", "--limit=6", "--samples=4", "--chunk_responses=4"]
    results = {}
    for ranks in 1, 4:
        out = tmp_path / str(ranks)
        torchrun(ranks, "eval.py", *flags, f"--rollout_tp={ranks}", f"--out_dir={out}")
        results[ranks] = json.loads((out / "results.json").read_text())
    assert results[4]["correct"] == results[1]["correct"]
    assert results[4]["pass@k"] == results[1]["pass@k"]


def test_a_node_whose_ranks_cannot_be_divided_among_engines_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    sentence = "rollout_tp is 4: it has to divide the 2 ranks of a node"
    with pytest.raises(Refused, match=sentence):
        check_run(Config(rollout_tp=4), OBJECTIVES["p3o"], KL_ESTIMATORS)
    with pytest.raises(Refused, match=sentence):
        load_benchmarks(EvalConfig(rollout_tp=4))


def test_a_model_whose_attention_heads_cannot_be_divided_is_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    sentence = "rollout_tp is 3, which does not divide tiny's 4 attention heads"
    with pytest.raises(Refused, match=sentence):
        load_benchmarks(EvalConfig(rollout_tp=3))
    check_model("tiny", tp=4)
