"""Tests of which models are accepted, and of the sentences that refuse others."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from config_fields import SIZE
from conftest import ROOT, refusal_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

import eval
import train
from support.command import Refused
from support.models import TRAINABLE, check_model, check_trainable, turn_end_tokens

FILE = "model.safetensors"
SHARD = "model-00002-of-00002.safetensors"
UP = "model.layers.2.mlp.up_proj.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a copy of tiny."""
    return Path(shutil.copytree(ROOT / "tiny", tmp_path / "model"))


def set_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def save(weights: dict[str, torch.Tensor], path: Path) -> None:
    save_file(weights, path, metadata={"format": "pt"})


def shard(folder: Path) -> None:
    """Distribute the weights of a folder over two files and an index."""
    weights = load_file(folder / FILE)
    (folder / FILE).unlink()
    first = SHARD.replace("00002-of", "00001-of")
    file_of = {name: SHARD if "layers.2" in name else first for name in weights}
    for file in first, SHARD:
        save(
            {name: weights[name] for name in weights if file_of[name] == file},
            folder / file,
        )
    (folder / f"{FILE}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": file_of})
    )


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(Refused) as refused:
        check_model(str(folder), **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Weights


@pytest.mark.parametrize(
    "change, config, sentence",
    [
        (
            lambda w: w.pop(UP),
            {},
            f"only its config.json has {UP} of shape [384, 128]",
        ),
        (
            lambda w: w.update({UP: torch.ones(384, 64)}),
            {},
            f"only its safetensors has {UP} of shape [384, 64]",
        ),
        (lambda w: None, {"tie_word_embeddings": False}, f"{HEAD} of shape"),
        (lambda w: w.update({HEAD: w.pop(EMBEDDING)}), {}, f"{EMBEDDING} of shape"),
        (
            lambda w: w.update({HEAD: 2 * w[EMBEDDING]}),
            {},
            f"{HEAD} and {EMBEDDING} differ in its safetensors, but its config.json",
        ),
        # The model would leave out the last layer of the file.
        (
            lambda w: None,
            {"num_hidden_layers": 2},
            "only its safetensors has model.layers.2.input_layernorm.weight of shape",
        ),
        (
            lambda w: None,
            {"attention_bias": True},
            "only its config.json has model.layers.0.self_attn.k_proj.bias of shape",
        ),
    ],
    ids="missing other-shape no-head head-only other-head layers bias".split(),
)
def test_weights_that_do_not_belong_to_the_config_are_refused_by_name(
    change, config, sentence, folder
):
    weights = load_file(folder / FILE)
    change(weights)
    save(weights, folder / FILE)
    set_config(folder, **config)
    assert sentence in refusal(folder)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "damage",
    [Path.unlink, cut, lambda path: path.write_bytes(POINTER)],
    ids=["gone", "cut", "pointer"],
)
def test_an_incomplete_file_of_weights_is_refused(damage, sharded, folder):
    if sharded:
        shard(folder)
        check_model(str(folder))
    damage(folder / (SHARD if sharded else FILE))
    sentence = refusal(folder)
    assert sentence.startswith(f"{folder}: its weights cannot be read: ")
    assert "it needs one complete model.safetensors, or shards and their" in sentence


def test_a_tied_head_that_is_stored_and_an_old_buffer_are_accepted(folder):
    weights = load_file(folder / FILE)
    weights[HEAD] = weights[EMBEDDING].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    save(weights, folder / FILE)
    check_model(str(folder), to_train=True)


def test_a_second_file_of_weights_which_vllm_would_read_is_refused(folder):
    shutil.copy(folder / FILE, folder / "old.safetensors")
    assert "it needs one complete model.safetensors" in refusal(folder)


@pytest.mark.parametrize("script", [train, eval])
def test_neither_script_starts_with_a_weight_that_is_missing(script, folder):
    weights = load_file(folder / FILE)
    del weights[UP]
    save(weights, folder / FILE)
    assert f"{UP} of shape" in refusal_of(script, f"--model={folder}")


# Folders, heads and types

