"""Ranks that share an engine, and nodes: whole runs do what one rank alone does."""

from pathlib import Path

import pytest
import torch
from conftest import TWO_STEPS
from launch import assert_same_metrics, read_metrics, torchrun, torchrun_on_nodes
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.slow
def test_two_ranks_that_share_an_engine_do_what_one_rank_does(train_here, tmp_path):
    torchrun(2, "train.py", *TWO_STEPS, "--rollout_tp=2", f"--out_dir={tmp_path}/two")
    assert_same_metrics(read_metrics(tmp_path / "two"), train_here(*TWO_STEPS))


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
    assert_same_metrics(read_metrics(out), one)
    assert AutoModelForCausalLM.from_pretrained(out / "model").vocab_size == 200
