"""The device memory that a run takes, phase by phase: arithmetic, before anything is loaded.

    torchrun --nproc-per-node 8 train.py --config recipes/NAME.yaml --dry_run true

It reads the model's config.json alone. Counted in bytes, printed in GB of 2^30, as kv_cache_gb is.
"""

import os

import torch
import transformers

from config import Config, Refused

GB = 2**30
CHUNK = 1024  # response tokens whose logits exist at once: Policy.forward
PROMPT = 1024  # tokens counted for a prompt where max_prompt_tokens sets no limit
PREFILL = (
    16384  # tokens that vLLM prefills at once, by default, on an H100; elsewhere as many or fewer
)
# A guess. CUDA: context and kernels 1, NCCL 1, CUDA graphs 2, fragmentation 2. CPU: the programs.
RESERVE = {"cuda": 6 * GB, "cpu": 2 * GB}


def kv_bytes_per_token(config: transformers.PreTrainedConfig, element: int, tp: int = 1) -> int:
    """Bytes of a token in the KV cache of one of tp ranks: key and value, per layer and head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = -(-heads // tp)  # each rank has one at least
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * element


def shapes(config: transformers.PreTrainedConfig) -> torch.nn.Module:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def longest_sequence(cfg: Config, context: int) -> int:
    """Tokens of prompt and response, at most."""
    return min(context, (cfg.max_prompt_tokens or PROMPT) + cfg.max_response_tokens)


def phases(
    cfg: Config, config: transformers.PreTrainedConfig, ranks: int, device: str
) -> dict[str, dict[str, int]]:
    """{phase: {what: bytes}} of one rank of `ranks` on its node; device: "cuda" or "cpu".

    The sum of a phase estimates its peak. Weights, gradient, moments and KV cache are exact; the
    rest was at most 5 % below what torch allocates on CPU, and mostly above (tests/test_memory.py).
    """
    model = shapes(config)
    layers = model.base_model.layers
    numel = [p.numel() for p in model.parameters()]  # a tied head once
    layer = sum(p.numel() for p in layers[0].parameters())
    root = sum(numel) - layer * len(layers)  # embedding, final norm, head
    linear = sum(m.weight.numel() for m in layers.modules() if isinstance(m, torch.nn.Linear))
    head = model.get_output_embeddings().weight.numel()
    # FSDP2 cuts the first dimension of each parameter, and pads it to a multiple of the ranks.
    shard = sum(-(-len(p) // ranks) * (p.numel() // len(p)) for p in model.parameters())
    hidden, mlp, vocabulary = config.hidden_size, config.intermediate_size, config.vocab_size
    per_token = kv_bytes_per_token(config, 1)  # of k and v, all layers
    kv = per_token // (2 * len(layers))  # elements of k, and of v
    query = layers[0].self_attn.q_proj.out_features
    dtype = cfg.dtype.replace("auto", "bfloat16" if device == "cuda" else "float32")
    b = getattr(torch, dtype).itemsize  # bytes of an element that the trainer computes with
    e = getattr(torch, cfg.rollout_dtype).itemsize  # ... and the engine

    # The trainer. Moments exist from the first optimizer step on, gradients during the update.
    trainer = {"weights: 4 P / R": 4 * shard, "AdamW's moments: 8 P / R": 8 * shard}
    update = trainer | {"gradient: 4 P / R": 4 * shard}
    # FSDP gathers the root's weights for the whole update; their gradient is complete at its end.
    update |= {f"embedding, head, gradient: {2 * b} x {root:,}": 2 * b * root}
    # e_B needs B on each rank: ratio, advantage, mask twice in float32, four arrays in float64.
    places = cfg.prompts_per_step * cfg.group_size // cfg.minibatches * cfg.max_response_tokens
    update |= {f"ratios of B: 56 x {places:,}": (3 * 4 * 2 + 4 * 8) * places}
    # Per token, kept for the backward pass: an RMS norm has a float32 input, a normalized and a
    # weighted output; attention q, k, v, output and log-sum-exp; the MLP four wide activations.
    norm = 4 + 2 * b  # bytes per element
    kept = 2 * norm * hidden + b * (2 * query + 2 * kv + 4 * mlp) + 4 * config.num_attention_heads
    kept += norm * (query + kv) if hasattr(layers[0].self_attn, "q_norm") else 0
    tokens = max(cfg.micro_batch_tokens, longest_sequence(cfg, config.max_position_embeddings))
    every = b * hidden if cfg.gradient_checkpointing else kept  # of each layer; its input alone
    again = kept if cfg.gradient_checkpointing else 0  # of the layer that is computed once more
    every *= len(layers)
    update |= {f"activations: {tokens:,} tokens x {every:,}": tokens * every}
    # At work on a layer: its weights, the next ones and their buffer, its gradient, two float32
    # buffers to reduce gradients; of activations its own, and the gradients of some, soon freed.
    at_layer = layer * (4 * b + 2 * 4) + tokens * (again + 2 * b * mlp + norm * hidden)
    # At work on the head: it, its gradient in float32 and once more rounded; of a chunk the
    # log-softmax and two gradients, in float32; the last norm, and its output where it is wanted.
    at_head = (4 + 4 + b) * head + 3 * 4 * min(CHUNK, tokens) * vocabulary
    at_head += tokens * (norm + b) * hidden

    # The engine. fp8: linear weights of the layers in 8 bits, a float32 scale an output is small.
    fp8 = cfg.rollout_quantization == "fp8_per_channel"
    formula = f"{e} P - {e - 1} x {linear:,}" if fp8 else f"{e} P"
    shared = f"({formula}) / {cfg.rollout_tp}" if cfg.rollout_tp > 1 else formula
    whole = e * sum(numel) - (e - 1) * linear * fp8
    weights = {f"engine's weights: {shared}": whole // cfg.rollout_tp}
    cache = {"engine's KV cache": int(cfg.kv_cache_gb * GB)}
    # Prefill: residuals, q, k, v and the MLP's wide ones. Sampler: four float32 copies of logits.
    prefill = PREFILL * e * (4 * hidden + query + 2 * kv + 3 * mlp)
    sampler = 4 * 4 * cfg.max_num_seqs * vocabulary + 4 * head * (device == "cpu")  # casts its head
    if device == "cpu" and cfg.rollout_quantization != "none":  # train.py has a second one
        second = e * sum(numel) // cfg.rollout_tp + sum(cache.values())
        weights |= {"second engine, to evaluate": second}
    awake = weights | cache
    # On CUDA the engine sleeps at level 2: weights and cache go, and RESERVE has the rest.
    asleep = {} if device == "cuda" else awake
    # build_policy reads all weights into main memory; from there a layer at a time is sharded.
    load = {
        "weights: 4 P / R": 4 * shard,
        "largest layer, or the root: 4 bytes": 4 * max(layer, root),
    }
    load = load if device == "cuda" else {"all weights, before sharding: 4 P": 4 * sum(numel)}
    # First FSDP's buffer and the result; then the result, a copy, and what vLLM loads that into.
    module, weight = b * max(layer, root), e * max(numel)
    gathered = {"a layer or the root, gathered and loaded": module + max(module, 2 * weight)}
    return {
        "load": asleep | load,
        "rollout": trainer | awake | {"engine's prefill, sampler": prefill + sampler},
        "update": asleep | update | {"at work on a layer or the head": max(at_layer, at_head)},
        "sync": trainer | weights | asleep | gathered,  # the cache wakes after it
        # At the end of a run; a single rank has all weights already.
        "export": trainer | awake | ({"one weight, gathered": 4 * max(numel)} if ranks > 1 else {}),
    }


def dry_run(cfg: Config, ranks: int) -> str:
    """The table of `phases`, on this machine or on GPUs with device_memory_gb; `ranks` of a node.

    Raises Refused where a phase does not fit, or where the KV cache holds no sequence.
    """
    device = "cuda" if torch.cuda.is_available() or cfg.device_memory_gb else "cpu"
    if torch.cuda.is_available():
        memory = torch.cuda.mem_get_info()[1]
    elif device == "cpu":  # its ranks share it
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
    else:
        memory = int(cfg.device_memory_gb * GB)
    room = memory - RESERVE[device]
    try:
        config = transformers.AutoConfig.from_pretrained(cfg.model)
        table = phases(cfg, config, ranks, device)
    except (OSError, ValueError, AttributeError) as error:  # no model, or one unlike Llama, Qwen
        reason = str(error).splitlines()[0]
        raise Refused(f"cannot count the memory of {cfg.model!r}: {reason}") from error
    longest = longest_sequence(cfg, config.max_position_embeddings)
    element = getattr(torch, cfg.rollout_dtype).itemsize
    block = 16 * kv_bytes_per_token(config, element, cfg.rollout_tp)  # of vLLM
    sequence = -(-longest // 16) * block
    fit = int(cfg.kv_cache_gb * GB) // sequence
    if not fit:
        raise Refused(
            f"kv_cache_gb is {cfg.kv_cache_gb:g}, too little for one sequence of {longest} tokens: "
            f"that takes {sequence / GB:.2f}"
        )
    total = {phase: sum(parts.values()) for phase, parts in table.items()}
    worst = max(total, key=total.__getitem__)
    if total[worst] > room:
        most = max(table[worst], key=table[worst].__getitem__)
        raise Refused(
            f"{cfg.model} does not fit: in its {worst} phase a rank takes {total[worst] / GB:.1f} "
            f"GB, {table[worst][most] / GB:.1f} of it for {most.partition(':')[0]}, and has "
            f"{room / GB:.1f} beside the reserve of {RESERVE[device] // GB}: use more ranks, less "
            "kv_cache_gb, micro_batch_tokens or max_num_seqs, rollout_tp or gradient_checkpointing"
        )
    parameters = shapes(config).num_parameters()
    lines = [f"{cfg.model} on R = {ranks} {device} ranks a node, P = {parameters:,} parameters"]
    lines.append(f"{'GB (2^30 bytes) on a rank':44}" + "".join(f"{phase:>8}" for phase in table))
    for what in dict.fromkeys(what for parts in table.values() for what in parts):
        cells = (f"{p[what] / GB:8.2f}" if what in p else 8 * " " for p in table.values())
        lines.append(f"{what:44}{''.join(cells)}".rstrip())
    lines.append(f"{'sum':44}" + "".join(f"{n / GB:8.2f}" for n in total.values()))
    lines.append(f"room: {memory / GB:.1f}, less a reserve of {RESERVE[device] // GB}")
    if device == "cuda":
        lines.append(f"main memory of a node, to load: R x 4 P = {ranks * 4 * parameters / GB:.1f}")
    wait = "; where all are long, others wait" if fit < cfg.max_num_seqs else ""
    lines.append(f"KV cache: {fit} sequences of {longest}, max_num_seqs {cfg.max_num_seqs}{wait}")
    return "\n".join(lines)
