"""How near the rollouts, the update, the sync and the loss are to what is possible.

experiments/bench.py runs this and writes what it finds. Every part compares things in
turn, in one process, and reports the median of the turns with the least and the most:
neighbors on the machine disturb seconds more than ratios.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed import DeviceMesh
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import linear_cross_entropy

from experiments.memory import peak_bytes
from loss import OBJECTIVES
from policy import (
    CHUNK,
    Policy,
    build_policy,
    can_share_prompts,
    chunk_log_probabilities,
    full_weights,
)
from rollout import Engine, Rollouts
from train import (
    Config,
    accumulate_gradient,
    add_reward,
    build_optimizer,
    load_data,
    rows_of_micro_batches,
    rows_of_minibatches,
    sample_step,
    sharing_of,
)

TURNS = 3
# What vLLM and Engine do differs by little: more turns, each of three first in two.
ROLLOUT_TURNS = 6
# Of a rollout and its gradient with and without the KL's tokens.
KL_TURNS = {"tiny": 10, "pretrained": 4}
# A step of a pretrained model. It learns next to nothing, so that its responses stay as
# long as they are.
SIZES = {
    "cpu": {
        "task": "recipes/sums-and-products",
        "prompts_per_step": 8,
        "group_size": 4,
        "max_response_tokens": 32,
        # One optimizer step, as TRL makes by default.
        "minibatches": 1,
        "learning_rate": 1e-9,
        "kv_cache_gb": 0.5,
    },
    "cuda": {
        "task": "recipes/sums-and-products",
        "prompts_per_step": 16,
        "group_size": 8,
        "max_response_tokens": 256,
        "minibatches": 1,
        "micro_batch_tokens": 8192,
        "learning_rate": 1e-9,
        "kv_cache_gb": 8.0,
    },
}
# Rows and columns of the matrices whose products are the ceiling, and how many of them.
MATRIX = {"cpu": 2048, "cuda": 8192}
PRODUCTS = 10
COPIED = 2**28  # bytes that are copied to measure the memory's rate
# Tokens of a micro-batch by default, and of a part of it. All logits of twice the part
# fit into memory at once: with the larger head they take 9 GB.
HEAD_TOKENS = 16_384
PART_TOKENS = 2048
# The vocabulary of a model, and its hidden size.
HEADS = {"SmolLM2-135M": (49_152, 576), "Qwen2.5-1.5B": (151_936, 1536)}
# Updates that do not count. The first ones of a process wait for memory, until malloc
# has kept enough of it: with SmolLM2 in float32 they took 16, 12, 11 and 11 s, then 9.
SETTLING = 4
# About so many micro-batches has an update whose pass for e_B is measured.
MICRO_BATCHES = 4
# Forward passes of a minibatch, by length, that are compared with a single one.
FORWARD_PASSES = (2, 4)
# Where sharing a prompt stops to pay: sequences of so many tokens, prompt and group
# together, this many tokens in all.
SHARED_LENGTHS = (256, 512, 1024, 2048)
SHARED_TOKENS_IN_ALL = 2048
SHARED_PROMPT = 32
SHARED_GROUP = 8
LISTED = 20  # K
# So many operators of a profile are kept, those that take most.
OPERATORS = 15
# torch's names of what multiplies matrices, but for attention.
PRODUCT_OPERATORS = ("aten::mm", "aten::addmm", "aten::bmm")


def seconds_of(act: Callable[[], Any]) -> float:
    start = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_turn(turns: int, **acts: Callable[[], Any]) -> dict[str, list[float]]:
    """Seconds of each act in so many turns, after one that does not count.

    Each turn begins with another act.
    """
    names = list(acts)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            took = seconds_of(acts[name])
            if turn > 0:
                seconds[name].append(took)
    return seconds


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": statistics.median(values),
        "least": min(values),
        "most": max(values),
    }


def ratios(numerators: list[float], denominators: list[float]) -> dict[str, float]:
    """The spread of the ratio over the turns."""
    pairs = zip(numerators, denominators, strict=True)
    return spread([numerator / denominator for numerator, denominator in pairs])


class Products:
    """Products of large square matrices in one dtype: as fast as the machine gets."""

    def __init__(self, dtype: str, device: str) -> None:
        rows = MATRIX[device]
        dtype_of_torch = getattr(torch, dtype)
        self.matrix = torch.randn(rows, rows, dtype=dtype_of_torch, device=device)
        self.operations = PRODUCTS * 2 * rows**3

    def __call__(self) -> None:
        for _ in range(PRODUCTS):
            self.matrix @ self.matrix


def measure_machine(device: str) -> dict[str, Any]:
    """What the machine does at most: products and bytes of memory, a second."""
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    for dtype in ("float32", "bfloat16"):
        products = Products(dtype, device)
        seconds = in_turn(TURNS, products=products)["products"]
        rates = [products.operations / s / 1e9 for s in seconds]
        found[f"GFLOP/s, {dtype}"] = spread(rates)
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = in_turn(TURNS, copy=lambda: target.copy_(source))["copy"]
    # A copy reads and writes.
    found["memory, GB/s"] = spread([2 * COPIED / s / 1e9 for s in seconds])
    return found


def sample_directly(llm: Any, cfg: Config, prompts: list, **more: Any) -> list:
    """vLLM's RequestOutputs for these prompts, with the noise of seed 0 for each."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        n=cfg.group_size,
        seed=0,
        max_tokens=cfg.max_response_tokens,
        detokenize=False,
        **more,
    )
    llm.reset_prefix_cache()
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(asked, sampling, use_tqdm=False)


