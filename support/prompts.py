"""A model folder's tokenizer, and the problems of a task as prompts of that model."""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from support.tasks import encode_prompt


class Split(NamedTuple):
    """Problems of a task, ready to sample from."""

    problems: list[dict[str, str]]  # {"prompt": ..., "answer": ...}
    prompts: list[list[int]]  # token ids, one of each problem
    dropped: int  # problems left out, whose prompts are too long


def check_model(model: str, tp: int = 1) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer and the context length of a model folder or hub name.

    ValueError where there is none, or where its attention heads cannot be divided among
    the `tp` ranks of an engine.
    """
    if not Path(model).is_dir() and model.count("/") != 1:
        raise ValueError(
            f"no model at {model!r}: neither a folder nor a hub name, owner/name"
        )
    try:
        # A model folder is data: code that it brings along is never run.
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"no model at {model!r}: {reason}") from error
    text_config = config.get_text_config()  # a part of it, for images and text
    heads = getattr(text_config, "num_attention_heads", None)
    context = getattr(text_config, "max_position_embeddings", None)
    if not heads or not context:
        raise ValueError(
            f"{model}'s config.json has no num_attention_heads or "
            "max_position_embeddings: give a causal language model with attention"
        )
    if heads % tp:
        raise ValueError(
            f"rollout_tp is {tp}, which does not divide {model}'s {heads} attention "
            "heads"
        )
    return tokenizer, context


def check_trainable(model: str) -> None:
    """ValueError where vLLM may sample from a model, but policy.Policy not train it.

    The trainer computes in training mode, as gradient checkpointing needs it, so with
    dropout every ratio would be random. FSDP shards the layers that a model of
    transformers has in base_model.layers. policy.check_head looks at the head, for
    which the weights have to be there.
    """
    config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    # Llama calls it attention_dropout, GPT-2 attn_pdrop.
    dropouts = [
        f"{name} {value}"
        for name, value in sorted(config.to_dict().items())
        if "drop" in name and isinstance(value, float) and value > 0
    ]
    if dropouts:
        raise ValueError(
            f"{model} has {', '.join(dropouts)}, by which every ratio would be random: "
            "set it to 0 in its config.json"
        )
    with torch.device("meta"):  # its modules, without memory for their weights
        try:
            language_model = AutoModelForCausalLM.from_config(
                config, trust_remote_code=False
            )
        except ValueError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{model} is no causal language model: {reason}"
            ) from error
    if not hasattr(language_model.base_model, "layers"):
        raise ValueError(
            f"{model} is of type {config.model_type}, which has no base_model.layers "
            "to shard: train a model of the kind of Llama or Qwen"
        )


def encode_problems(
    problems: list[dict[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    instruction: str | None,
    room: int,
    drop_long: bool,
    name: str,
) -> Split:
    """Problems and their prompts as token ids; `name` is what messages call them.

    A prompt of more than `room` tokens is dropped and counted if `drop_long`. It is a
    ValueError otherwise, or if none is left.
    """
    kept_problems, kept_prompts = [], []
    for problem in problems:
        prompt = encode_prompt(tokenizer, problem["prompt"], instruction)
        if len(prompt) <= room:
            kept_problems.append(problem)
            kept_prompts.append(prompt)
    dropped = len(problems) - len(kept_problems)
    if dropped > 0:
        complaint = f"{dropped} of {len(problems)} {name} have over {room} tokens"
        if not drop_long:
            raise ValueError(
                f"{complaint}, and no room for a response: lower max_response_tokens, "
                "or drop them (train.py: --max_prompt_tokens, eval.py: --drop_long)"
            )
        if not kept_problems:
            raise ValueError(
                f"{complaint}, so none is left: raise max_prompt_tokens (train.py), "
                "lower max_response_tokens (eval.py)"
            )
        if os.environ.get("RANK", "0") == "0":
            print(f"dropped: {complaint}")
    return Split(kept_problems, kept_prompts, dropped)
