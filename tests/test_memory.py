"""memory.py against what is really allocated, by policies and engines on CPU; and the recipes."""

import gc
import itertools
from pathlib import Path

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from config import Config, Refused, check_config, parse_config
from memory import GB, dry_run, kv_bytes_per_token, phases
from policy import build_policy
from rollout import Rollouts

CONFIGS = Path(__file__).parent / "data/configs"  # the public dimensions of the hub's models
RECIPES = sorted(Path("recipes").glob("*gpu*.yaml"))
RANKS = {"gsm8k-1gpu": 1}


def local_bytes(tensors):
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


def part(table, phase, name):
    """Bytes of the one component of a phase whose name starts like this."""
    (value,) = (n for what, n in table[phase].items() if what.startswith(name))
    return value


def random_batch(rows, length, vocabulary, prompt=16):
    shape = rows, length - prompt
    return Rollouts(
        tokens=torch.randint(vocabulary, (rows, length)),
        prompt_length=torch.full((rows,), prompt),
        mask=torch.ones(shape, dtype=torch.bool),
        logp_behavior=torch.zeros(shape),
        truncated=torch.zeros(rows, dtype=torch.bool),
        text=[""] * rows,
        weight_version="0",
    )


def peak_bytes(run):
    """The most that torch allocated at once on CPU for `run`, above what there was before."""
    gc.disable()  # a policy of before, collected as garbage in the middle, would be subtracted
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            run()
    finally:
        gc.enable()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in events))


def gradient_peak(cfg, group, rows, length=64):
    """Peak of forward and backward passes on rows x length tokens, gradients included."""
    policy = build_policy(cfg, group)
    batch = random_batch(rows, length, policy.model.config.vocab_size)
    # Twice, as with two micro-batches: the second finds the gradient of the first.
    return peak_bytes(lambda: [policy(batch).sum().backward() for _ in range(2)])


def counted_peak(cfg, rows, length=64):
    """The same by the arithmetic, which counts as many tokens as a micro-batch may have."""
    cfg.micro_batch_tokens = rows * length
    config = transformers.AutoConfig.from_pretrained(cfg.model)
    table = phases(cfg, config, 1, "cpu")
    return sum(
        part(table, "update", name) for name in ("gradient", "embedding", "activations", "at work")
    )


def test_weights_gradients_and_moments_are_counted_to_the_byte(group):
    cfg = Config()
    policy = build_policy(cfg, group)
    table = phases(cfg, policy.model.config, 1, "cpu")
    assert local_bytes(policy.parameters()) == part(table, "update", "weights")
    optimizer = torch.optim.AdamW(policy.parameters())
    policy(random_batch(2, 32, 20)).sum().backward()
    assert local_bytes(p.grad for p in policy.parameters()) == part(table, "update", "gradient")
    optimizer.step()
    state = [s for p in optimizer.state.values() for name, s in p.items() if name != "step"]
    assert local_bytes(state) == part(table, "update", "AdamW")
    assert part(table, "load", "all weights") == 4 * policy.model.num_parameters()


def test_shards_are_padded_to_equal_length():
    config = transformers.AutoConfig.from_pretrained("tiny")
    one, three, many = (
        part(phases(Config(), config, n, "cpu"), "rollout", "weights") for n in (1, 3, 1000)
    )
    assert one / 3 < three < 1.05 * one / 3
    # With more ranks than rows, each has a row of every parameter: of 3 x 7 matrices, 384 wide at
    # most, of 7 vectors, and of the embedding.
    matrices, vectors = 3 * (6 * 128 + 384) + 128, 7
    assert many == 4 * (matrices + vectors)


@pytest.mark.parametrize("dtype, checkpointing", [("float32", False), ("bfloat16", True)])
def test_activations_by_token(group, dtype, checkpointing):
    """The growth from 16 to 48 rows, so without weights: counted 5 % low to 20 % high."""
    cfg = Config(dtype=dtype, gradient_checkpointing=checkpointing, max_response_tokens=48)
    real = gradient_peak(cfg, group, 48) - gradient_peak(cfg, group, 16)
    counted = counted_peak(cfg, 48) - counted_peak(cfg, 16)
    assert 0.95 * real < counted < 1.2 * real


@pytest.mark.parametrize("width, rows, high", [(64, 32, 1.15), (512, 2, 1.45)])
def test_logits_and_head(group, tmp_path, width, rows, high):
    """A vocabulary of 20,000: mostly logits, counted up to 15 % high; mostly the head's weights,
    up to 45 % high, since its float32 copies and its gathered gradient do not all meet."""
    config = transformers.AutoConfig.from_pretrained("tiny", vocab_size=20_000, hidden_size=width)
    config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers = 2, 2, 1
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    cfg = Config(model=str(tmp_path), dtype="bfloat16", max_response_tokens=48)
    real, counted = gradient_peak(cfg, group, rows), counted_peak(cfg, rows)
    assert 0.95 * real < counted < high * real


