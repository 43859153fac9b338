"""Test that a run that was killed and resumed equals the run left alone.

The tests also show what --resume refuses and what it leaves untouched.
"""

import json
import signal
import sys
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import psutil
import pytest
from conftest import SOME_COMPLETE, refusal_of
from launch import read_metrics, run_command, torchrun
from test_checkpoints import names

import train
from support.checkpoints import check_out_dir, checkpoints, config_of
from support.command import Refused
from support.config import Config
from support.hub import COMMITS
from support.log import append_row

SMALL_RUN = [
    "--prompts_per_step=8",
    "--group_size=2",
    SOME_COMPLETE,
    "--eval_every=2",
    "--eval_problems=8",
    "--save_every=2",
    "--learning_rate=4e-4",
]


def reproducible(rows: list[dict]) -> list[dict]:
    """Return the metrics without seconds and memory, which differ in equal runs."""
    measured = ("_seconds", "peak_memory_gb")
    return [
        {name: value for name, value in row.items() if not name.endswith(measured)}
        for row in rows
    ]


def assert_same_run(out: Path, alone: Path) -> None:
    """Assert that metrics, samples and weights are equal, bit for bit."""
    assert reproducible(read_metrics(out)) == reproducible(read_metrics(alone))
    for name in "samples.jsonl", "model/model.safetensors":
        assert (out / name).read_bytes() == (alone / name).read_bytes(), name


# With lag 2 the checkpoint of step 2 holds the batches of steps 3 and 4. The batches of
# steps 5 to 7 are sampled after the resume. The row of step 3 is written twice.
def test_one_command_with_resume_repeats_the_run_left_alone_bit_for_bit(
    train_here, tmp_path, capsys
):
    flags = [*SMALL_RUN, "--steps=7", "--lag=2"]
    rows = train_here(*flags, out_dir=tmp_path / "alone")
    assert any(row["groups_with_signal"] > 0 for row in rows[1:])
    out = tmp_path / "stopped"
    # The first start ends in step 1, before any checkpoint, and the second in step 4. A
    # step makes two updates.
    for updates in 0, 6:
        ends = [DEFAULT] * updates + [KeyboardInterrupt]
        update = Mock(wraps=train.apply_gradient, side_effect=ends)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(train, "apply_gradient", update)
            train_here(*flags, "--resume", out_dir=out)
    assert names(out) == ["step-000002"]
    # A run that takes no further step writes the model of its checkpoint.
    train_here(*flags, "--resume", "--steps=2", out_dir=out)
    assert [row["step"] for row in read_metrics(out)] == [0, 1, 2]
    assert (out / "model/model.safetensors").exists()
    capsys.readouterr()
    train_here(*flags, "--resume", out_dir=out)
    assert f"{out}: continues after step 2/7, then saves" in capsys.readouterr().out
    assert_same_run(out, tmp_path / "alone")


# This test is slow because it really kills a process; test_checkpoints.py stops a save
# at each of its moments. Ranks that share an engine share named memory, which a kill
# does not free.
@pytest.mark.slow
@pytest.mark.parametrize("rollout_tp", [1, 2])
def test_after_a_kill_of_one_of_two_ranks_torchrun_ends_the_other_and_both_can_resume(
    rollout_tp, tmp_path
):
    flags = [*SMALL_RUN, "--steps=5", "--lag=2", f"--rollout_tp={rollout_tp}"]
    torchrun(2, "train.py", *flags, f"--out_dir={tmp_path / 'alone'}")
    out = tmp_path / "killed"
    flags.append(f"--out_dir={out}")
    # launch.run_command waits for at most five minutes.
    printed = torchrun(2, "tests/killed.py", "1", "2", *flags, fails=True)
    assert "Signal 9 (SIGKILL)" in printed
    processes = psutil.process_iter(["cmdline"])
    assert not [each for each in processes if flags[-1] in (each.info["cmdline"] or [])]
    assert names(out) == ["step-000002", "unfinished"]
    torchrun(2, "train.py", *flags, "--resume")
    assert_same_run(out, tmp_path / "alone")


def test_sigterm_prints_how_to_continue_and_the_first_lines_reach_a_file_at_once(
    tmp_path,
):
    code = f"""if True:
        import os
        from support.checkpoints import make_out_dir
        from support.command import run_script
        from support.config import Config
        from support.machine import init_distributed

        def main():
            init_distributed()
            make_out_dir(Config(out_dir='{tmp_path}/run'))
            os.kill(os.getpid(), 15)

        run_script(main)"""
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == 128 + signal.SIGINT  # as after Ctrl-C
    first, *_, last = done.stdout.splitlines()
    assert first.startswith(
        f"{tmp_path}/run: trains in float32; the engine's dtype is "
    )
    assert last == (
        "-c: interrupted; a run of train.py that has a checkpoint continues if its "
        "command is repeated with --resume --out_dir FOLDER (its first line on "
        "stdout names FOLDER)"
    )


