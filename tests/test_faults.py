"""What can go wrong under a run, and what becomes of it each time.

It goes on and counts it, or it stops and says why, with nothing lost that was saved.
The fault is put into one place of a run that is real in all others.
"""

import json
import math
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from launch import read_metrics
from safetensors.torch import load_file
from test_resume import metrics, names, trainer_state

import train
from policy import build_policy
from reward import load_task, score
from rollout import Rollouts
from support.checkpoints import (
    NotSaved,
    checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from support.checks import check_out_dir, claim_folder
from support.flags import OneRankFailed, Refused
from support.log import ACCURACIES, Log
from train import Config

SHORT = ["--prompts_per_step=4", "--group_size=2", "--eval_problems=8"]
# A checkpoint of tiny: 0.64M weights and twice as many moments, of 4 bytes, are 7.7 MB.
CHECKPOINT = 7_700_000


@pytest.fixture(scope="module")
def left_alone(train_here, tmp_path_factory) -> Path:
    """A run of four steps with checkpoints of the last two."""
    out = tmp_path_factory.mktemp("alone") / "run"
    train_here(*SHORT, "--steps=4", "--save_every=1", out_dir=out)
    return out


# A full disk


@pytest.fixture
def disk(tmp_path) -> Iterator[Callable[[int], Path]]:
    """Gives a folder on a file system of so many bytes, or the same one with more."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def of_size(size: int) -> Path:
        how = f"size={size}"
        if folder.is_mount():
            how = f"remount,{how}"
        # Only root may mount one, and not in every container. Without one there is no
        # small disk to fill, and filling a real one would harm what else runs here.
        command = ["mount", "-t", "tmpfs", "-o", how, "tmpfs", folder]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            pytest.skip(f"no tmpfs can be mounted here: {error}")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no tmpfs can be mounted here: {error.stderr.strip()}")
        return folder

    yield of_size
    if folder.is_mount():
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_is_full_at_a_checkpoint_stops_the_run_and_costs_none_before_it(
    disk, train_here, left_alone
):
    # Two are kept, and a third is there for a moment.
    out = disk(int(2.5 * CHECKPOINT)) / "run"
    flags = [*SHORT, "--steps=4", "--save_every=1"]
    with pytest.raises(NotSaved) as refused:
        train_here(*flags, out_dir=out)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.startswith("the checkpoint of step 3 cannot be written: ")
    assert sentence.endswith(
        f"the newest complete one is {out}/checkpoints/step-000002"
    )
    # Nothing is left of the third, which would fill the disk.
    assert names(out) == ["step-000001", "step-000002"]
    disk(5 * CHECKPOINT)
    train_here(*flags, "--resume", out_dir=out)
    assert metrics(out) == metrics(left_alone)


def test_a_run_that_is_asked_to_stop_says_so_where_it_cannot_save_its_step(
    disk, train_here, monkeypatch
):
    # It looks for signals before a batch is sampled, and when a step is done.
    signals = iter([0, signal.SIGTERM])
    monkeypatch.setattr(train, "agreed_signal", lambda caught: next(signals))
    out = disk(CHECKPOINT // 2) / "run"
    with pytest.raises(NotSaved) as refused:
        train_here(*SHORT, "--steps=4", out_dir=out)
    sentence = str(refused.value)
    assert sentence.startswith(
        "stopped by signal 15 after step 1: the checkpoint of step 1 cannot be written"
    )
    assert "--resume goes on" not in sentence


def test_a_disk_that_is_full_at_the_model_stops_the_run_before_its_last_line(
    disk, train_here, capsys
):
    out = disk(1_000_000) / "run"
    with pytest.raises(Refused, match="the model cannot be written to .*/run/model"):
        train_here(*SHORT, "--steps=1", out_dir=out)
    # Whoever sees the last line may rely on the model.
    assert [row["step"] for row in metrics(out)] == [0]
    said = capsys.readouterr().err
    assert "the checkpoint of step 1 cannot be written" in said


def test_a_disk_that_is_full_at_a_line_of_metrics_is_one_sentence(disk, group):
    out = disk(100_000)
    log = Log(out, tokenizer=None, group_size=2, report_to="none", config={}, done=0)
    with open(out / "filler", "wb", buffering=0) as filler:
        with pytest.raises(OSError):
            while True:
                filler.write(b"0" * 1000)
    with pytest.raises(
        OneRankFailed, match="metrics.jsonl cannot be written: No space"
    ):
        log.append("metrics.jsonl", {"step": 1})


# A broken checkpoint


@pytest.fixture(scope="module")
def two_checkpoints(group, tmp_path_factory) -> Path:
    """The folder of a run with checkpoints of step 1, all weights 1, and of step 2."""
    out = tmp_path_factory.mktemp("two")
    policy = build_policy("tiny", group)
    for step in 1, 2:
        for weight in policy.parameters():
            torch.nn.init.constant_(weight, step)
        state = (policy, *trainer_state(policy))
        save_checkpoint(out, step, *state, group_size=2, keep=2)
    return out


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("break_file", [cut, empty, Path.unlink])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "progress.pt"])
def test_a_broken_checkpoint_is_refused_and_the_one_before_it_is_offered(
    name, break_file, two_checkpoints, group, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(two_checkpoints, out)
    broken = out / "checkpoints/step-000002"
    break_file(broken / name)
    policy = build_policy("tiny", group)
    state = (policy, *trainer_state(policy))
    with pytest.raises(Refused) as refused:
        load_checkpoint(out, *state, group_size=2, rollouts_type=Rollouts)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.startswith(f"--resume: {broken} cannot be read: ")
    assert sentence.endswith(
        f"the newest complete one is {out}/checkpoints/step-000001: remove step-000002 "
        "to go on from there"
    )
    shutil.rmtree(broken)
    assert load_checkpoint(out, *state, group_size=2, rollouts_type=Rollouts) == 1
    for weight in policy.parameters():
        assert (weight.full_tensor() == 1).all()


def test_a_run_goes_on_from_the_checkpoint_before_a_broken_one(
    left_alone, train_here, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(left_alone, out)
    broken = out / "checkpoints/step-000004"
    cut(broken / "progress.pt")
    shutil.rmtree(out / "model")
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:-1]))  # killed while it ended
    flags = [*SHORT, "--steps=4", "--save_every=1", "--resume"]
    with pytest.raises(Refused, match="remove step-000004 to go on from there"):
        train_here(*flags, out_dir=out)
    shutil.rmtree(broken)
    train_here(*flags, out_dir=out)
    assert metrics(out) == metrics(left_alone)


def test_a_folder_that_is_no_checkpoint_is_not_taken_for_one(two_checkpoints, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(two_checkpoints, out)
    for name in "step-000009.bak", "step-", "step-2 (copy)":
        (out / "checkpoints" / name).mkdir()
    complete = [path.name for path in checkpoints(out)]
    assert complete == ["step-000001", "step-000002"]


def test_an_old_checkpoint_that_cannot_be_deleted_ends_nothing(
    group, tmp_path, monkeypatch
):
    policy = build_policy("tiny", group)
    state = (policy, *trainer_state(policy))

    def is_being_read(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError("directory not empty")

    save_checkpoint(tmp_path, 1, *state, group_size=2, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", is_being_read)
        save_checkpoint(tmp_path, 2, *state, group_size=2, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002"]
    # The next one tries again, and is not in its way.
    save_checkpoint(tmp_path, 3, *state, group_size=2, keep=1)
    left = [path.name for path in (tmp_path / "checkpoints").iterdir()]
    assert left == ["step-000003"]


# Two runs


def test_a_second_run_into_the_same_out_dir_is_refused_while_the_first_one_is_there(
    train_here, group, tmp_path
):
    out = tmp_path / "run"
    sentence = "is being written to by another process: choose another out_dir, or wait"
    with claim_folder(out, check=lambda: None):
        with pytest.raises(Refused, match=sentence):
            train_here(*SHORT, "--steps=1", out_dir=out)
        # It has written nothing there.
        assert [path.name for path in out.iterdir()] == ["lock"]
    train_here(*SHORT, "--steps=1", out_dir=out)


def test_a_run_that_came_and_went_since_the_first_look_at_out_dir_is_not_overwritten(
    group, tmp_path
):
    cfg = Config(out_dir=str(tmp_path))
    check_out_dir(cfg)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    with pytest.raises(Refused, match="holds another run"):
        with claim_folder(tmp_path, check=partial(check_out_dir, cfg)):
            pytest.fail("it went on")
    # The lock is given back.
    with claim_folder(tmp_path, check=lambda: None):
        pass


# The engine


def test_an_engine_that_raises_stops_the_run_and_the_steps_done_are_saved(
    train_here, left_alone, monkeypatch, tmp_path
):
    out = tmp_path / "run"
    sample_step = train.sample_step

    def generate(*arguments, **keywords):
        raise RuntimeError("EngineCore encountered an issue")

    def breaks_in_step_3(engine, cfg, step, prompts):
        if step == 3:
            patch.setattr(engine.llm, "generate", generate)
        return sample_step(engine, cfg, step, prompts)

    with monkeypatch.context() as patch:
        patch.setattr(train, "sample_step", breaks_in_step_3)
        # What vLLM says, with its traceback.
        with pytest.raises(RuntimeError, match="EngineCore encountered an issue"):
            train_here(*SHORT, "--steps=4", out_dir=out)
    assert names(out) == ["step-000002"]
    train_here(*SHORT, "--steps=4", "--resume", out_dir=out)
    assert metrics(out) == metrics(left_alone)


def test_an_error_between_two_updates_of_a_step_saves_no_weights_of_it(
    train_here, monkeypatch, tmp_path
):
    accumulate_gradient = train.accumulate_gradient
    steps = []

    def breaks_in_its_second_minibatch(*given):
        steps.append(given[-1])
        if steps[-2:] == [3, 3]:
            raise FloatingPointError("step 3, rank 0: a loss is not finite")
        return accumulate_gradient(*given)

    monkeypatch.setattr(train, "accumulate_gradient", breaks_in_its_second_minibatch)
    out = tmp_path / "run"
    flags = [*SHORT, "--steps=4", "--minibatches=2"]
    with pytest.raises(FloatingPointError, match="a loss is not finite"):
        train_here(*flags, out_dir=out)
    assert steps == [1, 1, 2, 2, 3, 3]
    # The policy is no longer that of step 2, and not yet that of step 3.
    assert checkpoints(out) == []


def test_an_error_after_the_last_update_costs_only_that_step_s_line(
    train_here, left_alone, monkeypatch, tmp_path, capsys
):
    out = tmp_path / "run"
    evaluate = train.Run.evaluate

    def breaks_at_the_end(run):
        if run.done == 4:
            raise RuntimeError("EngineCore encountered an issue")
        return evaluate(run)

    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "evaluate", breaks_at_the_end)
        with pytest.raises(RuntimeError, match="EngineCore encountered an issue"):
            train_here(*SHORT, "--steps=4", out_dir=out)
    assert names(out) == ["step-000004"]
    assert [row["step"] for row in metrics(out)] == [0, 1, 2, 3]
    train_here(*SHORT, "--steps=4", "--resume", out_dir=out)
    # Nothing is left to train; the model and its accuracies are there.
    *rows, last = metrics(left_alone)
    accuracies = {name: last[name] for name in ("step", *ACCURACIES)}
    assert metrics(out) == [*rows, accuracies]
    weights, expected = (
        load_file(folder / "model/model.safetensors") for folder in (out, left_alone)
    )
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name
    assert "held-out pass@1, greedy" in capsys.readouterr().out


# Batches that teach nothing


@pytest.fixture
def impossible(tmp_path) -> str:
    """The embedded task, with answers that are all wrong."""
    folder = tmp_path / "impossible"
    folder.mkdir()
    for split in "train", "heldout":
        with open(folder / f"{split}.jsonl", "w") as file:
            for problem in load_task("tiny", split):
                file.write(json.dumps(problem | {"answer": "999999"}) + "\n")
    settings = {"verifier": "exact", "instruction": None}
    (folder / "task.json").write_text(json.dumps(settings))
    return str(folder)


def test_groups_without_signal_are_counted_and_teach_nothing(impossible, train_here):
    rows = train_here(*SHORT, "--steps=3", f"--task={impossible}")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    for row in rows[1:]:
        assert row["reward"] == 0
        assert row["groups_with_signal"] == 0
        # Without an advantage (12) has no first term. Its second one is what rounding
        # leaves of a fresh batch: (1 - e_B) KL, with 1 - e_B and KL of about 1e-6.
        assert row["policy_loss"] == 0
        assert row["loss"] < 1e-9
        # AdamW divides by |gradient| + 1e-8, and would blow up what is not below that.
        assert row["grad_norm"] < 1e-6


def test_truncated_responses_are_counted_and_the_run_goes_on(train_here):
    rows = train_here(*SHORT, "--steps=2", "--max_response_tokens=3")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert row["truncated"] == 1
        assert row["response_tokens"] == 3
        assert row["reward"] == 0
        assert math.isfinite(row["loss"])


# A weight that is not a number


@pytest.fixture
def poisoned(monkeypatch) -> None:
    """A weight becomes NaN after the updates of step 2."""
    update = train.update

    def poison(policy, optimizer, schedule, rollouts, objective, cfg, step, is_first):
        history = update(
            policy, optimizer, schedule, rollouts, objective, cfg, step, is_first
        )
        if step == 2:
            with torch.no_grad():
                policy.model.base_model.norm.weight.to_local()[0] = math.nan
        return history

    monkeypatch.setattr(train, "update", poison)


def test_a_weight_that_is_nan_is_in_no_checkpoint(poisoned, train_here, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(NotSaved) as refused:
        train_here(*SHORT, "--steps=4", "--save_every=1", out_dir=out)
    assert str(refused.value) == (
        "a weight is not finite, so there is no checkpoint of step 2; the newest "
        f"complete one is {out}/checkpoints/step-000001"
    )
    assert names(out) == ["step-000001"]


def test_a_weight_that_is_nan_stops_the_run_in_the_next_step(
    poisoned, train_here, capsys, tmp_path
):
    out = tmp_path / "run"
    with pytest.raises(FloatingPointError, match=r"step 3, rank 0: \|log rho\|"):
        train_here(*SHORT, "--steps=4", out_dir=out)
    # It would save the weights, if they were numbers.
    said = capsys.readouterr().err
    assert "a weight is not finite, so there is no checkpoint of step 2" in said
    assert checkpoints(out) == []


def test_a_weight_that_is_nan_is_in_no_saved_model(poisoned, train_here, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(NotSaved, match="a weight is not finite, so there is no model"):
        train_here(*SHORT, "--steps=2", out_dir=out)
    assert not (out / "model").exists()
    assert [row["step"] for row in metrics(out)] == [0, 1]


# A clock that jumps


def test_a_clock_that_jumps_changes_no_number_and_no_verdict(
    train_here, left_alone, monkeypatch, tmp_path
):
    jump = random.Random(0)
    now = time.time

    def jumping() -> float:
        # By up to a day, forward and backward.
        return now() + jump.uniform(-86_400, 86_400)

    monkeypatch.setattr(time, "time", jumping)
    out = tmp_path / "run"
    train_here(*SHORT, "--steps=4", out_dir=out)
    assert metrics(out) == metrics(left_alone)
    for row in read_metrics(out)[1:]:
        for name in "rollout_seconds", "update_seconds", "tokens_per_second":
            assert row[name] > 0
    assert score([r"\boxed{1/2}"] * 3, ["0.5", "0.50", "2"], "math") == [1, 1, 0]


# Files that somebody removes


@pytest.fixture
def tidied(monkeypatch) -> Callable[[Path], None]:
    """Has a path removed in the middle of step 2."""
    update = train.update

    def remove(path: Path) -> None:
        def tidy(*arguments, **keywords) -> list[dict[str, float]]:
            history = update(*arguments, **keywords)
            if 2 in arguments:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            return history

        monkeypatch.setattr(train, "update", tidy)

    return remove


def test_without_its_metrics_a_run_goes_on_and_says_what_is_missing(
    tidied, train_here, left_alone, capsys, tmp_path
):
    out = tmp_path / "run"
    tidied(out / "metrics.jsonl")
    train_here(*SHORT, "--steps=4", out_dir=out)
    # The lines of the steps that came later are there, and the model.
    assert metrics(out) == metrics(left_alone)[2:]
    assert (out / "model/model.safetensors").exists()
    assert not (out / "curves.png").exists()
    *_, last_line = capsys.readouterr().out.splitlines()
    assert last_line == (
        f"{out}/metrics.jsonl begins at step 2, as the file was removed during the "
        "run: no table and no curves.png"
    )


def test_without_its_folder_a_run_stops_and_says_so(tidied, train_here, tmp_path):
    out = tmp_path / "run"
    tidied(out)
    with pytest.raises(OneRankFailed, match="samples.jsonl cannot be written: No such"):
        train_here(*SHORT, "--steps=4", out_dir=out)
