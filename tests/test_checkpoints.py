"""Test what a run writes: checkpoints, the log, the model and the figure."""

import json
import math
import re
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
from matplotlib.figure import Figure
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import support.log
from policy import build_policy, full_weights
from support.checkpoints import (
    load_checkpoint,
    make_out_dir,
    save_checkpoint,
    save_model,
)
from support.command import Refused, Stopped
from support.config import Config
from support.log import CURVES, PHASES, ROW_FILES, Log, append_row
from support.tasks import Dataset


def names(out: Path) -> list[str]:
    """Return the names in a run's folder of checkpoints."""
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture
def trained(group):
    """Return functions that save and load a policy and its optimizer.

    All weights of a saved policy equal its step. The second function returns the
    metrics of the checkpoint, which have the step.
    """
    policy = build_policy("tiny", group)
    optimizer = torch.optim.AdamW(policy.parameters())
    for weight in policy.parameters():
        weight.grad = torch.ones_like(weight)
    optimizer.step()

    def save(out: Path, step: int, queue: Any = ()) -> None:
        for weight in policy.parameters():
            torch.nn.init.constant_(weight, step)
        for name in ROW_FILES:
            (out / name).touch()
        save_checkpoint(out, step, policy, optimizer, queue, {"step": step})

    def load(out: Path) -> dict[str, Any]:
        step, metrics, _, load.rows = load_checkpoint(out, policy, optimizer)
        for weight in policy.parameters():
            assert (weight.full_tensor() == step).all()
        return metrics

    return save, load


# A save clears an unfinished one, writes weights, reads the rows, writes the state of
# each rank, waits for all ranks, clears the folder's name, gives it to the new folder
# (the first rename is in dcp.save), renames the oldest checkpoint, and deletes that.
@pytest.mark.parametrize(
    "owner, name, call, newest",
    [
        (shutil, "rmtree", 1, 2),
        (dcp, "save", 1, 2),
        (Path, "read_text", 1, 2),
        (dist, "barrier", 2, 2),
        (shutil, "rmtree", 2, 2),
        (Path, "rename", 2, 2),
        (Path, "rename", 3, 3),
        (shutil, "rmtree", 3, 3),
    ],
)
def test_a_save_may_end_between_any_two_of_its_writes_and_the_next_one_works(
    owner, name, call, newest, trained, tmp_path, monkeypatch
):
    save, load = trained
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "checkpoints/unfinished").mkdir()  # left by an earlier kill
    original, calls = getattr(owner, name), []

    def ends_here(*arguments, **keywords):
        calls.append(arguments)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(*arguments, **keywords)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, ends_here)
        save(tmp_path, 3)
    assert load(tmp_path) == {"step": newest}
    save(tmp_path, 4)
    assert names(tmp_path) == [f"step-{newest:06}", "step-000004"]
    assert load(tmp_path) == {"step": 4}


# Full disks and damaged files