TWELVE_HEADS = {"hidden_size": 144, "num_attention_heads": 12, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    "config, sentence",
    [
        # Three ranks can neither share two key heads equally nor have one together.
        (
            {"num_key_value_heads": 2},
            "rollout_tp is 3, which does not divide the 12 attention heads and 2 key",
        ),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "{}: its config.json has quantization_config {{",
        ),
        ({"model_type": "gpt2"}, "{} is of type gpt2, which train.py cannot train"),
        ({"final_logit_softcapping": 30.0}, "has final_logit_softcapping 30.0, for"),
        (
            {"vocab_size": 19},
            "{}: its tokenizer uses token 19, :, but the model has only 19 embeddings",
        ),
        ({"head_dim": 40}, "{} has attention heads of size"),
        ({"hidden_act": "x"}, "{}: its config.json has hidden_act 'x', for which vLLM"),
    ],
)
def test_a_model_that_cannot_be_shared_or_trained_is_refused(
    config, sentence, folder, monkeypatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    set_config(folder, **TWELVE_HEADS | config)
    refused = refusal_of(train, f"--model={folder}", "--rollout_tp=3")
    assert sentence.format(folder) in refused


def test_a_config_from_which_no_model_can_be_built_is_refused(folder):
    set_config(folder, hidden_act="x")
    sentence = "no model can be built from its config.json: KeyError('x')"
    assert sentence in refusal(folder)


def test_a_type_whose_config_has_no_context_length_is_refused(folder):
    (folder / "config.json").write_text('{"model_type": "bloom", "n_head": 4}')
    assert "bloom, whose config has no max_position_embeddings" in refusal(folder)


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_a_pointer_for_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_bytes(POINTER)


def with_a_token_that_has_no_embedding(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens("<new>")  # token 20; the 20 tokens of tiny end at 19
    tokenizer.chat_template = "<new>{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (shutil.rmtree, "it is neither a folder nor owner/name on the hub"),
        (without_config, "it has no config.json of a model: merge an adapter (LoRA)"),
        (lambda folder: (folder / "metrics.jsonl").touch(), "a run has model/ only"),
        (with_a_pointer_for_a_tokenizer, "is not a model that can be read: Expecting"),
        (with_a_token_that_has_no_embedding, "its tokenizer uses token 20, <new>, but"),
    ],
)
def test_a_folder_that_is_not_a_model_is_refused(
    damage: Callable, sentence: str, folder: Path
):
    damage(folder)
    assert sentence in refusal(folder)


def test_engines_that_cannot_divide_the_ranks_of_a_node_are_refused():
    sentence = refusal(ROOT / "tiny", tp=3)
    assert sentence.startswith("rollout_tp is 3: it has to divide the 1 ranks")


# Fields of config.json in which vLLM and transformers differ


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 32}
LONGROPE |= {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}


def test_a_config_for_which_engine_and_policy_were_seen_to_differ_is_refused(tmp_path):
    rows = [json.loads(line) for line in open(ROOT / "tests/data/config_fields.jsonl")]
    assert {row["type"] for row in rows} == set(TRAINABLE)
    for row in rows:
        config = AutoConfig.for_model(row["type"], **SIZE | row["fields"])
        if row["gap"] is None or row["gap"] > 1e-3:
            with pytest.raises(Refused, match=f"{tmp_path}: its config.json has "):
                check_trainable(str(tmp_path), config)
        elif not row["fields"]:
            check_trainable(str(tmp_path), config)


@pytest.mark.parametrize(
    "model_type, fields, sentence",
    [
        ("qwen3", {"attention_bias": True}, "its config.json has attention_bias True"),
        ("stablelm", {"qk_layernorm": True}, "its config.json has qk_layernorm True"),
        ("llama", {"sliding_window": 8}, "its config.json has sliding_window 8"),
        ("phi3", {"rope_parameters": LONGROPE}, "has rope_parameters {'rope_type': 'l"),
        # These agree: every clause of the rule has a neighbor that it accepts.
        ("llama", {"attention_bias": True, "mlp_bias": True}, None),
        ("mistral", {"sliding_window": 8}, None),
        ("qwen2", {"head_dim": 32, "sliding_window": 8}, None),
        ("gemma", {"hidden_act": "gelu"}, None),
        ("glm4", {"partial_rotary_factor": 0.75}, None),
    ],
)
def test_a_field_is_refused_by_name_only_for_the_types_in_which_it_makes_a_difference(
    model_type, fields, sentence
):
    config = AutoConfig.for_model(model_type, **SIZE | fields)
    if sentence is None:
        check_trainable("FOLDER", config)
    else:
        with pytest.raises(Refused) as refused:
            check_trainable("FOLDER", config)
        assert sentence in str(refused.value)
        assert model_type in str(refused.value)


# The end of a turn


def turns(turn: str, end: str = "") -> str:
    """A chat template with this text for each message, `m`, and `end` behind all."""
    return "{% for m in messages %}" + turn + "{% endfor %}" + end


CHATML = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
LLAMA_2 = (
    "{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}"
)
HARMONY = (
    "<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
)
REFUSES_AN_ANSWER = "{{ raise_exception('no') if messages[-1].role == 'assistant' }}"


@pytest.mark.parametrize(
    "template, token",
    [
        (turns(LLAMA_2), "</s>"),
        (turns(CHATML), "<|im_end|>"),
        (turns(CHATML, end="{{ eos_token }}"), "<|im_end|>"),
        (turns(CHATML, end=REFUSES_AN_ANSWER), "<|im_end|>"),
        (turns("{{ m.content | trim }}<end_of_turn>\n"), "<end_of_turn>"),
        (turns("<|{{ m.role }}|>\n{{ m.content }}"), "<|user|>"),
        (turns(HARMONY), "<|return|>"),
        (turns("{{ m.role }}: {{ m.content }}\n\n"), None),
        ("{{ messages[0].content }}<|im_end|>", None),
        (None, None),
    ],
)
def test_the_token_with_which_a_chat_template_ends_a_turn_is_found(template, token):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny")
    # The name <|im_ is here because the longer name has to be found.
    tokenizer.add_tokens(
        "</s> <s> <|im_ <|im_end|> <end_of_turn> <|user|> <|end|> <|return|>".split()
    )
    tokenizer.chat_template = template
    expected = [] if token is None else [tokenizer.get_added_vocab()[token]]
    assert turn_end_tokens(tokenizer) == expected
