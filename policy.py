"""The policy pi_theta: the trainer's side of the ratio (7), and how it is sharded.

`Policy` is the forward pass, `build_policy` puts it under FSDP2, `full_weights` is how
the weights leave it, on their way into the rollout engine, and `check_sync` tells
whether they have arrived.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers.integrations import sdpa_attention

from rollout import Engine, Rollouts
from support.command import Stopped

CHUNK = 1024  # response tokens whose logits exist at the same time
# How far engine and policy may be apart after a sync, as mean |log pi_theta - log pi_b|
# in nats a token. Measured were 7e-6 in float32, 0.03 in bfloat16, and in fp8 0.17 with
# SmolLM2-135M, 0.22 with 1.5 billion random weights, and less with the embedded policy.
# One update of the embedded default makes about 0.001, and a layer without its weights
# several nats.
SYNC_LIMITS = {"float32 on a CPU": 1e-4, "bfloat16 or TF32": 0.15, "fp8": 0.4}


class Policy(torch.nn.Module):
    """A causal language model of transformers with a linear head (Llama, Qwen, ...).

    FSDP gathers the weights of the root module (the embedding, the head) when the root
    is called. `forward` uses the head's weight directly, so Policy has to be the root.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        temperature: float = 1.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.dtype = dtype  # what FSDP has it compute in

    def forward(self, rollouts: Rollouts) -> tuple[torch.Tensor, torch.Tensor]:
        """log pi_theta of the response tokens and of the K top_tokens at each.

        [N, T] and [N, T, K], in nats, float32, with 0 where the mask is False. The head
        is applied in float32 (or TF32: see build_policy), to response positions alone,
        CHUNK of them at a time. The backward pass computes their logits again, so that
        none are kept.
        """
        # Padding on the right needs no attention mask: no token sees a later one.
        output = self.model.base_model(input_ids=rollouts.tokens, use_cache=False)
        row, t = rollouts.mask.nonzero(as_tuple=True)  # [M] each, for M response tokens
        position = rollouts.prompt_length[row] + t  # [M]
        # [M, D]. The position before a token predicts it.
        hidden = output.last_hidden_state[row, position - 1]
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


def token_log_probabilities(
    hidden: torch.Tensor, head: torch.Tensor, temperature: float, tokens: torch.Tensor
) -> torch.Tensor:
    """log pi_theta of these tokens, [M, 1 + K], from M hidden states, [M, D]."""
    logits = hidden.float() @ head.T / temperature  # [M, V]
    return logits.log_softmax(dim=-1).gather(1, tokens)


def build_policy(
    model: str,
    mesh: dist.DeviceMesh,
    dtype: str = "float32",
    temperature: float = 1.0,
    gradient_checkpointing: bool = False,
) -> Policy:
    """A policy under FSDP2: sharded within a node, replicated across nodes.

    Master weights and gradients are float32; it computes in `dtype`.
    """
    transformers.utils.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=False)
    stored_dtype = config.dtype or torch.float32
    # The engine has no dropout, and with it rho would be noise.
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    language_model = transformers.AutoModelForCausalLM.from_pretrained(
        model, config=config, dtype=torch.float32, trust_remote_code=False
    )
    language_model.config.dtype = stored_dtype  # in which save_model writes them
    # Where vLLM has prepared the class for its compiler (see Engine.as_current).
    language_model.base_model.do_not_compile = True
    if gradient_checkpointing:
        language_model.gradient_checkpointing_enable()
    if mesh.device_type == "cuda":
        # Beside a bfloat16 policy the head's product may use TF32, which holds a
        # bfloat16 exactly. The backward pass rounds the logits' gradient to 11 bits.
        # The whole process has one setting: an engine in float32 follows it too.
        torch.set_float32_matmul_precision("high" if dtype == "bfloat16" else "highest")
        if dtype == "float32":
            # For heads that share keys torch has only the kernel that keeps all scores,
            # [N, H, L, L]. Without it transformers repeats the keys and values.
            sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    policy = Policy(language_model, temperature, getattr(torch, dtype))
    precision = MixedPrecisionPolicy(
        param_dtype=policy.dtype,
        reduce_dtype=torch.float32,
        # The batch holds log-probabilities, which rounding would ruin.
        cast_forward_inputs=False,
    )
    # One layer after another moves to the device, and only this rank's shard stays.
    for layer in language_model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)
    # Training mode, as transformers checkpoints activations only there.
    return policy.train()


def full_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole weights as transformers and vLLM know them, one after another.

    In float32, with both names of a tied head. A collective: each weight is gathered
    from all ranks when it is asked for.
    """
    for name, weight in policy.model.state_dict().items():
        yield name, weight.full_tensor()


def check_sync(engine: Engine, policy: Policy, prompts: list[list[int]]) -> float:
    """Compare log pi_b and log pi_theta on 16 fresh samples, right after a sync.

    Returns their distance: mean |log pi_theta - log pi_b| in nats a token, of the rank
    where it is largest. The samples are at the policy's temperature, so only rounding
    and fp8 lie between the two. A collective. Raises Stopped, on all ranks, where they
    are further apart than SYNC_LIMITS: then the run prints the error's sentence and
    ends with exit code 1. The sync is not tried again, and the checkpoints stay.
    """
    # The shortest take the least memory. Four answers may have 15 tokens in all, to
    # whose mean one unlikely token, 2 nats off in bfloat16, adds 0.13.
    prompts = (sorted(prompts, key=len) * 16)[:16]
    samples = engine.sample(
        prompts,
        1,
        list(range(16)),
        temperature=policy.temperature,
        max_tokens=32,
    )
    device = next(policy.parameters()).device
    samples = samples.select(torch.arange(16), device)
    with torch.no_grad():
        logp, _ = policy(samples)
    # Without a backward pass the root stays gathered, and a later forward pass could
    # use outdated weights. In train.update the backward pass shards it again.
    policy.reshard()
    distance = (logp - samples.logp_behavior).abs()[samples.mask].mean()
    # A maximum over ranks may ignore NaN.
    distance.nan_to_num_(nan=torch.inf)
    dist.all_reduce(distance, dist.ReduceOp.MAX)
    precision = "bfloat16 or TF32"
    if engine.quantization != "none":
        precision = "fp8"
    elif engine.dtype == policy.dtype == torch.float32 and device.type == "cpu":
        precision = "float32 on a CPU"  # On CUDA vLLM's kernels may use TF32.
    if distance > SYNC_LIMITS[precision]:
        raise Stopped(
            f"after the sync of weights {samples.weight_version}, engine and policy "
            f"differ by {distance:.2g} nats a token on fresh samples (limit in "
            f"{precision}: {SYNC_LIMITS[precision]}): did the engine get all weights, "
            "the tied head's too, and does the trainer compute what the model does?"
        )
    return distance.item()