MEGABYTE = 10**6


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Limit the bytes of a file that this process writes, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# A checkpoint of tiny has 7.7 MB: 0.64 million weights and twice as many moments, of 4
# bytes each. The unused rollouts have a file of their own.
@pytest.mark.parametrize(
    "limit, unused", [(4, 0), (12, 20)], ids=["weights", "rollouts"]
)
def test_a_checkpoint_that_cannot_be_written_stops_the_run_and_leaves_the_others_whole(
    limit, unused, trained, tmp_path
):
    save, load = trained
    save(tmp_path, 1)
    rollouts = SimpleNamespace(tokens=torch.zeros(unused * MEGABYTE // 4))
    sentence = f"^{tmp_path}/checkpoints/step-000002 cannot be written: .*; free space "
    sentence += "if its disk is full; --resume continues from the newest checkpoint, if"
    with files_of_at_most(limit * MEGABYTE), pytest.raises(Stopped, match=sentence):
        save(tmp_path, 2, [rollouts])
    assert load(tmp_path) == {"step": 1}


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def fill_with_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize("damage", [cut, fill_with_zeros, Path.unlink])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "rank-0.pt"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_can_be_loaded(
    name, damage, trained, tmp_path
):
    save, load = trained
    save(tmp_path, 1)
    save(tmp_path, 2)
    newest = tmp_path / "checkpoints/step-000002"
    damage(newest / name)
    sentence = f"^--resume: {newest} cannot be read: .*; move it away to continue from"
    with pytest.raises(Refused, match=f"{sentence} the one before$"):
        load(tmp_path)
    newest.rename(tmp_path / "removed")
    assert load(tmp_path) == {"step": 1}


def test_a_log_that_cannot_be_written_stops_the_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(" " * 1000)
    with files_of_at_most(1000), pytest.raises(Stopped, match="cannot be written: "):
        append_row(tmp_path / "metrics.jsonl", {"step": 1})


def test_a_model_that_cannot_be_written_stops_the_run_and_leaves_no_model(
    group, tmp_path
):
    model = AutoModelForCausalLM.from_pretrained("tiny")
    weights = model.state_dict().items()
    sentence = f"^{tmp_path}/model cannot be written: .*; free space if"
    with files_of_at_most(MEGABYTE), pytest.raises(Stopped, match=sentence):
        save_model(model, weights, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_saved_model_has_the_files_of_its_source_and_weights_of_the_same_dtype(
    group, tmp_path
):
    source, saved = tmp_path / "source", tmp_path / "model"
    shutil.copytree("tiny", source)
    AutoModelForCausalLM.from_pretrained("tiny", dtype="bfloat16").save_pretrained(
        source
    )
    # transformers 4 wrote such a config; it does not know rope_parameters.
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    scaling = {"rope_type": "linear", "factor": 2.0}
    config |= {"rope_theta": 500000.0, "rope_scaling": scaling}
    (source / "config.json").write_text(json.dumps(config))
    # transformers would refuse to write these: a top_p without do_sample, as in Vicuna,
    # and the padding of early LLaMAs.
    (source / "generation_config.json").write_text('{"top_p": 0.6, "pad_token_id": -1}')
    more = "special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt"
    more = ["tokenizer.model", *more.split()]
    for name in more:
        (source / name).write_text(name)
    (source / "tokenizer_backup").mkdir()
    policy = build_policy(str(source), group)
    # AdamW's steps are often below half a bit of bfloat16.
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    save_model(policy.model, full_weights(policy), saved)
    files = "config.json generation_config.json chat_template.jinja tokenizer.json "
    files = [*(files + "tokenizer_config.json").split(), *more]
    assert {path.name for path in saved.iterdir()} == {*files, "model.safetensors"}
    for name in files:
        assert (saved / name).read_bytes() == (source / name).read_bytes(), name
    # A bfloat16 number survives float32 unchanged. The tied head is stored once.
    weights, expected = [
        load_file(folder / "model.safetensors") for folder in (saved, source)
    ]
    assert "lm_head.weight" not in weights
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)  # and in dtype
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1


def test_a_folder_in_which_another_run_is_at_work_is_refused(group, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    cfg = Config(out_dir=str(tmp_path), resume=True)
    # Another process has the lock until it ends.
    code = "import fcntl; file = open('config.json', 'r+')\n"
    code += "fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as other:
        other.stdout.readline()
        with pytest.raises(Refused, match="another run is using it"):
            make_out_dir(cfg)
        other.kill()
    assert make_out_dir(cfg) == tmp_path


# After the checkpoint of step 3 the run wrote the rows of steps 3 and 4. Then the row
# of step 2 was damaged, or both files were deleted.
@pytest.mark.parametrize("damage", [b"", b"\xff\n", None])
def test_a_resumed_run_has_the_rows_that_its_checkpoint_had(damage, trained, tmp_path):
    save, load = trained
    before = b'{"step": 0}\n{"step": 1}\n{"step": 2}\n'
    paths = [tmp_path / name for name in ROW_FILES]
    for path in paths:
        path.write_bytes(before)
    save(tmp_path, 3)
    for path in paths:
        append_row(path, {"step": 3})
        append_row(path, {"step": 4})
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(path.read_bytes().replace(b'{"step": 2}\n', damage))
    assert load(tmp_path) == {"step": 3}
    # The log restores the rows with its first line. Until then nothing has changed.
    assert before not in [path.exists() and path.read_bytes() for path in paths]
    log = Log(tmp_path, None, 2, None, load.rows)
    log.write({"step": 3} | STEP_METRICS)
    log.write({"step": 4} | STEP_METRICS)
    assert paths[1].read_bytes() == before
    assert re.findall(r'"step": (.)', paths[0].read_text()) == [*"01234"]


def test_a_folder_that_a_node_does_not_see_is_refused(group, tmp_path, monkeypatch):
    # Rank 0 creates the folder on another host, and broadcasts its name.
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    given = str(tmp_path / "r0")
    monkeypatch.setattr(
        dist, "broadcast_object_list", lambda names: names.__setitem__(0, given)
    )
    sentence = f"^out_dir {given} on this node is not that of the first rank: give"
    with pytest.raises(Refused, match=sentence):
        make_out_dir(Config())


# The log


@pytest.fixture
def log(group, tmp_path) -> Log:
    """Return the log of a run whose verifier expects a marked answer."""
    log = Log(tmp_path, None, 2, Dataset([], [], "math"), {})
    log.append_samples = lambda *_: None
    return log


# Three of four responses were cut, and two have an answer where the verifier looks for
# one: an answer in a thought that has not ended does not count.
ROLLOUTS = SimpleNamespace(
    reward=torch.zeros(4),
    mask=torch.ones(4, 3).bool(),
    truncated=torch.tensor([1, 1, 0, 1]),
    logp_behavior=torch.zeros(4, 3),
    weight_version="0",
    text=["\\boxed{7}", "#### 7", "<think>\\boxed{7}", "7"],
)
STEP_METRICS = {"reward": 0.3, "ess": 0.75, "mismatch_kl": 0.02, "response_tokens": 7.0}
STEP_METRICS |= {"entropy": 1.5, "grad_norm": 0.4}
STEP_METRICS |= {f"{phase}_seconds": 100.0 for phase in PHASES}


def test_the_seconds_of_a_phase_add_up_within_a_step(log, monkeypatch):
    clock = SimpleNamespace(perf_counter=iter([1, 3, 10, 15]).__next__)
    monkeypatch.setattr(support.log, "time", clock)
    for _ in range(2):
        with log.phase("update"):
            pass
    seconds = [log.metrics_of(step, ROLLOUTS)["update_seconds"] for step in (1, 2)]
    assert seconds == [2 + 5, 0]


def test_a_group_has_a_signal_if_its_rewards_differ_even_if_none_is_1(log):
    rewards = torch.tensor([0.5, 0.25, 0.5, 0.5])  # of two groups
    metrics = log.metrics_of(1, SimpleNamespace(**vars(ROLLOUTS) | {"reward": rewards}))
    assert (metrics["reward"], metrics["groups_with_signal"]) == (0.4375, 0.5)


def test_a_first_step_without_any_signal_is_explained_at_once(log, capsys):
    metrics = log.metrics_of(1, ROLLOUTS)
    assert (metrics["truncated"], metrics["unmarked"]) == (0.75, 0.5)
    log.write(STEP_METRICS | metrics)
    assert capsys.readouterr().out.splitlines()[-1] == (
        "In step 1 nothing was learned from rewards, because they are equal in "
        "each group: 75% of responses were cut at max_response_tokens, and "
        "50% lack a \\boxed{} or #### that the verifier needs; see "
        f"{log.out}/samples.jsonl"
    )
    for other in {"step": 2}, {"groups_with_signal": 0.25}:
        log.write(STEP_METRICS | metrics | other)
    assert "nothing was learned" not in capsys.readouterr().out
    # The verifier exact compares the whole response.
    for verifier, unmarked in {"gsm8k": 0.5, "exact": 0}.items():
        log.dataset = Dataset([], [], verifier)
        assert log.metrics_of(1, ROLLOUTS)["unmarked"] == unmarked


def test_a_line_has_the_seconds_of_all_four_phases(log, capsys):
    log.write({"step": 5, **STEP_METRICS, "sync_seconds": 0.5})
    assert capsys.readouterr().out.endswith("  300.5 s\n")  # 100 + 100 + 100 + 0.5


def test_the_figure_has_the_numbers_of_the_log(log, monkeypatch):
    log.write({"step": 0, "heldout_pass@1": 0.4, "heldout_greedy": 0.2})
    log.write({"step": 2} | STEP_METRICS)
    log.write(
        {"step": 4} | STEP_METRICS | {"heldout_pass@1": 0.6, "heldout_greedy": 0.9}
    )
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda *given, **_: figures.append(given))
    log.finish()
    [(figure, path)] = figures
    assert path == log.out / "curves.png"
    lines = [line for axis in figure.axes for line in axis.lines]
    drawn = {line.get_label(): line.get_xydata() for line in lines}
    assert [*drawn] == CURVES
    # Step 2 was not evaluated, and there was no batch at step 0.
    nan = math.nan
    expected = {"heldout_greedy": [0.2, nan, 0.9], "ess": [nan, 0.75, 0.75]}
    for name, values in expected.items():
        assert drawn[name][:, 0].tolist() == [0, 2, 4]
        assert drawn[name][:, 1].tolist() == pytest.approx(values, nan_ok=True)
