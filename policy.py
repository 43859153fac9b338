"""The policy pi_theta, which is the numerator of rho, and its sharding.

`Policy` is the forward pass, and `build_policy` puts it under FSDP2. `sync` copies its
weights into the rollout engine, and can check that they have arrived.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import embedding
from torch.utils.checkpoint import checkpoint
from transformers.integrations import sdpa_attention

from rollout import Engine, Rollouts
from support.command import Stopped
from support.models import model_folder

CHUNK = 1024  # response tokens whose logits exist at the same time
# check_sync accepts a mean |log pi_theta - log pi_b| up to these limits, in nats per
# token. For SmolLM2-135M we measured 6e-6 in float32, 0.004 in float16, 0.03 in
# bfloat16 and 0.2 in fp8. All are lower for the embedded policy (tiny/). In fp8, a
# model of 1.5 billion random weights has 0.22. For comparison, one update of the
# embedded policy changes log pi_theta by about 0.001, and a layer that was not synced
# changes log pi_b by several nats.
SYNC_LIMITS = {
    torch.float32: 1e-4,
    torch.float16: 0.03,
    torch.bfloat16: 0.15,
    "fp8_per_channel": 0.4,
    "none": 0.0,  # no quantization
}
SYNC_SAMPLES = 16


class Policy(torch.nn.Module):
    """A causal language model from transformers, with a linear head (Llama, Qwen, ...).

    FSDP gathers the root module's weights (those outside the layers) when the root is
    called. `forward` uses the head's weight directly, so Policy is the root.
    """

    dtype = torch.float32  # the dtype in which FSDP makes it compute

    def __init__(self, model: torch.nn.Module, temperature: float = 1.0) -> None:
        super().__init__()
        model.set_attn_implementation("attend_in_rows")
        # If vLLM has no implementation of its own for a model, it changes the model's
        # class in transformers so that the forward pass is compiled. This attribute
        # exempts the policy.
        model.base_model.do_not_compile = True
        self.model = model
        self.temperature = temperature

    def forward(self, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log pi_theta of each response token and of the K top_tokens there.

        The shapes are [N, T] and [N, T, K]. Values are float32, in nats, and 0 on
        padding. The head is applied in float32 (or TF32: see train.Run), and only to
        positions that predict a response token, CHUNK of them at a time. The backward
        pass computes their logits again, so no logits are kept.
        """
        index, computed = distinct_tokens(rollouts.tokens)
        for layer in self.model.base_model.layers:
            # attend_in_rows reads this layout. With gradient checkpointing the backward
            # pass reads it again, so each backward pass must come before the next
            # forward pass.
            layer.self_attn.layout = index, computed
        output = self.model.base_model(
            input_ids=rollouts.tokens[computed][None],  # [1, S]
            position_ids=computed[1][None],
            use_cache=False,
            return_dict=True,
        )
        row, t = rollouts.mask.nonzero(as_tuple=True)  # [M] each, for M response tokens
        position = rollouts.prompt_length[row] + t  # [M]
        # [M, D]. A token is predicted at the position before it.
        hidden = embedding(index[row, position - 1], output.last_hidden_state[0])
        sampled_token = rollouts.tokens[row, position][:, None]  # [M, 1]
        # [M, 1 + K]
        tokens = torch.cat([sampled_token, rollouts.top_tokens[row, t]], dim=1)
        # Cast once, outside the chunks, so that their gradients add up in float32.
        head = self.model.get_output_embeddings().weight.float()  # [V, D]
        chunks = [
            checkpoint(
                token_log_probabilities,
                hidden_chunk,
                head,
                self.temperature,
                token_chunk,
                use_reentrant=False,
            )
            for hidden_chunk, token_chunk in zip(
                hidden.split(CHUNK), tokens.split(CHUNK), strict=True
            )
        ]
        logp = torch.cat(chunks)  # [M, 1 + K]
        sampled_logp = logp.new_zeros(rollouts.mask.shape)
        top_logp = logp.new_zeros(rollouts.top_tokens.shape)
        return (
            sampled_logp.index_put((row, t), logp[:, 0]),  # [N, T]
            top_logp.index_put((row, t), logp[:, 1:]),  # [N, T, K]
        )


def distinct_tokens(tokens: torch.Tensor) -> tuple[torch.Tensor, tuple]:
    """Find the S tokens of `tokens`, [N, L], whose hidden states have to be computed.

    The hidden state of a token depends only on the tokens up to it. If the row above
    begins with the same tokens, that row's state is used. Responses to the same prompt
    are neighbors, so their prompt, and any beginning that neighboring prompts share, is
    computed once. Padding (-1) is left out.

    Returns `index`, [N, L], and `computed`, the rows and the columns of the S tokens,
    [S] each: tokens[n, l] equals tokens[computed][index[n, l]]. On padding, `index` has
    no meaning.
    """
    differs = tokens.diff(dim=0, prepend=tokens[:1] + 1) != 0
    is_computed = (differs.cumsum(dim=1) > 0) & (tokens >= 0)
    # Computed tokens are numbered row by row, so the numbers in a column grow downward.
    # In each column, cummax therefore finds the nearest computed token at or above each
    # row.
    number = (is_computed.flatten().cumsum(dim=0) - 1).view_as(tokens) * is_computed
    return number.cummax(dim=0).values, is_computed.nonzero(as_tuple=True)


