"""Test both sides of the ratio and of the KL on a real vLLM engine.

log pi_b has to be that of the distribution from which the engine samples, and the
trainer has to score the same tokens. Both compute in float32 and agree to 1e-4 nats. A
mistake, such as another temperature, makes them differ by about 0.1 nats.
"""

import copy
import shutil
from itertools import pairwise

import pytest
import torch
import vllm
from config_fields import build as build_model
from conftest import add_noise
from transformers import AutoModelForCausalLM, AutoTokenizer

import policy as policy_module
from loss import kl_divergence
from policy import Policy, build_policy, full_weights
from rollout import Engine, Rollouts, noise_seed
from support.command import Refused, Stopped
from support.models import TRAINABLE, check_model
from tools.memory import shape_of
from train import Config, kl_at_positions

TOLERANCE = 1e-4  # nats
TEMPERATURE = 1.4


def sample(engine: Engine, prompts: list[list[int]], n: int = 4, **sampling):
    """Return n responses to each prompt, each with its own noise."""
    seeds = [noise_seed(0, group, n) for group in range(len(prompts))]
    return engine.sample(prompts, n, seeds, max_tokens=64, **sampling)


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


def support_of(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Return which tokens top-p or top-k keep, [M, V] bool.

    The nucleus ends with the token by which its probability reaches top_p.
    """
    probability, order = logits.softmax(dim=-1).sort(descending=True)
    before = probability.cumsum(dim=-1) - probability  # of the likelier tokens
    inside = (before < top_p) | (top_p == 1)
    if top_k > 0:
        inside[:, top_k:] = False
    return torch.zeros_like(inside).scatter(1, order, inside)


@pytest.mark.parametrize(
    "temperature, top_p, top_k", [(0.6, 1.0, 0), (TEMPERATURE, 0.8, 0), (1.0, 1.0, 2)]
)
def test_log_pi_b_is_after_temperature_top_p_and_top_k_and_minus_infinity_outside(
    temperature, top_p, top_k, engine, policy, prompts
):
    settings = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    rollouts = sample(engine, prompts[:8], **settings)
    with torch.no_grad():
        logits = logits_of(policy, rollouts) / temperature
    outside = ~support_of(logits, top_p, top_k)
    log_pi_b = logits.masked_fill(outside, -torch.inf).log_softmax(dim=-1)
    logp = rollouts.logp_behavior[rollouts.mask][:, None]
    sampled = log_pi_b.gather(1, sampled_tokens(rollouts))
    assert torch.allclose(logp, sampled, atol=TOLERANCE)
    # All 20 tokens are listed, from the likeliest down.
    top_logp = rollouts.top_logp_behavior[rollouts.mask]
    listed = log_pi_b.gather(1, rollouts.top_tokens[rollouts.mask])
    assert torch.allclose(top_logp, listed, atol=TOLERANCE)
    assert torch.allclose(top_logp, log_pi_b.topk(20).values, atol=TOLERANCE)


# The KL, from the listed tokens


@pytest.mark.parametrize("top_p, top_k", [(1.0, 0), (0.8, 0), (1.0, 2)])
def test_with_all_tokens_listed_the_kl_and_its_gradient_are_those_of_the_full_logits(
    top_p, top_k, engine, policy, prompts, monkeypatch
):
    monkeypatch.setattr(policy_module, "CHUNK", 7)  # tokens; this changes nothing
    settings = {"temperature": TEMPERATURE, "top_p": top_p, "top_k": top_k}
    rollouts = sample(engine, prompts[:4], **settings)
    # The policy moves after the sampling. The trainer's copy of it is float32.
    pi_b = copy.deepcopy(policy).double()
    moved = copy.deepcopy(policy)
    add_noise(moved, 0.02)
    pi_theta = copy.deepcopy(moved).double()
    _, top_logp = Policy(moved)(rollouts)
    kl = kl_at_positions(top_logp, rollouts, Config(**settings))[rollouts.mask]

    # Restrict both policies to the support of pi_b. Without top-p and top-k it has all
    # tokens.
    behavior_logits = logits_of(pi_b, rollouts).detach() / TEMPERATURE
    outside = ~support_of(behavior_logits, top_p, top_k)
    log_pi, log_pi_b = [
        logits.masked_fill(outside, -torch.inf).log_softmax(dim=-1)
        for logits in (logits_of(pi_theta, rollouts), behavior_logits)
    ]
    difference = (log_pi - log_pi_b).masked_fill(outside, 0)
    expected = (log_pi.exp() * difference).sum(dim=-1)
    assert expected.mean() > 0.01
    assert (kl - expected).abs().max() < 1e-5
    expected_gradient = gradient_vector(expected.mean(), pi_theta)
    assert relative_error(gradient_vector(kl.mean(), moved), expected_gradient) < 1e-4
    if outside.any():
        # Over the whole vocabulary the KL would be infinite.
        whole = kl_divergence(top_logp, rollouts.top_logp_behavior)[rollouts.mask]
        assert whole.isinf().any()


# log pi_theta


FAST_TYPE = "qwen2"  # All other tests are of a llama, because tiny is one.
OTHER_TYPES = [each for each in TRAINABLE if each != FAST_TYPE]


@pytest.mark.parametrize(
    "model_type",
    [FAST_TYPE, *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_TYPES)],
)
def test_policy_engine_and_transformers_agree_on_every_type_before_and_after_an_update(
    model_type, build_engine, group, prompts, tmp_path
):
    folder = str(tmp_path)
    build_model(model_type, {}, folder)
    check_model(folder, to_train=True)
    policy = build_policy(folder, group)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.base_model.do_not_compile = True
    assert shape_of(folder).total == model.num_parameters()  # for tools/memory.py
    engine = build_engine(folder, load_format="dummy", top_logprobs=3)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    for version in "0", "1":
        engine.load_weights(full_weights(policy), version=version)
        rollouts = sample(engine, prompts[:4])
        assert rollouts.weight_version == version
        logp, top_logp = policy(rollouts)
        model.load_state_dict(dict(full_weights(policy)))
        log_pi = logits_of(model, rollouts).log_softmax(dim=-1)
        expected = log_pi.gather(1, sampled_tokens(rollouts))[:, 0]
        assert torch.allclose(logp[rollouts.mask], expected, atol=TOLERANCE)
        assert torch.allclose(logp, rollouts.logp_behavior, atol=TOLERANCE)
        assert torch.allclose(top_logp, rollouts.top_logp_behavior, atol=TOLERANCE)
        # The update changes the log-probabilities by much more than TOLERANCE.
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
    # Nor does the form matter in which its output is to be returned.
    build_model(model_type, {name: 0.5, "return_dict": False}, str(tmp_path))
    policy = build_policy(str(tmp_path), group)
    assert torch.equal(policy(rollouts)[0], policy(rollouts)[0])


# Responses and their seeds


def test_the_end_of_sequence_is_in_the_mask_and_truncated_responses_lack_it(
    engine, policy, prompts
):
    rollouts = engine.sample(prompts[:16], 1, list(range(16)), max_tokens=30)
    for row, prompt in enumerate(prompts[:16]):
        length = rollouts.mask[row].sum()
        assert rollouts.tokens[row, : len(prompt)].tolist() == prompt
        response = rollouts.tokens[row, len(prompt) : len(prompt) + length].tolist()
        if rollouts.truncated[row]:
            assert length == 30
        else:
            assert response.pop() == engine.tokenizer.eos_token_id
        assert engine.tokenizer.decode(response) == rollouts.text[row]
    assert 0 < rollouts.truncated.sum() < 16


def test_a_response_also_ends_at_the_token_with_which_its_chat_template_ends_a_turn(
    build_engine, tmp_path
):
    # The model's end of sequence is <eos>, but its template ends a turn with ".".
    tokenizer = AutoTokenizer.from_pretrained("tiny")
    tokenizer.add_tokens(".")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}.{% endfor %}"
    shutil.copytree("tiny", tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    engine = build_engine(str(tmp_path / "model"))
    rollouts = sample(engine, [tokenizer.encode("7890+1663:")], n=16)
    # tiny writes each column of a sum as a sentence: "0+3+0=3. 9+6+0=15. ..."
    assert not rollouts.truncated.any()
    last = rollouts.prompt_length + rollouts.mask.sum(dim=1) - 1
    ends = rollouts.tokens.gather(1, last[:, None])
    assert set(tokenizer.convert_ids_to_tokens(ends.flatten())) == {".", "<eos>"}
    assert not any("." in text for text in rollouts.text)


@pytest.mark.parametrize("token, text", [(1, "<bos><bos>"), (2, "")])
def test_special_tokens_stay_in_the_text_except_the_end_of_sequence(
    token, text, engine, prompts
):
    # In some models <think> and </think> are special tokens.
    always = {"logit_bias": {token: 100.0}, "max_tokens": 2}
    assert engine.sample(prompts[:1], 1, [0], **always).text == [text]


def test_response_j_to_a_prompt_has_the_noise_of_its_seed_plus_j(
    engine, policy, prompts
):
    first, second = sample(engine, prompts[:1], n=2).text
    assert first != second
    seed = noise_seed(0, 0, 2)
    again = engine.sample(prompts[:1] * 2, 1, [seed + 1, seed + 2], max_tokens=64).text
    assert again[0] == second
    assert again[1] not in (first, second)


def test_samples_of_a_prompt_compute_its_whole_blocks_only_once(engine):
    engine.llm.reset_prefix_cache()
    requests = [{"prompt_token_ids": [5, 6, 7, 8, 9] * 9}] * 3  # 45 tokens each
    one_token = vllm.SamplingParams(max_tokens=1)
    outputs = engine.llm.generate(requests, one_token, use_tqdm=False)
    # A block has 32 tokens.
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32]


def test_runs_of_different_seeds_share_no_noise():
    # 60 steps of 32 prompts with 8 responses take 15,360 seeds in a row. If a run's
    # first seed were its own number, most of its seeds would be those of run 0.
    first = sorted(noise_seed(run, 0, 8) for run in range(10))
    assert all(after - before >= 15_360 for before, after in pairwise(first))


# Memory: a CPU's engine does not lend any, so CUDA's errors are raised by hand


def test_an_engine_that_sleeps_says_so_until_the_next_sync(engine, policy, prompts):
    engine.sleep()
    with pytest.raises(RuntimeError, match="the engine sleeps: call wake_up and"):
        sample(engine, prompts[:1])
    engine.wake_up()
    engine.load_weights(policy.state_dict().items(), version="1")
    assert sample(engine, prompts[:1]).weight_version == "1"


def test_fp8_beside_float32_is_refused_by_vllm(group):
    with pytest.raises(Refused, match="float32 is not supported for .* fp8_per_ch"):
        Engine("tiny", 128, quantization="fp8_per_channel", dtype="float32")


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99.00 GiB"),
        ValueError("No available memory for the cache blocks"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(error, group, monkeypatch):
    def build(*_, **__):
        raise type(error)(f"{error}. Set an option of vLLM.")

    monkeypatch.setattr(vllm, "LLM", build)
    with pytest.raises(Refused) as refused:
        Engine("tiny", 128, kv_cache_gb=99)
    sentence = f"vLLM cannot build an engine for tiny with kv_cache_gb 99: {error}"
    assert str(refused.value) == sentence


def test_a_run_stops_if_an_engine_finds_no_memory_to_wake_up(
    engine, policy, monkeypatch
):
    def wake_up():
        raise RuntimeError("CUDA Error: out of memory at cumem_allocator.cpp:114")

    monkeypatch.setattr(engine, "can_sleep", True)
    monkeypatch.setattr(engine.llm, "wake_up", wake_up)
    with pytest.raises(Stopped, match="cannot take back the memory .*CUDA Error"):
        engine.wake_up()
