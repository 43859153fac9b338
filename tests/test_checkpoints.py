"""Checkpoints, the log and the model: whole on the disk, whenever a save ends."""

import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import support.checkpoints
from policy import build_policy, full_weights
from support.checkpoints import (
    load_checkpoint,
    make_out_dir,
    save_checkpoint,
    save_model,
    take_folder,
)
from support.command import Refused, Stopped
from support.config import Config
from support.log import append_row, keep_steps


def names(out: Path) -> list[str]:
    """What there is in its folder of checkpoints."""
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture
def trained(group):
    """A policy and its optimizer after one step, and what sets all of its weights."""
    policy = build_policy("tiny", group)
    optimizer = torch.optim.AdamW(policy.parameters())
    for weight in policy.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()

    def set_weights(value: float) -> None:
        for weight in policy.parameters():
            torch.nn.init.constant_(weight, value)

    return policy, optimizer, set_weights


def loaded_step(out: Path, policy: Any, optimizer: Any) -> int:
    """The step of the newest checkpoint; all weights are equal to it, as saved."""
    step, _, _ = load_checkpoint(out, policy, optimizer)
    for weight in policy.parameters():
        assert (weight.full_tensor() == step).all()
    return step


def test_the_newest_two_checkpoints_stay(trained, tmp_path):
    policy, optimizer, set_weights = trained
    for step in 8, 9, 10:
        set_weights(step)
        save_checkpoint(tmp_path, step, policy, optimizer, [], {})
    assert names(tmp_path) == ["step-000009", "step-000010"]
    assert loaded_step(tmp_path, policy, optimizer) == 10


