"""The two sides of the ratio and of the KL, on a real vLLM engine.

What the engine samples from, and that the trainer scores the same tokens under the same
weights. Both compute in float32: they agree to 1e-4 nats, and the signals are of 0.1
nats.
"""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import vllm
from conftest import NONE_COMPLETE, add_noise
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import policy as policy_module
from loss import kl_divergence
from policy import Policy, build_policy, full_weights
from rollout import Engine, Rollouts, noise_seed
from support.command import Refused, Stopped
from support.models import TRAINABLE
from train import Config, kl_at_positions

AGREE = 1e-4  # nats
HOT = 1.4


def sample(engine: Engine, prompts: list[list[int]], n: int = 4, **sampling):
    """n responses to each prompt, each with noise of its own."""
    seeds = [noise_seed(0, group, n) for group in range(len(prompts))]
    return engine.sample(prompts, n, seeds, max_tokens=64, **sampling)


def gap(
    model: torch.nn.Module, rollouts: Rollouts, temperature: float = 1.0
) -> torch.Tensor:
    """|log pi_theta - log pi_b| of every response token, [M]."""
    with torch.no_grad():
        logp, _ = Policy(model, temperature)(rollouts)
    return (logp - rollouts.logp_behavior)[rollouts.mask].abs()


def logits_of(model: torch.nn.Module, rollouts: Rollouts) -> torch.Tensor:
    """Return the logits at every response token, [M, V], by transformers itself.

    They are in the model's own precision, and carry its gradient.
    """
    row, t = rollouts.mask.nonzero(as_tuple=True)
    position = rollouts.prompt_length[row] + t
    return model(rollouts.tokens.clamp(min=0)).logits[row, position - 1]


def sampled_tokens(rollouts: Rollouts) -> torch.Tensor:
    """Return the response tokens, [M, 1]."""
    row, t = rollouts.mask.nonzero(as_tuple=True)
    return rollouts.tokens[row, rollouts.prompt_length[row] + t][:, None]


