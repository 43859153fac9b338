"""Ranks that share an engine, and nodes: whole runs do what one rank alone does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TWO_STEPS
from launch import read_metrics, torchrun, torchrun_on_nodes
from transformers import AutoModelForCausalLM, AutoTokenizer


def assert_same_run(
    rows: list[dict[str, Any]], expected_rows: list[dict[str, Any]]
) -> None:
    """Two runs' lines of metrics say the same, to rounding."""
    for name in "heldout_pass@1", "heldout_greedy":
        assert rows[0][name] == expected_rows[0][name]
        # One answer of 31 may be another after two updates that were rounded in another
        # order.
        assert abs(rows[-1][name] - expected_rows[-1][name]) < 1.1 / 31
    for row, expected in zip(rows[1:], expected_rows[1:], strict=True):
        # Each rank has the responses to its own prompts: those to others have reward 0.
        for name in "reward", "response_tokens", "groups_with_signal":
            assert row[name] == pytest.approx(expected[name], rel=1e-6)
        for name in "ess", "grad_norm", "entropy":
            assert row[name] == pytest.approx(expected[name], rel=1e-3)
        # Each part of the engine has its part of the new weights: log pi_b is that of
        # the trainer.
        assert row["mismatch_mean"] < 1e-6


@pytest.mark.slow
def test_two_ranks_that_share_an_engine_do_what_one_rank_does(one_rank, tmp_path):
    torchrun(2, "train.py", *TWO_STEPS, "--rollout_tp=2", f"--out_dir={tmp_path}/two")
    assert_same_run(read_metrics(tmp_path / "two"), one_rank)


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