def measure_rollout(engine: Engine, cfg: Config, prompts: list) -> dict[str, Any]:
    """Engine.sample beside its vLLM when that is driven directly, with the same noise.

    So it tells what Engine adds to vLLM or saves, and not what its settings of vLLM
    cost: both have those. "as asked" has the same log-probabilities, and leaves out
    what Engine does with them. "bare" asks for none. The noise is that of seed 0 for
    each prompt, so all three sample the same responses. vLLM compiles the count of
    token ranks on a CPU, and Engine has it computed without (support/vllm_on_cpu.py):
    the compiling itself falls into the turn that does not count. In bfloat16 Engine has
    the head cast to float32 once there, and vLLM does so at every decoding step.
    """

    def ours() -> Rollouts:
        return engine.sample(
            prompts,
            cfg.group_size,
            [0] * len(prompts),
            max_tokens=cfg.max_response_tokens,
        )

    direct = partial(sample_directly, engine.llm, cfg, prompts)
    as_asked = partial(direct, logprobs=engine.top_logprobs, flat_logprobs=True)
    tokens = int(ours().mask.sum())
    seconds = in_turn(ROLLOUT_TURNS, ours=ours, as_asked=as_asked, bare=direct)
    return {
        "tokens": tokens,
        "tokens a second": spread([tokens / s for s in seconds["ours"]]),
        "speed beside vLLM as asked": ratios(seconds["as_asked"], seconds["ours"]),
        "speed beside vLLM bare": ratios(seconds["bare"], seconds["ours"]),
    }


def measure_update(
    policy: Policy, rollouts: Rollouts, cfg: Config, device: str
) -> dict[str, Any]:
    """The optimizer steps of a pass, beside the machine's products in its dtype.

    A token that the model reads counts 6 operations a parameter. Neither padding nor
    what is computed twice counts, and a prompt that a group shares counts once. The
    head counts for the tokens of prompts too, where it is not applied, and in "share of
    the ceiling, head of responses" it does not. Tokens a second are of prompts and
    responses, with the prompt of each.
    """
    update = update_of(policy, rollouts, cfg)
    for _ in range(SETTLING):
        update()
    products = Products(cfg.dtype, device)
    seconds = in_turn(TURNS, update=update, products=products)
    tokens = int((rollouts.prompt_length + rollouts.mask.sum(dim=1)).sum())
    read = tokens_read(policy, rollouts)
    micro_batches = []
    for rows in rows_of_minibatches(cfg, step=1, pass_number=1):
        micro_batches += rows_of_micro_batches(
            rollouts, rows, cfg.micro_batch_tokens, policy.sharing
        )
    parameters = sum(weight.numel() for weight in policy.parameters())
    # How long the operations of the update take where they are large products.
    scale = 6 * parameters * read / products.operations
    at_best = [scale * s for s in seconds["products"]]
    head = policy.model.get_output_embeddings().weight.numel()
    in_prompts = head * (read - int(rollouts.mask.sum())) / (parameters * read)
    without = [(1 - in_prompts) * s for s in at_best]
    return {
        "tokens": tokens,
        "tokens read": read,
        "seconds": spread(seconds["update"]),
        "GFLOP/s": spread([6 * parameters * read / s / 1e9 for s in seconds["update"]]),
        "GFLOP/s of the products": spread(
            [products.operations / s / 1e9 for s in seconds["products"]]
        ),
        "tokens a second": spread([tokens / s for s in seconds["update"]]),
        "tokens read a second": spread([read / s for s in seconds["update"]]),
        "share of the ceiling": ratios(at_best, seconds["update"]),
        "share of the ceiling, head of responses": ratios(without, seconds["update"]),
        "share of padding": padding(policy, rollouts, micro_batches),
        "responses that share a sequence": policy.sharing,
    }


