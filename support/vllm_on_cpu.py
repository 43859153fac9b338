"""What makes vLLM faster on a CPU, and changes nothing that it samples.

Where layers compute in bfloat16, vLLM casts the weights of a head in float32 at every
decoding step on a CPU. The larger the vocabulary, the longer that takes. On a GPU there
is nothing to cast, as a product of factors in bfloat16 is summed up in float32.

Importing this replaces a layer in all engines that are built afterwards, by the
register that vLLM has for this. Outside of faster_on_cpu the layer is vLLM's own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.functional import linear
from vllm import LLM
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

PLAIN = (UnquantizedEmbeddingMethod, UnquantizedLinearMethod)


@LogitsProcessor.register_oot(name="LogitsProcessor")
class CastingProcessor(LogitsProcessor):
    """vLLM's layer from hidden states to logits, with copies of the heads' weights."""

    # Each head's weights in head_dtype: [vocabulary, H]. None outside of faster_on_cpu.
    copies: dict[VocabParallelEmbedding, torch.Tensor] | None = None

    def _apply_head(
        self,
        lm_head: VocabParallelEmbedding,
        hidden_states: torch.Tensor,
        embedding_bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """vLLM's logits, bit for bit: [M, vocabulary] of hidden states [M, H]."""
        is_cast = self.head_dtype not in (None, hidden_states.dtype)
        is_plain = isinstance(lm_head.quant_method, PLAIN)
        if self.copies is None or not is_cast or not is_plain:
            return super()._apply_head(lm_head, hidden_states, embedding_bias)
        if lm_head not in self.copies:
            self.copies[lm_head] = lm_head.weight.to(self.head_dtype)
        if embedding_bias is not None:
            embedding_bias = embedding_bias.to(self.head_dtype)
        hidden_states = hidden_states.to(self.head_dtype)
        return linear(hidden_states, self.copies[lm_head], embedding_bias)


def set_copying(model: torch.nn.Module, is_on: bool) -> None:
    """Let a vLLM model keep copies from now on, or drop them and make none."""
    for layer in model.modules():
        if isinstance(layer, CastingProcessor):
            layer.copies = {} if is_on else None


@contextmanager
def faster_on_cpu(llm: LLM) -> Iterator[None]:
    """Within, the weights of `llm` must not change, and it generates faster."""
    llm.apply_model(partial(set_copying, is_on=True))
    try:
        # With a log-probability vLLM counts the token's rank, in a compiled function.
        # The compiler takes ten seconds or more, and the count itself no time.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        llm.apply_model(partial(set_copying, is_on=False))