def gradient_vector(value: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """Return the gradient of a 0-d value to all weights, as one float64 vector."""
    gradients = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def relative_error(vector: torch.Tensor, expected: torch.Tensor) -> float:
    return ((vector - expected).norm() / expected.norm()).item()


# log pi_b


@pytest.mark.parametrize("temperature", [0.6, 1.0, HOT])
def test_log_pi_b_is_after_the_temperature_and_the_trainer_agrees_on_every_token(
    temperature, engine, policy, prompts
):
    rollouts = sample(engine, prompts[:8], temperature=temperature)
    assert gap(policy, rollouts, temperature).max() < AGREE
    if temperature != 1:
        # Against the policy itself it is off-policy data.
        assert gap(policy, rollouts).max() > 0.1


def support_of(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Return which tokens top-p or top-k keep, [M, V] bool.

    The nucleus ends with the token by which its probability reaches top_p.
    """
    probability, order = logits.softmax(dim=-1).sort(descending=True)
    before = probability.cumsum(dim=-1) - probability  # of the likelier tokens
    rank = torch.arange(logits.shape[1]).expand_as(order)
    inside = before < top_p
    if top_k > 0:
        inside = inside & (rank < top_k)
    return torch.zeros_like(inside).scatter(1, order, inside)


@pytest.mark.parametrize("top_p, top_k", [(0.8, 0), (1.0, 2)])
def test_log_pi_b_is_renormalized_to_the_support_and_minus_infinity_outside(
    top_p, top_k, engine, policy, prompts
):
    rollouts = sample(engine, prompts[:8], top_p=top_p, top_k=top_k)
    with torch.no_grad():
        logits = logits_of(policy, rollouts)
    outside = ~support_of(logits, top_p, top_k)
    token, listed = sampled_tokens(rollouts), rollouts.top_tokens[rollouts.mask]
    assert not outside.gather(1, token).any()
    log_pi_b = logits.masked_fill(outside, -torch.inf).log_softmax(dim=-1)
    logp = rollouts.logp_behavior[rollouts.mask][:, None]
    assert torch.allclose(logp, log_pi_b.gather(1, token), atol=AGREE)
    # All 20 tokens are listed, from the likeliest down.
    top_logp = rollouts.top_logp_behavior[rollouts.mask]
    assert torch.allclose(top_logp, log_pi_b.topk(20).values, atol=AGREE)
    assert torch.allclose(top_logp, log_pi_b.gather(1, listed), atol=AGREE)


# The KL, from the listed tokens


@pytest.fixture(scope="module")
def pi_b() -> torch.nn.Module:
    """Return tiny in float64, whose copy in the engine samples."""
    return AutoModelForCausalLM.from_pretrained("tiny").double()


@pytest.fixture(scope="module")
def pi_theta(pi_b) -> torch.nn.Module:
    """Return pi_b with noise on every weight, as if after an update."""
    model = copy.deepcopy(pi_b)
    add_noise(model, 0.02)
    return model


@pytest.mark.parametrize("top_p, top_k", [(1.0, 0), (0.8, 0), (1.0, 2)])
def test_with_all_tokens_listed_the_kl_and_its_gradient_are_those_of_the_full_logits(
    top_p, top_k, engine, policy, prompts, pi_b, pi_theta
):
    rollouts = sample(engine, prompts[:4], temperature=HOT, top_p=top_p, top_k=top_k)
    float32 = copy.deepcopy(pi_theta).float()
    _, top_logp = Policy(float32)(rollouts)
    cfg = Config(temperature=HOT, top_p=top_p, top_k=top_k)
    kl = kl_at_positions(top_logp, rollouts, cfg)[rollouts.mask]

    # Both policies on the support of pi_b, which is all tokens without top-p and top-k.
    behavior_logits = logits_of(pi_b, rollouts).detach() / HOT
    outside = ~support_of(behavior_logits, top_p, top_k)
    log_pi = []
    for logits in logits_of(pi_theta, rollouts), behavior_logits:
        log_pi.append(logits.masked_fill(outside, -torch.inf).log_softmax(dim=-1))
    difference = (log_pi[0] - log_pi[1]).masked_fill(outside, 0)
    expected = (log_pi[0].exp() * difference).sum(dim=-1)
    assert expected.mean() > 0.01
    assert (kl - expected).abs().max() < 1e-5
    expected_gradient = gradient_vector(expected.mean(), pi_theta)
    gradient = gradient_vector(kl.mean(), float32)
    assert relative_error(gradient, expected_gradient) < 1e-4
    if outside.any():
        # Over the whole vocabulary it would be infinite.
        whole = kl_divergence(top_logp, rollouts.top_logp_behavior)[rollouts.mask]
        assert whole.isinf().any()


# log pi_theta


def test_the_policy_gives_log_softmax_of_the_logits_and_its_gradient(
    engine, policy, prompts, monkeypatch
):
    monkeypatch.setattr(policy_module, "CHUNK", 7)  # tokens; it changes nothing
    rollouts = sample(engine, prompts[:4])
    logp, top_logp = Policy(policy, temperature=0.7)(rollouts)
    log_pi = (logits_of(policy, rollouts) / 0.7).log_softmax(dim=-1)  # [M, V]
    expected = log_pi.gather(1, sampled_tokens(rollouts))[:, 0]
    expected_top = log_pi.gather(1, rollouts.top_tokens[rollouts.mask])
    assert torch.allclose(logp[rollouts.mask], expected, atol=1e-5)
    assert torch.allclose(top_logp[rollouts.mask], expected_top, atol=1e-5)
    assert (logp[~rollouts.mask] == 0).all()
    assert (top_logp[~rollouts.mask] == 0).all()
    value = logp.sum() + 0.1 * top_logp[..., 2].sum()
    expected_value = expected.sum() + 0.1 * expected_top[:, 2].sum()
    gradient = gradient_vector(value, policy)
    assert relative_error(gradient, gradient_vector(expected_value, policy)) < 1e-4


# Random models, with fewer heads for keys and values, and 2,000 tokens.
SIZE = {
    "vocab_size": 2000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "attention_dropout": 0.1,  # which nothing here may use
}


FAST = "qwen2"  # of a llama, which tiny is, all other tests tell
OTHERS = [each for each in TRAINABLE if each != FAST]
# Of tiny's tokenizer. Some types have others, beyond the 2,000.
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def random_model(model_type: str, folder: Path) -> str:
    """Save a random model of a type with the tokenizer of tiny; return its folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZE, **SPECIAL_TOKENS)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained("tiny").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "model_type",
    [FAST, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)],
)
def test_policy_engine_and_transformers_agree_on_every_type_before_and_after_an_update(
    model_type, train_here, build_engine, group, prompts, tmp_path
):
    folder = random_model(model_type, tmp_path / "model")
    few = ["--prompts_per_step=2", "--group_size=2", NONE_COMPLETE]
    exact = "--rollout_dtype=float32"  # auto is bfloat16 on some CPUs
    rows = train_here(f"--model={folder}", "--steps=2", exact, *few)
    assert rows[2]["logprob_abs_diff"] < AGREE
    engine = build_engine(folder, load_format="dummy", top_logprobs=3)
    with engine.as_current():
        policy = build_policy(folder, group)
        model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    for version in "0", "1":
        engine.load_weights(full_weights(policy), version=version)
        rollouts = sample(engine, prompts[:4])
        assert rollouts.weight_version == version
        logp, top_logp = policy(rollouts)
        model.load_state_dict(dict(full_weights(policy)))
        log_pi = logits_of(model, rollouts).log_softmax(dim=-1)
        expected = log_pi.gather(1, sampled_tokens(rollouts))[:, 0]
        assert torch.allclose(logp[rollouts.mask], expected, atol=AGREE)
        assert torch.allclose(logp, rollouts.logp_behavior, atol=AGREE)
        assert torch.allclose(top_logp, rollouts.top_logp_behavior, atol=AGREE)
        # The update, and with it the new weights' log-probabilities, are large.
        logp.sum().backward()
        optimizer.step()
        assert (policy(rollouts)[0] - logp).abs().max() > 0.1


