"""Models, as the user names them, and what is refused before one is built.

A model is a folder or a hub's owner/name. Its safetensors are held against its
config.json by their headers alone, so that a large model costs no more than a small
one.
"""

import os
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from support.command import Refused, one_line

# What policy.py is written for: base_model.layers, a linear head and no dropout. In
# tests/test_rollout.py engine and trainer agree on each of them.
TRAINABLE = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "phi3", "glm4"),
    *("stablelm", "nemotron", "exaone4", "ernie4_5"),
    # Of these vLLM has no code of its own (see rollout.Engine.as_current).
    *("smollm3", "olmo", "olmo2", "olmo3", "glm", "starcoder2", "seed_oss"),
    *("ministral", "hunyuan_v1_dense", "arcee", "helium"),
)
# What policy.py does not know: quantized weights, and what multiplies or bends the
# logits behind the head.
UNKNOWN = (
    "quantization_config",
    *("logits_scaling", "logit_scale", "final_logit_softcapping"),
)
# Of vLLM's attention on a CPU.
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
# Old checkpoints have this, which is computed and not learned.
COMPUTED = "rotary_emb.inv_freq"
MAX_ACTIVATION_BYTES = 2 * 2**30  # bytes that they may take on a CPU


def folder_of(model: str) -> str:
    """The folder of a model, which a run has in its own as model/, or the hub name."""
    of_run = Path(model, "model")
    return str(of_run) if of_run.is_dir() else model


def check_model(model: str, tp: int = 1, *, to_train: bool = False) -> tuple[Any, Any]:
    """The tokenizer and the config (of texts) of a model folder or hub name.

    Raises Refused where there is no such model, where its weights are not those of its
    config.json, where the ranks of a node or its heads cannot be divided among engines
    of `tp` ranks, or where policy.py cannot train it.
    """
    config, tokenizer = load_config_and_tokenizer(model)
    text_config = config.get_text_config()  # a part of it, for images and text
    if to_train:
        check_trainable(model, config)
    check_heads(model, text_config, tp)
    # Tokens that were added later may have no embedding, as those of images in Gemma 3.
    if tokenizer.vocab_size > text_config.vocab_size:
        raise Refused(
            f"{model}: its tokenizer has {tokenizer.vocab_size} tokens, and the model "
            f"only {text_config.vocab_size} embeddings: are both of the same model?"
        )
    for token, number in tokenizer.get_added_vocab().items():
        if number >= text_config.vocab_size and token in str(tokenizer.chat_template):
            raise Refused(
                f"{model}: its chat template has {token}, token {number}, and the "
                f"model only {text_config.vocab_size} embeddings: resize them"
            )
    check_weights(model, config)
    return tokenizer, text_config


def load_config_and_tokenizer(model: str) -> tuple[Any, Any]:
    """Both, by transformers. Raises Refused where there is no such model."""
    folder = Path(model)
    is_run = (folder / "metrics.jsonl").exists()  # whose config.json is another
    if folder.is_dir() and (is_run or not (folder / "config.json").is_file()):
        raise Refused(
            f"{model} is no model folder, as it has no config.json of a model: an "
            "adapter (LoRA) is merged into its model first, a run has model/ when it "
            "has ended, and --resume takes its checkpoints"
        )
    if not folder.is_dir() and model.count("/") != 1:
        raise Refused(
            f"no model at {model!r}: neither a folder nor a hub's owner/name (the "
            "default, tiny, is beside train.py: start there)"
        )
    try:
        # A model folder is data: code that it brings along is never run.
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        # Mistral's own tokenizers have no chat template, and look like a base model's.
        tokenizer = AutoTokenizer.from_pretrained(
            model, trust_remote_code=False, mistral_format=False
        )
    except Exception as error:  # tokenizers has kinds of its own
        reason, *_ = one_line(error).split(". ")
        raise Refused(
            f"no model at {model!r}, a folder or on the hub: {reason}"
        ) from None
    return config, tokenizer


def check_trainable(model: str, config: Any) -> None:
    """Raises Refused where policy.py cannot train a model of this config."""
    if config.model_type not in TRAINABLE:
        raise Refused(
            f"{model} is of type {config.model_type}, which train.py has not learnt to "
            f"train: give one of type {', '.join(TRAINABLE)}"
        )
    for name in UNKNOWN:
        if getattr(config, name, None) not in (None, 1):
            raise Refused(
                f"{model}: its config.json has a {name}, which train.py does not know: "
                "give a model without it"
            )


def check_heads(model: str, config: Any, tp: int) -> None:
    """Raises Refused where engines of `tp` ranks cannot share these attention heads."""
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if ranks_of_node % tp:
        raise Refused(
            f"rollout_tp is {tp}: it has to divide the {ranks_of_node} ranks of a node"
        )
    for name in ("num_attention_heads", "max_position_embeddings"):
        if not hasattr(config, name):
            raise Refused(
                f"{model} is of type {config.model_type}, whose config has no {name}: "
                "give a model of another type"
            )
    heads = config.num_attention_heads
    key_heads = key_heads_of(config)
    # A rank has several of the key heads, or several ranks have one.
    if heads % tp or max(key_heads, tp) % min(key_heads, tp):
        raise Refused(
            f"rollout_tp is {tp}, which does not divide {model}'s {heads} attention "
            f"and {key_heads} key heads"
        )
    size = head_size(config)
    if size not in CPU_HEAD_SIZES and not torch.cuda.is_available():
        raise Refused(
            f"{model} has attention heads of size {size}, and vLLM has on a CPU only "
            f"those of {', '.join(map(str, CPU_HEAD_SIZES))}"
        )