def update_of(policy: Policy, rollouts: Rollouts, cfg: Config) -> Callable[[], None]:
    """The optimizer steps of a pass over the rollouts, to be done again and again."""
    optimizer, _ = build_optimizer(policy, cfg)

    def update() -> None:
        for rows in rows_of_minibatches(cfg, step=1, pass_number=1):
            accumulate_gradient(policy, rollouts, rows, OBJECTIVES["p3o"], cfg, step=1)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()

    return update


def gradient_of(policy: Policy, rollouts: Rollouts, cfg: Config) -> Callable[[], None]:
    """The gradient of all responses as one minibatch, to be done again and again.

    Neither clipping nor an optimizer step is part of it.
    """
    rows = list(range(len(rollouts.text)))

    def gradient() -> None:
        accumulate_gradient(policy, rollouts, rows, OBJECTIVES["p3o"], cfg, step=1)
        policy.zero_grad()

    return gradient


def tokens_read(policy: Policy, rollouts: Rollouts) -> int:
    """Tokens that the model reads: the responses, and the prompt of each sequence."""
    sequences = policy.sequences(rollouts)
    prompts = dict(
        zip(
            sequences.of_response.tolist(),
            rollouts.prompt_length.tolist(),
            strict=True,
        )
    )
    return int(rollouts.mask.sum()) + sum(prompts.values())


def measure_sharing(policy: Policy, rollouts: Rollouts, cfg: Config) -> dict[str, Any]:
    """The gradient where a group shares its prompt, beside that where none does.

    All of it is one micro-batch, so that neither has a pass for e_B.
    """
    whole = cfg.model_copy(update={"micro_batch_tokens": 2**30})
    gradient = gradient_of(policy, rollouts, whole)
    sharing_in_a_run = policy.sharing
    tokens = {}
    for policy.sharing in 1, cfg.group_size:
        tokens[policy.sharing] = tokens_read(policy, rollouts)
    policy.sharing = sharing_in_a_run
    return {
        "share of the tokens read": tokens[cfg.group_size] / tokens[1],
        "shared / alone": time_sharing(policy, cfg.group_size, gradient),
    }


def time_sharing(
    policy: Policy, sharing: int, gradient: Callable[[], None]
) -> dict[str, float]:
    """The time of a gradient if so many responses share a prompt, beside that if none
    do.
    """
    sharing_in_a_run = policy.sharing

    def gradient_with(count: int) -> None:
        policy.sharing = count
        gradient()

    seconds = in_turn(
        TURNS, alone=partial(gradient_with, 1), shared=partial(gradient_with, sharing)
    )
    policy.sharing = sharing_in_a_run
    return ratios(seconds["shared"], seconds["alone"])


def groups_of_length(length: int, vocabulary: int) -> Rollouts:
    """Made-up groups that have `length` tokens each, with their prompt once."""
    groups = SHARED_TOKENS_IN_ALL // length
    rows = groups * SHARED_GROUP
    response = (length - SHARED_PROMPT) // SHARED_GROUP
    prompts = torch.randint(vocabulary, (groups, SHARED_PROMPT))
    responses = torch.randint(vocabulary, (rows, response))
    prompts = prompts.repeat_interleave(SHARED_GROUP, dim=0)
    return Rollouts(
        tokens=torch.cat([prompts, responses], dim=1),
        prompt_length=torch.full((rows,), SHARED_PROMPT),
        mask=torch.ones(rows, response, dtype=torch.bool),
        logp_behavior=torch.zeros(rows, response),
        top_tokens=torch.zeros(rows, response, 0, dtype=torch.long),
        top_logp_behavior=torch.zeros(rows, response, 0),
        truncated=torch.zeros(rows, dtype=torch.bool),
        text=[""] * rows,
        weight_version="0",
    )