@pytest.mark.parametrize(
    "model_type, name",
    [
        ("llama", "attention_dropout"),
        ("stablelm", "hidden_dropout"),
        ("phi3", "resid_pdrop"),
    ],
)
def test_no_dropout_of_a_models_config_acts(
    model_type, name, engine, group, prompts, tmp_path
):
    rollouts = sample(engine, prompts[:4])
    folder = Path(random_model(model_type, tmp_path))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: 0.5}))
    policy = build_policy(str(folder), group)
    assert torch.equal(policy(rollouts)[0], policy(rollouts)[0])


def saved_sizes(policy: Policy, rollouts: Rollouts) -> list[int]:
    """Return the sizes of the tensors kept by a forward pass for the backward pass."""
    sizes = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        policy(rollouts)
    return sizes


def test_no_logits_are_kept_for_the_backward_pass_and_none_are_made_of_the_prompt(
    build_engine, group, prompts, tmp_path, monkeypatch
):
    folder = random_model("llama", tmp_path)
    rollouts = sample(build_engine(folder, top_logprobs=3), prompts[:4])
    positions = []
    score = policy_module.token_log_probabilities

    def counted(hidden, *others):
        positions.append(len(hidden))
        return score(hidden, *others)

    monkeypatch.setattr(policy_module, "token_log_probabilities", counted)
    monkeypatch.setattr(policy_module, "CHUNK", 100)
    sizes = saved_sizes(build_policy(folder, group), rollouts)
    response_tokens = int(rollouts.mask.sum())
    assert response_tokens > 500
    assert sum(positions) == response_tokens
    assert max(positions) == 100
    # A chunk's logits would have 100 x 2,000 numbers; the head has 2,000 x 64.
    assert max(sizes) < 100 * 2000


def test_gradient_checkpointing_keeps_less_and_has_the_same_gradient(
    engine, policy, prompts, group
):
    rollouts = sample(engine, prompts[:4])
    kept, gradients = [], []
    for gradient_checkpointing in False, True:
        sharded = build_policy(
            "tiny", group, gradient_checkpointing=gradient_checkpointing
        )
        kept.append(sum(saved_sizes(sharded, rollouts)))
        sharded(rollouts)[0].sum().backward()
        grads = [weight.grad.full_tensor() for weight in sharded.parameters()]
        gradients.append(torch.cat([grad.flatten() for grad in grads]))
    assert kept[1] < kept[0] / 3
    assert relative_error(gradients[1], gradients[0]) < 1e-5


# Responses and their seeds


def test_the_end_of_sequence_is_in_the_mask_and_truncated_responses_lack_it(
    engine, policy, prompts
):
    seeds = list(range(16))
    rollouts = engine.sample(prompts[:16], 1, seeds, max_tokens=30)
    length = rollouts.mask.sum(dim=1)
    last_position = rollouts.prompt_length + length - 1
    last = rollouts.tokens.gather(1, last_position[:, None])[:, 0]
    ended = last == engine.tokenizer.eos_token_id
    assert 0 < ended.sum() < 16
    assert torch.equal(ended, ~rollouts.truncated)
    assert (length[rollouts.truncated] == 30).all()
    for row, text in enumerate(rollouts.text):
        prompt = rollouts.prompt_length[row]
        assert rollouts.tokens[row, :prompt].tolist() == prompts[row]
        response = rollouts.tokens[
            row, prompt : prompt + length[row] - ended[row].int()
        ]
        assert engine.tokenizer.decode(response) == text


