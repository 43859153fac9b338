"""The policy pi_theta: the trainer's side of the ratio (7), and how it is sharded.

`Policy` is the forward pass, `build_policy` puts it under FSDP2, and `full_weights` is
how the weights leave it, on their way into the rollout engine.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from rollout import Rollouts
from support.flags import Refused

# Response tokens whose logits exist at the same time.
CHUNK = 1024
# A group shares its prompt's sequence if that has at most so many tokens. Attention
# computes the pairs that the mask hides as well, so long groups lose: 512 tokens save
# time or cost next to none, and 1,024 cost more (experiments/results/bench.md).
SHARED_TOKENS = 512


class Policy(torch.nn.Module):
    """A causal language model of transformers with a linear head (Llama, Qwen, ...).

    It is a module because FSDP gathers the weights of its root (the embedding, the
    head) when that root is called.
    """

    def __init__(
        self, model: torch.nn.Module, temperature: float = 1.0, sharing: int = 1
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        # At most so many responses share a sequence with their prompt.
        self.sharing = sharing

    def sequences(self, rollouts: Rollouts) -> "Sequences":
        """What the model reads of these responses."""
        if self.sharing == 1:
            return own_sequences(rollouts)
        return shared_sequences(rollouts, self.sharing)

    def forward(
        self, rollouts: Rollouts, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """log pi_theta of the response tokens and of the K top_tokens at each.

        [N, T] and [N, T, K], in nats, float32, with 0 where the mask is False; at the
        policy's own temperature if no other is given. The head is applied in float32,
        to response positions alone, CHUNK of them at a time, and once more in the
        backward pass: no tensor of size tokens x vocabulary is ever kept.
        """
        temperature = self.temperature if temperature is None else temperature
        sequences = self.sequences(rollouts)
        output = self.model.base_model(
            input_ids=sequences.tokens,
            position_ids=sequences.position_ids,
            attention_mask=sequences.attention_mask,
            use_cache=False,
        )
        row, t = rollouts.mask.nonzero(as_tuple=True)  # [M] each, for M response tokens
        # A token is predicted from the one before it: the first one from the prompt's
        # last, which need not be its neighbor.
        before = torch.where(
            t == 0, rollouts.prompt_length[row] - 1, sequences.start[row] + t - 1
        )
        hidden = output[0][sequences.of_response[row], before]  # [M, D]
        position = rollouts.prompt_length[row] + t  # [M]
        sampled_token = rollouts.tokens[row, position][:, None]  # [M, 1]
        top_tokens = rollouts.top_tokens[row, t]  # [M, K]
        tokens = torch.cat([sampled_token, top_tokens], dim=1)  # [M, 1 + K]
        # In float32 once, for all chunks: so their gradients of it are also added up in
        # float32.
        head = self.model.get_output_embeddings().weight.float()  # [V, D]
        chunks = []
        # Without any token there is one empty chunk. FSDP needs its graph.
        for hidden_chunk, token_chunk in zip(
            hidden.split(CHUNK), tokens.split(CHUNK), strict=True
        ):
            logp = checkpoint(
                chunk_log_probabilities,
                hidden_chunk,
                head,
                temperature,
                token_chunk,
                use_reentrant=False,
            )
            chunks.append(logp)
        logp = torch.cat(chunks)  # [M, 1 + K]
        sampled_logp = logp.new_zeros(rollouts.mask.shape)
        top_logp = logp.new_zeros(rollouts.top_tokens.shape)
        return (
            sampled_logp.index_put((row, t), logp[:, 0]),  # [N, T]
            top_logp.index_put((row, t), logp[:, 1:]),  # [N, T, K]
        )


class Sequences(NamedTuple):
    """What the model reads for N responses: S sequences of L places.

    A token's place is its column here. Its position is the number of tokens before it
    in its own prompt and response.
    """

    tokens: torch.Tensor  # [S, L]
    of_response: torch.Tensor  # [N] the sequence that a response is in
    start: torch.Tensor  # [N] the place where it begins there
    position_ids: torch.Tensor | None = None  # [S, L]; None: the places
    attention_mask: torch.Tensor | None = None  # [S, 1, L, L] bool; None: causal


def own_sequences(rollouts: Rollouts) -> Sequences:
    """Each response behind its own copy of the prompt.

    Right padding needs no attention mask: no token sees a later one.
    """
    of_response = sequence_of_response(rollouts, sharing=1)
    return Sequences(rollouts.tokens, of_response, rollouts.prompt_length)


def prompt_mask(rollouts: Rollouts) -> torch.Tensor:
    """Which of the tokens of each response's row are its prompt's, [N, L] bool."""
    position = torch.arange(rollouts.tokens.shape[1], device=rollouts.tokens.device)
    return position < rollouts.prompt_length[:, None]


def sequence_of_response(rollouts: Rollouts, sharing: int) -> torch.Tensor:
    """The number of each response's sequence, [N] from 0 on.

    Responses to equal prompts share one, up to `sharing` of them, in their order.
    """
    if sharing == 1:
        return torch.arange(len(rollouts.mask), device=rollouts.mask.device)
    prompts = rollouts.tokens.masked_fill(~prompt_mask(rollouts), -1)
    _, prompt = prompts.unique(dim=0, return_inverse=True)  # [N] its number
    # How many responses to the same prompt come before this one.
    earlier = (prompt[:, None] == prompt).tril(-1).sum(dim=1)  # [N]
    # A sequence is a prompt, and how many full sequences of it came before: one number
    # for the two.
    responses = len(prompt)
    pair = prompt * responses + earlier // sharing
    return pair.unique(return_inverse=True)[1]


def shared_sequences(rollouts: Rollouts, sharing: int) -> Sequences:
    """Up to `sharing` responses to a prompt behind a single copy of it.

    The mask lets a token see the prompt and the earlier tokens of its own response, and
    its position is counted in these alone. So the model computes each response as if no
    other were there.
    """
    device = rollouts.tokens.device
    of_response = sequence_of_response(rollouts, sharing)  # [N]
    length = rollouts.mask.sum(dim=1)  # [N]
    # [N, N]: the response of the column stands before that of the row.
    is_before = (of_response[:, None] == of_response).tril(-1)
    start = rollouts.prompt_length + (is_before * length).sum(dim=1)  # [N]
    shape = (int(of_response.max()) + 1, int((start + length).max()))
    tokens = torch.zeros(shape, dtype=torch.long, device=device)
    position_ids = torch.zeros_like(tokens)
    # Which response a place belongs to, counted from 1. The prompt has 0, and so has
    # padding: it comes last, where no token sees it.
    owner = torch.zeros_like(tokens)

    row, position = prompt_mask(rollouts).nonzero(as_tuple=True)
    # The prompts of a sequence are equal, so it does not matter which is written last.
    tokens[of_response[row], position] = rollouts.tokens[row, position]
    position_ids[of_response[row], position] = position

    row, t = rollouts.mask.nonzero(as_tuple=True)
    position = rollouts.prompt_length[row] + t
    sequence, place = of_response[row], start[row] + t
    tokens[sequence, place] = rollouts.tokens[row, position]
    position_ids[sequence, place] = position
    owner[sequence, place] = row + 1

    sees_prompt = owner[:, None, :] == 0  # [S, 1, L]
    sees_itself = owner[:, :, None] == owner[:, None, :]  # [S, L, L]
    attention_mask = (sees_prompt | sees_itself).tril()
    return Sequences(tokens, of_response, start, position_ids, attention_mask[:, None])


def can_share_prompts(model: torch.nn.Module) -> bool:
    """Whether every layer of this model of transformers heeds the mask given to it.

    Layers that carry a state along the sequence do not. Where attention has a window,
    the mask replaces it, which is right as long as all that a token sees is within.
    """
    config = model.config
    layer_types = getattr(config, "layer_types", None) or []
    windows = [
        value
        for name, value in config.to_dict().items()
        if name.endswith(("window", "window_size")) and type(value) is int
    ]
    return (
        config._attn_implementation == "sdpa"
        and not model._is_stateful
        and all(layer_type == "full_attention" for layer_type in layer_types)
        and all(window >= SHARED_TOKENS for window in windows)
    )


def chunk_log_probabilities(
    hidden: torch.Tensor,
    head: torch.Tensor,
    temperature: float,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """log pi_theta of these tokens, [chunk, 1 + K], at a chunk of positions.

    The head is in float32.
    """
    logits = hidden.float() @ head.T  # [chunk, V]
    if temperature != 1:
        logits = logits / temperature
    return logits.log_softmax(dim=-1).gather(1, tokens)


def check_head(model: torch.nn.Module, name: str) -> None:
    """Raises Refused where a model's logits are not what Policy computes.

    That is the product of its head and its last hidden state. Some models add a bias
    (Phi), divide the product (Granite) or bound it (Gemma 2).
    """
    tokens = torch.tensor([[0, 1]])
    with torch.no_grad():
        logits = model(tokens).logits
        product = model.base_model(tokens)[0] @ model.get_output_embeddings().weight.T
    if not torch.allclose(logits, product, rtol=1e-4, atol=1e-4):
        raise Refused(
            f"{name} does not take its head's product for its logits, but biases, "
            "scales or bounds it, which the trainer does not: train a model of the "
            "kind of Llama or Qwen"
        )


def build_policy(
    model: str,
    mesh: dist.DeviceMesh,
    *,
    dtype: str = "auto",
    temperature: float = 1.0,
    gradient_checkpointing: bool = False,
    sharing: int = 1,
) -> Policy:
    """A policy under FSDP2: sharded within a node, replicated across nodes.

    Master weights and gradients are float32. It computes in `dtype`; auto is bfloat16
    on CUDA and float32 on CPU. Up to `sharing` responses share their prompt's sequence,
    if the model allows it; train.sharing_of sees to it that these have SHARED_TOKENS at
    most. Raises Refused where the model's head is not linear.
    """
    language_model = transformers.AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, trust_remote_code=False
    )
    check_head(language_model, model)
    if gradient_checkpointing:
        language_model.gradient_checkpointing_enable()
    if dtype == "auto":
        dtype = "bfloat16" if mesh.device_type == "cuda" else "float32"
    compute_dtype = getattr(torch, dtype)
    if mesh.device_type == "cuda":
        # Beside a bfloat16 policy the head's product may use TF32, which holds a
        # bfloat16 exactly. Its backward pass rounds the logits' gradient to 11 bits.
        is_bfloat16 = compute_dtype == torch.bfloat16
        torch.set_float32_matmul_precision("high" if is_bfloat16 else "highest")
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.float32,
        # The batch holds log-probabilities, which rounding would ruin.
        cast_forward_inputs=False,
    )
    if not can_share_prompts(language_model):
        sharing = 1
    policy = Policy(language_model, temperature, sharing)
    # Each layer moves to the device alone, and only its shard stays there.
    for layer in language_model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    # In training mode, without which there is no gradient checkpointing. A model with
    # dropout has been refused by then.
    return policy.train()


def full_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole weights as transformers and vLLM know them, in the compute dtype.

    A tied head comes under both its names. A collective: FSDP gathers one layer at a
    time, as it does for a forward pass, and frees it when the next one is asked for.
    """
    # A forward pass without a backward one leaves the root gathered, with weights that
    # an optimizer step since then has made old.
    policy.reshard()
    for module in [*policy.model.base_model.layers, policy]:
        module.unshard()
        for name, weight in policy.model.named_parameters(remove_duplicate=False):
            # The gathered ones are this module's; a DTensor is a shard of another's.
            if not isinstance(weight, DTensor):
                yield name, weight.detach()
        module.reshard()
