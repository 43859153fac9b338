"""Shows that a model folder is only data: no code in it is run.

Each hostile file would create a witness if it were run. Problems and answers are tested
in tests/test_tasks.py and tests/test_reward.py.
"""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from policy import build_policy
from support.command import Refused
from support.models import check_model


class Hostile:
    """An object that creates a folder, the witness, when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = str(witness)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.witness,)


@pytest.fixture
def witness(tmp_path) -> Path:
    """Return the path that a hostile file would create, and check that it did not."""
    path = tmp_path / "witness"
    yield path
    assert not path.exists()


def test_unpickling_a_hostile_object_creates_the_witness(tmp_path):
    pickle.loads(pickle.dumps(Hostile(tmp_path / "witness")))
    assert (tmp_path / "witness").exists()


CODE = """
import os
os.mkdir({witness!r})
from transformers import LlamaConfig as Config
from transformers import LlamaForCausalLM as Model
from transformers import PreTrainedTokenizerFast as Tokenizer
"""


@pytest.fixture
def model_with_code(witness, tmp_path) -> Path:
    """Copy tiny/ and give it code for its configuration, model and tokenizer."""
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


def test_trainer_and_engine_do_not_run_the_code_of_a_model_folder(
    model_with_code, train_here
):
    # Both have code of their own for this model, which is a Llama.
    flags = ["--prompts_per_step=4", "--group_size=2", "--steps=1"]
    rows = train_here(*flags, f"--model={model_with_code}")
    assert [row["step"] for row in rows] == [0, 1]


def test_a_model_that_needs_its_own_code_is_refused_in_a_sentence(model_with_code):
    config = json.loads((model_with_code / "config.json").read_text())
    config["model_type"] = "unheard_of"
    (model_with_code / "config.json").write_text(json.dumps(config))
    with pytest.raises(Refused, match="is not a model that can be read: ") as refused:
        check_model(str(model_with_code))
    assert "\n" not in str(refused.value)


def test_weights_that_are_a_hostile_pickle_are_not_run(group, witness, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "tiny", folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Hostile(witness)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match="(?i)weights.only"):
        build_policy(str(folder), group)


def test_every_call_that_loads_a_model_forbids_its_code():
    # Otherwise vLLM and transformers would ask or follow an environment variable.
    calls = []
    for path in [*ROOT.glob("*.py"), *ROOT.glob("support/*.py")]:
        for loader in ("from_pretrained(", "LLM("):
            calls += path.read_text().split(loader)[1:]
    assert len(calls) >= 5
    for call in calls:
        assert "trust_remote_code=False" in call[:200], call[:200]
