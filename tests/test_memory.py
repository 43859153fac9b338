"""memory.py against what policies and engines really allocate on CPU; the recipes."""

import itertools
import tracemalloc
from pathlib import Path

import pytest
import torch
import transformers

from experiments import memory
from experiments.bench import kl_on_paper
from experiments.memory import (
    GB,
    Memory,
    MemoryConfig,
    kv_bytes_per_token,
    peak_bytes,
    report,
)
from loss import KL_ESTIMATORS, OBJECTIVES, kl_divergence, p3o_loss
from policy import build_policy
from rollout import Rollouts
from support.checks import check_run
from support.flags import Refused, find_objective, parse_flags
from train import Config

# The public dimensions of the hub's models.
CONFIGS = Path(__file__).parent / "data/configs"
RECIPES = sorted(Path("recipes").glob("*gpu*.yaml"))
RANKS = {"gsm8k-1gpu": 1}  # of a recipe, if not 8
# What an "80 GB" card has, in GB of 2^30 bytes.
CARD = 79


def memory_of(cfg, ranks=1, device="cpu"):
    config = transformers.AutoConfig.from_pretrained(cfg.model)
    return Memory(cfg, config, ranks, device)


def part(parts, beginning):
    """Bytes of the one part of a phase whose name begins like this."""
    (found,) = (size for what, size in parts.items() if what.startswith(beginning))
    return found


def local_bytes(tensors):
    return sum(tensor.to_local().nbytes for tensor in tensors)


def random_batch(rows, length, vocabulary, prompt=16, listed=0):
    """Rollouts of `rows` responses that all have `length` tokens with their prompts."""
    shape = (rows, length - prompt)
    return Rollouts(
        tokens=torch.randint(vocabulary, (rows, length)),
        prompt_length=torch.full((rows,), prompt),
        mask=torch.ones(shape, dtype=torch.bool),
        logp_behavior=torch.zeros(shape),
        top_tokens=torch.randint(vocabulary, (*shape, listed)),
        top_logp_behavior=torch.full((*shape, listed), -4.0),
        truncated=torch.zeros(rows, dtype=torch.bool),
        text=[""] * rows,
        weight_version="0",
        advantage=torch.ones(rows),
    )


def gradient_peak(cfg, mesh, rows, length=64):
    """Peak of the passes on rows x length tokens, with the gradients they leave."""
    policy = build_policy(
        cfg.model,
        mesh,
        dtype=cfg.dtype,
        gradient_checkpointing=cfg.gradient_checkpointing,
    )
    batch = random_batch(
        rows, length, policy.model.config.vocab_size, listed=cfg.top_logprobs
    )

    def two_micro_batches():
        # The second one finds the gradient of the first.
        for _ in range(2):
            logp, top_logp = policy(batch)
            kl = None
            if cfg.top_logprobs > 0:
                kl = kl_divergence(top_logp, batch.top_logp_behavior)
            loss, _ = p3o_loss(
                logp, logp.detach(), batch.advantage, batch.mask, kl=kl, ess=0.5
            )
            loss.backward()

    return peak_bytes(two_micro_batches)


def counted_peak(cfg, rows, length=64):
    """The same by the arithmetic, whose micro-batch has as many tokens as it may."""
    cfg = cfg.model_copy(update={"micro_batch_tokens": rows * length})
    parts = memory_of(cfg).phases()["update"]
    names = ("gradient", "embedding", "activations", "at work")
    return sum(part(parts, name) for name in names)


def test_weights_gradients_and_moments_are_counted_to_the_byte(group):
    policy = build_policy("tiny", group)
    phases = memory_of(Config()).phases()
    update = phases["update"]
    assert local_bytes(policy.parameters()) == part(update, "weights")
    optimizer = torch.optim.AdamW(policy.parameters())
    logp, _ = policy(random_batch(2, 32, 20))
    logp.sum().backward()
    gradients = [weight.grad for weight in policy.parameters()]
    assert local_bytes(gradients) == part(update, "gradient")
    optimizer.step()
    moments = []
    for state in optimizer.state.values():
        moments += [state["exp_avg"], state["exp_avg_sq"]]
    assert local_bytes(moments) == part(update, "AdamW")
    assert part(phases["load"], "all weights") == 4 * policy.model.num_parameters()


