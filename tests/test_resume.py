"""A run that is killed, anywhere, and resumed does what a run does that was left alone.

Also what it is resumed from: checkpoints, the log, the reports. And what --resume
refuses.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT, TORCHRUN
from launch import ENVIRONMENT, read_metrics
from torch.distributed.checkpoint.state_dict import get_state_dict

import train
from policy import Policy, build_policy
from rollout import Rollouts
from support.checkpoints import (
    MAY_DIFFER,
    check_resume,
    checkpoints,
    join_ranks,
    load_checkpoint,
    save_checkpoint,
    share_of_rank,
)
from support.flags import Refused
from support.log import Log, check_reporter, reporter
from train import Config

SIZE = {
    "prompts_per_step": 5,
    "group_size": 4,
    "eval_problems": 16,
    "eval_every": 3,
    "save_every": 2,
}
# Its engine is in float32: in bfloat16, ranks with batches of another size round
# otherwise.
LAGGED = {
    **SIZE,
    "lag": 1,
    "steps": 8,
    "minibatches": 2,
    "rollout_dtype": "float32",
    "learning_rate": 4e-4,
}
FRESH = {
    **SIZE,
    "steps": 4,
    "passes": 2,
    "objective": "experiments.objectives:decoupled",
    "rollout_quantization": "fp8_per_channel",
}


def flags_of(fields: dict[str, Any], out_dir: Path | str, *more: str) -> list[str]:
    """The command line of a configuration."""
    flags = [f"--{name}={value}" for name, value in fields.items()]
    return [*flags, f"--out_dir={out_dir}", *more]


def life(flags: list[str], blow: list | None = None, copy_to: Path | None = None):
    """A line of the file that lives.py reads."""
    return {"flags": flags, "blow": blow, "copy_to": copy_to and str(copy_to)}


def start_lives(folder: Path, core: int, runs: list[dict]) -> subprocess.Popen:
    """Start tests/lives.py on one of the cores (there may be only one)."""
    file = folder / f"{core}.json"
    file.write_text(json.dumps(runs))
    core_here = core % len(os.sched_getaffinity(0))
    return subprocess.Popen(
        [sys.executable, ROOT / "tests/lives.py", file, str(core_here)],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def lives(tmp_path_factory) -> SimpleNamespace:
    """Runs killed again and again, with lag and without, and runs left alone.

    `folder` has them; `lagged` and `others` are what each life printed, and its code.
    """
    folder = tmp_path_factory.mktemp("lives")
    begin = flags_of(LAGGED, folder / "lagged")
    go_on = flags_of(LAGGED, folder / "lagged", "--resume")
    lagged = [
        life(begin, ["SIGTERM", "rollout", 1], copy_to=folder / "lagged-1"),
        life(go_on, ["SIGKILL", "rollout", 4], copy_to=folder / "lagged-2"),
        life(go_on, ["SIGKILL", "update", 6], copy_to=folder / "lagged-3"),
        life(go_on, ["SIGKILL", "save", 6], copy_to=folder / "lagged-4"),
        life(go_on),
    ]
    fresh = folder / "fresh"
    others = [
        life(flags_of(LAGGED, folder / "lagged-alone", "--keep_checkpoints=9")),
        life(flags_of(FRESH, folder / "fresh-alone")),
        life(flags_of(FRESH, fresh), ["SIGKILL", "update", 4]),
        life(flags_of(FRESH, fresh, "--resume")),
    ]
    processes = [
        start_lives(folder, core, runs) for core, runs in enumerate((lagged, others))
    ]
    ends = []
    for process in processes:
        printed, errors = process.communicate()
        assert process.returncode == 0, errors
        ends.append(json.loads(printed))
    return SimpleNamespace(folder=folder, lagged=ends[0], others=ends[1])


def metrics(out_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run without what differs between two runs of the same thing."""
    rows = []
    for row in read_metrics(out_dir):
        for name in list(row):
            if name.endswith(("_seconds", "_per_second")) or name == "peak_memory_gb":
                del row[name]
        rows.append(row)
    return rows


def names(out_dir: Path) -> list[str]:
    """What there is in its checkpoints folder."""
    return sorted(path.name for path in Path(out_dir, "checkpoints").iterdir())


# What a killed run leaves