# A finished run


FINISHED_RUN = [*SMALL_RUN, "--eval_every=3", "--steps=5"]


@pytest.fixture(scope="module")
def finished(train_here, tmp_path_factory) -> Path:
    """Return the folder of a finished run with checkpoints."""
    out = tmp_path_factory.mktemp("run") / "run"
    train_here(*FINISHED_RUN, out_dir=out)
    return out


def test_a_run_is_evaluated_and_saved_every_so_many_steps_and_after_the_last(finished):
    rows = read_metrics(finished)
    assert [row["step"] for row in rows if "heldout_greedy" in row] == [0, 3, 5]
    # Checkpoints were written after steps 2, 4 and 5. Only the newest two remain.
    assert names(finished) == ["step-000004", "step-000005"]


def test_an_evaluation_that_fails_costs_no_step(
    finished, train_here, tmp_path, monkeypatch
):
    out, flags = tmp_path / "failed", [*SMALL_RUN, "--steps=1"]
    once = [train.heldout_accuracy]  # The evaluation before training succeeds.
    with monkeypatch.context() as patch, pytest.raises(IndexError, match="pop from"):
        patch.setattr(train, "heldout_accuracy", lambda *given: once.pop()(*given))
        train_here(*flags, out_dir=out)
    assert list(checkpoints(out)) == [1]
    assert (out / "model").is_dir()
    assert [row["step"] for row in read_metrics(out)] == [0]
    # The resumed run writes the unchanged line of step 1, with the evaluation.
    train_here(*flags, "--resume", out_dir=out)
    [row] = reproducible(read_metrics(out)[1:])
    [expected] = reproducible(read_metrics(finished)[1:2])
    assert row.items() >= expected.items()
    assert row.keys() - expected.keys() == {"heldout_pass@1", "heldout_greedy"}


def test_a_finished_run_resumed_with_other_memory_or_rate_changes_no_number_or_config(
    finished, train_here
):
    files = ("config.json", "model/model.safetensors")
    before = read_metrics(finished), [(finished / name).read_bytes() for name in files]
    (finished / "model/model.safetensors").unlink()
    memory = "--micro_batch_tokens=999 --gradient_checkpointing --kv_cache_gb=0.05"
    changed = [*memory.split(), "--max_num_seqs=64", "--learning_rate=1e-5"]
    train_here(*FINISHED_RUN, "--resume", *changed, out_dir=finished)
    after = read_metrics(finished), [(finished / name).read_bytes() for name in files]
    assert after == before
    # The fields with which the run continued are recorded beside config.json.
    [resumed] = map(json.loads, open(finished / "resumes.jsonl"))
    assert (resumed["step"], resumed["lag"], resumed["ranks"]) == (5, 0, 1)
    assert (resumed["learning_rate"], resumed["max_num_seqs"]) == (1e-5, 64)


# What is refused, without an engine


@pytest.fixture
def stored(tmp_path):
    """Write the folder of a run with its last checkpoint at step `done`, if any."""

    def write(done: int, **fields) -> Path:
        fields = {"out_dir": str(tmp_path), "save_every": 4} | fields
        config = config_of(Config(**fields))
        (tmp_path / "config.json").write_text(json.dumps(config))
        append_row(tmp_path / "metrics.jsonl", {"step": 0})
        if done:
            (tmp_path / f"checkpoints/step-{done:06}").mkdir(parents=True)
        return tmp_path

    return write


def resume_refusal(out: Path, **fields) -> str:
    """Return the sentence that refuses to resume with these fields, or ""."""
    try:
        check_out_dir(Config(out_dir=str(out), resume=True, **fields))
    except Refused as error:
        assert "\n" not in str(error)
        return str(error)
    return ""


