"""Test what flags and recipes set, and which sentences refuse them."""

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from launch import run_command

import support.checkpoints
import support.machine
from support.checkpoints import config_of
from support.command import Refused
from support.config import Config, EvalConfig
from train import find_objective

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def refusal(*flags: str) -> str:
    """Return the sentence that refuses these flags of train.py."""
    with pytest.raises(Refused) as refused:
        cfg = Config.from_flags(list(flags))
        find_objective(cfg.objective, cfg.objective_args)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("kind", [Config, EvalConfig])
def test_every_field_is_a_flag_with_its_sentence_and_default_in_help(kind, capsys):
    with pytest.raises(SystemExit) as ended:
        kind.from_flags(["--help"])
    assert ended.value.code == 0
    # argparse breaks lines after spaces and hyphens.
    text = "".join(capsys.readouterr().out.split())
    for name, field in kind.model_fields.items():
        assert f"--{name}" in text
        assert "".join(field.description.split()) + "(default:" in text, name


def test_flags_override_recipes_of_which_the_later_counts_and_a_runs_config_is_one(
    tmp_path,
):
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("objective: grpo\nsteps: 7\nlag: 2\nresume: true\n")
    second.write_text("steps: 9\npasses: 3\nlearning_rate: 1e-5\n")  # YAML: a text
    files = [f"--config={first}", f"--config={second}"]
    cfg = Config.from_flags([*files, "--passes=4", "--no-resume", "--out_dir=taken"])
    assert (cfg.objective, cfg.lag, cfg.steps, cfg.passes) == ("grpo", 2, 9, 4)
    assert (cfg.resume, cfg.learning_rate) == (False, 1e-5)
    assert cfg.group_size == Config().group_size == 8
    (tmp_path / "config.json").write_text(json.dumps(config_of(cfg) | {"resume": True}))
    again = Config.from_flags([f"--config={tmp_path / 'config.json'}"])
    assert again == cfg.model_copy(update={"out_dir": ""})


def test_no_variable_of_the_environment_sets_a_field(monkeypatch):
    monkeypatch.setenv("STEPS", "7")
    monkeypatch.setenv("steps", "7")
    assert Config.from_flags([]).steps == Config().steps == 60


