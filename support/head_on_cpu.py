"""vLLM's head in float32, with its weights cast once a sync: for engines on a CPU.

Where layers compute in bfloat16, vLLM casts the head's weights to float32 at every
decoding step on a CPU. The larger the vocabulary, the longer that takes: bench.py has
the time. On a GPU there is nothing to cast, as a product of factors in bfloat16 is
summed up in float32.

Importing this replaces vLLM's layer in all engines that are built afterwards, by the
register that vLLM has for this.
"""

import torch
from torch.nn.functional import linear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)


@LogitsProcessor.register_oot(name="LogitsProcessor")
class CastOnce(LogitsProcessor):
    """vLLM's layer from hidden states to logits, with a copy of the head's weights.

    The copy is made at the first use, and is wrong as soon as the weights change:
    forget_cast comes before.
    """

    cast_weight: torch.Tensor | None = None  # [vocabulary, hidden size], head_dtype

    def _apply_head(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """vLLM's logits, bit for bit: [M, vocabulary] of hidden states [M, H]."""
        is_plain = isinstance(lm_head.quant_method, UnquantizedEmbeddingMethod)
        if not is_plain or self.head_dtype in (None, hidden_states.dtype):
            return super()._apply_head(lm_head, hidden_states, embedding_bias)
        if self.cast_weight is None:
            self.cast_weight = lm_head.weight.to(self.head_dtype)
        if embedding_bias is not None:
            embedding_bias = embedding_bias.to(self.head_dtype)
        hidden_states = hidden_states.to(self.head_dtype)
        return linear(hidden_states, self.cast_weight, embedding_bias)


def forget_cast(model: torch.nn.Module) -> None:
    """Let the copy of this vLLM model's head be made anew."""
    for layer in model.modules():
        if isinstance(layer, CastOnce):
            layer.cast_weight = None