@pytest.mark.slow
def test_sigterm_finishes_the_step_saves_it_and_exits(lives):
    end = lives.lagged[0]
    assert end["code"] == 1
    assert "stopped by signal 15 after step 1: --resume goes on" in end["printed"]
    assert names(lives.folder / "lagged-1") == ["step-000001"]
    alone = metrics(lives.folder / "lagged-alone")
    assert metrics(lives.folder / "lagged-1") == alone[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, last_line, left",
    [
        (2, 3, ["step-000001", "step-000002"]),
        (3, 5, ["step-000002", "step-000004"]),
        (4, 6, ["step-000002", "step-000004", "unfinished"]),
    ],
    ids=["rollout", "update", "save"],
)
def test_after_kill_9_complete_checkpoints_and_whole_lines_are_there(
    number, last_line, left, lives
):
    end = lives.lagged[number - 1]
    assert end["code"] == -signal.SIGKILL, end["printed"]
    out = lives.folder / f"lagged-{number}"
    # The lines of each life, and none of them twice.
    alone = metrics(lives.folder / "lagged-alone")
    assert metrics(out) == alone[: last_line + 1]
    assert names(out) == left
    assert not (out / "checkpoints/unfinished/.metadata").exists()


# What the resumed run does


@pytest.mark.slow
@pytest.mark.parametrize("run", ["lagged", "fresh"])
def test_resumed_on_one_rank_it_equals_the_run_left_alone_bit_for_bit(run, lives):
    assert lives.lagged[-1]["code"] == 0, lives.lagged[-1]["printed"]
    codes = [end["code"] for end in lives.others]
    assert codes == [0, 0, -signal.SIGKILL, 0], lives.others
    resumed = lives.folder / run
    alone = lives.folder / f"{run}-alone"
    assert metrics(resumed) == metrics(alone)
    for name in "samples.jsonl", "model/model.safetensors":
        assert (resumed / name).read_bytes() == (alone / name).read_bytes(), name
    last_step = metrics(resumed)[-1]["step"]
    assert names(resumed)[-1] == f"step-{last_step:06d}"