def test_a_response_also_ends_at_the_token_with_which_its_chat_template_ends_a_turn(
    build_engine, tmp_path
):
    # A base model's end of sequence is <eos>, and this template ends a turn with ".".
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    tokenizer.add_tokens(".")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}.{% endfor %}"
    shutil.copytree("tiny", tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    engine = build_engine(str(tmp_path / "model"))
    rollouts = sample(engine, [tokenizer.encode("7890+1663:")], n=16)
    # tiny writes each column of a sum as a sentence: "0+3+0=3. 9+6+0=15. ..."
    end = tokenizer.convert_tokens_to_ids(".")
    last = rollouts.prompt_length + rollouts.mask.sum(dim=1) - 1
    assert not rollouts.truncated.any()
    ends = rollouts.tokens.gather(1, last[:, None])
    assert set(ends.flatten().tolist()) == {end, tokenizer.eos_token_id}
    assert not any("." in text for text in rollouts.text)


@pytest.mark.parametrize("token, text", [(1, "<bos><bos>"), (2, "")])
def test_special_tokens_stay_in_the_text_except_the_end_of_sequence(
    token, text, engine, prompts
):
    # In some models <think> and </think> are special tokens.
    always = {"logit_bias": {token: 100.0}, "max_tokens": 2}
    assert engine.sample(prompts[:1], 1, [0], **always).text == [text]


def test_a_response_depends_on_its_seed_and_prompt_and_on_no_other_prompt_or_rank(
    engine, policy, prompts
):
    seeds = [noise_seed(1, group, 2) for group in range(8)]
    together = engine.sample(prompts[:8], 2, seeds, max_tokens=64)
    # What rank 1 of two would sample.
    alone = engine.sample(prompts[1:8:2], 2, seeds[1::2], max_tokens=64)
    expected = [together.text[2 * i : 2 * i + 2] for i in range(1, 8, 2)]
    assert alone.text == sum(expected, [])
    # Response 1 to a prompt has the noise of seed + 1.
    assert together.text[0] != together.text[1]
    others = [seeds[0] + 1, seeds[1]]
    again = engine.sample([prompts[0]] * 2, 1, others, max_tokens=64)
    assert again.text[0] == together.text[1]
    assert again.text[1] not in together.text[:2]


def test_runs_of_different_seeds_share_no_noise():
    # 60 steps of 32 prompts with 8 responses take 15,360 seeds. Those of run 1 must not
    # begin among those of run 0.
    seen = set()
    for run in range(10):
        seeds = [noise_seed(run, group, 8) for group in range(60 * 32)]
        taken = {seed + j for seed in seeds for j in range(8)}
        assert len(taken) == 60 * 32 * 8
        assert not taken & seen
        seen |= taken


# Memory, which a CPU's engine does not lend out: as CUDA's fails


def test_an_engine_that_sleeps_says_so_until_the_next_sync(engine, policy, prompts):
    engine.sleep()
    with pytest.raises(RuntimeError, match="the engine sleeps: call wake_up and"):
        sample(engine, prompts[:1])
    engine.wake_up()
    engine.load_weights(policy.state_dict().items(), version="1")
    assert sample(engine, prompts[:1]).weight_version == "1"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99.00 GiB."),
        ValueError("Free memory on device cuda:0 (0.1/79.2 GiB) on startup is ..."),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(error, group, monkeypatch):
    def build(*_, **__):
        raise error

    monkeypatch.setattr(vllm, "LLM", build)
    with pytest.raises(Refused) as refused:
        Engine("tiny", 128, kv_cache_gb=99)
    reason, *_ = str(error).split(". ")
    assert str(refused.value).startswith(f"kv_cache_gb is 99: {reason}")


def test_a_run_stops_if_an_engine_finds_no_memory_to_wake_up(
    engine, policy, monkeypatch
):
    def wake_up():
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:114")

    monkeypatch.setattr(engine, "can_sleep", True)
    monkeypatch.setattr(engine.llm, "wake_up", wake_up)
    with pytest.raises(Stopped, match="too little free memory for the engine, which"):
        engine.wake_up()
