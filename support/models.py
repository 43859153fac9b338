"""Finds the model that the user named, and refuses one that cannot be used.

A model is a run, a folder, or owner/name on the hub. It is refused before anything slow
is built if its files are incomplete or, for training, if vLLM and transformers do not
compute the same function from its config.json. Weights are checked by the headers of
their safetensors (and a tied head by its values), so a large model takes hardly longer
than a small one.
"""

import functools
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import load_torch_model, snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from support.command import Refused, one_line
from support.hub import COMMITS, explain, split_revision
from support.tasks import encode_prompt, text_after_answer

# The types of models that policy.py supports, with base_model.layers and a linear head.
# tests/test_rollout.py compares engine and trainer on each of them. For those from
# smollm3 on, vLLM has no implementation of its own (see Policy.__init__).
TRAINABLE = """
    llama mistral qwen2 qwen3 gemma gemma3_text phi3 glm4 stablelm nemotron exaone4
    ernie4_5 smollm3 olmo olmo2 olmo3 glm starcoder2 seed_oss ministral hunyuan_v1_dense
    arcee helium
""".split()
# The fields of a config.json for which vLLM and transformers compute different
# functions, as tests/config_fields.py shows. check_trainable writes each field as a
# line such as "qwen3 attention_bias False -> True": the model's type, the field, the
# type's default for it, and the value in the config.json. For a field that the type
# does not have, the line is like "qwen3 mlp_bias lacks -> True". Only for head_dim
# is a default added, as in "qwen2 head_dim lacks 128 -> 64". The model is refused if a
# line matches. (?!...) excludes values for which both compute the same.
DIFFERING_FIELDS = re.compile(
    r"""(?x)
    # Another activation. Gemma's gelu is gelu_pytorch_tanh.
    (?:(?:llama|mistral|qwen[23]|gemma|phi3|glm4|stablelm|exaone4|ernie4_5)\ hidden_act|
        gemma3_text\ hidden_activation)\ (?!(\w+)\w*\ ->\ \1$)
    | qwen[23]\ use_sliding_window .* True
    | (?:qwen3|gemma)\ attention_bias .* True
    | gemma\w*\ use_bidirectional_attention .* (?:True|all)
    | gemma3_text\ final_logit_softcapping .* \d
    | stablelm\ (?:qk_layernorm|use_parallel_residual) .* True
    | ernie4_5\ use_bias .* True
    # vLLM reads these even if the type does not have them, and policy.py supports
    # neither quantized weights nor scaled or bounded logits.
    | \w+\ (?:attention_bias|bias|mlp_bias|qkv_bias|qk_norm|head_dim|sliding_window|
        layer_types|quantization_config|logits_scaling|logit_scale|
        final_logit_softcapping)\ lacks\ (?!(?:(\w+)\ )?->\ (?:\2|None|False|{})$)
    # transformers chooses the factors of longrope for each batch, and vLLM only once.
    | \w+\ rope_parameters .* -> .* (?:longrope|proportional)
    | \w+\ rope_parameters (?!.*partial_rotary_factor .* ->) .* partial_rotary_factor
    | \w+\ layer_types (?!.*sliding_attention .* ->) .* sliding_attention
    | \w+\ is_causal .* False
    """
)
WEIGHTS = """
    model.safetensors model-*.safetensors model.safetensors.index.json
""".split()
# A model's other files, which save_model copies.
COMPANIONS = """
    config.json generation_config.json tokenizer* special_tokens_map.json
    added_tokens.json vocab* merges.txt chat_template* *.model
""".split()


@functools.cache  # The engines, the policy and the checks all ask for the same model.
def model_folder(model: str) -> str:
    """Return the local folder of a model. A model on the hub is downloaded first.

    `model` is a run (its model/ is used), a model folder, or owner/name on the hub,
    optionally with @revision. Raises Refused if there is no such model.
    """
    for folder in Path(model, "model"), Path(model):
        if folder.is_dir():
            return str(folder)
    repository, revision = split_revision(model)
    if repository.count("/") != 1:
        raise Refused(
            f"no model at {model!r}: it is neither a folder nor owner/name on the hub "
            "(the default, tiny, is a folder beside train.py: run the script there)"
        )
    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=COMPANIONS + WEIGHTS,
        )
    except Exception as error:
        raise Refused(f"no model at {model!r}: {explain(error)}") from None
    COMMITS[model] = Path(folder).name
    return folder


