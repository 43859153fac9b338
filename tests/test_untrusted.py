"""What comes from outside is data: a model folder or a checkpoint runs no code here.

Each hostile file would write a witness if it were run. (Problems and answers from
outside are tests/test_reward.py's business.)
"""

import json
import os
import pickle
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROOT
from test_resume import trainer_state
from torch.distributed.checkpoint.state_dict import get_state_dict

from eval import EvalConfig, load_benchmarks
from policy import build_policy
from rollout import Rollouts
from support.checkpoints import load_checkpoint, save_checkpoint
from support.flags import Refused
from support.safe_load import IndexUnpickler
from train import Config, load_data


class Hostile:
    """Unpickled, it makes a folder: the witness that it was run."""

    def __init__(self, witness: Path) -> None:
        self.witness = str(witness)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.witness,)


@pytest.fixture
def witness(tmp_path) -> Path:
    """What a hostile file makes if it is run; none may have made it."""
    path = tmp_path / "witness"
    yield path
    assert not path.exists()


def test_the_hostile_pickle_of_these_tests_is_one(tmp_path):
    pickle.loads(pickle.dumps(Hostile(tmp_path / "witness")))
    assert (tmp_path / "witness").exists()


# Model folders


CODE = """
import os
os.mkdir({witness!r})
from transformers import LlamaConfig as Config
from transformers import LlamaForCausalLM as Model
from transformers import PreTrainedTokenizerFast as Tokenizer
"""


@pytest.fixture
def model_with_code(witness, tmp_path) -> Path:
    """tiny, with code of its own for configuration, model and tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "tiny", folder)
    (folder / "code.py").write_text(CODE.format(witness=str(witness)))
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "code.Config",
        "AutoModelForCausalLM": "code.Model",
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "code.Tokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_the_code_of_a_model_folder_is_left_alone_by_trainer_and_engine(
    model_with_code, witness, train_here
):
    # It is a Llama, which both know themselves.
    flags = ["--prompts_per_step=4", "--group_size=2", "--eval_problems=8"]
    rows = train_here(*flags, "--steps=1", f"--model={model_with_code}")
    assert [row["step"] for row in rows] == [0, 1]


def test_a_model_that_needs_its_own_code_is_refused_in_a_sentence(
    model_with_code, witness
):
    config = json.loads((model_with_code / "config.json").read_text())
    config["model_type"] = "unheard_of"
    (model_with_code / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match=f"no model at '{model_with_code}': ") as refused:
        load_data(Config(model=str(model_with_code)))
    assert "\n" not in str(refused.value)
    with pytest.raises(Refused, match=f"no model at '{model_with_code}': "):
        load_benchmarks(EvalConfig(model=str(model_with_code)))


def test_weights_that_are_a_hostile_pickle_are_not_run(group, witness, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "tiny", folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Hostile(witness)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match="(?i)weights.only"):
        build_policy(str(folder), group)


def test_every_loading_of_a_model_says_that_code_is_not_to_be_run():
    # vLLM and transformers would ask, or follow an environment variable, otherwise.
    calls = 0
    for path in [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]:
        text = path.read_text()
        for call in ("from_pretrained(", "LLM("):
            for place in range(len(text)):
                if text.startswith(call, place):
                    arguments = text[place : place + 200]
                    assert "trust_remote_code=False" in arguments, path
                    calls += 1
    assert calls >= 6


# Checkpoints


@pytest.fixture
def saved(group, tmp_path) -> tuple[Path, tuple]:
    """A run with one checkpoint: (its folder, what load_checkpoint restores)."""
    policy = build_policy("tiny", group)
    state = (policy, *trainer_state(policy))
    save_checkpoint(tmp_path / "run", 1, *state, group_size=2, keep=1)
    return tmp_path / "run", state


def load(saved: tuple[Path, tuple]) -> int:
    out, state = saved
    return load_checkpoint(out, *state, group_size=2, rollouts_type=Rollouts)


def test_a_hostile_pickle_as_the_index_of_a_checkpoint_is_refused(saved, witness):
    index = saved[0] / "checkpoints/step-000001/.metadata"
    index.write_bytes(pickle.dumps(Hostile(witness)))
    # os.mkdir is posix.mkdir.
    with pytest.raises(Refused, match="cannot be read: its index names posix.mkdir; "):
        load(saved)


def test_a_hostile_pickle_as_the_progress_of_a_checkpoint_is_refused(saved, witness):
    progress = saved[0] / "checkpoints/step-000001/progress.pt"
    torch.save({"step": 1, "schedule": Hostile(witness), "queue": []}, progress)
    with pytest.raises(Refused, match="step-000001 cannot be read: Weights only load"):
        load(saved)


def test_a_hostile_pickle_among_the_values_of_a_checkpoint_is_refused(saved, witness):
    out, (policy, optimizer, _, _) = saved
    weights, moments = get_state_dict(policy, optimizer)
    moments["param_groups"][0]["lr"] = Hostile(witness)
    folder = out / "checkpoints/step-000001"
    for stored in folder.glob("*.distcp"):
        stored.unlink()
    dcp.save({"policy": weights, "optimizer": moments}, checkpoint_id=folder)
    with pytest.raises(Refused, match="step-000001 cannot be read: .*[Ww]eights.only"):
        load(saved)


def rewrite_index(folder: Path, name: str) -> None:
    """Have the index of a checkpoint say that all its tensors are in this file."""
    index = folder / ".metadata"
    metadata = IndexUnpickler(BytesIO(index.read_bytes())).load()
    for stored in metadata.storage_data.values():
        object.__setattr__(stored, "relative_path", name)
    index.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("name", ["../elsewhere", "/tmp/elsewhere", "..", "a/../../b"])
def test_an_index_that_names_a_file_outside_its_checkpoint_is_refused(
    name, saved, tmp_path
):
    rewrite_index(saved[0] / "checkpoints/step-000001", name)
    with pytest.raises(Refused, match="cannot be read: its index names the file"):
        load(saved)


@pytest.mark.parametrize(
    "module, name",
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch", "hub.load"),
        ("torch.serialization", "os.system"),
        ("pathlib", "Path.unlink"),
        ("torch.distributed.checkpoint.filesystem", "os.remove"),
    ],
)
def test_an_index_may_name_its_own_classes_and_nothing_else(module, name):
    # GLOBAL, of protocol 0; STACK_GLOBAL of protocol 4 is what dumps() writes.
    old = f"c{module}\n{name}\n.".encode()
    new = pickle.PROTO + b"\x04" + text(module) + text(name) + pickle.STACK_GLOBAL
    for content in old, new + pickle.STOP:
        with pytest.raises(pickle.UnpicklingError, match="its index names"):
            IndexUnpickler(BytesIO(content)).load()


def text(value: str) -> bytes:
    """A text in a pickle of protocol 4."""
    encoded = value.encode()
    return pickle.SHORT_BINUNICODE + bytes([len(encoded)]) + encoded


def test_an_index_that_torch_writes_is_read(saved: Any):
    assert load(saved) == 1
