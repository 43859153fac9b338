"""Tests of which models are accepted, and of the sentences that refuse others."""

import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from config_fields import SIZE
from conftest import ROOT, refusal_of
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoTokenizer

import eval
import train
from support.checkpoints import config_of
from support.command import Refused
from support.config import Config
from support.models import (
    TRAINABLE,
    check_model,
    check_trainable,
    load_tokenizer,
    turn_end_tokens,
)

FILE = "model.safetensors"
SHARD = "model-00002-of-00003.safetensors"
MLP = "model.layers.2.mlp.up_proj.weight"
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
    """Distribute the weights of a folder over files of a megabyte and an index."""
    save_torch_state_dict(load_file(folder / FILE), folder, max_shard_size="1MB")


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(Refused) as refused:
        check_model(str(folder), **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Weights


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda w: w.pop(MLP), f"its safetensors lack {MLP}: get complete"),
        (
            lambda w: w.update({MLP: torch.ones(384, 64)}),
            f"size mismatch for {MLP}: copying a param with shape torch.Size([384, 64]",
        ),
        (lambda w: w.update({HEAD: w.pop(EMBEDDING)}), f"safetensors lack {EMBEDDING}"),
        (
            lambda w: w.update({HEAD: 2 * w[EMBEDDING]}),
            f"{HEAD} and {EMBEDDING} differ in its safetensors, but its config.json",
        ),
    ],
    ids="missing other-shape head-only other-head".split(),
)
def test_weights_that_do_not_belong_to_the_config_are_refused_by_name(
    change, sentence, folder
):
    weights = load_file(folder / FILE)
    change(weights)
    save(weights, folder / FILE)
    assert sentence in refusal(folder)


# With 2 of its 3 layers, the model would leave out the last layer of the file.
CONFIGS = """
{"tie_word_embeddings": false} -> its safetensors lack lm_head.weight: get
{"num_hidden_layers": 2} -> have an extra model.layers.2.input_layernorm.weight:
{"attention_bias": true} -> lack model.layers.0.self_attn.k_proj.bias
{"hidden_act": "x"} -> or do not fit its config.json: KeyError('x'); it needs one compl
"""


@pytest.mark.parametrize("row", CONFIGS.strip().splitlines())
def test_a_config_that_does_not_belong_to_the_weights_is_refused(row, folder):
    fields, sentence = row.split(" -> ")
    set_config(folder, **json.loads(fields))
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
    assert sentence.startswith(f"{folder}: its weights cannot be read or do not fit")
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
def test_no_script_starts_with_a_missing_weight_or_a_verifier_that_cannot_score(
    script, folder
):
    assert "--verifier math:pi: 3.14" in refusal_of(script, "--verifier=math:pi")
    weights = load_file(folder / FILE)
    del weights[MLP]
    save(weights, folder / FILE)
    assert f"lack {MLP}: get" in refusal_of(script, f"--model={folder}")


# Folders, heads and types

# Of models with 12 heads of 12, on three ranks that share an engine. Three ranks can
# neither share two key heads equally nor have one together.
REFUSED_CONFIGS = """
{"num_key_value_heads": 2} -> 3, which does not suit the 12 attention heads and 2 key
{"num_attention_heads": 8} -> 3, which does not suit the 8 attention heads and 1 key
{"quantization_config": {"quant_method": "fp8"}} -> has quantization_config {
{"model_type": "gpt2"} -> is of type gpt2, which train.py cannot train
{"final_logit_softcapping": 30.0} -> config.json has final_logit_softcapping 30.0, for
{"vocab_size": 19} -> its tokenizer uses token 19, :, but the model has only 19 embedd
{"head_dim": 40} -> has attention heads of size 40
{"head_dim": 16} -> has attention heads of size 16
{"hidden_act": "x"} -> its config.json has hidden_act 'x', for which vLLM
"""


@pytest.mark.parametrize("row", REFUSED_CONFIGS.strip().splitlines())
def test_a_model_that_cannot_be_shared_or_trained_is_refused(row, folder, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    heads = {"num_attention_heads": 12, "num_key_value_heads": 1}
    fields, sentence = row.split(" -> ")
    set_config(folder, **{"hidden_size": 144} | heads | json.loads(fields))
    refused = refusal_of(train, f"--model={folder}", "--rollout_tp=3")
    assert str(folder) in refused and sentence in refused


def test_a_type_whose_config_has_no_context_length_is_refused(folder):
    (folder / "config.json").write_text('{"model_type": "bloom", "n_head": 4}')
    sentence = "'BloomConfig' object has no attribute 'max_position_embeddings'; "
    assert f"is not a model that can be read: {sentence}" in refusal(folder)


def without_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def with_the_flags_of_a_run(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(Config())))


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
        (without_config, "; if it is an adapter (LoRA), merge it into its base model;"),
        (with_the_flags_of_a_run, "if it is a run that has not ended, repeat"),
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