def check_model(model: str, tp: int = 1, *, to_train: bool = False) -> tuple[Any, int]:
    """Return a model's tokenizer and its context length, in tokens.

    Raises Refused if there is no such model, if its weights, its tokenizer or `tp` do
    not fit it, if a CPU cannot run its attention heads, or, with `to_train`, if
    policy.py cannot train it.
    """
    folder = model_folder(model)
    try:
        # A model folder is data: code that comes with it is never run.
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        tokenizer = load_tokenizer(folder)
        text_config = config.get_text_config()  # differs if the model also reads images
        context_length = text_config.max_position_embeddings  # which BLOOM lacks
    except Exception as error:  # tokenizers has its own exceptions
        raise Refused(
            f"{model} is not a model that can be read: {one_line(error)}; if it is an "
            "adapter (LoRA), merge it into its base model; if it is a run that has not "
            "ended, repeat the run's command with --resume --steps N to write model/, "
            "where N is the step of its newest checkpoint"
        ) from None
    if to_train:
        check_trainable(model, config)
    check_heads(model, text_config, tp)
    # Added tokens, like that for images in Gemma 3, may lack an embedding, but not
    # those that are in every prompt.
    highest = max(tokenizer.vocab_size - 1, *encode_prompt(tokenizer, "1"))
    if highest >= text_config.vocab_size:
        raise Refused(
            f"{model}: its tokenizer uses token {highest}, "
            f"{tokenizer.convert_ids_to_tokens(highest)}, but the model has only "
            f"{text_config.vocab_size} embeddings: use the tokenizer of this model, or "
            "add embeddings"
        )
    check_weights(model, folder, config)
    return tokenizer, context_length


def load_tokenizer(folder: str) -> Any:
    """Return the tokenizer of a model folder, as tokenizer.json describes it.

    For some types of models AutoTokenizer builds another tokenizer from the same files.
    With DeepSeek-V3's files, transformers 5.19 drops all spaces if the type is llama,
    and splits numbers differently if it is qwen2.
    """
    if Path(folder, "tokenizer.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder, trust_remote_code=False)
    # Mistral's own tokenizer format has no chat template, so its models would be taken
    # for base models.
    return AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, mistral_format=False
    )


def check_trainable(model: str, config: Any) -> None:
    """Raise Refused if policy.py cannot train a model of this config."""
    if config.model_type not in TRAINABLE:
        raise Refused(
            f"{model} is of type {config.model_type}, which train.py cannot train: "
            f"give one of type {', '.join(TRAINABLE)}"
        )
    own_head_size = config.hidden_size // config.num_attention_heads
    # A config may set head_dim although its type lacks it, if the heads have that size.
    defaults = {"head_dim": f"lacks {own_head_size}"} | type(config)().to_dict()
    for name, value in config.to_dict().items():
        default = defaults.get(name, "lacks")
        if DIFFERING_FIELDS.match(f"{config.model_type} {name} {default} -> {value}"):
            raise Refused(
                f"{model}: its config.json has {name} {value!r}, for which vLLM and "
                "transformers do not compute the same function if the type is "
                f"{config.model_type}: give a model without it"
            )
    if "layer_types" in defaults:
        slides = "sliding_attention" in config.layer_types
        if slides != bool(config.sliding_window):
            raise Refused(
                f"{model}: its config.json has sliding_window {config.sliding_window}, "
                f"but layer_types {config.layer_types}: give one with both or neither"
            )


