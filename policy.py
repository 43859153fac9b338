"""The policy: the trainer's side of the ratio (1), and its shards."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from config import Config
from rollout import Rollouts


class Policy(torch.nn.Module):
    """A causal language model of transformers with a linear head (Llama, Qwen, ...).

    A module, because FSDP gathers the weights of its root (embedding, head) when that is called.
    """

    def __init__(self, model: torch.nn.Module, temperature: float = 1.0) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, batch: Rollouts, chunk: int = 1024) -> torch.Tensor:
        """log pi_theta of the response tokens, [N, T] float32, nats; 0 where the mask is False.

        Right padding needs no attention mask: no token sees a later one. The head is applied in
        float32, to response positions alone, `chunk` of them at a time, and once more in the
        backward pass: no [tokens, vocabulary] tensor is ever kept.
        """
        hidden = self.model.base_model(input_ids=batch.tokens, use_cache=False)[0]  # [N, L, D]
        row, t = batch.mask.nonzero(as_tuple=True)  # [M] each, for M response tokens
        position = batch.prompt_length[row] + t  # [M]; predicted one position earlier
        hidden, target = hidden[row, position - 1], batch.tokens[row, position]  # [M, D], [M]
        head = self.model.get_output_embeddings().weight  # [V, D]
        chunks = zip(hidden.split(chunk), target.split(chunk), strict=True)
        logp = [checkpoint(self.logp, h, head, y, use_reentrant=False) for h, y in chunks]
        zeros = torch.zeros(batch.mask.shape, device=batch.mask.device)  # [N, T]
        return zeros.masked_scatter(batch.mask, torch.cat(logp))

    def logp(self, hidden: torch.Tensor, head: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        logits = hidden.float() @ head.float().T / self.temperature  # [chunk, V]
        return -torch.nn.functional.cross_entropy(logits, target, reduction="none")  # [chunk]


def build_policy(cfg: Config, mesh: dist.DeviceMesh) -> Policy:
    """float32 master weights, computed with in cfg.dtype, sharded in a node, replicated across."""
    model = transformers.AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    auto = "bfloat16" if mesh.device_type == "cuda" else "float32"
    dtype = getattr(torch, cfg.dtype.replace("auto", auto))
    if mesh.device_type == "cuda" and dtype == torch.bfloat16:
        torch.set_float32_matmul_precision("high")  # the head: TF32 holds a bfloat16 exactly
    # The batch is not cast: its log-probabilities are no activations, and rounding ruins them.
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    policy = Policy(model, cfg.policy_temperature)
    for layer in model.base_model.layers:  # each moves to the device alone, and leaves a shard
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(policy, mesh=mesh, mp_policy=precision).train()


def full_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Names (a tied head has two) and weights as transformers and vLLM know them, in cfg.dtype, as
    the policy computes with them, whatever the engine's.

    FSDP gathers them as for a forward pass, a layer at a time: a collective. Each is freed when the
    next one is asked for.
    """
    policy.reshard()  # a forward pass without a backward one leaves its root gathered
    for module in [*policy.model.base_model.layers, policy]:
        module.unshard()
        for name, weight in policy.model.named_parameters(remove_duplicate=False):
            if not isinstance(weight, DTensor):  # of this module; the others' are shards
                yield name, weight.detach()
        module.reshard()