def test_kv_cache_of_the_engine(build_engine):
    """vLLM makes as many blocks of tokens as fit, less one at most; 2 heads for k and v of 4."""
    engine = build_engine(kv_cache_gb=0.125)
    cache = engine.llm.llm_engine.vllm_config.cache_config
    per_token = kv_bytes_per_token(transformers.AutoConfig.from_pretrained("tiny"), 4)
    assert per_token == 2 * 3 * 4 * 32 * 4  # k and v, layers, heads, head size, float32
    tokens = cache.num_gpu_blocks * cache.block_size
    assert 0 <= 0.125 * GB - tokens * per_token < cache.block_size * per_token


def recipe(path):
    return parse_config(["--config", str(path)])


def offline(cfg):
    """The recipe with the model's config.json from tests/data."""
    cfg.model = str(CONFIGS / cfg.model.partition("/")[2])
    return cfg


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe(path, monkeypatch):
    cfg, ranks = recipe(path), RANKS.get(path.stem, 8)
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    check_config(cfg)
    assert cfg.prompts_per_step % (ranks * cfg.minibatches) == 0
    assert cfg.save_every < cfg.steps and cfg.warmup_steps < cfg.steps
    text = path.read_text()
    assert "nverified on a GPU" in text
    # The table in its comments is what a dry run prints of the same dimensions.
    table = dry_run(offline(cfg), ranks).replace(f"{CONFIGS}/", "Qwen/").splitlines()
    comments = [line[2:] for line in text.splitlines() if line.startswith("#")]
    assert comments[-len(table) :] == table
    config = transformers.AutoConfig.from_pretrained(cfg.model)
    largest = max(sum(parts.values()) for parts in phases(cfg, config, ranks, "cuda").values())
    assert largest < 0.96 * (79 - 6) * GB  # with a margin beside the reserve


def test_sixteen_bytes_a_parameter_over_the_ranks():
    """4.02e9 parameters x 16 bytes / 8 ranks = 8.0e9, the KV cache of a token 147,456 bytes."""
    cfg = offline(recipe("recipes/deepscaler-8gpu.yaml"))
    config = transformers.AutoConfig.from_pretrained(cfg.model)
    table = phases(cfg, config, 8, "cuda")
    state = sum(part(table, "update", name) for name in ("weights", "gradient", "AdamW"))
    assert part(table, "load", "weights") == pytest.approx(4 * 4_022_468_096 / 8, rel=1e-3)
    assert "to load: R x 4 P = 119.9" in dry_run(cfg, 8)  # 8 x 4 x 4.02e9 / 2^30
    assert state == pytest.approx(2 * 4_022_468_096, rel=1e-3)
    assert kv_bytes_per_token(config, 2) == 147_456
    fp8 = offline(recipe("recipes/deepscaler-8gpu-fp8.yaml"))
    halved = part(phases(fp8, config, 8, "cuda"), "rollout", "engine's weights")
    assert 0.5 < halved / part(table, "rollout", "engine's weights") < 0.6  # not the embedding


def test_ranks_that_share_an_engine_hold_a_part_of_its_weights_and_of_each_sequence():
    """Of Qwen3-4B, 8.04e9 bytes in bf16; 54 sequences fit in 38 GB of cache, 4 x 54 and more if
    each rank has a quarter of every sequence's keys and values."""
    cfg = offline(recipe("recipes/deepscaler-8gpu.yaml"))
    config = transformers.AutoConfig.from_pretrained(cfg.model)
    cfg.rollout_tp = 4
    assert part(phases(cfg, config, 8, "cuda"), "rollout", "engine's weights") == 4_022_468_096 // 2
    assert "KV cache: 216 sequences" in dry_run(cfg, 8)


def test_what_does_not_fit_is_refused_in_a_sentence(tmp_path):
    cfg = offline(recipe("recipes/deepscaler-8gpu.yaml"))
    cfg.device_memory_gb = 24
    with pytest.raises(
        Refused, match=r"does not fit: in its .* phase .*: use more ranks"
    ) as refusal:
        dry_run(cfg, 1)
    assert "\n" not in str(refusal.value)
    cfg.kv_cache_gb = 0.5
    with pytest.raises(Refused, match="too little for one sequence of 5120 tokens: .* 0.70"):
        dry_run(cfg, 8)
    with pytest.raises(Refused, match="cannot count the memory of "):
        dry_run(Config(model=str(tmp_path)), 1)


def test_an_engine_on_cpu_stays():
    config = transformers.AutoConfig.from_pretrained("tiny")
    cpu, cuda = (phases(Config(), config, 1, device) for device in ("cpu", "cuda"))
    assert part(cpu, "update", "engine's KV cache") == GB // 4
    assert not [what for what in cuda["update"] if what.startswith("engine")]


def test_dry_run_of_train(monkeypatch, capsys):
    import train

    monkeypatch.setattr("sys.argv", ["train.py", "--dry_run", "true"])
    train.main()
    assert "P = 642,432 parameters" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["train.py", "--dry_run", "--kv_cache_gb", "1e6"])
    with pytest.raises(Refused, match="does not fit"):
        train.main()
    monkeypatch.setenv("RANK", "1")  # one rank speaks
    train.main()
    assert not capsys.readouterr().out
