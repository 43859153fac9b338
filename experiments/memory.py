"""The memory that a run takes, phase by phase: arithmetic, before anything is loaded.

    python experiments/memory.py --config recipes/gsm8k-8gpu.yaml --ranks 8 \\
        --device_gb 79

It takes the flags of train.py, and of the model it reads config.json alone. Bytes are
printed in GB of 2^30, as kv_cache_gb is. It refuses a run that does not fit. Without
--device_gb it counts for this machine: its GPU, or its main memory. Each response is
counted with a prompt of its own; a group that shares one takes less.
"""

import gc
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from policy import CHUNK
from support.flags import Amount, PositiveCount, Refused, parse_flags
from train import Config

GB = 2**30
# Tokens counted for a prompt where max_prompt_tokens sets no limit.
PROMPT = 1024
# Tokens that vLLM prefills at once, by default, on an H100. Elsewhere it is no more.
PREFILL = 16384
# Tokens of a block of vLLM's KV cache.
BLOCK = 16
# A guess. On CUDA the context and kernels take 1 GB, NCCL 1, CUDA graphs 2 and
# fragmentation 2. On a CPU it is the programs.
RESERVE = {"cuda": 6 * GB, "cpu": 2 * GB}
# Likewise, for the CUDA graphs of a second engine.
SECOND_RESERVE = {"cuda": 2 * GB, "cpu": 0}
# vLLM returns the log-probabilities of a response as four Python lists. A listed token
# has four pointers of 8 bytes, an integer of 32 and a float of 24.
LISTED_BYTES = 4 * 8 + 32 + 24
# Of a token in Rollouts.top_tokens (int64) and top_logp_behavior (float32).
TOP_BYTES = 8 + 4
# Of a listed token at a position of a micro-batch, at most: its index twice, in the
# batch and before the head, and seven arrays of float64 in kl_divergence.
TOP_WORK_BYTES = 2 * 8 + 7 * 8

Parts = dict[str, int]  # what takes memory, and how many bytes