def another(value):
    """Return a value that differs from this one and is allowed in its field."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, dict):
        return {"eps": 0.3}
    return f"{value}2" if isinstance(value, str) else value / 2 or 1


NEUTRAL_FIELDS = """out_dir eval_every save_every resume verbose micro_batch_tokens
    gradient_checkpointing rollout_tp kv_cache_gb max_num_seqs""".split()
NEUTRAL_AFTER_CHECKPOINT = [*NEUTRAL_FIELDS, "learning_rate", "warmup_updates"]


@pytest.mark.parametrize(
    "done, neutral", [(0, NEUTRAL_FIELDS), (4, NEUTRAL_AFTER_CHECKPOINT)]
)
def test_a_resumed_run_may_change_only_fields_that_do_not_affect_what_it_learns(
    done, neutral, stored
):
    out = stored(done)
    cfg = Config(out_dir=str(out), resume=True)
    for name, value in cfg.model_dump(exclude={"out_dir", "resume", "steps"}).items():
        changed = cfg.model_copy(update={name: another(value)})
        if name in neutral:
            check_out_dir(changed)
        else:
            with pytest.raises(Refused) as refused:
                check_out_dir(changed)
            start = f"--resume: {name} was {value!r} in {out} and is {another(value)!r}"
            assert str(refused.value).startswith(start)


def test_another_number_of_ranks_is_refused(stored, monkeypatch):
    out = stored(4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert resume_refusal(out).startswith(f"--resume: ranks was 1 in {out} and is 2")


def test_a_resumed_run_reads_the_recorded_commits(stored, monkeypatch):
    monkeypatch.setitem(COMMITS, "owner/name", "c0ffee")
    out = stored(4)
    COMMITS.clear()
    assert resume_refusal(out) == ""
    assert COMMITS == {"owner/name": "c0ffee"}


# The run was to take 60 steps and has a checkpoint of step 20.
@pytest.mark.parametrize(
    "lag, steps, sentence",
    [
        (0, 90, ""),
        (0, 30, ""),
        (0, 20, ""),
        (0, 19, "steps was 60 in "),
        (4, 20, ""),  # No step is left, so no batch is needed.
        (4, 30, "steps was 60 in "),  # It would have sampled fewer batches ahead.
        (4, 90, "steps was 60 in "),
    ],
)
def test_with_a_lag_a_resumed_run_may_only_have_all_steps_or_no_further_one(
    lag, steps, sentence, stored
):
    refusal = resume_refusal(stored(20, lag=lag), lag=lag, steps=steps)
    assert sentence in refusal
    assert bool(sentence) == bool(refusal)


def test_a_resume_may_not_ask_for_fewer_steps_than_an_earlier_resume_made(stored):
    out = stored(80)  # after --steps=60 and a --resume with more
    assert "steps was 80 in " in resume_refusal(out, steps=60)
    assert resume_refusal(out, steps=80) == resume_refusal(out, steps=81) == ""


def test_resume_needs_an_out_dir_and_no_resume_needs_a_free_one(stored):
    assert refusal_of(train, "--resume").startswith("--resume: give the folder of")
    sentence = "exists: choose another; train.py continues a run of its own with"
    assert sentence in refusal_of(train, f"--out_dir={stored(4)}")


def test_resume_starts_in_a_folder_in_which_nothing_was_done(tmp_path):
    assert resume_refusal(tmp_path / "missing") == ""
    (tmp_path / "config.json").touch()  # A kill may come before it is written.
    assert resume_refusal(tmp_path) == ""
    (tmp_path / "config.json").unlink()
    for log in "slurm-7.out", "train.log", "job.o7", "recipe.yaml", ".nfs07":
        (tmp_path / log).touch()
    assert resume_refusal(tmp_path) == ""
    (tmp_path / "model.safetensors").touch()
    assert "config.json cannot be read" in resume_refusal(tmp_path)


def test_resume_does_not_restart_a_run_that_ended_or_saves_no_checkpoints(stored):
    sentence = "has ended or saves no checkpoints (save_every is 0), so there is noth"
    assert sentence in resume_refusal(stored(0, save_every=0))
    out = stored(0)
    (out / "model").mkdir()
    assert sentence in resume_refusal(out)


def test_other_folders_beside_the_checkpoints_are_ignored(stored):
    out = stored(20)
    for name in "step-backup", "step-000030.old", "unfinished":
        (out / "checkpoints" / name).mkdir()
    assert checkpoints(out) == {20: out / "checkpoints/step-000020"}
    # Above 999,999 steps a name has more digits.
    (out / "checkpoints/step-1000000").mkdir()
    assert sorted(checkpoints(out)) == [20, 1000000]


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    "content",
    [None, b"", b'{"steps": 60', b"[1]", b"\0" * 9, b"\xff", DEEP, b'{"steps": 60}'],
)
def test_a_config_json_that_cannot_be_read_is_refused(content, stored):
    out = stored(4)
    path = out / "config.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert resume_refusal(out).startswith(f"--resume: {path} cannot be read: ")
    assert path.exists() == (content is not None)