def measure_sharing_by_length(policy: Policy, device: str) -> dict[str, Any]:
    """log pi_theta and its gradient with shared prompts beside own ones, by length.

    Of made-up tokens, since no task here has groups of each of these lengths.
    """

    def gradient(rollouts: Rollouts) -> None:
        policy(rollouts)[0].sum().backward()
        policy.zero_grad()

    found = {}
    for length in SHARED_LENGTHS:
        rollouts = groups_of_length(length, policy.model.config.vocab_size)
        rollouts = rollouts.select(list(range(len(rollouts.text))), device)
        found[f"{length:,} tokens"] = time_sharing(
            policy, SHARED_GROUP, partial(gradient, rollouts)
        )
    return found


def sync_of(policy: Policy, engine: Engine) -> Callable[[], None]:
    """A sync of the policy's weights into the engine, to be done again and again."""

    def sync() -> None:
        engine.load_weights(full_weights(policy), version="0")

    return sync


def measure_sync(policy: Policy, engine: Engine, dtype: str) -> dict[str, Any]:
    """The weights into the engine, in seconds, and bytes of the weights a second.

    They leave the policy in `dtype`. A tied head, which goes twice, counts once.
    """

    def gather() -> None:
        for _ in full_weights(policy):
            pass

    parameters = sum(weight.numel() for weight in policy.parameters())
    total = parameters * getattr(torch, dtype).itemsize
    seconds = in_turn(TURNS, sync=sync_of(policy, engine), gather=gather)
    return {
        "bytes": total,
        "seconds": spread(seconds["sync"]),
        "seconds to gather the weights": spread(seconds["gather"]),
        "GB/s": spread([total / s / 1e9 for s in seconds["sync"]]),
    }


def measure_compile(
    plain: Policy, compiled: Policy, rollouts: Rollouts, cfg: Config
) -> dict[str, Any]:
    """The gradient with each layer compiled by torch.compile, beside the one without.

    Two policies, since a compiled one cannot be had back.
    """
    # All models here have the same layers, which are compiled a few times at most.
    torch.compiler.reset()
    for layer in compiled.model.base_model.layers:
        layer.compile(dynamic=True)
    gradient_of_compiled = gradient_of(compiled, rollouts, cfg)
    first = seconds_of(gradient_of_compiled)
    seconds = in_turn(
        TURNS,
        plain=gradient_of(plain, rollouts, cfg),
        compiled=gradient_of_compiled,
    )
    return {
        "seconds of the first": first,
        "compiled / plain": ratios(seconds["compiled"], seconds["plain"]),
    }