def test_shards_are_padded_to_equal_length():
    weights = {}
    for ranks in (1, 3, 1000):
        weights[ranks] = part(memory_of(Config(), ranks).trainer(), "weights")
    assert weights[1] / 3 < weights[3] < 1.05 * weights[1] / 3
    # With more ranks than rows, each has a row of every weight: of 3 x 7 matrices, of
    # which the widest has 384 columns and the others 128; of the embedding; and, of 7
    # vectors, an element.
    matrices = 3 * (6 * 128 + 384) + 128
    vectors = 7
    assert weights[1000] == 4 * (matrices + vectors)


@pytest.mark.parametrize(
    "dtype, checkpointing", [("float32", False), ("bfloat16", True)]
)
def test_activations_by_token(group, dtype, checkpointing):
    """The growth from 16 to 48 rows, so without weights: 5% low to 20% high."""
    cfg = Config(
        dtype=dtype,
        gradient_checkpointing=checkpointing,
        max_response_tokens=48,
        top_logprobs=0,
    )
    real = gradient_peak(cfg, group, 48) - gradient_peak(cfg, group, 16)
    counted = counted_peak(cfg, 48) - counted_peak(cfg, 16)
    assert 0.95 * real < counted < 1.2 * real


def save_wide(folder, width):
    """A model of one layer, with a vocabulary of 20,000."""
    config = transformers.AutoConfig.from_pretrained(
        "tiny", vocab_size=20_000, hidden_size=width
    )
    config.num_attention_heads = 2
    config.num_key_value_heads = 2
    config.num_hidden_layers = 1
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "width, rows, high",
    [
        (64, 32, 1.15),  # mostly logits
        # Mostly the head's weights: its float32 copies and its gathered gradient do not
        # all meet.
        (512, 2, 1.45),
    ],
)
def test_logits_and_head(group, tmp_path, width, rows, high):
    cfg = Config(
        model=save_wide(tmp_path, width),
        dtype="bfloat16",
        max_response_tokens=48,
        top_logprobs=0,
    )
    real = gradient_peak(cfg, group, rows)
    counted = counted_peak(cfg, rows)
    assert 0.95 * real < counted < high * real


def test_the_exact_kl_takes_as_much_as_is_counted_for_a_listed_token():
    """Forward and backward of kl_divergence over 64 tokens, at 4,096 positions."""
    shape = (4096, 64)
    logp = torch.full(shape, -5.0, requires_grad=True)
    logp_behavior = torch.full(shape, -5.0)

    def forward_and_backward():
        kl_divergence(logp, logp_behavior).sum().backward()

    real = peak_bytes(forward_and_backward)
    # The indices, int64, are there twice: in the batch and in front of the head.
    counted = (memory.TOP_WORK_BYTES - 2 * 8) * logp.numel()
    assert 0.95 * real < counted < 1.2 * real


def test_the_lists_of_vllm_take_as_much_as_is_counted_for_a_listed_token():
    from vllm.logprobs import FlatLogprobs

    listed = 21
    positions = 1000
    # Above 256, below which Python has each integer once.
    tokens = torch.arange(1000, 1000 + listed)
    logps = torch.linspace(-9, 0, listed)
    tracemalloc.start()
    lists = FlatLogprobs()
    for _ in range(positions):
        lists.append_fast(
            tokens.tolist(),
            logps.tolist(),
            itertools.chain([1], range(1, listed)),
            itertools.repeat(None),
        )
    real = tracemalloc.get_traced_memory()[0] / (positions * listed)
    tracemalloc.stop()
    assert len(lists.token_ids) == positions * listed
    assert 0.9 * real < memory.LISTED_BYTES < 1.1 * real