def attend_in_rows(
    module: torch.nn.Module,
    *states: torch.Tensor,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of each of the S tokens to the tokens of its row.

    `states` are the queries, keys and values, [1, H, S, D] (keys and values may have
    fewer heads), and a mask, which is None because transformers makes no mask for this
    function. The result is [1, S, H, D].
    """
    index, computed = module.layout  # see distinct_tokens
    # We use `embedding` instead of indexing because of its gradient, which is summed in
    # the same order in every run and, on a GPU, in float32.
    rows = [
        embedding(index, state[0].transpose(0, 1).flatten(1))  # [N, L, H * D]
        .unflatten(2, state.shape[1::2])
        .transpose(1, 2)  # [N, H, L, D]
        for state in states[:3]
    ]
    # Right padding needs no mask, because no token attends to a later one.
    mask, length = None, index.shape[1]
    if (sliding_window or length) < length:
        mask = index.new_ones(length, length).tril().triu(1 - sliding_window).bool()
    output, _ = sdpa_attention.sdpa_attention_forward(module, *rows, mask, **options)
    return output[computed][None], None


transformers.AttentionInterface.register("attend_in_rows", attend_in_rows)


def token_log_probabilities(
    hidden: torch.Tensor, head: torch.Tensor, temperature: float, tokens: torch.Tensor
) -> torch.Tensor:
    """Return log pi_theta of these tokens, [M, 1 + K], from M hidden states, [M, D]."""
    logits = hidden.float() @ head.T / temperature  # [M, V]
    return logits.log_softmax(dim=-1).gather(1, tokens)


def build_policy(
    model: str,
    mesh: dist.DeviceMesh,
    dtype: str = "float32",
    temperature: float = 1.0,
    gradient_checkpointing: bool = False,
) -> Policy:
    """Build a policy under FSDP2: sharded within a node and replicated across nodes.

    Master weights and gradients are float32. The policy computes in `dtype`.
    """
    transformers.utils.logging.disable_progress_bar()
    folder = model_folder(model)
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    # The engine has no dropout. If the policy had any, rho would be noise.
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    language_model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, trust_remote_code=False
    )
    # save_model writes the weights in the dtype in which they were stored.
    language_model.config.dtype = config.dtype or torch.float32
    if gradient_checkpointing:
        language_model.gradient_checkpointing_enable()
    if mesh.device_type == "cuda" and dtype == "float32":
        # If heads share keys and values, torch's float32 attention keeps all scores,
        # [N, H, L, L]. So we let transformers repeat the keys and values instead.
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    policy = Policy(language_model, temperature)
    policy.dtype = getattr(torch, dtype)
    precision = MixedPrecisionPolicy(
        param_dtype=policy.dtype,
        reduce_dtype=torch.float32,
        # The inputs include log-probabilities, which must not be rounded.
        cast_forward_inputs=False,
    )
    # Each layer moves to the device in turn, and only this rank's shard stays there.
    for layer in language_model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    # In eval mode, transformers would ignore gradient_checkpointing.
    return policy.train()


def full_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole value of each weight, one after another.

    Names are those of transformers and vLLM, values are float32, and a tied head
    appears under both of its names. A collective: each weight is gathered from all
    ranks when it is asked for.
    """
    for name, weight in policy.model.state_dict().items():
        yield name, weight.full_tensor()


def sync(engine: Engine, policy: Policy, step: int, check_on: list[list[int]]) -> None:
    """Copy the policy's weights into the engine and name them after this step.

    `check_on` has prompts (token ids) for check_sync; if it is empty, nothing is
    checked. A collective.
    """
    engine.load_weights(full_weights(policy), version=str(step))
    if check_on:
        check_sync(engine, policy, check_on)


def check_sync(engine: Engine, policy: Policy, prompts: list[list[int]]) -> float:
    """Compare log pi_b and log pi_theta on 16 samples per rank, right after a sync.

    Returns their distance: the mean of |log pi_theta - log pi_b|, in nats per token, on
    the rank on which it is largest. Samples are drawn at the policy's temperature, so
    only rounding and fp8 separate the two. Raises Stopped, on all ranks, if the
    distance exceeds the largest limit of the dtypes in use. A collective.
    """
    # The shortest prompts need the least memory. We take 16 samples because a few short
    # answers can have only 15 tokens in all, and then one unlikely token, off by 2 nats
    # in bfloat16, would add 0.13 to the mean.
    prompts = (sorted(prompts, key=len) * SYNC_SAMPLES)[:SYNC_SAMPLES]
    samples = engine.sample(
        prompts,
        1,
        list(range(SYNC_SAMPLES)),
        temperature=policy.temperature,
        max_tokens=32,
    )
    device = next(policy.parameters()).device
    samples = samples.select(torch.arange(SYNC_SAMPLES), device)
    with torch.no_grad():
        logp, _ = policy(samples)
    # Without a backward pass the root stays gathered, and a later forward pass could
    # use outdated weights. In train.update the backward pass shards it again.
    policy.reshard()
    distance = (logp - samples.logp_behavior).abs()[samples.mask].mean()
    # A maximum over ranks may ignore NaN, so NaN is replaced by infinity.
    distance.nan_to_num_(nan=torch.inf)
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    precisions = {policy.dtype, engine.dtype, engine.quantization}
    if engine.dtype == torch.float32 and device.type == "cuda":
        # vLLM may use TF32, which needs bfloat16's limit.
        precisions.add(torch.bfloat16)
    limit = max(SYNC_LIMITS[precision] for precision in precisions)
    if distance > limit:
        raise Stopped(
            f"after the sync of weights {samples.weight_version}, engine and policy "
            f"differ by {distance:.2g} nats per token on fresh samples (for these "
            f"dtypes the limit is {limit}): check that the engine got all weights, "
            "including a tied head, and that trainer and engine compute the same model"
        )
    return distance.item()
