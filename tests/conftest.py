"""Fixtures: the loss under test (--loss PATH, or the repository's), engines, runs.

The first vLLM engine in this process takes 10 s to build, each further one a third of a
second.
"""

import functools
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path

import pytest

# OpenMP reads it when torch is imported. Threads that spin while they wait starve the
# other ranks.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# All engines: one that is collected as garbage takes the process group with it.
KEPT = []
ROOT = Path(__file__).parents[1]
LOSS = ROOT / "loss.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
# All that --loss takes from a file.
FUNCTIONS = (
    "group_advantage",
    "ratio_sums",
    "effective_sample_size",
    "kl_divergence",
    "p3o",
)


def load_module(path):
    """Import the file at `path`, which need not be on sys.path."""
    spec = importlib.util.spec_from_file_location(
        f"loss_at_{abs(hash(str(path)))}", path
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for its annotations
    spec.loader.exec_module(module)
    return module


def differences(module, expected):
    """Sentences on where `module` lacks the interface of `expected`.

    The names of parameters matter, and their annotations do not.
    """

    def parameters(signature):
        return [(each.name, each.kind) for each in signature.parameters.values()]

    for name in FUNCTIONS:
        function = getattr(module, name, None)
        right = inspect.signature(getattr(expected, name))
        if function is None:
            yield f"{name} is missing"
        elif parameters(inspect.signature(function)) != parameters(right):
            yield f"{name}{inspect.signature(function)} should be {name}{right}"


def pytest_addoption(parser):
    parser.addoption(
        "--loss", metavar="PATH", help="run tests/test_loss.py on this file"
    )


def pytest_sessionstart(session):
    session.config.session = session


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    # At the end of a process vLLM looks through all of its memory for garbage, three
    # times for each engine. For the hundred engines here that takes two minutes.
    if KEPT:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(config.session.exitstatus))


def pytest_configure(config):
    path = config.getoption("--loss")
    if path is None:
        return
    if not Path(path).is_file():
        raise pytest.UsageError(f"--loss {path}: there is no such file")
    try:
        config.loss_module = load_module(Path(path).resolve())
    except Exception as error:
        raise pytest.UsageError(
            f"--loss {path} cannot be imported: {error!r}"
        ) from error
    complaints = list(differences(config.loss_module, load_module(LOSS)))
    if complaints:
        lines = [f"--loss {path} has another interface:", *complaints]
        raise pytest.UsageError("\n".join(lines))


@pytest.fixture(scope="session")
def loss(request):
    """The module under test."""
    return getattr(request.config, "loss_module", None) or load_module(LOSS)


# Some hundred engines live in one process until it ends. This is room for 256 sequences
# of tiny in float32, as many as are decoded at the same time.
CACHE_GB = 0.1

# Of 38 tokens some responses are complete, mostly sums of three digits. Of nine none
# is, so that no group has a signal.
SOME_COMPLETE = "--max_response_tokens=38"
NONE_COMPLETE = "--max_response_tokens=9"

# What one rank and several have to do alike. In bfloat16 a batch of another size rounds
# otherwise, which flips single samples. 31 problems cannot be shared out equally.
TWO_STEPS = [
    SOME_COMPLETE,
    "--steps=2",
    "--prompts_per_step=8",
    "--rollout_dtype=float32",
    "--eval_problems=31",
]


def replace_kernels_once():
    """Each engine replaces vLLM's kernels in all modules, by the same ones.

    Once a process is enough.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read at the import
    from vllm.platforms.cpu import CpuPlatform

    replace = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = staticmethod(replace)


@pytest.fixture(scope="session")
def group():
    """The mesh of this process, the only rank of a group that ends with its engines."""
    from support.machine import init_distributed

    replace_kernels_once()
    return init_distributed()


@pytest.fixture(scope="session")
def build_engine(group):
    """Builds a rollout.Engine, by default of tiny in float32.

    In float32 engine and trainer agree to 1e-4 nats.
    """
    from rollout import Engine

    def build(model="tiny", max_model_len=128, **options):
        options.setdefault("kv_cache_gb", CACHE_GB)
        engine = Engine(str(model), max_model_len, **options)
        KEPT.append(engine)
        return engine

    return build


@pytest.fixture(scope="session")
def engine(build_engine):
    """An engine that gives pi_b of all tokens: tiny has 20."""
    return build_engine(top_logprobs=99)


@pytest.fixture
def policy(engine):
    """A fresh copy of the tiny policy, in the engine too when the test starts."""
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
    """What engines are asked to sample from here on, as they sample it."""
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
    """The held-out split of the embedded task: problems, and prompts as token ids."""
    from train import Config, load_data

    _, _, heldout, _ = load_data(Config())
    return heldout


@pytest.fixture(scope="session")
def prompts(heldout):
    """The held-out prompts of the embedded task, as token ids."""
    return heldout.prompts


@pytest.fixture(scope="session")
def run_here(group):
    """Runs a script's main() with flags in this process, which has vLLM loaded.

    Left out are joining the process group, which a process can do once, and the figure,
    which takes as long as a step.
    """
    import rollout
    import support.log
    import support.tasks

    def build(*arguments, **options):
        options["kv_cache_gb"] = min(options.get("kv_cache_gb", 1), CACHE_GB)
        engine = rollout.Engine(*arguments, **options)
        KEPT.append(engine)
        return engine

    encode_prompt = support.tasks.encode_prompt
    known = {}

    def encode_once(tokenizer, *texts):
        # The 4,608 prompts of tiny take a second, and nearly every run has them.
        key = tokenizer.name_or_path, *texts
        if key not in known:
            known[key] = encode_prompt(tokenizer, *texts)
        return known[key]

    def run(module, *flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "init_distributed", lambda: group)
            patch.setattr(module, "Engine", build)
            patch.setattr(support.tasks, "encode_prompt", encode_once)
            patch.setattr(support.log, "draw_curves", lambda rows, path: None)
            patch.setattr(sys, "argv", [module.__file__, *flags])
            module.main()

    return run


def refusal_of(script, *flags):
    """The sentence with which a script refuses these flags before anything is built."""
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
    """Runs train.py with flags in this process; returns its lines of metrics.

    Where a test says nothing else, the two evaluations are short, as they would take as
    long as two steps, and responses are cut where some of them are complete.
    """
    import train

    def run(*flags, out_dir=None):
        # A fresh clone has no runs/ either.
        out = out_dir or tmp_path_factory.mktemp("fresh") / "runs/here"
        defaults = ["--eval_every=0", "--eval_problems=4", SOME_COMPLETE]
        run_here(train, f"--out_dir={out}", *defaults, *flags)
        return [json.loads(line) for line in open(out / "metrics.jsonl")]

    return run