def check_heads(model: str, config: Any, tp: int) -> None:
    """Raise Refused if the `tp` ranks of an engine cannot share these attention heads.

    On a CPU, also raise it if vLLM does not support the size of the heads.
    """
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks_of_node % tp:
        raise Refused(
            f"rollout_tp is {tp}: it has to divide the {ranks_of_node} ranks of a node"
        )
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    # Each rank has one or several key heads, or several ranks share one.
    if heads % tp or max(kv_heads, tp) % min(kv_heads, tp):
        raise Refused(
            f"rollout_tp is {tp}, which does not suit the {heads} attention heads "
            f"and {kv_heads} key heads of {model}"
        )
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    # vLLM refuses some larger multiples of 16, such as 144, but only when it samples.
    if (size < 32 or size % 16) and not torch.cuda.is_available():
        raise Refused(
            f"{model} has attention heads of size {size}; on a CPU vLLM supports only "
            "some multiples of 16 from 32 on: give another model, or use a GPU"
        )


def check_weights(model: str, folder: str, config: Any) -> None:
    """Raise Refused unless the stored weights are exactly those of the config.

    transformers would fill in random numbers for a missing weight, and the sync would
    copy them to the engine. For types that are not in TRAINABLE and for quantized
    models, whose weights may have other names, the files only have to be readable.
    """
    stored = {}  # the weights in the files, by name
    try:
        is_quantized = getattr(config, "quantization_config", None)
        if config.model_type not in TRAINABLE or is_quantized:
            load_torch_model(torch.nn.Module(), folder)
            return
        with torch.device("meta"):  # takes no memory
            built = AutoModelForCausalLM.from_config(config)
        # This hook gets each file's weights, mapped into memory and not yet read.
        built.register_load_state_dict_pre_hook(
            lambda _, file, *__: stored.update(file)
        )
        # For each weight torch warns that nothing is copied to the meta device.
        with warnings.catch_warnings(action="ignore"):
            missing, unexpected = load_torch_model(built, folder)
    except Exception as error:  # safetensors has its own exceptions
        raise Refused(
            f"{model}: its weights cannot be read or do not fit its config.json: "
            f"{one_line(error)}; it needs one complete model.safetensors, or shards "
            "and their index (`git lfs pull` replaces pointers, and save_pretrained "
            "converts .bin files), the config.json that belongs to them, and no other "
            ".safetensors files"
        ) from None
    embedding_of = built.all_tied_weights_keys  # by the name of the tied head
    for name in sorted({*missing, *unexpected} - {*embedding_of}):
        # Old checkpoints hold this buffer, which is computed and not learned.
        if not name.endswith("rotary_emb.inv_freq"):
            fault = "lack" if name in missing else "have an extra"
            raise Refused(
                f"{model}: by its config.json, its safetensors {fault} {name}: get "
                "complete files and the config.json of the same model"
            )
    for head, embedding in embedding_of.items():
        if head in stored and not torch.equal(stored[head], stored[embedding]):
            raise Refused(
                f"{model}: {head} and {embedding} differ in its safetensors, but its "
                "config.json ties them: get the files and the config of one model"
            )


def turn_end_tokens(tokenizer: Any) -> list[int]:
    """Return the token that ends an assistant's turn in the chat template, or [].

    A base model may come with the template of a chat model. The template then ends a
    turn with a token that is not the end of sequence, and unless sampling also stops at
    that token, the model continues with a user's turn of its own. The result is
    - the end of sequence if the template ends a turn with it, as Llama 2's does;
    - <|im_end|> for ChatML (Qwen), and <end_of_turn> for Gemma;
    - the token that opens the user's turn if nothing ends the assistant's, as in GLM;
    - [] if only text separates the turns (see tasks.Dataset), if the template does not
      show an assistant's turn, or if there is no template.
    """
    # Harmony (gpt-oss) ends thoughts and earlier turns by <|end|>, but the last turn by
    # <|return|>, which is therefore looked for first.
    after = text_after_answer(tokenizer, 2) + text_after_answer(tokenizer, 3)
    token_ids = tokenizer.encode(after, add_special_tokens=False)
    added = tokenizer.added_tokens_decoder
    # An unknown character may be encoded as an added token that is not in the text.
    return [i for i in token_ids if i in added and str(added[i]) in after][:1]
