"""Fixtures: the loss under test (by default loss.py), engines and runs.

The first vLLM engine in a process takes 10 s to build, each further one a third of a
second.
"""

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

# OpenMP reads this variable when torch is imported. Without it, threads spin while they
# wait and starve the other ranks.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# All engines. If one were garbage-collected, it would destroy the process group.
ENGINES = []
ROOT = Path(__file__).parents[1]
LOSS = ROOT / "loss.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def load_module(path):
    """Import the file at `path`, which need not be on sys.path."""
    spec = importlib.util.spec_from_file_location(
        f"loss_at_{abs(hash(str(path)))}", path
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look up their annotations there.
    spec.loader.exec_module(module)
    return module


def pytest_addoption(parser):
    parser.addoption(
        "--loss", metavar="PATH", help="run tests/test_loss.py on this file"
    )


def pytest_sessionstart(session):
    session.config.session = session


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    # At exit vLLM runs three full garbage collections for each engine, which takes two
    # minutes for the hundred engines here.
    if ENGINES:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(config.session.exitstatus))


@pytest.fixture(scope="session")
def loss(request):
    """Return the module under test."""
    return load_module(Path(request.config.getoption("--loss") or LOSS).resolve())


# About a hundred engines live in one process until it ends. This is enough for the 256
# sequences of tiny in float32 that are decoded at the same time.
CACHE_GB = 0.1

# With 38 tokens some responses are complete, mostly sums of three digits. With 9 tokens
# none is, so no group has a signal.
SOME_COMPLETE = "--max_response_tokens=38"
NONE_COMPLETE = "--max_response_tokens=9"

# A run that gives the same result on one rank and on several. In bfloat16 the rounding
# depends on the batch size, which changes single samples. 31 problems cannot be divided
# equally.
TWO_STEPS = [
    SOME_COMPLETE,
    "--steps=2",
    "--prompts_per_step=8",
    "--rollout_dtype=float32",
    "--eval_problems=31",
]


def replace_kernels_once():
    """Make vLLM replace its kernels once per process instead of once per engine."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at the import
    from vllm.platforms.cpu import CpuPlatform

    replace = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(replace)


@pytest.fixture(scope="session")
def group():
    """Return the mesh of this process, which is the only rank of its group."""
    from support.machine import init_distributed

    replace_kernels_once()
    return init_distributed()


@pytest.fixture(scope="session")
def build_engine(group):
    """Return a function that builds a rollout.Engine, by default of tiny in float32.

    In float32 engine and trainer agree to 1e-4 nats.
    """
    from rollout import Engine

    def build(model="tiny", max_model_len=128, **options):
        options.setdefault("kv_cache_gb", CACHE_GB)
        engine = Engine(str(model), max_model_len, **options)
        ENGINES.append(engine)
        return engine

    return build


@pytest.fixture(scope="session")
def engine(build_engine):
    """Return an engine that gives pi_b of all 20 tokens of tiny."""
    return build_engine(top_logprobs=99)


@pytest.fixture
def policy(engine):
    """Return a fresh copy of the tiny policy, whose weights `engine` has, too."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained("tiny")
    engine.load_weights(policy.state_dict().items(), version="0")
    return policy


def add_noise(model, scale):
    """Imitate an update: add normal noise of this deviation to every weight."""
    import torch

    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            # Under FSDP a weight is a DTensor; the only rank has all of it.
            whole = getattr(weight, "to_local", lambda weight=weight: weight)()
            whole.add_(scale * torch.randn(weight.shape, generator=generator))


@pytest.fixture
def asked(monkeypatch):
    """Return a list in which the arguments of all later samplings are recorded."""
    from rollout import Engine

    calls = []
    sample = Engine.sample

    def recording(engine, prompts, n, seeds, **sampling):
        calls.append({"prompts": prompts, "n": n, "seeds": seeds, **sampling})
        return sample(engine, prompts, n, seeds, **sampling)

    monkeypatch.setattr(Engine, "sample", recording)
    return calls


@pytest.fixture(scope="session")
def heldout():
    """Return the held-out problems of the embedded task with prompts as token ids."""
    from train import Config, load_data

    _, _, heldout, _ = load_data(Config())
    return heldout


@pytest.fixture(scope="session")
def prompts(heldout):
    """Return the held-out prompts of the embedded task as token ids."""
    return heldout.prompts


@pytest.fixture(scope="session")
def run_here(group):
    """Return a function that runs a script's main() with flags in this process.

    It does not join the process group again, and it draws no figure, which would take
    as long as a step.
    """
    import rollout
    import support.log
    import support.tasks

    def build(*arguments, **options):
        options["kv_cache_gb"] = min(options.get("kv_cache_gb", 1), CACHE_GB)
        engine = rollout.Engine(*arguments, **options)
        ENGINES.append(engine)
        return engine

    encode_prompt = support.tasks.encode_prompt
    known = {}

    def encode_once(tokenizer, *texts):
        # Encoding the 4,608 prompts of tiny takes a second, in nearly every run.
        key = tokenizer.name_or_path, *texts
        if key not in known:
            known[key] = encode_prompt(tokenizer, *texts)
        return known[key]

    def run(module, *flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "init_distributed", lambda: group)
            patch.setattr(module, "Engine", build)
            patch.setattr(support.tasks, "encode_prompt", encode_once)
            patch.setattr("pandas.DataFrame.plot", MagicMock())
            patch.setattr(sys, "argv", [module.__file__, *flags])
            module.main()

    return run


def refusal_of(script, *flags):
    """Return the sentence with which a script refuses these flags at its start."""
    from support.command import Refused

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Refused) as refused:
        patch.setattr(sys, "argv", [script.__file__, *flags])
        patch.setattr(script, "init_distributed", lambda: pytest.fail("too late"))
        script.main()
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


@pytest.fixture(scope="session")
def train_here(run_here, tmp_path_factory):
    """Return a function that runs train.py with flags and returns its lines of metrics.

    By default the two evaluations are short, because they would take as long as two
    steps, and responses are cut at a length at which some of them are complete.
    """
    import train

    def run(*flags, out_dir=None):
        # A fresh clone has no runs/ either.
        out = out_dir or tmp_path_factory.mktemp("fresh") / "runs/here"
        defaults = ["--eval_every=0", "--eval_problems=4", SOME_COMPLETE]
        run_here(train, f"--out_dir={out}", *defaults, *flags)
        return [json.loads(line) for line in open(out / "metrics.jsonl")]

    return run