def micro_batch_tokens_for(policy: Policy, rollouts: Rollouts, count: int) -> int:
    """With which all responses as one minibatch come to about so many micro-batches."""
    sequences, longest = policy.sequences(rollouts).tokens.shape
    return -(-sequences // count) * longest


def measure_forward_passes(
    policy: Policy, rollouts: Rollouts, device: str
) -> dict[str, Any]:
    """The gradient of log pi_theta in several forward passes, by length, beside one.

    All graphs are kept, so none is computed twice. Shorter responses are padded less,
    and the weights are read, and their gradient is added up, more often.
    """
    rows = list(range(len(rollouts.text)))
    micro_batches = {}
    for count in (1, *FORWARD_PASSES):
        tokens = micro_batch_tokens_for(policy, rollouts, count)
        micro_batches[count] = rows_of_micro_batches(
            rollouts, rows, tokens, policy.sharing
        )

    def gradient(count: int) -> None:
        total = torch.zeros((), device=device)
        for chosen in micro_batches[count]:
            total = total + policy(rollouts.select(chosen, device))[0].sum()
        total.backward()
        policy.zero_grad()

    acts = {str(count): partial(gradient, count) for count in micro_batches}
    seconds = in_turn(TURNS, **acts)
    found = {}
    for count in FORWARD_PASSES:
        found[f"about {count} forward passes by length"] = {
            "forward passes": len(micro_batches[count]),
            "share of padding": padding(policy, rollouts, micro_batches[count]),
            "time beside one": ratios(seconds[str(count)], seconds["1"]),
        }
    return found


def padding(
    policy: Policy, rollouts: Rollouts, micro_batches: list[list[int]]
) -> float:
    """The share of the layers' places that hold no token, over all these rows."""
    places = 0
    for rows in micro_batches:
        places += policy.sequences(rollouts.select(rows)).tokens.numel()
    return 1 - tokens_read(policy, rollouts) / places


def measure_ess_pass(
    policy: Policy, rollouts: Rollouts, cfg: Config, device: str
) -> dict[str, Any]:
    """The pass for e_B where a minibatch has several micro-batches.

    As a share of the time of the gradient, the pass included. With a single micro-batch
    there is no such pass.
    """
    rows = list(range(len(rollouts.text)))
    tokens = micro_batch_tokens_for(policy, rollouts, MICRO_BATCHES)
    several = cfg.model_copy(update={"micro_batch_tokens": tokens})
    micro_batches = rows_of_micro_batches(rollouts, rows, tokens, policy.sharing)

    def pass_for_ess() -> None:
        with torch.no_grad():
            for chosen in micro_batches:
                policy(rollouts.select(chosen, device))

    seconds = in_turn(
        TURNS,
        gradient=gradient_of(policy, rollouts, several),
        pass_for_ess=pass_for_ess,
    )
    return {
        "micro-batches": len(micro_batches),
        "share of the update": ratios(seconds["pass_for_ess"], seconds["gradient"]),
    }


def profile(act: Callable[[], Any], device: str, vocabulary: int) -> dict[str, Any]:
    """Where the time of an act goes: torch's operators, by their own time.

    It is done once before. On a GPU it is the GPU's time. The head's products are those
    of a matrix with as many rows or columns as the vocabulary has tokens.
    """
    act()
    on_gpu = device == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities, record_shapes=True) as record:
        act()
    microseconds: dict[str, float] = defaultdict(float)
    calls: dict[str, int] = defaultdict(int)
    in_head = 0.0
    for event in record.key_averages(group_by_input_shape=True):
        # A kernel of the GPU has a row of its own, and is in that of its operator.
        if event.device_type != torch.autograd.DeviceType.CPU:
            continue
        of_gpu, of_cpu = event.self_device_time_total, event.self_cpu_time_total
        own = of_gpu if on_gpu else of_cpu
        microseconds[event.key] += own
        calls[event.key] += event.count
        is_of_head = any(vocabulary in shape for shape in event.input_shapes)
        if event.key in PRODUCT_OPERATORS and is_of_head:
            in_head += own
    total = sum(microseconds.values())
    in_products = sum(microseconds.get(name, 0.0) for name in PRODUCT_OPERATORS)
    longest = sorted(microseconds, key=microseconds.__getitem__, reverse=True)
    return {
        "share outside of products": 1 - in_products / total,
        "share in the head's products": in_head / total,
        "operators": [
            {
                "operator": name,
                "share": microseconds[name] / total,
                "calls": calls[name],
            }
            for name in longest[:OPERATORS]
        ],
    }


def head_gradient(
    head: torch.Tensor, hidden: torch.Tensor, tokens: torch.Tensor, chunk: int
) -> None:
    """log pi_theta of tokens, [M, 1 + K], and its gradients, as in Policy.forward.

    `chunk` of the M hidden states, [M, D], at a time; the head is [V, D].
    """
    float_head = head.float()
    logps = []
    for hidden_chunk, token_chunk in zip(
        hidden.split(chunk), tokens.split(chunk), strict=True
    ):
        logp = torch.utils.checkpoint.checkpoint(
            chunk_log_probabilities,
            hidden_chunk,
            float_head,
            1.0,
            token_chunk,
            use_reentrant=False,
        )
        logps.append(logp)
    torch.cat(logps).sum().backward()