def test_rollouts_take_12_bytes_for_a_listed_token():
    without, with_20 = (random_batch(4, 40, 100, listed=listed) for listed in (0, 20))

    def nbytes(batch):
        return sum(v.nbytes for v in vars(batch).values() if torch.is_tensor(v))

    positions = 4 * 24
    assert nbytes(with_20) - nbytes(without) == positions * 20 * memory.TOP_BYTES


def test_the_benchmark_counts_a_long_response_of_a_large_vocabulary_on_paper():
    """4,096 tokens x 20 or 151,936 listed ones x 12 bytes: 1 MB or 7.5 GB."""
    found = kl_on_paper()
    assert found["K = 20"]["bytes in the rollouts"] == 983_040
    assert found["K = vocabulary"]["bytes in the rollouts"] == 7_467_958_272


def test_kv_cache_of_the_engine(build_engine):
    """vLLM makes as many blocks of tokens as fit, or one less."""
    engine = build_engine(kv_cache_gb=0.125)
    cache = engine.llm.llm_engine.vllm_config.cache_config
    per_token = kv_bytes_per_token(transformers.AutoConfig.from_pretrained("tiny"), 4)
    # k and v, 3 layers, 4 heads of 32 elements, float32
    assert per_token == 2 * 3 * 4 * 32 * 4
    tokens = cache.num_gpu_blocks * cache.block_size
    assert 0 <= 0.125 * GB - tokens * per_token < cache.block_size * per_token


def recipe(path, ranks, *flags):
    """A recipe with the model's config.json from tests/data."""
    given = ["--config", str(path), "--ranks", str(ranks), "--device_gb", str(CARD)]
    cfg = parse_flags(MemoryConfig, [*given, *flags])
    cfg.model = str(CONFIGS / cfg.model.partition("/")[2])
    return cfg


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path, monkeypatch):
    ranks = RANKS.get(path.stem, 8)
    cfg = recipe(path, ranks)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    objective = find_objective(OBJECTIVES, cfg.objective, cfg.objective_args)
    check_run(cfg, objective, KL_ESTIMATORS)
    assert cfg.prompts_per_step % (ranks * cfg.minibatches) == 0
    assert cfg.save_every < cfg.steps
    assert cfg.warmup_steps < cfg.steps
    text = path.read_text()
    assert "nverified on a GPU" in text
    # The table at the end of its first comment is what memory.py prints.
    table = report(cfg).replace(f"{CONFIGS}/", "Qwen/").splitlines()
    first_comment, _ = text.split("\n\n", maxsplit=1)
    lines = [line.removeprefix("# ") for line in first_comment.splitlines()]
    assert lines[-len(table) :] == table
    # It fits with a margin beside the reserve.
    counted = memory_of(cfg, ranks, "cuda")
    largest = max(sum(parts.values()) for parts in counted.phases().values())
    assert largest < 0.96 * (CARD * GB - counted.reserve())


def test_sixteen_bytes_a_parameter_over_the_ranks():
    """4.02e9 parameters x 16 bytes / 8 ranks = 8.0e9 bytes."""
    cfg = recipe("recipes/deepscaler-8gpu.yaml", 8)
    phases = memory_of(cfg, 8, "cuda").phases()
    update = phases["update"]
    state = sum(part(update, name) for name in ("weights", "gradient", "AdamW"))
    assert state == pytest.approx(2 * 4_022_468_096, rel=1e-3)
    weights = part(phases["load"], "weights")
    assert weights == pytest.approx(4 * 4_022_468_096 / 8, rel=1e-3)
    # 8 x 4 x 4.02e9 / 2^30
    assert "to load: R x 4 P = 119.9" in report(cfg)


def test_a_token_of_qwen3_4b_takes_147456_bytes_of_cache():
    config = transformers.AutoConfig.from_pretrained(CONFIGS / "Qwen3-4B-Thinking-2507")
    # k and v, 36 layers, 8 heads of 128 elements, bfloat16
    assert kv_bytes_per_token(config, 2) == 2 * 36 * 8 * 128 * 2 == 147_456