class MemoryConfig(Config):
    """A run of train.py, and the machine that its memory is counted for."""

    ranks: PositiveCount = 1
    """ranks of a node"""
    device_gb: Amount = 0.0
    """memory of each rank's GPU, in GB of 2^30 bytes; 0: that of this machine"""


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements in a model. The weights of a tied head count once."""

    total: int  # P, all weights
    largest: int  # the largest weight
    shard: int  # what a rank holds of all weights
    layer: int  # the weights of a decoder layer
    layers: int  # how many decoder layers there are
    root: int  # the weights that are in no layer: embedding, final norm, head
    linear: int  # the weights of the linear layers of all decoder layers
    head: int  # the weights of the head
    hidden: int  # the hidden state of a token
    mlp: int  # a wide activation of a token in the MLP
    vocabulary: int  # the logits of a token
    query: int  # q of a token in a layer
    key_value: int  # k of a token in a layer, and v
    attention_heads: int
    has_query_norm: bool  # q and k are normalized, as in Qwen3


def sizes_of(config: transformers.PreTrainedConfig, ranks: int) -> Sizes:
    """The sizes of a model like Llama or Qwen, sharded over the ranks of a node."""
    with torch.device("meta"):  # Without memory for the weights.
        model = transformers.AutoModelForCausalLM.from_config(config)
    layers = model.base_model.layers
    attention = layers[0].self_attn
    weights = list(model.parameters())
    total = sum(weight.numel() for weight in weights)
    layer = sum(weight.numel() for weight in layers[0].parameters())
    linear = 0
    for module in layers.modules():
        if isinstance(module, torch.nn.Linear):
            linear += module.weight.numel()
    # FSDP2 cuts the first dimension of each weight, padded to a multiple of the ranks.
    shard = 0
    for weight in weights:
        rows = -(-len(weight) // ranks)
        shard += rows * (weight.numel() // len(weight))
    return Sizes(
        total=total,
        largest=max(weight.numel() for weight in weights),
        shard=shard,
        layer=layer,
        layers=len(layers),
        root=total - layer * len(layers),
        linear=linear,
        head=model.get_output_embeddings().weight.numel(),
        hidden=config.hidden_size,
        mlp=config.intermediate_size,
        vocabulary=config.vocab_size,
        query=attention.q_proj.out_features,
        key_value=attention.k_proj.out_features,
        attention_heads=config.num_attention_heads,
        has_query_norm=hasattr(attention, "q_norm"),
    )


def kv_bytes_per_token(
    config: transformers.PreTrainedConfig, element: int, tp: int = 1
) -> int:
    """Bytes that a token takes in the KV cache of one of the `tp` ranks of an engine.

    It has a key and a value in each layer for each of its heads, with elements of
    `element` bytes. A rank has at least one head.
    """
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads_of_rank = -(-heads // tp)
    head_size = getattr(config, "head_dim", None)
    if head_size is None:
        head_size = config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads_of_rank * head_size * element


def longest_sequence(cfg: Config, context: int) -> int:
    """Tokens of prompt and response, at most."""
    prompt = cfg.max_prompt_tokens or PROMPT
    return min(context, prompt + cfg.max_response_tokens)


def responses_of_rank(cfg: Config, ranks: int) -> int:
    """Responses that a rank samples for a step, at most."""
    prompts = -(-cfg.prompts_per_step // ranks)
    return prompts * cfg.group_size


class Memory:
    """What one of the `ranks` of a node holds on its device, "cuda" or "cpu".

    Weights, gradient, moments and KV cache are exact. The rest was between 5% below and
    45% above what torch allocates on CPU, and mostly above (tests/test_memory.py).
    """

    def __init__(
        self,
        cfg: Config,
        config: transformers.PreTrainedConfig,
        ranks: int,
        device: str,
    ) -> None:
        self.cfg = cfg
        self.ranks = ranks
        self.device = device
        self.sizes = sizes_of(config, ranks)
        self.longest = longest_sequence(cfg, config.max_position_embeddings)
        self.top = min(cfg.top_logprobs, config.vocab_size)  # K
        dtype = cfg.dtype
        if dtype == "auto":
            dtype = "bfloat16" if device == "cuda" else "float32"
        self.element = getattr(torch, dtype).itemsize  # the trainer computes in it
        self.engine_element = getattr(torch, cfg.rollout_dtype).itemsize
        self.has_second_engine = cfg.rollout_quantization != "none"

    def phases(self) -> dict[str, Parts]:
        """The parts of each phase of a run. Their sum estimates its peak."""
        trainer = self.trainer()
        weights = self.engine_weights()
        cache = self.engine_cache()
        second = self.second_engine()
        # On CUDA the engine sleeps at level 2 during an update: weights and cache go.
        # What else it keeps is in RESERVE. The second engine never sleeps.
        asleep = second if self.device == "cuda" else weights | cache | second
        awake = weights | cache | second
        # The cache wakes up after the sync. But when the second engine gets weights,
        # for an evaluation, the first one is awake.
        syncing = weights | asleep | (cache if second else {})
        return {
            "load": asleep | self.load(),
            "rollout": trainer | awake | self.sampling(),
            "update": asleep | self.update(),
            "sync": trainer | syncing | self.gathered(),
            "export": trainer | awake | self.exported(),
        }

    def trainer(self) -> Parts:
        """What the trainer holds always. Moments exist after the first update."""
        return {
            "weights: 4 P / R": 4 * self.sizes.shard,
            "AdamW's moments: 8 P / R": 8 * self.sizes.shard,
        }

    def load(self) -> Parts:
        """build_policy: all weights go to main memory, and are sharded by layers."""
        sizes = self.sizes
        if self.device == "cpu":
            return {"all weights, before sharding: 4 P": 4 * sizes.total}
        return {
            "weights: 4 P / R": 4 * sizes.shard,
            "largest layer, or the root: 4 bytes": 4 * max(sizes.layer, sizes.root),
        }

    def update(self) -> Parts:
        """The trainer's part of an update, at the worst moment of a micro-batch."""
        cfg = self.cfg
        sizes = self.sizes
        places = (
            cfg.prompts_per_step
            * cfg.group_size
            // cfg.minibatches
            * cfg.max_response_tokens
        )
        places_of_rank = -(-places // self.ranks)
        tokens = max(cfg.micro_batch_tokens, self.longest)
        # FSDP gathers the root's weights for the whole update. Their gradient is
        # complete only at its end.
        root = 2 * self.element
        # e_B needs all of B on each rank. The ratio, the advantage and the mask are
        # there twice in float32, and four arrays in float64.
        ratios = 2 * 3 * 4 + 4 * 8
        # The rank's share of B is there as a whole.
        top = TOP_BYTES * self.top
        # With checkpointing each layer keeps its input alone.
        kept = self.activations()
        if cfg.gradient_checkpointing:
            kept = self.element * sizes.hidden
        kept *= sizes.layers
        parts = self.trainer()
        parts["gradient: 4 P / R"] = 4 * sizes.shard
        parts[f"embedding, head, gradient: {root} x {sizes.root:,}"] = root * sizes.root
        parts[f"ratios of B: {ratios} x {places:,}"] = ratios * places
        if self.top > 0:
            parts[f"K likeliest tokens: {top} x {places_of_rank:,}"] = (
                top * places_of_rank
            )
        parts[f"activations: {tokens:,} tokens x {kept:,}"] = tokens * kept
        parts["at work on a layer, the head or the loss"] = max(
            self.at_layer(tokens), self.at_head(tokens), self.at_loss(tokens)
        )
        return parts

    def activations(self) -> int:
        """Bytes that a layer keeps of a token for its backward pass.

        An RMS norm keeps a float32 input, a normalized and a weighted output. Attention
        keeps q, k, v, its output and log-sum-exp, and the MLP four wide activations.
        """
        sizes = self.sizes
        wide = 2 * sizes.query + 2 * sizes.key_value + 4 * sizes.mlp
        kept = 2 * self.norm() * sizes.hidden
        kept += self.element * wide
        kept += 4 * sizes.attention_heads
        if sizes.has_query_norm:
            kept += self.norm() * (sizes.query + sizes.key_value)
        return kept

    def norm(self) -> int:
        """Bytes that an RMS norm keeps of an element."""
        return 4 + 2 * self.element

    def at_layer(self, tokens: int) -> int:
        """The backward pass of a layer, beside what was kept for it.

        There are its weights, the next ones and their buffer, its gradient, and two
        float32 buffers to reduce gradients; of activations there are its own, if they
        were not kept, and the gradients of some, which are soon freed.
        """
        sizes = self.sizes
        again = self.activations() if self.cfg.gradient_checkpointing else 0
        gradients = 2 * self.element * sizes.mlp + self.norm() * sizes.hidden
        buffers = sizes.layer * (4 * self.element + 2 * 4)
        return buffers + tokens * (again + gradients)

    def at_head(self, tokens: int) -> int:
        """The backward pass of the head.

        There are the head in float32, its gradient, and that of a chunk or, at the end,
        in the compute dtype; of a chunk of logits the log-softmax and two gradients, in
        float32; and of all tokens the last norm and its output, where it is wanted.
        """
        sizes = self.sizes
        last = 4 if tokens > CHUNK else self.element
        head = (4 + 4 + last) * sizes.head
        logits = 3 * 4 * min(CHUNK, tokens) * sizes.vocabulary
        last_norm = tokens * (self.norm() + self.element) * sizes.hidden
        return head + logits + last_norm

    def at_loss(self, tokens: int) -> int:
        """The KL over K tokens at each position, forward and backward."""
        return tokens * TOP_WORK_BYTES * self.top

    def engine_weights(self) -> Parts:
        """fp8 has 8 bits for each weight of a linear layer, and small scales."""
        bytes_of_all = self.engine_element * self.sizes.total
        formula = f"{self.engine_element} P"
        if self.cfg.rollout_quantization == "fp8_per_channel":
            saved = self.engine_element - 1
            bytes_of_all -= saved * self.sizes.linear
            formula = f"{formula} - {saved} x {self.sizes.linear:,}"
        tp = self.cfg.rollout_tp
        if tp > 1:
            formula = f"({formula}) / {tp}"
        return {f"engine's weights: {formula}": bytes_of_all // tp}

    def engine_cache(self) -> Parts:
        return {"engine's KV cache": int(self.cfg.kv_cache_gb * GB)}

    def second_engine(self) -> Parts:
        """Where rollouts are quantized, what is evaluated is another engine's."""
        if not self.has_second_engine:
            return {}
        weights = self.engine_element * self.sizes.total // self.cfg.rollout_tp
        cache = int(self.cfg.kv_cache_gb * GB)
        return {"second engine, to evaluate": weights + cache}

    def sampling(self) -> Parts:
        """An engine at work.

        Its prefill has residuals, q, k, v and wide activations of the MLP. Its sampler
        has four float32 copies of the logits, and on CPU a float32 copy of the head.
        """
        sizes = self.sizes
        wide = 4 * sizes.hidden + sizes.query + 2 * sizes.key_value + 3 * sizes.mlp
        prefill = PREFILL * self.engine_element * wide
        sampler = 4 * 4 * self.cfg.max_num_seqs * sizes.vocabulary
        if self.device == "cpu":
            sampler += 4 * sizes.head
        return {"engine's prefill, sampler": prefill + sampler}

    def gathered(self) -> Parts:
        """full_weights and load_weights: a layer, or the root, on its way.

        First there are FSDP's buffer and its result; then the result, a copy of a
        weight, and what vLLM loads this copy into.
        """
        module = self.element * max(self.sizes.layer, self.sizes.root)
        weight = self.engine_element * self.sizes.largest
        return {
            "a layer or the root, gathered and loaded": module + max(module, 2 * weight)
        }

    def exported(self) -> Parts:
        """save_model, at the end of a run. A single rank has all weights already."""
        if self.ranks == 1:
            return {}
        return {"one weight, gathered": 4 * self.sizes.largest}

    def reserve(self) -> int:
        """Bytes that are not counted above."""
        reserve = RESERVE[self.device]
        if self.has_second_engine:
            reserve += SECOND_RESERVE[self.device]
        return reserve

    def rollouts_in_main_memory(self) -> int:
        """Bytes of all ranks of a node: vLLM's lists, and the batches in the queue."""
        cfg = self.cfg
        responses = self.ranks * responses_of_rank(cfg, self.ranks)
        tokens = responses * cfg.max_response_tokens
        # Each rank that shares an engine gets the responses of all of them.
        lists = tokens * LISTED_BYTES * (1 + self.top) * cfg.rollout_tp
        queue = tokens * TOP_BYTES * self.top * (1 + cfg.lag)
        return lists + queue


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that torch allocates at once on CPU in run(), above what it found."""
    # Without garbage collection: what it frees in the middle would be subtracted.
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            run()
    finally:
        gc.enable()
    allocations = [
        event
        for event in record.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    allocations.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in allocations))


def memory_of_device(cfg: MemoryConfig) -> tuple[str, int]:
    """The device, "cuda" or "cpu", and the bytes that a rank has of it."""
    if cfg.device_gb > 0:
        return "cuda", int(cfg.device_gb * GB)
    if torch.cuda.is_available():
        return "cuda", torch.cuda.mem_get_info()[1]
    main_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return "cpu", main_memory // cfg.ranks


def report(cfg: MemoryConfig) -> str:
    """The table of `Memory.phases`, and what it leaves room for.

    Raises Refused where a phase does not fit, or where the KV cache holds no sequence.
    """
    device, memory_bytes = memory_of_device(cfg)
    try:
        config = transformers.AutoConfig.from_pretrained(cfg.model)
        memory = Memory(cfg, config, cfg.ranks, device)
    except (OSError, ValueError, AttributeError) as error:
        # There is no such model, or it is unlike Llama and Qwen.
        reason = str(error).splitlines()[0]
        raise Refused(f"cannot count the memory of {cfg.model!r}: {reason}") from error
    sequences = sequences_in_cache(cfg, config, memory.longest)
    phases = memory.phases()
    room = memory_bytes - memory.reserve()
    check_fit(cfg.model, phases, room, memory.reserve())

    title = "GB (2^30 bytes) on a rank"
    lines = [
        f"{cfg.model} on R = {cfg.ranks} {device} ranks a node, "
        f"P = {memory.sizes.total:,} parameters",
        f"{title:44}" + "".join(f"{phase:>8}" for phase in phases),
    ]
    parts_of_all = {what: None for parts in phases.values() for what in parts}
    for what in parts_of_all:
        line = f"{what:44}"
        for parts in phases.values():
            line += f"{parts[what] / GB:8.2f}" if what in parts else " " * 8
        lines.append(line.rstrip())
    totals = [sum(parts.values()) for parts in phases.values()]
    lines.append(f"{'sum':44}" + "".join(f"{total / GB:8.2f}" for total in totals))
    lines.append(
        f"room: {memory_bytes / GB:.1f}, less a reserve of {memory.reserve() // GB}"
    )
    rollouts = memory.rollouts_in_main_memory() / GB
    if device == "cuda":
        to_load = cfg.ranks * 4 * memory.sizes.total / GB
        lines.append(f"main memory of a node, to load: R x 4 P = {to_load:.1f}")
    lines.append(
        f"main memory of a node, rollouts with K = {memory.top}: {rollouts:.1f}"
    )
    cache = (
        f"KV cache: {sequences} sequences of {memory.longest}, "
        f"max_num_seqs {cfg.max_num_seqs}"
    )
    if sequences < cfg.max_num_seqs:
        cache += "; where all are long, others wait"
    lines.append(cache)
    return "\n".join(lines)


def sequences_in_cache(
    cfg: Config, config: transformers.PreTrainedConfig, longest: int
) -> int:
    """Sequences of `longest` tokens that fit into an engine's KV cache."""
    element = getattr(torch, cfg.rollout_dtype).itemsize
    blocks = -(-longest // BLOCK)
    sequence = blocks * BLOCK * kv_bytes_per_token(config, element, cfg.rollout_tp)
    sequences = int(cfg.kv_cache_gb * GB) // sequence
    if sequences == 0:
        raise Refused(
            f"kv_cache_gb is {cfg.kv_cache_gb:g}, too little for one sequence of "
            f"{longest} tokens: that takes {sequence / GB:.2f}"
        )
    return sequences


def check_fit(model: str, phases: dict[str, Parts], room: int, reserve: int) -> None:
    """Raises Refused where the largest phase takes more than the room."""
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    worst = max(totals, key=lambda phase: totals[phase])
    if totals[worst] <= room:
        return
    parts = phases[worst]
    most = max(parts, key=lambda what: parts[what])
    raise Refused(
        f"{model} does not fit: in its {worst} phase a rank takes "
        f"{totals[worst] / GB:.1f} GB, {parts[most] / GB:.1f} of it for "
        f"{most.partition(':')[0]}, and has {room / GB:.1f} beside the reserve of "
        f"{reserve // GB}: use more ranks, less kv_cache_gb, micro_batch_tokens or "
        "max_num_seqs, rollout_tp or gradient_checkpointing"
    )


if __name__ == "__main__":
    try:
        print(report(parse_flags(MemoryConfig)))
    except Refused as error:
        sys.exit(f"memory.py: {error}")