def check_weights(model: str, config: Any) -> None:
    """Hold the weights that a model brings against those that its config.json asks for.

    transformers would fill in random numbers for what is missing, in the trainer and,
    by way of the sync, in the engine. Raises Refused. Of types that are not TRAINABLE,
    and of quantized models, the names may be others: their files only have to be whole.
    """
    stored = stored_weights(model)
    is_quantized = getattr(config, "quantization_config", None)
    if config.model_type not in TRAINABLE or is_quantized:
        return
    try:
        with torch.device("meta"):  # without memory for the weights
            built = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # an unknown activation is a KeyError
        raise Refused(
            f"{model}: its config.json is of no model: {one_line(error)}"
        ) from None
    wanted = {(name, *weight.shape) for name, weight in built.state_dict().items()}
    found = {(name, *weight.get_shape()) for name, weight in stored.items()}
    embedding_of = built.all_tied_weights_keys  # by the name of the tied head
    for name, *shape in sorted(wanted ^ found):
        if name not in embedding_of and not name.endswith(COMPUTED):
            place = "config.json" if (name, *shape) in wanted else "safetensors"
            raise Refused(
                f"{model}: {name} of shape {shape} is in its {place} alone: get whole "
                "files, and the config.json of the same model"
            )
    for head, embedding in embedding_of.items():
        if head in stored and not torch.equal(stored[head][:], stored[embedding][:]):
            raise Refused(
                f"{model}: {head} and {embedding} differ in its safetensors, and are "
                "one weight by its config.json: get files and config of one model"
            )


def stored_weights(model: str) -> dict[str, Any]:
    """The safetensors' slices of a model's weights, by name: nothing is read so far.

    A hub's files are downloaded. Raises Refused where one is not there, or not whole.
    """
    weights = {}
    try:
        index = cached_file(
            model, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False
        )
        if index:
            files, _ = get_checkpoint_shard_files(model, index)
        else:
            # vLLM reads all that are there.
            whole = Path(cached_file(model, SAFE_WEIGHTS_NAME))
            files = whole.parent.glob("*.safetensors")
        for file in files:
            opened = safe_open(file, "pt")
            if weights.keys() & opened.keys():
                raise ValueError(f"{file} has some of them again")
            weights |= {name: opened.get_slice(name) for name in opened.keys()}
    except Exception as error:  # safetensors has kinds of its own
        raise Refused(
            f"{model}: its weights cannot be read: {one_line(error)}: give whole "
            "safetensors (git lfs pull, where they are pointers; save_pretrained makes "
            "them of .bin files)"
        ) from None
    return weights


def turn_end_tokens(tokenizer: Any) -> list[int]:
    """Return the token that ends an assistant's turn in the chat template, or [].

    A base model may come with the template of a chat model. Its end of sequence is then
    a different token, and unless sampling also stops at the end of a turn, the model
    continues with a user's turn of its own. The result is
    - the end of sequence if the template ends a turn with it, as Llama 2's does;
    - <|im_end|> for ChatML (Qwen), and <end_of_turn> for Gemma;
    - the token that opens the user's turn if nothing ends the assistant's, as in GLM;
    - [] if only text separates the turns, if the template does not show an assistant's
      turn, or if there is no template.
    """
    if not tokenizer.chat_template:
        return []
    question, answer, next_question = "First question", "First answer", "Next question"
    conversation = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": next_question},
    ]
    token_ids = tokenizer.get_added_vocab()
    longest_first = sorted(token_ids, key=len, reverse=True)
    # Harmony (gpt-oss) ends thoughts and earlier turns by <|end|>, but the last turn by
    # <|return|>, so the end of a conversation is tried first.
    for turns in (conversation[:2], conversation):
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        except Exception:  # the template may raise any
            continue
        after_answer = text.partition(answer)[2].partition(next_question)[0]
        found = re.search("|".join(map(re.escape, longest_first)), after_answer)
        if found and found.group():
            return [token_ids[found.group()]]
    return []


def activation_bytes(config: Any, element: int) -> int:
    """What all layers keep of a token for its backward pass; `element` is in bytes.

    Each of two RMS norms keeps a float32 input, a normalized and a weighted output.
    Attention keeps q, k, v and its output, and the MLP four wide activations.
    """
    heads = config.num_attention_heads + key_heads_of(config)
    norms = 2 * (4 + 2 * element) * config.hidden_size
    wide = 2 * heads * head_size(config) + 4 * config.intermediate_size
    return config.num_hidden_layers * (norms + element * wide)


def key_heads_of(config: Any) -> int:
    """The heads of keys and values: as many as of queries where none are named."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_size(config: Any) -> int:
    """The elements of an attention head's query or key."""
    of_config = getattr(config, "head_dim", None)
    return of_config or config.hidden_size // config.num_attention_heads