@pytest.fixture(scope="module")
def two_ranks(lives) -> tuple[Path, str]:
    """The run killed while it saved step 6, resumed by two ranks: (folder, printed).

    It has more steps to do. At step 8 torchrun, and torchrun alone, gets SIGTERM.
    """
    out = lives.folder / "two-ranks"
    shutil.copytree(lives.folder / "lagged-4", out)
    more = ["--resume", "--keep_checkpoints=9", "--steps=99"]
    process = subprocess.Popen(
        [
            *TORCHRUN,
            "--standalone",
            "--nproc-per-node=2",
            ROOT / "train.py",
            *flags_of(LAGGED, out, *more),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    printed = []
    for line in process.stdout:
        printed.append(line)
        if line.startswith("step    8"):
            process.send_signal(signal.SIGTERM)  # as Slurm and Kubernetes do
    assert process.wait() != 0
    return out, "".join(printed)


@pytest.mark.slow
def test_resumed_on_two_ranks_it_does_the_same_to_rounding(lives, two_ranks):
    alone = metrics(lives.folder / "lagged-alone")
    two = metrics(two_ranks[0])
    assert two[:5] == alone[:5]  # before the checkpoint
    for of_one, of_two in zip(alone[5:], two[5:9], strict=True):
        assert of_two["step"] == of_one["step"]
        assert of_two["weight_version"] == of_one["weight_version"]
        for name in "reward", "response_tokens", "groups_with_signal":
            assert of_two[name] == pytest.approx(of_one[name], rel=1e-6), name
        for name in "ess", "kl", "grad_norm", "entropy", "loss", "learning_rate":
            assert of_two[name] == pytest.approx(of_one[name], rel=1e-3), name


@pytest.mark.slow
def test_torchrun_passes_a_sigterm_on_and_waits_for_the_checkpoint(two_ranks):
    out, printed = two_ranks
    last = metrics(out)[-1]["step"]
    assert last >= 8
    assert f"stopped by signal 15 after step {last}" in printed
    assert names(out)[-1] == f"step-{last:06d}"
    # Both ranks say so. What follows is torchrun's own.
    of_ranks, _, _ = printed.rpartition("stopped by signal 15")
    assert of_ranks.count("stopped by signal 15") == 1
    assert "Traceback" not in of_ranks


def trainer_state(policy: Policy) -> tuple:
    """What save_checkpoint and load_checkpoint take beside the policy, as at step 0."""
    optimizer = torch.optim.AdamW(policy.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: 1.0)
    return optimizer, schedule, deque()


def whole(value: Any) -> Any:
    """A sharded tensor, gathered; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_has_what_a_checkpoint_of_one_has(
    lives, two_ranks, group
):
    states = []
    for out in lives.folder / "lagged-alone", two_ranks[0]:
        for checkpoint in checkpoints(out):
            if checkpoint.name > "step-000006":
                shutil.rmtree(checkpoint)
        policy = build_policy("tiny", group)
        optimizer, schedule, queue = trainer_state(policy)
        done = load_checkpoint(
            out,
            policy,
            optimizer,
            schedule,
            queue,
            group_size=LAGGED["group_size"],
            rollouts_type=Rollouts,
        )
        assert done == 6
        assert schedule.last_epoch == 6 * LAGGED["minibatches"]
        weights, moments = get_state_dict(policy, optimizer)
        [waiting] = queue
        states.append((weights, moments["state"], waiting))
    (weights, moments, waiting), (weights_2, moments_2, waiting_2) = states
    for name, weight in weights.items():
        assert torch.allclose(whole(weight), whole(weights_2[name]), atol=1e-4), name
    for name, of_weight in moments.items():
        for kind, value in of_weight.items():
            difference = whole(value) - whole(moments_2[name][kind])
            assert difference.norm() <= 1e-2 * whole(value).norm(), (name, kind)
    assert waiting.text == waiting_2.text
    assert len(waiting.text) == 20
    assert waiting.weight_version == waiting_2.weight_version == "5"
    for name in "tokens", "prompt_length", "mask", "truncated", "reward", "advantage":
        assert torch.equal(getattr(waiting, name), getattr(waiting_2, name)), name
    for name in "logp_behavior", "top_logp_behavior":
        difference = getattr(waiting, name) - getattr(waiting_2, name)
        assert difference[waiting.mask].abs().max() < 1e-3, name
    # Which of two tokens of equal probability comes first is up to rounding.
    likeliest = waiting.top_tokens[..., 0] == waiting_2.top_tokens[..., 0]
    assert likeliest[waiting.mask].float().mean() > 0.99


def made_up_rollouts() -> Rollouts:
    """Ten responses of 1 to 6 tokens, with pi_b of three tokens at each position."""
    generator = torch.Generator().manual_seed(0)
    length = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5, 3, 5])  # [N]
    mask = torch.arange(6) < length[:, None]  # [N, T]
    position = torch.arange(7)
    tokens = torch.arange(70).view(10, 7)
    top_tokens = torch.randint(20, (10, 6, 3), generator=generator)
    top_logp_behavior = -torch.rand(10, 6, 3, generator=generator)
    return Rollouts(
        tokens=tokens * (position <= length[:, None]),
        prompt_length=torch.ones(10, dtype=torch.long),
        mask=mask,
        logp_behavior=torch.randn(10, 6, generator=generator) * mask,
        top_tokens=top_tokens * mask[..., None],
        top_logp_behavior=top_logp_behavior * mask[..., None],
        truncated=length == 6,
        text=[str(row) for row in range(10)],
        weight_version="3",
        reward=torch.arange(10.0),
    )


def assert_same_rollouts(rollouts: Rollouts, expected: Rollouts) -> None:
    """All fields are equal, the tensors bit for bit."""
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(rollouts, name), value), name
        else:
            assert getattr(rollouts, name) == value, name


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_joining_the_shares_of_any_number_of_ranks_gives_the_step_in_order(world):
    # Group g is on rank g % world. Of five groups on three ranks the last one has one.
    rollouts = made_up_rollouts()
    shares = []
    for rank in range(world):
        shares.append(share_of_rank(rollouts, 2, rank, world))
    assert_same_rollouts(join_ranks(tuple(shares), group_size=2), rollouts)


def test_a_checkpoint_brings_back_the_waiting_rollouts_with_pi_b_of_their_top_tokens(
    engine, policy, prompts, group, tmp_path
):
    sharded = build_policy("tiny", group)
    optimizer, schedule, queue = trainer_state(sharded)
    for step in 1, 2:
        rollouts = engine.sample(prompts[:3], 2, [10 * step] * 3, max_tokens=64)
        rollouts.reward = torch.rand(6)
        rollouts.advantage = torch.rand(6)
        queue.append(rollouts)
    save_checkpoint(
        tmp_path, 2, sharded, optimizer, schedule, queue, group_size=2, keep=1
    )
    restored: deque = deque()
    load_checkpoint(
        tmp_path,
        sharded,
        optimizer,
        schedule,
        restored,
        group_size=2,
        rollouts_type=Rollouts,
    )
    assert len(restored) == 2
    for rollouts, expected in zip(restored, queue, strict=True):
        assert expected.top_tokens.shape == (*expected.mask.shape, 20)
        assert_same_rollouts(rollouts, expected)


# Files


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_leaves_a_newest_checkpoint_that_loads(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "tests/save_until_killed.py", str(tmp_path), "5"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    left_by_kill = [line.split() for line in done.stdout.splitlines()]
    assert len(left_by_kill) == 5
    assert any("unfinished" in left for left in left_by_kill), left_by_kill
    for left in left_by_kill:
        # Two are kept, and a third is there for a moment, beside an unfinished one.
        assert 1 <= len(left) <= 4, left_by_kill


def test_the_last_k_checkpoints_are_kept_and_an_unfinished_one_is_overwritten(
    group, tmp_path
):
    policy = build_policy("tiny", group)
    state = (policy, *trainer_state(policy))
    leftover = tmp_path / "checkpoints/unfinished/left.distcp"
    for step in 9, 10, 999_999, 1_000_000:
        leftover.parent.mkdir(parents=True, exist_ok=True)
        leftover.write_text("of a run that was killed")
        save_checkpoint(tmp_path, step, *state, group_size=8, keep=2)
        assert not (checkpoints(tmp_path)[-1] / leftover.name).exists()
    # By number: as a text step-1000000 comes before step-999999.
    kept = [path.name for path in checkpoints(tmp_path)]
    assert kept == ["step-999999", "step-1000000"]
    step = load_checkpoint(tmp_path, *state, group_size=8, rollouts_type=Rollouts)
    assert step == 1_000_000


def test_a_resumed_log_ends_at_its_step_and_has_no_torn_line(group, tmp_path):
    files = "metrics.jsonl", "samples.jsonl"
    for name in files:
        lines = [f'{{"step": {step}, "x": 0.1}}\n' for step in (0, 1, 2, 2, 3)]
        (tmp_path / name).write_text("".join(lines) + '{"step": 1')
    Log(tmp_path, tokenizer=None, group_size=8, report_to="none", config={}, done=2)
    for name in files:
        rows = [json.loads(line) for line in open(tmp_path / name)]
        assert [row["step"] for row in rows] == [0, 1, 2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)


@pytest.mark.parametrize("save_every", [0, 1])
def test_a_run_that_is_asked_to_stop_saves_its_step_whether_or_not_it_would_have(
    save_every, train_here, tmp_path, monkeypatch
):
    # It looks for signals before a batch is sampled, and when a step is done.
    signals = iter([0, 0, 0, signal.SIGTERM])
    monkeypatch.setattr(train, "agreed_signal", lambda caught: next(signals))
    flags = ["--steps=4", "--prompts_per_step=4", f"--save_every={save_every}"]
    with pytest.raises(Refused, match="stopped by signal 15 after step 2: --resume"):
        train_here(*flags, f"--out_dir={tmp_path}/run")
    assert names(tmp_path / "run")[-1] == "step-000002"


# What is refused, before the engine is built


def refusal(monkeypatch, out_dir: Path | str, **fields: Any) -> str:
    """What train.py --resume says of this folder and configuration."""
    flags = flags_of(fields, out_dir, "--resume")
    monkeypatch.setattr(sys, "argv", ["train.py", *flags])
    monkeypatch.setattr(train, "init_distributed", lambda: pytest.fail("too late"))
    with pytest.raises(Refused) as refused:
        train.main()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def store_run(folder: Path, has_checkpoint: bool = True, **fields: Any) -> None:
    """Write the files of a run that has done 3 steps."""
    (folder / "config.json").write_text(json.dumps(Config(**fields).model_dump()))
    lines = [f'{{"step": {step}}}\n' for step in range(4)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if has_checkpoint:
        (folder / "checkpoints/step-000003").mkdir(parents=True)


def test_a_resume_with_another_configuration_names_the_fields(tmp_path, monkeypatch):
    store_run(tmp_path)
    sentence = refusal(
        monkeypatch,
        tmp_path,
        learning_rate=1e-5,
        objective="grpo",
        steps=200,
        eval_every=1,
    )
    assert "learning_rate was 0.0002, is 1e-05" in sentence
    assert "objective was 'p3o', is 'grpo'" in sentence
    # These may differ.
    assert "steps" not in sentence
    assert "eval_every" not in sentence


def test_top_logprobs_and_objective_args_decide_what_is_learned(tmp_path, monkeypatch):
    store_run(tmp_path, objective="grpo", objective_args={"eps": 0.4})
    sentence = refusal(
        monkeypatch,
        tmp_path,
        objective="grpo",
        objective_args="eps=0.3",
        top_logprobs=3,
    )
    assert "objective_args was {'eps': 0.4}, is {'eps': 0.3}" in sentence
    assert "top_logprobs was 20, is 3" in sentence
    # The same objective_args, from a flag, are no change.
    sentence = refusal(
        monkeypatch, tmp_path, steps=3, objective="grpo", objective_args="eps=0.4"
    )
    assert "is finished" in sentence


def test_what_does_not_matter_may_differ(tmp_path):
    store_run(tmp_path, save_every=5)
    other = Config(
        out_dir=str(tmp_path),
        steps=200,
        save_every=1,
        eval_every=1,
        keep_checkpoints=7,
        verbose=True,
        report_to="wandb",
        resume=True,
        micro_batch_tokens=1,
        kv_cache_gb=1.0,
        max_num_seqs=1,
    )
    assert set(MAY_DIFFER) == other.model_fields_set
    check_resume(other.out_dir, other.steps, other.model_dump())


@pytest.mark.parametrize("has_checkpoint", [True, False])
@pytest.mark.parametrize("steps", [2, 3])
def test_a_finished_run_says_so(steps, has_checkpoint, tmp_path, monkeypatch):
    store_run(tmp_path, has_checkpoint)
    sentence = refusal(monkeypatch, tmp_path, steps=steps)
    assert "is finished, 3 steps are done; give it more --steps" in sentence


def test_a_run_without_a_checkpoint_says_so(tmp_path, monkeypatch):
    store_run(tmp_path, has_checkpoint=False)
    (tmp_path / "checkpoints/unfinished").mkdir(parents=True)
    assert "no complete checkpoint" in refusal(monkeypatch, tmp_path)
    (tmp_path / "metrics.jsonl").unlink()  # killed before its first line
    assert "no complete checkpoint" in refusal(monkeypatch, tmp_path)


@pytest.mark.parametrize("out_dir", ["", "missing", "tests"])
def test_a_folder_without_a_run_says_so(out_dir, monkeypatch):
    assert f"{out_dir!r} holds no run" in refusal(monkeypatch, out_dir)


# Reports


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_report_without_its_package_is_refused_by_one_sentence(package, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Refused, match=f"pip install {package}$"):
        check_reporter(package)


def test_a_folder_named_wandb_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(Refused, match="pip install wandb"):
        check_reporter("wandb")


def report(out_dir: Path, package: str) -> None:
    """Steps 0 to 3; a kill; resumed after step 1, steps 2 to 4."""
    for done, steps in (0, [0, 1, 2, 3]), (1, [2, 3, 4]):
        send = reporter(out_dir, package, config={}, done=done)
        for step in steps:
            send({"step": step, "reward": step / 2, "weight_version": "1"})


def test_tensorboard_has_every_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward"]
    rewards = [(event.step, event.value) for event in events.Scalars("reward")]
    assert rewards == [(step, step / 2) for step in range(5)]


def test_wandb_resumes_the_run_that_it_began(tmp_path, monkeypatch):
    pytest.importorskip("wandb.sdk")  # a run's folder wandb/ would pass for the package
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    report(tmp_path, "wandb")
    wandb.finish()
    run_id = (tmp_path / "wandb_id").read_text()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{run_id}"))) >= 1
