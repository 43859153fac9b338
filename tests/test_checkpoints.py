"""Checkpoints, the log and the model: whole on the disk, whenever a save ends."""

import json
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import support.checkpoints
from policy import build_policy, full_weights
from support.checkpoints import (
    config_of,
    load_checkpoint,
    make_out_dir,
    save_checkpoint,
    save_model,
)
from support.command import Refused, Stopped
from support.config import Config
from support.log import (
    Log,
    append_row,
    draw_curves,
    duration,
    keep_steps,
    peak_memory_gb,
)


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
    assert names(tmp_path) == [f"step-{newest:06}", "step-000004"]
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


def test_a_model_whose_generation_config_is_invalid_can_be_written(group, tmp_path):
    model = AutoModelForCausalLM.from_pretrained("tiny")
    model.generation_config.pad_token_id = -1  # as in early LLaMAs
    end = model.generation_config.eos_token_id
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    save_model(model, model.state_dict().items(), tokenizer, tmp_path / "model")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").generation_config
    assert (saved.eos_token_id, saved.pad_token_id) == (end, None)


def test_a_model_has_the_dtype_that_came_in_its_tied_head_once_and_ordinary_modes(
    group, tmp_path
):
    folder = tmp_path / "bfloat16"
    model = AutoModelForCausalLM.from_pretrained("tiny", dtype="bfloat16")
    model.save_pretrained(folder)
    policy = build_policy(str(folder), group)
    # AdamW's steps are often below half a bit of bfloat16.
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    tokenizer, saved = AutoTokenizer.from_pretrained("tiny"), tmp_path / "model"
    save_model(policy.model, full_weights(policy), tokenizer, saved)
    weights = load_file(saved / "model.safetensors")
    # bfloat16 numbers are the same ones after float32.
    expected = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)  # and in dtype
    assert AutoConfig.from_pretrained(saved).dtype == torch.bfloat16
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
        with pytest.raises(Refused, match="another run is at work there"):
            make_out_dir(cfg)
        other.kill()
    assert make_out_dir(cfg) == tmp_path


def test_lines_of_steps_after_the_checkpoint_and_a_torn_one_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "rew')
    keep_steps(path, done=2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_folder_that_a_node_does_not_see_is_refused(group, tmp_path, monkeypatch):
    monkeypatch.setattr(support.checkpoints, "SECONDS_UNSEEN", 1)
    # Rank 0 makes it elsewhere, and gives it its name.
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    given = str(tmp_path / "r0")
    monkeypatch.setattr(
        dist, "broadcast_object_list", lambda named: named.__setitem__(0, given)
    )
    with pytest.raises(
        Refused, match="/r0 is not on .*: give a folder on a file system"
    ):
        make_out_dir(Config())


def test_config_json_has_the_variables_that_change_a_run_and_no_key(monkeypatch):
    for name in "VLLM_CPU_X", "OMP_X", "TORCH_X", "CUDA_X", "VLLM_API_KEY", "HF_TOKEN":
        monkeypatch.setenv(name, "1")
    names = config_of(Config())["environment"]
    assert {"VLLM_CPU_X", "OMP_X", "TORCH_X", "CUDA_X"} <= set(names)
    assert not {"VLLM_API_KEY", "HF_TOKEN"} & set(names)


# What the log tells


def test_the_seconds_of_a_phase_add_up_within_a_step(group, tmp_path, monkeypatch):
    clock = iter([0, 1, 3, 10, 15])
    monkeypatch.setattr(
        support.log, "time", SimpleNamespace(perf_counter=lambda: next(clock))
    )
    log = Log(tmp_path, None, 2, 2, done=0)
    for _ in range(2):
        with log.phase("update"):
            pass
    rollouts = SimpleNamespace(
        reward=torch.tensor([0.0, 1.0]),
        mask=torch.ones(2, 3).bool(),
        truncated=torch.zeros(2),
        logp_behavior=torch.zeros(2, 3),
        weight_version="0",
        text=[],
    )
    seconds = [log.metrics_of(step, rollouts)["update_seconds"] for step in (1, 2)]
    assert seconds == [2 + 5, 0]


def test_a_line_has_the_seconds_of_its_step_and_the_time_left_of_a_resumed_run(
    group, tmp_path, monkeypatch, capsys
):
    evaluated = {"heldout_pass@1": 0.5, "heldout_greedy": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3} | evaluated) + "\n")
    (tmp_path / "samples.jsonl").write_text("")
    # It was evaluated at 1000 s, and step 4 took 300 s, step 5 500 s. Four are left.
    clock = iter([0, 1000, 1300, 1800])
    monkeypatch.setattr(
        support.log, "time", SimpleNamespace(perf_counter=lambda: next(clock))
    )
    log = Log(tmp_path, None, 2, 9, done=3)
    row = {"reward": 0.5, "ess": 0.9, "mismatch_kl": 0.01, "response_tokens": 7.0}
    for step in 3, 4, 5:
        log.write({"step": step, **row})
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("  500.0 s  27 min left")  # 4 times 400 s
    # Step 3 was the last before, and what it was evaluated to stays.
    rows = [json.loads(line) for line in open(tmp_path / "metrics.jsonl")]
    assert [row["step"] for row in rows] == [3, 4, 5]
    assert rows[0].items() >= (row | evaluated).items()


@pytest.mark.parametrize(
    "seconds, said", [(99, "99 s"), (600, "10 min"), (36000, "10.0 h")]
)
def test_seconds_are_said_in_the_unit_that_people_use(seconds, said):
    assert duration(seconds) == said


def test_peak_memory_is_that_of_the_kernel_in_gb():
    status = Path("/proc/self/status").read_text()
    [kilobytes] = re.findall(r"VmHWM:\s+(\d+) kB", status)
    assert peak_memory_gb() == pytest.approx(int(kilobytes) / 2**20, rel=0.01)


def test_the_figure_has_the_numbers_of_the_log(monkeypatch):
    figures = []
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: figures.append(figure)
    )
    of_step = {"reward": 0.3, "ess": 0.75, "mismatch_kl": 0.02, "entropy": 1.5}
    rows = [
        {"step": 0, "heldout_pass@1": 0.4, "heldout_greedy": 0.2},
        {"step": 1, "heldout_pass@1": 0.6, "heldout_greedy": 0.9, **of_step},
    ]
    draw_curves(rows, Path("curves.png"))
    lines = [line for axis in figures[0].axes for line in axis.lines]
    sampled, greedy, *others = [line.get_xydata().tolist() for line in lines]
    assert sampled == [[0, 0.4], [1, 0.6]]
    assert greedy == [[0, 0.2], [1, 0.9]]
    # The weight of the KL is 1 - e_B.
    assert others == [[[1, value]] for value in (0.3, 1 - 0.75, 0.02, 1.5)]
