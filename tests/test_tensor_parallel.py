"""Ranks that share an engine, and nodes: whole runs do what one rank alone does, to rounding.

In bfloat16 a sum over ranks rounds differently, which flips single samples: hence float32.
"""

import json
from pathlib import Path

import pytest
import torch
from conftest import TWO_STEPS
from test_train import metrics, on_nodes, torchrun
from transformers import AutoModelForCausalLM, AutoTokenizer

from config import Config, EvalConfig, Refused, check_config, load_evaluation, load_model_files


def assert_same_run(found, expected):
    assert found[0]["heldout_pass@1"] == expected[0]["heldout_pass@1"]
    # One answer of 31 may be another: two updates were rounded in another order.
    assert found[-1]["heldout_pass@1"] == pytest.approx(expected[-1]["heldout_pass@1"], abs=0.04)
    for a, b in zip(found[1:], expected[1:], strict=True):
        for name in "reward", "response_tokens", "groups_with_signal":
            assert a[name] == pytest.approx(b[name], rel=1e-6)
        for name in "ess", "grad_norm", "entropy":
            assert a[name] == pytest.approx(b[name], rel=1e-3)
        # Each part of the engine has its part of the new weights: log pi_b is that of the trainer.
        assert a["mismatch_max"] < 1e-3


def test_two_ranks_that_share_an_engine_do_what_one_rank_does(one_rank, tmp_path):
    torchrun(2, "train.py", *TWO_STEPS, "--rollout_tp=2", f"--out_dir={tmp_path / 'two'}")
    assert_same_run(metrics(tmp_path / "two"), one_rank)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The tiny policy with 200 tokens, the added ones as improbable as padding: 20 would all be in
    the first rank's part of the embedding and of the head."""
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
    # Sharded within a node, replicated across (HSDP); an engine a node, split over its two ranks.
    flags = [*TWO_STEPS, f"--model={wide}"]
    one = train_here(*flags)
    on_nodes(2, 2, "train.py", *flags, "--rollout_tp=2", f"--out_dir={tmp_path / 'four'}")
    assert_same_run(metrics(tmp_path / "four"), one)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "four/model").vocab_size == 200


@pytest.mark.slow
def test_an_evaluation_by_four_ranks_that_share_an_engine_counts_what_one_rank_counts(
    wide, tmp_path
):
    # Six problems on four ranks, then two: two ranks without one have to take part.
    flags = [f"--model={wide}", "--limit=6", "--samples=4", "--chunk_responses=4"]
    for ranks in 1, 4:
        out = f"--out_dir={tmp_path / str(ranks)}"
        torchrun(ranks, "eval.py", *flags, f"--rollout_tp={ranks}", out)
    one, four = (json.loads(Path(tmp_path, n, "results.json").read_text()) for n in "14")
    assert one["correct"] == four["correct"] and one["pass@k"] == four["pass@k"]


def test_ranks_that_cannot_share_an_engine_are_refused_in_a_sentence(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(Refused, match="rollout_tp is 4: it has to divide a node's 2 ranks"):
        check_config(Config(rollout_tp=4))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(Refused, match="rollout_tp is 3, which does not divide the 4 attention hea"):
        load_evaluation(EvalConfig(rollout_tp=3))
    assert load_model_files("tiny", tp=4)[1] == 128