def test_a_flag_sets_its_field(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")  # ~ in a shell
    flags = "--objective_args=a=.4 --objective_args c=3 --resume --model=~/x --task=~/x"
    cfg = Config.from_flags(flags.split())
    assert cfg.objective_args == {"a": 0.4, "c": 3}
    assert cfg.resume
    evaluated = EvalConfig.from_flags(["--task=gsm8k,~/math", "--out_dir=~/x"])
    assert evaluated.task == ["gsm8k", "/home/someone/math"]
    assert cfg.model == cfg.task == evaluated.out_dir == "/home/someone/x"


# The bounds of grpo's clip are 1 - eps and 1 + eps, which cross if eps is below 0.
REFUSED_FLAGS = """
--steps=40.5 -> steps is '40.5': Input should be a valid integer
--steps=0 -> steps is '0': Input should be greater than 0
--lag=-1 -> lag is '-1': Input should be greater than or equal to 0
--group_size=1 -> group_size is '1': Input should be greater than or equal
--learning_rate=fast -> learning_rate is 'fast': Input should be a valid number
--learning_rate=inf -> learning_rate is 'inf': Input should be a finite
--learning_rate=nan -> learning_rate is 'nan': Input should be a finite
--top_p=1.5 -> top_p is '1.5': Input should be less than or equal to 1
--temperature=0.001 -> temperature is '0.001': Input should be greater than
--dtype=float16 -> dtype is 'float16': Input should be 'auto', 'float32'
--resume=maybe -> ignored explicit argument 'maybe'
--lerning_rate=1e-4 -> unrecognized arguments: --lerning_rate=1e-4
--learning=1e-4 -> unrecognized arguments: --learning=1e-4
--Steps=4 -> unrecognized arguments: --Steps=4
--config=missing.yaml -> --config missing.yaml is not a YAML file of fields
--config=tests -> --config tests is not a YAML file of fields
--objective_args=eps -> objective_args
--objective=ppo -> objective 'ppo'
--objective=tools.objectives:none -> no attribute 'none'
--objective_args=eps=0.4 -> unexpected keyword argument 'eps'
--objective=grpo --objective_args=eps=nan -> with {'eps': 'nan'} cannot be used:
--objective=grpo --objective_args=eps=-1 -> eps is -1.0: the clip
--objective=tools.objectives:dapo --objective_args=eps_low=-1 -> both
--objective=builtins:print -> the objective 'builtins:print' with {} cannot be used
--objective=test_objectives:detached -> does not require grad
--objective=tools.objectives:dppo_tv --objective_args=cap=0 -> loss does not favor
--objective=test_objectives:exchanged -> are its first two arguments swapped, is a minus
--minibatches=3 -> prompts_per_step is 32: give a multiple of 6
"""


@pytest.mark.parametrize("case", REFUSED_FLAGS.strip().splitlines())
def test_a_flag_that_its_field_does_not_accept_is_refused_in_a_sentence(
    case, monkeypatch
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags, sentence = case.split(" -> ")
    assert sentence in refusal(*flags.split())


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("clip_range: 0.2\n", "clip_range is 0.2: Extra inputs are not permitted"),
        ("steps: 3.5\n", "steps is 3.5: Input should be a valid integer"),
        ("- steps\n", "not a YAML file of fields: write `name: value`, one per line"),
        ("", "not a YAML file of fields: write `name: value`, one per line"),
        ("eps:0.4", "not a YAML file of fields: write `name: value`, one per line"),
        ("steps: [\n", "is not a YAML file of fields: while parsing"),
        ("lag: 1\nlag: 2\n", "is not a YAML file of fields: a name occurs twice"),
        ("[" * 9999, "is not a YAML file of fields: maximum recursion depth"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused_in_a_sentence(
    text, sentence, tmp_path
):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert sentence in refusal(f"--config={path}")


@pytest.mark.parametrize("path", RECIPES, ids="{.stem}".format)
def test_every_recipe_of_the_repository_is_a_configuration(path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8" if "8gpu" in path.stem else "1")
    cfg = Config.from_flags([f"--config={path}"])
    find_objective(cfg.objective, cfg.objective_args)


def assert_refused_in_one_line(command: str, printed: str) -> None:
    """Assert that a command prints only this sentence, and that its exit code is 1."""
    done = run_command([sys.executable, *command.split()])
    assert done.returncode == 1
    assert done.stdout.startswith(printed)
    assert len(done.stdout.splitlines()) == 1


def test_a_refusal_is_one_line_with_exit_code_1():
    assert_refused_in_one_line("train.py --lag=-1", "train.py: lag is '-1': ")


@pytest.mark.slow
def test_a_cache_that_is_too_small_or_too_large_is_refused_in_one_line():
    for size, reason in (("1e-05", "No available"), ("9999.0", "Available")):
        sentence = "eval.py: vLLM cannot build an engine for tiny with kv_cache_gb "
        sentence += f"{size}: {reason} memory"
        assert_refused_in_one_line(f"eval.py --kv_cache_gb={size}", sentence)


@pytest.mark.parametrize(
    "name",
    "WORLD_SIZE SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE PMI_SIZE".split(),
)
def test_ranks_of_a_launcher_other_than_torchrun_are_told_how_to_start(
    name, monkeypatch
):
    # Kubernetes' PyTorchJob, srun and mpirun set no rank within a node.
    monkeypatch.setenv(name, "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(Refused, match=f"{name} is 2, but .*LOCAL_WORLD_SIZE.* not"):
        support.machine.init_distributed()


@pytest.mark.parametrize(
    "is_slow, flags, sampled_in",
    [
        (False, [], "bfloat16"),
        (True, [], "float32"),
        (True, ["--rollout_quantization=fp8_per_channel"], "bfloat16"),
        (True, ["--rollout_dtype=bfloat16"], "bfloat16"),
    ],
)
def test_auto_avoids_slow_bfloat16_and_a_run_prints_the_dtype_of_its_samples(
    is_slow, flags, sampled_in, group, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(support.machine, "has_fast_bfloat16", lambda: not is_slow)
    cfg = Config.from_flags([f"--out_dir={tmp_path}/run", *flags])
    support.checkpoints.make_out_dir(cfg)
    assert [cfg.dtype, cfg.rollout_dtype] == ["float32", sampled_in]
    printed = f"/run: trains in float32; the engine's dtype is {sampled_in}\n"
    assert printed in capsys.readouterr().out


@pytest.mark.parametrize(
    "capability, dtypes",
    [
        ((7, 5), ("float32", "float16", "float16")),  # a T4
        ((8, 0), ("bfloat16", "bfloat16", "bfloat16")),  # an A100
    ],
)
def test_auto_on_a_gpu_without_bfloat16_is_float16_for_the_engine(
    capability, dtypes, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    cfg = Config()
    assert (cfg.dtype, cfg.rollout_dtype, EvalConfig().dtype) == dtypes


@pytest.mark.parametrize("script", ["train.py", "eval.py"])
@pytest.mark.parametrize("flag, status", [("--help", 0), ("--lerning_rate=1", 1)])
def test_help_and_a_refused_flag_do_not_wait_for_the_import_of_torch(
    flag, status, script
):
    command = [sys.executable, "-X", "importtime", script, flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == status
    assert "pydantic" in done.stderr
    assert "torch" not in done.stderr