# Every clause of the rule has a neighbor that it accepts.
FIELDS = """
qwen3 {"attention_bias": true} -> its config.json has attention_bias True, for
llama {"attention_bias": true, "mlp_bias": true} ->
stablelm {"qk_layernorm": true} -> its config.json has qk_layernorm True, for
llama {"sliding_window": 32} -> its config.json has sliding_window 32, for
mistral {"sliding_window": 32} ->
qwen2 {"head_dim": 64} -> its config.json has head_dim 64, for
qwen2 {"head_dim": 32, "sliding_window": 8} ->
gemma {"hidden_act": "gelu"} ->
gemma {"hidden_act": "silu"} -> its config.json has hidden_act 'silu', for
glm4 {"partial_rotary_factor": 0.75} ->
llama {"partial_rotary_factor": 0.75} -> its config.json has rope_parameters {'
phi3 {"rope_parameters": LONGROPE} -> its config.json has rope_parameters {'rope_type'
starcoder2 {"sliding_window": 8} ->
exaone4 {"layer_types": FULL, "sliding_window": 8} -> sliding_window 8, but layer_types
exaone4 {"layer_types": FULL, "sliding_window": null} ->
olmo3 {"sliding_window": null} -> its config.json has sliding_window None, but layer_typ
olmo2 {"quantization_config": {}, "is_causal": true, "bias": false} ->
olmo2 {"is_causal": false} -> its config.json has is_causal False, for
"""


@pytest.mark.parametrize("row", FIELDS.strip().splitlines())
def test_a_field_is_refused_by_name_only_for_the_types_in_which_it_makes_a_difference(
    row,
):
    given, sentence = row.split(" ->")
    given = given.replace("LONGROPE", json.dumps(LONGROPE))
    given = given.replace("FULL", json.dumps(["full_attention", "full_attention"]))
    model_type, fields = given.split(" ", 1)
    config = AutoConfig.for_model(model_type, **SIZE | json.loads(fields))
    refused = pytest.raises(Refused, match=re.escape(sentence.strip()))
    with refused if sentence else nullcontext():
        check_trainable("FOLDER", config)


# The tokenizer


def test_the_tokenizer_is_the_one_that_tokenizer_json_describes(folder):
    # AutoTokenizer would read it as a LlamaTokenizer, which loses the blanks.
    written = Tokenizer(models.BPE())
    written.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    written.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    written.train_from_iterator(
        ["12 + 7 = 19"], trainers.BpeTrainer(initial_alphabet=alphabet)
    )
    written.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "LlamaTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(str(folder))
    text = "Is 12 + 7 = 19?"
    assert tokenizer.encode(text) == written.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text


# The end of a turn


# What a template writes for each message, with its role r and its text t, and the token
# that ends an answer's turn.
TURNS = """
{{ '[INST]' + t + '[/INST]' if r == 'user' else t + '</s>' }} -> </s>
<|im_start|>{{ r }} {{ t }}<|im_end|> -> <|im_end|>
<|im_start|>{{ r }} {{ t }}<|im_end|>{{ eos_token if loop.last }} -> <|im_end|>
{{ t }}<|im_end|>{{ no() if loop.last and r == 'assistant' }} -> <|im_end|>
{{ t | trim }} <end_of_turn> -> <end_of_turn>
<|{{ r }}|> {{ t }} -> <|user|>
<|start|>{{ r }} {{ t }}{{ '<|return|>' if loop.last else '<|end|>' }} -> <|return|>
{{ r }}: {{ t }} ->
{{ t if r == 'user' }}<|im_end|> ->
"""


@pytest.mark.parametrize("row", TURNS.strip().splitlines())
def test_the_token_with_which_a_chat_template_ends_a_turn_is_found(row):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tiny")
    # The name <|im_ is here because the longer name has to be found.
    tokenizer.add_tokens(
        "</s> [INST] <|im_ <|im_end|> <end_of_turn> <|user|> <|end|> <|return|>".split()
    )
    tokenizer.chat_template = None
    assert turn_end_tokens(tokenizer) == []
    turn, token = row.split(" ->")
    start = "{% for m in messages %}{% set r, t = m.role, m.content %}"
    tokenizer.chat_template = start + turn + "{% endfor %}"
    assert tokenizer.convert_ids_to_tokens(turn_end_tokens(tokenizer)) == token.split()