def measure_head(vocabulary: int, hidden_size: int, dtype: str) -> dict[str, Any]:
    """Memory and time of log pi_theta with its gradients: in chunks, and otherwise.

    Weights and hidden states are in `dtype`, logits in float32. The gradient of the
    head counts, and so does its copy in float32. All logits at once are too many for
    the memory of most machines: they are measured for PART_TOKENS and for twice as
    many, and HEAD_TOKENS lie on the line through the two. On the CPU always: the bytes
    are those of any device.
    """
    options = {"dtype": getattr(torch, dtype), "requires_grad": True}
    head = torch.randn(vocabulary, hidden_size, **options)
    hidden = torch.randn(HEAD_TOKENS, hidden_size, **options)
    tokens = torch.randint(vocabulary, (HEAD_TOKENS, 1 + LISTED))

    def in_chunks(count: int, columns: int) -> None:
        head_gradient(head, hidden[:count], tokens[:count, :columns], CHUNK)
        head.grad = hidden.grad = None

    def at_once(count: int) -> None:
        logp = chunk_log_probabilities(
            hidden[:count], head.float(), 1.0, tokens[:count]
        )
        logp.sum().backward()
        head.grad = hidden.grad = None

    def by_torch() -> None:
        negative_logp = linear_cross_entropy(
            hidden[:PART_TOKENS],
            head,
            tokens[:PART_TOKENS, 0],
            reduction="none",
            options=LinearCrossEntropyOptions(batch_chunk_size=CHUNK),
        )
        negative_logp.sum().backward()
        head.grad = hidden.grad = None

    chunked = peak_bytes(partial(in_chunks, HEAD_TOKENS, 1 + LISTED))
    of_part = peak_bytes(partial(at_once, PART_TOKENS))
    of_two_parts = peak_bytes(partial(at_once, 2 * PART_TOKENS))
    parts = HEAD_TOKENS / PART_TOKENS
    whole = of_part + (parts - 1) * (of_two_parts - of_part)
    found: dict[str, Any] = {
        "vocabulary": vocabulary,
        "hidden size": hidden_size,
        "tokens": HEAD_TOKENS,
        "chunk": CHUNK,
        "bytes in chunks": chunked,
        "bytes at once": whole,
        "ratio": chunked / whole,
    }
    # torch's function computes in the dtype of the head, as ours do in float32 alone.
    # It knows the sampled token alone, so ours have that one token here too.
    if dtype == "float32":
        ours = partial(in_chunks, PART_TOKENS, 1)
        seconds = in_turn(TURNS, ours=ours, torchs=by_torch)
        found["linear_cross_entropy"] = {
            "tokens": PART_TOKENS,
            "bytes beside chunks": peak_bytes(by_torch) / peak_bytes(ours),
            "time beside chunks": ratios(seconds["torchs"], seconds["ours"]),
        }
    return found


class FirstStep(NamedTuple):
    """A policy, its engine, and what a first step has sampled, with rewards."""

    policy: Policy
    engine: Engine
    rollouts: Rollouts
    prompts: list[list[int]]


def build_engine(cfg: Config, max_model_len: int, top_logprobs: int) -> Engine:
    """An engine as a run of cfg has it, with so many log-probabilities a token."""
    return Engine(
        cfg.model,
        max_model_len,
        dtype=cfg.rollout_dtype,
        top_logprobs=top_logprobs,
        kv_cache_gb=cfg.kv_cache_gb,
    )


def first_step(cfg: Config, mesh: DeviceMesh, engines: list[Engine]) -> FirstStep:
    """What is measured of a model. Its engine is put into `engines`: one that is freed
    takes the process group along.
    """
    data = load_data(cfg)
    sharing = sharing_of(cfg, data.longest)
    policy = build_policy(cfg.model, mesh, dtype=cfg.dtype, sharing=sharing)
    engine = build_engine(cfg, data.longest, cfg.top_logprobs)
    engines.append(engine)
    engine.load_weights(full_weights(policy), version="0")
    rollouts = sample_step(engine, cfg, 1, data.train.prompts)
    add_reward(rollouts, cfg, 1, data.train.problems)
    prompts = data.train.prompts[: cfg.prompts_per_step]
    return FirstStep(policy, engine, rollouts, prompts)


def measure_speed(
    cfg: Config, mesh: DeviceMesh, engines: list[Engine]
) -> dict[str, Any]:
    """All of the above for one model, in the dtype of cfg."""
    device = mesh.device_type
    policy, engine, rollouts, prompts = first_step(cfg, mesh, engines)
    compiled = build_policy(cfg.model, mesh, dtype=cfg.dtype, sharing=policy.sharing)
    vocabulary = policy.model.config.vocab_size
    measured = {
        "rollout": measure_rollout(engine, cfg, prompts),
        "update": measure_update(policy, rollouts, cfg, device),
        "sync": measure_sync(policy, engine, cfg.dtype),
        "torch.compile": measure_compile(policy, compiled, rollouts, cfg),
        "pass for e_B": measure_ess_pass(policy, rollouts, cfg, device),
        "forward passes": measure_forward_passes(policy, rollouts, device),
        "profile": profile(update_of(policy, rollouts, cfg), device, vocabulary),
        "profile of the sync": profile(sync_of(policy, engine), device, vocabulary),
    }
    if can_share_prompts(policy.model):
        measured["shared prompts"] = measure_sharing(policy, rollouts, cfg)
        measured["shared prompts by length"] = measure_sharing_by_length(policy, device)
    return measured
