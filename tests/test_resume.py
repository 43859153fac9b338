"""A run that is killed, anywhere, and resumed does what a run does that was left alone."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import train
from checkpoint import check_resume, checkpoints, load_checkpoint, merge
from config import REPORTS, Config, Refused, check_config
from log import Log, reporter
from policy import build_policy
from rollout import Rollouts
from train import save_checkpoint

ROOT = Path(__file__).parents[1]
SIZE = dict(prompts_per_step=5, group_size=4, eval_problems=16, eval_every=3, save_every=2)
# Its engine in float32: in bfloat16, ranks with batches of another size round otherwise.
LAGGED = SIZE | dict(lag=1, steps=8, minibatches=2, rollout_dtype="float32", learning_rate=4e-4)
FRESH = SIZE | dict(steps=4, passes=2, objective="decoupled", rollout_quantization="fp8_emulated")


def flags(fields, out_dir, *more):
    return [*(f"--{name}={value}" for name, value in fields.items()), f"--out_dir={out_dir}", *more]


def start_lives(tmp, core, runs):
    """Start tests/lives.py on one of the cores (there may be only one)."""
    Path(tmp, f"{core}.json").write_text(json.dumps(runs, default=str))
    core = core % len(os.sched_getaffinity(0))
    command = [sys.executable, ROOT / "tests/lives.py", tmp / f"{core}.json", str(core)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """Runs killed again and again, with lag and without, and runs left alone:
    (folder, [what each printed, exit code] of the killed run with lag, and of the others)."""
    tmp = tmp_path_factory.mktemp("lives")
    run, again = flags(LAGGED, tmp / "lagged"), flags(LAGGED, tmp / "lagged", "--resume")
    lagged = [
        [run, ["SIGTERM", "rollout", 1], tmp / "lagged-1"],
        [again, ["SIGKILL", "rollout", 4], tmp / "lagged-2"],
        [again, ["SIGKILL", "update", 6], tmp / "lagged-3"],
        [again, ["SIGKILL", "save", 6], tmp / "lagged-4"],
        [again, None, None],
    ]
    alone = flags(LAGGED, tmp / "lagged-alone", "--keep_checkpoints=9")
    others = [
        [alone, None, None],
        [flags(FRESH, tmp / "fresh-alone"), None, None],
        [flags(FRESH, tmp / "fresh"), ["SIGKILL", "update", 4], None],
        [flags(FRESH, tmp / "fresh", "--resume"), None, None],
    ]
    started = [start_lives(tmp, core, runs) for core, runs in enumerate((lagged, others))]
    ends = []
    for process in started:
        out, errors = process.communicate()
        assert process.returncode == 0, errors
        ends.append(json.loads(out))
    return tmp, *ends


def metrics(out_dir):
    """The lines of a run without what differs between two runs of the same thing."""
    rows = [json.loads(line) for line in open(Path(out_dir, "metrics.jsonl"))]
    time_and_space = {"tokens_per_second", "peak_memory_gb"}
    return [
        {k: v for k, v in row.items() if not k.endswith("_seconds") and k not in time_and_space}
        for row in rows
    ]


def names(out_dir):
    return sorted(path.name for path in Path(out_dir, "checkpoints").iterdir())


# What a killed run leaves


@pytest.mark.slow
def test_sigterm_finishes_the_step_saves_it_and_exits(lives):
    tmp, ((printed, code), *_), _ = lives
    assert code == 1 and "stopped by signal 15 after step 1: --resume goes on" in printed
    assert names(tmp / "lagged-1") == ["step-000001"]
    assert metrics(tmp / "lagged-1") == metrics(tmp / "lagged-alone")[:2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "life, phase, last_line, left",
    [
        (2, "rollout", 3, ["step-000001", "step-000002"]),
        (3, "update", 5, ["step-000002", "step-000004"]),
        (4, "save", 6, ["step-000002", "step-000004", "unfinished"]),
    ],
)
def test_after_kill_9_complete_checkpoints_and_whole_lines_are_there(
    life, phase, last_line, left, lives
):
    tmp, ends, _ = lives
    assert ends[life - 1][1] == -signal.SIGKILL, ends[life - 1][0]
    rows = metrics(tmp / f"lagged-{life}")
    assert rows == metrics(tmp / "lagged-alone")[: last_line + 1]  # each life's lines, none twice
    assert names(tmp / f"lagged-{life}") == left
    assert not (tmp / f"lagged-{life}" / "checkpoints/unfinished/.metadata").exists()


# What the resumed run does


@pytest.mark.slow
@pytest.mark.parametrize("run", ["lagged", "fresh"])
def test_resumed_on_one_rank_it_equals_the_run_left_alone_bit_for_bit(run, lives):
    tmp, lagged, others = lives
    assert [code for _, code in [lagged[-1], *others]] == [0, 0, 0, -signal.SIGKILL, 0], lives
    assert metrics(tmp / run) == metrics(tmp / f"{run}-alone")
    for name in "samples.jsonl", "model/model.safetensors":
        assert (tmp / run / name).read_bytes() == (tmp / f"{run}-alone" / name).read_bytes(), name
    assert metrics(tmp / run)[-1]["step"] == int(names(tmp / run)[-1].removeprefix("step-"))


@pytest.fixture(scope="module")
def two_ranks(lives):
    """The run killed while it saved step 6, resumed by two ranks with more steps to do; at step 8
    torchrun, and torchrun alone, gets SIGTERM: (folder, what was printed)."""
    out = lives[0] / "two-ranks"
    shutil.copytree(lives[0] / "lagged-4", out)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    more = "--resume", "--keep_checkpoints=9", "--steps=99"
    process = subprocess.Popen(
        [*command, ROOT / "train.py", *flags(LAGGED, out, *more)],
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
    alone, two = metrics(lives[0] / "lagged-alone"), metrics(two_ranks[0])
    assert two[:5] == alone[:5]  # before the checkpoint
    for a, b in zip(alone[5:], two[5:9], strict=True):
        assert (b["step"], b["weight_version"]) == (a["step"], a["weight_version"])
        for name in "reward", "response_tokens", "groups_with_signal":
            assert b[name] == pytest.approx(a[name], rel=1e-6), name
        for name in "ess", "grad_norm", "entropy", "loss", "learning_rate":
            assert b[name] == pytest.approx(a[name], rel=1e-3), name


@pytest.mark.slow
def test_torchrun_passes_a_sigterm_on_and_waits_for_the_checkpoint(two_ranks):
    out, printed = two_ranks
    last = metrics(out)[-1]["step"]
    assert last >= 8 and f"stopped by signal 15 after step {last}" in printed
    assert names(out)[-1] == f"step-{last:06d}" and "Traceback" not in printed.split("torch")[0]


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_has_what_a_checkpoint_of_one_has(lives, two_ranks, group):
    states = []
    for out in lives[0] / "lagged-alone", two_ranks[0]:
        for later in checkpoints(out):
            if later.name > "step-000008":
                shutil.rmtree(later)
        cfg = Config(**LAGGED, out_dir=str(out))
        policy = build_policy(cfg, group)
        optimizer = torch.optim.AdamW(policy.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
        queue = deque()
        assert load_checkpoint(cfg, policy, optimizer, schedule, queue) == 8
        assert schedule.last_epoch == 8 * cfg.minibatches
        states.append((get_state_dict(policy, optimizer), *queue))
    (((one, moments), batch), ((two, moments_of_two), batch_of_two)) = states
    for name, weight in one.items():
        assert torch.allclose(weight.full_tensor(), two[name].full_tensor(), atol=1e-4), name
    for name, state in moments["state"].items():
        for a, b in zip(state.values(), moments_of_two["state"][name].values(), strict=True):
            a, b = (getattr(x, "full_tensor", lambda x=x: x)() for x in (a, b))
            assert (a - b).norm() <= 1e-2 * a.norm(), name
    assert batch.text == batch_of_two.text and len(batch.text) == 20
    assert batch.weight_version == batch_of_two.weight_version == "7"
    for name in "tokens", "prompt_length", "mask", "truncated", "reward", "advantage":
        assert torch.equal(getattr(batch, name), getattr(batch_of_two, name)), name
    assert torch.allclose(batch.logp_behavior, batch_of_two.logp_behavior, atol=1e-3)


def test_merging_the_shares_of_any_number_of_ranks_gives_the_step_in_order_of_place():
    places, group = 5, 2
    length = torch.tensor([3, 1, 4, 1, 5, 2, 6, 5, 3, 5])  # [N] of the responses
    mask = torch.arange(6) < length[:, None]  # [N, T]
    whole = Rollouts(
        tokens=torch.arange(70).view(10, 7) * (torch.arange(7) <= length[:, None]),
        prompt_length=torch.ones(10, dtype=torch.long),
        mask=mask,
        logp_behavior=torch.randn(10, 6) * mask,
        truncated=length == 6,
        text=[str(i) for i in range(10)],
        weight_version="3",
        reward=torch.arange(10.0),
    )
    for world in 1, 2, 3, 5:
        rows = [[i for i in range(10) if i // group % world == rank] for rank in range(world)]
        merged = merge([whole.rows(part) for part in rows], group)
        assert merged.text == whole.text and merged.weight_version == "3", places
        for name, value in vars(whole).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(getattr(merged, name), value), (world, name)


# Files


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_leaves_a_newest_checkpoint_that_loads(tmp_path):
    command = [sys.executable, ROOT / "tests/save_until_killed.py", str(tmp_path), "5"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = [line.split() for line in done.stdout.splitlines()]
    assert len(left) == 5 and any("unfinished" in names for names in left), left
    assert all(1 <= len(names) <= 4 for names in left)  # two kept, a third for a moment


def test_the_last_k_checkpoints_are_kept_and_an_unfinished_one_is_overwritten(group, tmp_path):
    cfg = Config(out_dir=str(tmp_path), keep_checkpoints=2)
    policy = build_policy(cfg, group)
    optimizer = torch.optim.AdamW(policy.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    left = tmp_path / "checkpoints/unfinished/left.distcp"
    for step in 9, 10, 999_999, 1_000_000:
        left.parent.mkdir(parents=True, exist_ok=True)
        left.write_text("of a run that was killed")
        save_checkpoint(cfg, step, policy, optimizer, schedule, deque())
        assert not (checkpoints(cfg.out_dir)[-1] / left.name).exists()
    assert [path.name for path in checkpoints(cfg.out_dir)] == ["step-999999", "step-1000000"]
    assert load_checkpoint(cfg, policy, optimizer, schedule, deque()) == 1_000_000


def test_a_resumed_log_ends_at_its_step_and_has_no_torn_line(group, tmp_path):
    for name in "metrics.jsonl", "samples.jsonl":
        rows = "".join(f'{{"step": {step}, "x": 0.1}}\n' for step in (0, 1, 2, 2, 3))
        (tmp_path / name).write_text(rows + '{"step": 1')
    Log(Config(out_dir=str(tmp_path), resume=True), None, 2)
    for name in "metrics.jsonl", "samples.jsonl":
        rows = [json.loads(line) for line in open(tmp_path / name)]
        assert [row["step"] for row in rows] == [0, 1, 2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


# What is refused, before the engine is built


def refusal(cfg, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", *flags(cfg, cfg.pop("out_dir"), "--resume")])
    monkeypatch.setattr(train, "init_distributed", lambda: pytest.fail("too late"))
    with pytest.raises(Refused) as refused:
        train.main()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def stored_run(folder, checkpoint=True, **fields):
    """The files of a run that has done 3 steps."""
    (folder / "config.json").write_text(json.dumps(asdict(Config(**fields))))
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}}}\n' for n in range(4)))
    if checkpoint:
        (folder / "checkpoints/step-000003").mkdir(parents=True)


def test_a_resume_with_another_configuration_names_the_fields(tmp_path, monkeypatch):
    stored_run(tmp_path)
    other = dict(learning_rate=1e-5, objective="grpo", steps=200, eval_every=1)
    said = refusal(other | {"out_dir": tmp_path}, monkeypatch)
    assert "learning_rate was 0.0002, is 1e-05, objective was 'p3o', is 'grpo'" in said
    assert "steps" not in said and "eval_every" not in said


def test_what_does_not_matter_may_differ(tmp_path):
    stored_run(tmp_path, save_every=5)
    free = dict(steps=200, save_every=1, eval_every=1, verbose=True, report_to="wandb", resume=True)
    free |= dict(micro_batch_tokens=1, kv_cache_gb=1.0, max_num_seqs=1, keep_checkpoints=7)
    check_resume(Config(out_dir=str(tmp_path), **free))


@pytest.mark.parametrize("checkpoint", [True, False])
def test_a_finished_run_says_so(checkpoint, tmp_path, monkeypatch):
    stored_run(tmp_path, checkpoint)
    for steps in 2, 3:
        said = refusal({"out_dir": tmp_path, "steps": steps}, monkeypatch)
        assert "is finished, 3 steps are done" in said and "--steps" in said


def test_a_run_without_a_checkpoint_says_so(tmp_path, monkeypatch):
    stored_run(tmp_path, checkpoint=False)
    (tmp_path / "checkpoints/unfinished").mkdir(parents=True)
    assert "no complete checkpoint" in refusal({"out_dir": tmp_path}, monkeypatch)
    (tmp_path / "metrics.jsonl").unlink()  # killed before its first line
    assert "no complete checkpoint" in refusal({"out_dir": tmp_path}, monkeypatch)


@pytest.mark.parametrize("out_dir", ["", "missing", "tests"])
def test_a_folder_without_a_run_says_so(out_dir, monkeypatch):
    assert f"{out_dir!r} holds no run" in refusal({"out_dir": out_dir}, monkeypatch)


# Reports


@pytest.mark.parametrize("package", REPORTS)
def test_a_report_without_its_package_is_refused_by_one_sentence(package, monkeypatch):
    monkeypatch.setattr("config.find_spec", lambda name: None)
    with pytest.raises(Refused, match=f"pip install {package}$"):
        check_config(Config(report_to=package))


def test_a_folder_named_wandb_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(Refused, match="pip install wandb"):
        check_config(Config(report_to="wandb"))


def report(out_dir, package):
    """Steps 0 to 3; a kill; resumed at step 1."""
    for resume, start, steps in (False, 0, (0, 1, 2, 3)), (True, 1, (2, 3, 4)):
        cfg = Config(out_dir=str(out_dir), report_to=package, resume=resume)
        log = reporter(cfg, start)
        for step in steps:
            log({"step": step, "reward": step / 2, "weight_version": "1"})


def test_tensorboard_has_every_step_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward"]
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(i, i / 2) for i in range(5)]


def test_wandb_resumes_the_run_that_it_began(tmp_path, monkeypatch):
    pytest.importorskip("wandb.sdk")  # a run's folder wandb/ would pass for the package
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    report(tmp_path, "wandb")
    wandb.finish()
    name = (tmp_path / "wandb_id").read_text()
    assert len(list((tmp_path / "wandb").glob(f"offline-run-*-{name}"))) >= 1