def test_fp8_halves_the_weights_of_an_engine_but_not_its_embedding():
    bf16 = recipe("recipes/deepscaler-8gpu.yaml", 8)
    fp8 = recipe("recipes/deepscaler-8gpu-fp8.yaml", 8)
    whole, rounded = (
        part(memory_of(cfg, 8, "cuda").engine_weights(), "engine's weights")
        for cfg in (bf16, fp8)
    )
    # 1 byte for 3.63e9 weights, 2 for 0.39e9; before, 2 for 4.02e9.
    assert rounded / whole == pytest.approx((3.633 + 2 * 0.389) / 8.045, rel=1e-3)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_with_fp8_rollouts_a_second_engine_is_there_in_every_phase(device):
    """Its weights are not quantized, and its cache is as large as the first one's."""
    cfg = Config(rollout_quantization="fp8_per_channel", kv_cache_gb=1)
    for parts in memory_of(cfg, device=device).phases().values():
        assert part(parts, "second engine") == 2 * 642_432 + GB
    plain = Config(kv_cache_gb=1)
    for parts in memory_of(plain, device=device).phases().values():
        assert not [what for what in parts if what.startswith("second")]


def test_listed_tokens_are_counted_in_the_update_and_in_main_memory():
    """20 tokens at each of 8 x 4 x 64 = 2,048 places of B, on one rank."""
    sizes = {
        "prompts_per_step": 8,
        "group_size": 4,
        "max_response_tokens": 64,
        "minibatches": 1,
    }
    counted = memory_of(Config(**sizes, lag=1))
    update = counted.update()
    # 12 bytes in the batch: a token and its log pi_b.
    assert part(update, "K likeliest") == 2048 * 20 * 12
    # vLLM lists the sampled token too. With a lag of 1 two batches are there.
    main_memory = 2048 * (21 * memory.LISTED_BYTES + 2 * 20 * 12)
    assert counted.rollouts_in_main_memory() == main_memory
    without = memory_of(Config(**sizes, top_logprobs=0)).update()
    assert not [what for what in without if what.startswith("K likeliest")]


def test_tiny_lists_its_vocabulary_at_most():
    """It has 20 tokens."""
    assert memory_of(Config(top_logprobs=1000)).top == 20


def test_ranks_that_share_an_engine_hold_a_part_of_its_weights_and_sequences():
    """Of Qwen3-4B, 8.04e9 bytes in bf16, a quarter; and 4 x 54 sequences in 38 GB."""
    cfg = recipe("recipes/deepscaler-8gpu.yaml", 8)
    assert "KV cache: 54 sequences" in report(cfg)
    cfg.rollout_tp = 4
    weights = memory_of(cfg, 8, "cuda").engine_weights()
    assert part(weights, "engine's weights") == 2 * 4_022_468_096 // 4
    assert "KV cache: 216 sequences" in report(cfg)


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path):
    path = "recipes/deepscaler-8gpu.yaml"
    small = recipe(path, 1, "--device_gb=24")
    sentence = r"does not fit: in its .* phase .*: use more ranks"
    with pytest.raises(Refused, match=sentence) as refusal:
        report(small)
    assert "\n" not in str(refusal.value)
    short = recipe(path, 8, "--kv_cache_gb=0.5")
    with pytest.raises(Refused, match="too little for one sequence of 5120 .* 0.70"):
        report(short)
    with pytest.raises(Refused, match="cannot count the memory of "):
        report(MemoryConfig(model=str(tmp_path)))


def test_an_engine_on_cpu_stays_during_the_update():
    cpu = memory_of(Config(), device="cpu").phases()["update"]
    cuda = memory_of(Config(), device="cuda").phases()["update"]
    assert part(cpu, "engine's KV cache") == GB // 4
    assert not [what for what in cuda if what.startswith("engine")]


def test_without_device_gb_it_counts_for_this_machine():
    assert "P = 642,432 parameters" in report(MemoryConfig())
    with pytest.raises(Refused, match="does not fit"):
        report(MemoryConfig(kv_cache_gb=1e6))
