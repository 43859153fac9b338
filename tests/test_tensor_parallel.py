"""Test that whole runs on several ranks and nodes do what one rank does."""

from pathlib import Path

import pytest
import torch
from conftest import TWO_STEPS
from launch import assert_same_metrics, read_metrics, torchrun, torchrun_on_nodes
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.mark.slow
@pytest.mark.parametrize("ranks_per_engine", [1, 2])
def test_two_ranks_do_what_one_rank_does(ranks_per_engine, train_here, tmp_path):
    tp = f"--rollout_tp={ranks_per_engine}"
    torchrun(2, "train.py", *TWO_STEPS, tp, f"--out_dir={tmp_path}/two")
    assert_same_metrics(read_metrics(tmp_path / "two"), train_here(*TWO_STEPS))


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """Return tiny with 200 tokens. The added ones are as improbable as padding.

    With only its own 20 tokens, the first rank would hold the whole head.
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
    # The weights are sharded within a node and replicated across nodes (HSDP). Each
    # node has one engine, which its two ranks share.
    flags = [*TWO_STEPS, f"--model={wide}"]
    one = train_here(*flags)
    out = tmp_path / "four"
    torchrun_on_nodes(2, 2, "train.py", *flags, "--rollout_tp=2", f"--out_dir={out}")
    assert_same_metrics(read_metrics(out), one)
    assert AutoModelForCausalLM.from_pretrained(out / "model").vocab_size == 200
