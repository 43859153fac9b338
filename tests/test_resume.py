"""A run that is stopped or killed, and resumed, does what the run left alone does.

Also what --resume refuses.
"""

import shutil
from pathlib import Path

import pytest
from conftest import SOME_COMPLETE, refusal_of
from launch import read_metrics, start_on_ranks, torchrun
from test_checkpoints import names

import train
from support.checkpoints import checkpoints

SMALL = [
    "--prompts_per_step=8",
    "--group_size=2",
    SOME_COMPLETE,
    "--eval_every=3",
    "--eval_problems=8",
    "--save_every=2",
    "--learning_rate=4e-4",
]
FINISHED = [*SMALL, "--steps=5"]


def reproducible(rows: list[dict]) -> list[dict]:
    """The metrics without seconds and memory, which differ between equal runs."""
    measured = ("_seconds", "peak_memory_gb")
    return [
        {name: value for name, value in row.items() if not name.endswith(measured)}
        for row in rows
    ]


def assert_same_run(out: Path, alone: Path) -> None:
    """Metrics, samples and weights are equal, bit for bit."""
    assert reproducible(read_metrics(out)) == reproducible(read_metrics(alone))
    for name in "samples.jsonl", "model/model.safetensors":
        assert (out / name).read_bytes() == (alone / name).read_bytes(), name


def test_stopped_in_a_step_and_resumed_a_run_equals_the_one_left_alone_bit_for_bit(
    train_here, tmp_path, monkeypatch
):
    flags = [*SMALL, "--steps=4", "--lag=2"]
    rows = train_here(*flags, out_dir=tmp_path / "alone")
    assert any(row["groups_with_signal"] > 0 for row in rows[1:])
    apply_gradient = train.apply_gradient

    def stop(policy, optimizer, cfg, step):
        if step == 3:
            raise KeyboardInterrupt
        return apply_gradient(policy, optimizer, cfg, step)

    out = tmp_path / "stopped"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "apply_gradient", stop)
        train_here(*flags, out_dir=out)
    assert names(out) == ["step-000002"]
    train_here(*flags, "--resume", out_dir=out)
    assert_same_run(out, tmp_path / "alone")


def processes_of(out: Path) -> list[str]:
    """The processes that have this folder in their command line."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
        except OSError:  # it ended meanwhile
            continue
        if f"--out_dir={out}" in words:
            found.append(process.name)
    return found


# Slow, as a process is really killed. test_checkpoints stops a save at each of its
# moments. Ranks that share an engine have named
# memory in common, which a kill does not free.
@pytest.mark.slow
@pytest.mark.parametrize("rollout_tp", [1, 2])
def test_one_of_two_ranks_killed_torchrun_ends_the_other_and_both_go_on_bit_for_bit(
    rollout_tp, tmp_path
):
    flags = [*FINISHED, "--lag=2", f"--rollout_tp={rollout_tp}"]
    torchrun(2, "train.py", *flags, f"--out_dir={tmp_path / 'alone'}")
    out = tmp_path / "killed"
    flags.append(f"--out_dir={out}")
    # It ends: launch.run_script waits for five minutes at most.
    killed = start_on_ranks(2, "tests/killed.py", "1", "4", *flags)
    assert killed.returncode != 0
    assert "Signal 9 (SIGKILL)" in killed.stdout
    assert processes_of(out) == []
    assert names(out) == ["step-000002", "unfinished"]
    torchrun(2, "train.py", *flags, "--resume")
    assert_same_run(out, tmp_path / "alone")


# A finished run, and what is refused


@pytest.fixture(scope="module")
def finished(train_here, tmp_path_factory) -> Path:
    """A finished run with checkpoints."""
    out = tmp_path_factory.mktemp("run") / "run"
    train_here(*FINISHED, out_dir=out)
    return out


def test_a_run_is_evaluated_and_saved_every_so_many_steps_and_after_the_last(finished):
    rows = read_metrics(finished)
    evaluated = [row["step"] for row in rows if "heldout_greedy" in row]
    assert evaluated == [0, 3, 5]
    assert names(finished) == [
        "step-000004",
        "step-000005",
    ]  # the newest two of 2, 4, 5


def test_an_evaluation_that_fails_costs_no_step(
    finished, train_here, tmp_path, monkeypatch
):
    heldout_accuracy = train.heldout_accuracy
    before_training = []

    def fail_after_training(*arguments):
        if before_training:
            raise MemoryError
        before_training.append(heldout_accuracy(*arguments))
        return before_training[0]

    out, flags = tmp_path / "failed", [*SMALL, "--steps=1"]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(train, "heldout_accuracy", fail_after_training)
        train_here(*flags, out_dir=out)
    assert len(checkpoints(out)) == 1
    assert (out / "model").is_dir()
    assert [row["step"] for row in read_metrics(out)] == [0]
    # The line of step 1 is written by the resumed run, as it was, with the evaluation.
    train_here(*flags, "--resume", out_dir=out)
    _, row = read_metrics(out)
    accuracies = {row["heldout_pass@1"], row["heldout_greedy"]}
    assert accuracies <= {part / 8 for part in range(9)}  # of 8 problems
    assert reproducible([row]) == reproducible(read_metrics(finished)[1:2])


def test_resume_refuses_fewer_steps_than_are_done(finished):
    resumed = [*FINISHED, f"--out_dir={finished}", "--resume", "--steps=4"]
    assert refusal_of(train, *resumed).endswith(
        f"{finished} has made 5 steps; steps is 4"
    )


def test_an_out_dir_that_exists_is_refused_without_resume(finished):
    assert "exists: choose another, or --resume" in refusal_of(
        train, f"--out_dir={finished}"
    )


def test_resume_needs_an_out_dir_with_a_complete_checkpoint(tmp_path):
    (tmp_path / "checkpoints/unfinished").mkdir(parents=True)
    for flags in [], [f"--out_dir={tmp_path}"]:
        assert "has no complete checkpoint" in refusal_of(train, "--resume", *flags)


@pytest.mark.parametrize(
    "flags, ranks, sentence",
    [
        ("--lag=1", 1, "lag was 0 in"),
        ("--objective=grpo", 1, "objective was 'p3o' in"),
        ("--steps=9", 2, "ranks was 1 in"),  # more steps would be taken
        ("--steps=9 --lag=1", 1, "steps was 5 in"),  # but not with a lag
    ],
)
def test_resume_refuses_a_changed_field_and_another_number_of_ranks(
    flags, ranks, sentence, finished, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    resumed = [*FINISHED, f"--out_dir={finished}", "--resume"]
    refused = refusal_of(train, *resumed, *flags.split())
    assert refused.startswith(f"--resume: {sentence}")


def test_a_finished_run_resumed_with_other_memory_writes_its_model_again_and_no_line(
    finished, train_here
):
    weights = (finished / "model/model.safetensors").read_bytes()
    before = read_metrics(finished)
    shutil.rmtree(finished / "model")
    memory = "--micro_batch_tokens=999 --gradient_checkpointing --kv_cache_gb=0.05"
    more = [*memory.split(), "--max_num_seqs=64"]
    train_here(*FINISHED, "--resume", *more, out_dir=finished)
    assert read_metrics(finished) == before
    assert (finished / "model/model.safetensors").read_bytes() == weights
