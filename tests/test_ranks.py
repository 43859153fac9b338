"""How ranks end: each says why, none is left behind, and the same command runs again.

A collective waits in C++ for a rank that is not there any more, and Python's signal
handlers and exceptions wait with it.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from launch import ENVIRONMENT, read_metrics

import train
from support.checkpoints import checkpoints
from support.flags import OneRankFailed, Refused
from support.ranks import ONE_WISH, run_script

SHORT = ["--prompts_per_step=4", "--group_size=2", "--eval_problems=8"]


def json_of(script: str, *arguments: str) -> Any:
    """What a script of tests/ prints as JSON."""
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / script, *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# What a rank says at its end


@pytest.mark.parametrize("error", [Refused, FloatingPointError, OneRankFailed])
@pytest.mark.parametrize("rank, who", [("0", ""), ("3", "rank 3: ")])
def test_a_refusal_is_printed_on_every_rank(error, rank, who, monkeypatch, capsys):
    def main() -> None:
        raise error("the disk is full: free some")

    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    assert run_script(main) == 1
    assert capsys.readouterr().err == f"train.py: {who}the disk is full: free some\n"


def test_a_rank_whose_neighbor_is_gone_says_so_without_a_traceback(monkeypatch, capsys):
    def main() -> None:
        # What gloo says, of which only the beginning is always the same.
        raise RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection "
            "closed by peer [127.0.0.1]:4242"
        )

    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert run_script(main) == 1
    sentence = "train.py: another rank has ended, and so does this one\n"
    assert capsys.readouterr().err == sentence


def test_an_error_that_a_traceback_tells_more_about_keeps_it():
    def main() -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (1x2 and 3x4)")

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run_script(main)


def test_a_collective_that_waited_too_long_is_no_rank_that_has_ended():
    def main() -> None:
        raise RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:83] Timed "
            "out waiting 1800000ms for recv operation to complete"
        )

    with pytest.raises(RuntimeError, match="Timed out"):
        run_script(main)


# One rank is killed


@pytest.fixture(
    scope="module",
    params=[(1, 1), (2, 1), (1, 0)],
    ids=["one-node", "two-nodes", "rank-0"],
)
def outlived(request, tmp_path_factory) -> tuple[Path, int, dict[str, dict]]:
    """Two ranks, of which one is killed in step 2: (folder, that rank, ends by phase).

    Rank 0 holds the store by which the ranks found each other.
    """
    folder = tmp_path_factory.mktemp("ranks")
    nodes, killed = request.param
    phases = ["rollout", "update", "sync", "save"]
    ends = json_of("one_rank_dies.py", str(folder), str(nodes), str(killed), *phases)
    return folder, killed, ends


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["rollout", "update", "sync", "save"])
def test_if_one_rank_is_killed_the_other_ends_within_a_minute_with_a_sentence(
    phase, outlived
):
    folder, killed, ends = outlived
    end = ends[phase]
    assert end["code"] == 1, end["printed"]
    assert end["seconds"] < 60
    *_, last_line = end["printed"].splitlines()
    # A rank other than 0 says which one it is.
    speaker = "train.py: " if killed == 1 else "train.py: rank 1: "
    assert last_line in (
        f"{speaker}another rank has ended, and so does this one",
        f"{speaker}rank {killed} has ended, and so does this one",
    )
    assert "Traceback" not in end["printed"]
    # The checkpoint of the step before is there.
    saved = folder / phase / "run/checkpoints/step-000001"
    assert (saved / ".metadata").exists()


@pytest.mark.slow
def test_after_kill_9_ranks_that_share_an_engine_run_again_also_beside_others(tmp_path):
    ends = json_of("shared_engines_die.py", str(tmp_path))
    assert ends["killed"] == [-signal.SIGKILL, -signal.SIGKILL]
    assert ends["left"] == []
    assert ends["again"] == [0, 0], ends["printed"]
    assert ends["beside"] == [0, 0], ends["printed"]
    first, other = (
        read_metrics(tmp_path / name / "run") for name in ("first", "other")
    )
    # The same seed: had they met in one segment, their numbers would differ.
    assert [row["reward"] for row in first[1:]] == [row["reward"] for row in other[1:]]
    assert [row["step"] for row in first] == [0, 1, 2]


def test_ranks_learn_that_another_one_has_ended_while_they_are_busy(
    tmp_path,
):
    # Ranks 0 and 1 wait in C++ for something else than a collective.
    ends = json_of("watched_ranks.py", str(tmp_path))
    for rank, who in (0, ""), (1, "rank 1: "):
        sentence = f"watched_ranks.py: {who}rank 2 has ended, and so does this one\n"
        assert ends[rank] == {"code": 1, "printed": sentence}
    assert ends[2]["code"] == -signal.SIGKILL


# Signals


def test_a_second_ctrl_c_ends_a_rank_at_once_even_where_it_waits_for_another():
    process = subprocess.Popen(
        [sys.executable, ROOT / "tests/waits_in_cpp.py"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "waiting\n"
    # A shell and torchrun both send the first one: that is one wish.
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == f"{int(signal.SIGINT)}\n"
    time.sleep(ONE_WISH + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 128 + signal.SIGINT


@pytest.fixture
def sampled_for(monkeypatch) -> list[int]:
    """The steps for which train.py samples, in the order in which it does."""
    steps: list[int] = []
    sample_step = train.sample_step

    def counted(engine, cfg, step, prompts):
        steps.append(step)
        return sample_step(engine, cfg, step, prompts)

    monkeypatch.setattr(train, "sample_step", counted)
    return steps


def test_signals_count_while_the_queue_of_lag_fills(
    sampled_for, train_here, monkeypatch
):
    def agreed_signal(signals: list[int]) -> int:
        return signal.SIGTERM if len(sampled_for) == 2 else 0

    monkeypatch.setattr(train, "agreed_signal", agreed_signal)
    sentence = "stopped by signal 15 after step 0: nothing is lost"
    with pytest.raises(Refused, match=sentence):
        train_here(*SHORT, "--steps=9", "--lag=6")
    # The first step would have sampled for seven.
    assert sampled_for == [1, 2]


def test_no_batch_is_sampled_that_no_step_will_use(sampled_for, train_here):
    rows = train_here(*SHORT, "--steps=4", "--lag=2")
    assert sampled_for == [1, 2, 3, 4]
    # Weights 0 sample the first three, and weights 1 the fourth, which is the last.
    assert [row["weight_version"] for row in rows[1:]] == ["0", "0", "0", "1"]


def test_a_lagged_run_that_gets_more_steps_goes_on_without_the_batches_it_left_out(
    sampled_for, train_here, tmp_path
):
    flags = [*SHORT, "--lag=1", "--save_every=1"]
    train_here(*flags, "--steps=2", out_dir=tmp_path / "run")
    rows = train_here(*flags, "--steps=4", "--resume", out_dir=tmp_path / "run")
    assert sampled_for == [1, 2, 3, 4]
    # Left alone it would have sampled for step 3 by weights 1. They are gone.
    assert [row["weight_version"] for row in rows[1:]] == ["0", "0", "2", "2"]


def test_batches_of_newer_weights_are_taken_by_the_next_run_that_goes_on(
    sampled_for, train_here, monkeypatch, tmp_path
):
    flags = [*SHORT, "--lag=2"]
    out = tmp_path / "run"
    train_here(*flags, "--steps=2", "--save_every=2", out_dir=out)

    def agreed_signal(signals: list[int]) -> int:
        """A wish to stop once it has sampled for step 6, which it does in step 4."""
        return signal.SIGTERM if 6 in sampled_for else 0

    with monkeypatch.context() as patch:
        patch.setattr(train, "agreed_signal", agreed_signal)
        with pytest.raises(Refused, match="stopped by signal 15 after step 4"):
            train_here(*flags, "--steps=8", "--resume", out_dir=out)
    rows = train_here(*flags, "--steps=8", "--resume", out_dir=out)
    assert sampled_for == [1, 2, 3, 4, 5, 6, 7, 8]
    # Weights 2 sampled for the steps 3 to 5, as there were no older ones by then. The
    # last run found those for the steps 5 and 6 in the checkpoint of step 4.
    expected = ["0", "0", "2", "2", "2", "3", "4", "5"]
    assert [row["weight_version"] for row in rows[1:]] == expected


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[Path, dict[str, dict]]:
    """Runs of two ranks in which something happens to rank 1 in step 2."""
    folder = tmp_path_factory.mktemp("stopped")
    cases = ["advantage", "engine", "signal"]
    return folder, json_of("two_ranks_stop.py", str(folder), *cases)


@pytest.mark.slow
def test_a_ratio_that_one_rank_cannot_use_is_named_by_both_and_they_save(stopped):
    folder, ends = stopped
    end = ends["advantage"]
    assert end["codes"] == [1, 1], end["printed"]
    for who, printed in zip(("", "rank 1: "), end["printed"], strict=True):
        *_, last_line = printed.splitlines()
        assert last_line.startswith(f"train.py: {who}step 2, rank 1: "), printed
        assert "or the advantage is not finite, in response" in last_line
    complete = [path.name for path in checkpoints(folder / "advantage/run")]
    assert complete == ["step-000001"]


@pytest.mark.slow
def test_an_error_of_one_rank_ends_both_and_saves_nothing(stopped):
    folder, ends = stopped
    end = ends["engine"]
    assert [code != 0 for code in end["codes"]] == [True, True], end["printed"]
    assert "RuntimeError: EngineCore encountered an issue" in end["printed"][1]
    *_, last_line = end["printed"][0].splitlines()
    assert last_line.endswith("has ended, and so does this one"), end["printed"][0]
    assert checkpoints(folder / "engine/run") == []


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_both_after_the_step_that_is_saved(stopped):
    folder, ends = stopped
    end = ends["signal"]
    assert end["codes"] == [1, 1], end["printed"]
    for printed in end["printed"]:
        assert "stopped by signal 15 after step 2: --resume goes on" in printed
    complete = [path.name for path in checkpoints(folder / "signal/run")]
    assert complete == ["step-000002"]


# A start that fails


def out_of_memory(*arguments, **keywords):
    raise RuntimeError("CUDA out of memory")


@pytest.mark.parametrize(
    "part, steps_written",
    [
        ("build_engines", []),
        ("build_policy", []),
        ("SyncProbe", []),
        # The line of the evaluation before the first step is there by then.
        ("sample_step", [0]),
    ],
)
def test_a_start_that_fails_leaves_an_out_dir_that_the_same_command_can_use(
    part, steps_written, train_here, monkeypatch, tmp_path
):
    out = tmp_path / "run"
    flags = [*SHORT, "--steps=1", "--save_every=1"]
    with monkeypatch.context() as patch:
        patch.setattr(train, part, out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            train_here(*flags, out_dir=out)
    rows = read_metrics(out) if (out / "metrics.jsonl").exists() else []
    assert [row["step"] for row in rows] == steps_written
    rows = train_here(*flags, out_dir=out)
    assert [row["step"] for row in rows] == [0, 1]


def test_a_run_that_has_a_step_to_lose_is_not_overwritten(train_here, tmp_path):
    out = tmp_path / "run"
    train_here(*SHORT, "--steps=1", out_dir=out)
    with pytest.raises(Refused, match="holds another run: choose another out_dir, or"):
        train_here(*SHORT, "--steps=1", out_dir=out)