# A save clears what another left unfinished, writes weights and rollouts, waits for all
# ranks, gives the folder its name (the first rename is that of its index), takes the
# oldest one's away, and deletes that.
@pytest.mark.parametrize(
    "owner, name, call, newest",
    [
        (shutil, "rmtree", 1, 2),
        (dcp, "save", 1, 2),
        (dist, "barrier", 2, 2),
        (Path, "rename", 2, 2),
        (Path, "rename", 3, 3),
        (shutil, "rmtree", 2, 3),
    ],
)
def test_a_save_may_end_between_any_two_of_its_writes_and_the_next_one_works(
    owner, name, call, newest, trained, tmp_path, monkeypatch
):
    policy, optimizer, set_weights = trained
    for step in 1, 2:
        set_weights(step)
        save_checkpoint(tmp_path, step, policy, optimizer, [], {})
    (tmp_path / "checkpoints/unfinished").mkdir()  # of an earlier kill
    original, calls = getattr(owner, name), []

    def ends_here(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    set_weights(3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, ends_here)
        save_checkpoint(tmp_path, 3, policy, optimizer, [], {})
    assert loaded_step(tmp_path, policy, optimizer) == newest
    set_weights(4)
    save_checkpoint(tmp_path, 4, policy, optimizer, [], {})
    assert names(tmp_path)[-1] == "step-000004"
    assert loaded_step(tmp_path, policy, optimizer) == 4


def test_moments_metrics_and_waiting_rollouts_come_back_bit_for_bit(
    trained, engine, policy, prompts, tmp_path
):
    sharded, optimizer, _ = trained
    rollouts = engine.sample(prompts[:3], 2, [10, 20, 30], max_tokens=64)
    metrics = {"step": 1, "weight_version": "0", "reward": 0.1}
    save_checkpoint(tmp_path, 1, sharded, optimizer, [rollouts], metrics)
    moments = [state["exp_avg_sq"].clone() for state in optimizer.state.values()]
    optimizer.step()
    step, restored, [waiting] = load_checkpoint(tmp_path, sharded, optimizer)
    assert (step, restored) == (1, metrics)
    for state, expected in zip(optimizer.state.values(), moments, strict=True):
        assert torch.equal(state["exp_avg_sq"].full_tensor(), expected.full_tensor())
    for name, value in vars(rollouts).items():
        same = torch.equal if isinstance(value, torch.Tensor) else type(value).__eq__
        assert value is waiting[name] or same(value, waiting[name]), name


# Disks that are full, files that are broken


MEGABYTE = 10**6


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Within, this process can write no larger file: what a full disk is like."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# A checkpoint of tiny has 7.7 MB: 0.64 million weights, twice as many moments, of 4
# bytes each. The rollouts that wait have a file of their own.
@pytest.mark.parametrize(
    "limit, waiting", [(4, 0), (12, 20)], ids=["weights", "waiting"]
)
def test_a_checkpoint_that_cannot_be_written_is_a_sentence_and_the_others_stay_whole(
    limit,
    waiting,
    trained,
    tmp_path,
):
    policy, optimizer, set_weights = trained
    set_weights(1)
    save_checkpoint(tmp_path, 1, policy, optimizer, [], {})
    set_weights(2)
    rollouts = SimpleNamespace(tokens=torch.zeros(waiting * MEGABYTE // 4))
    with files_of_at_most(limit * MEGABYTE), pytest.raises(Stopped) as refused:
        save_checkpoint(tmp_path, 2, policy, optimizer, [rollouts], {})
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.startswith("step 2: the checkpoint cannot be written to ")
    assert loaded_step(tmp_path, policy, optimizer) == 1
    save_checkpoint(tmp_path, 2, policy, optimizer, [], {})
    assert names(tmp_path) == ["step-000001", "step-000002"]


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("damage", [cut, Path.unlink])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "rank-0.pt"])
def test_a_checkpoint_that_cannot_be_read_is_refused_and_the_one_before_can_be(
    name,
    damage,
    trained,
    tmp_path,
):
    policy, optimizer, set_weights = trained
    for step in 1, 2:
        set_weights(step)
        save_checkpoint(tmp_path, step, policy, optimizer, [], {})
    newest = tmp_path / "checkpoints/step-000002"
    damage(newest / name)
    with pytest.raises(Refused) as refused:
        load_checkpoint(tmp_path, policy, optimizer)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.startswith(f"--resume: {newest} cannot be read: ")
    assert sentence.endswith("remove it to go on from the one before")
    newest.rename(tmp_path / "removed")
    assert loaded_step(tmp_path, policy, optimizer) == 1


def test_a_log_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(" " * 1000)
    with files_of_at_most(1000), pytest.raises(Stopped, match="cannot be written: "):
        append_row(tmp_path / "metrics.jsonl", {"step": 1})


def test_a_model_that_cannot_be_written_is_a_sentence_and_leaves_no_model(
    group, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained("tiny")
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    weights = model.state_dict().items()
    with files_of_at_most(MEGABYTE), pytest.raises(Stopped) as refused:
        save_model(model, weights, tokenizer, tmp_path / "model")
    sentence = str(refused.value)
    assert sentence.startswith(f"the model cannot be written to {tmp_path}/model: ")
    assert "\n" not in sentence
    assert not (tmp_path / "model").exists()


def test_a_model_that_came_with_a_temperature_can_be_written(group, tmp_path):
    model = AutoModelForCausalLM.from_pretrained("tiny")
    model.generation_config.temperature = 0.9  # without do_sample, as Vicuna's
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    save_model(model, model.state_dict().items(), tokenizer, tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert saved.generation_config.do_sample


def test_a_model_has_the_dtype_that_came_in_its_tied_head_once_and_ordinary_modes(
    group, tmp_path
):
    folder = tmp_path / "bfloat16"
    model = AutoModelForCausalLM.from_pretrained("tiny", dtype="bfloat16")
    model.save_pretrained(folder)
    policy = build_policy(str(folder), group)  # which has float32
    tokenizer, saved = AutoTokenizer.from_pretrained("tiny"), tmp_path / "model"
    save_model(policy.model, full_weights(policy), tokenizer, saved)
    weights = load_file(saved / "model.safetensors")
    # bfloat16 numbers are the same ones after float32.
    expected = load_file(folder / "model.safetensors")
    assert sorted(weights) == sorted(expected)
    assert "lm_head.weight" not in weights
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name
    assert AutoConfig.from_pretrained(saved).dtype == torch.bfloat16
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1


def test_a_folder_in_which_another_run_is_at_work_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    # Another process has the lock until it ends.
    code = "import fcntl; file = open('config.json', 'r+')\n"
    code += "fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as other:
        other.stdout.readline()
        with pytest.raises(Refused, match="another run is at work there"):
            take_folder(tmp_path)
        other.kill()
    take_folder(tmp_path)


def test_lines_of_steps_after_the_checkpoint_and_a_torn_one_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew')
    keep_steps(path, done=2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_folder_that_a_node_does_not_see_is_refused(group, tmp_path, monkeypatch):
    monkeypatch.setattr(support.checkpoints, "SECONDS_UNSEEN", 1)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)  # rank 0 makes it elsewhere
    with pytest.raises(
        Refused, match="run is not on .*: give a folder on a file system"
    ):
        make_out_dir(Config(out_dir=str(tmp_path / "run")))
