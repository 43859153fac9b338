"""The two sides of the ratio and of the KL, on a real vLLM engine.

What the engine samples from, and that the trainer scores the same tokens under the same
weights. Both compute in float32: they agree to 1e-4 nats, and the signals are of 0.1
nats.
"""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

import policy as policy_module
from loss import kl_divergence
from policy import Policy
from rollout import Engine, Rollouts
from train import Config, kl_of_positions

AGREE = 1e-4  # nats
HOT = 1.4


def sample(engine: Engine, prompts: list[list[int]], n: int = 4, **sampling):
    """n responses to each prompt, each with noise of its own."""
    seeds = [100 * prompt for prompt in range(len(prompts))]
    return engine.sample(prompts, n, seeds, max_tokens=64, **sampling)


def gap(
    model: torch.nn.Module, rollouts: Rollouts, temperature: float = 1.0
) -> torch.Tensor:
    """|log pi_theta - log pi_b| of every response token, [M]."""
    with torch.no_grad():
        logp, _ = Policy(model, temperature)(rollouts)
    return (logp - rollouts.logp_behavior)[rollouts.mask].abs()


def logits_of(model: torch.nn.Module, rollouts: Rollouts) -> torch.Tensor:
    """The logits of all tokens at every response token, [M, V], by transformers alone.

    They are in the model's own precision, and carry its gradient.
    """
    row, t = rollouts.mask.nonzero(as_tuple=True)
    position = rollouts.prompt_length[row] + t
    return model(rollouts.tokens).logits[row, position - 1]


def sampled_tokens(rollouts: Rollouts) -> torch.Tensor:
    """The response tokens, [M]."""
    row, t = rollouts.mask.nonzero(as_tuple=True)
    return rollouts.tokens[row, rollouts.prompt_length[row] + t]


def moved(model: torch.nn.Module, scale: float = 0.02) -> torch.nn.Module:
    """The same policy after something like an update: noise on every weight."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(scale * torch.randn(weight.shape, generator=generator))
    return model


# log pi of the sampled tokens


def test_engine_and_trainer_agree_on_the_log_probability_of_every_sampled_token(
    engine, policy, prompts
):
    rollouts = sample(engine, prompts[:16])
    assert rollouts.mask.sum() > 1000
    assert gap(policy, rollouts).max() < AGREE


@pytest.mark.parametrize("chunk", [7, 1024])  # tokens; it changes nothing
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_policy_gives_log_softmax_of_the_logits_at_sampled_and_top_tokens(
    temperature, chunk, engine, policy, prompts, monkeypatch
):
    rollouts = sample(engine, prompts[:4])
    log_pi = (logits_of(policy, rollouts) / temperature).log_softmax(dim=-1)  # [M, V]
    token = sampled_tokens(rollouts)  # [M]
    top_tokens = rollouts.top_tokens[rollouts.mask]  # [M, K]
    monkeypatch.setattr(policy_module, "CHUNK", chunk)
    logp, top_logp = Policy(policy, temperature)(rollouts)
    expected = log_pi.gather(1, token[:, None])[:, 0]
    assert torch.allclose(logp[rollouts.mask], expected, atol=1e-5)
    expected = log_pi.gather(1, top_tokens)
    assert top_logp.shape == (*rollouts.mask.shape, 20)
    assert torch.allclose(top_logp[rollouts.mask], expected, atol=1e-5)
    assert (logp[~rollouts.mask] == 0).all()
    assert (top_logp[~rollouts.mask] == 0).all()


def test_the_gradient_of_the_policy_is_that_of_log_softmax(
    engine, policy, prompts, monkeypatch
):
    rollouts = sample(engine, prompts[:4])
    token = sampled_tokens(rollouts)
    third = rollouts.top_tokens[rollouts.mask][:, 2]
    log_pi = logits_of(policy, rollouts).log_softmax(dim=-1)
    plain = log_pi.gather(1, token[:, None]).sum()
    plain = plain + 0.1 * log_pi.gather(1, third[:, None]).sum()
    monkeypatch.setattr(policy_module, "CHUNK", 50)
    logp, top_logp = Policy(policy)(rollouts)
    chunked = logp.sum() + 0.1 * top_logp[..., 2].sum()
    weights = list(policy.parameters())
    expected = torch.autograd.grad(plain, weights)
    gradient = torch.autograd.grad(chunked, weights)
    for of_weight, expected_of_weight in zip(gradient, expected, strict=True):
        largest = expected_of_weight.abs().max().item()
        assert torch.allclose(
            of_weight, expected_of_weight, rtol=1e-4, atol=1e-4 * largest
        )


def test_the_gradient_of_a_bfloat16_head_is_not_added_up_in_bfloat16(
    engine, policy, prompts, monkeypatch
):
    rollouts = sample(engine, prompts[:4])
    model = copy.deepcopy(policy).bfloat16()
    head = model.get_output_embeddings().weight
    gradient = {}
    for chunk in 1, 1024:  # a sum of over a hundred gradients, and of one
        monkeypatch.setattr(policy_module, "CHUNK", chunk)
        logp, _ = Policy(model)(rollouts)
        (of_head,) = torch.autograd.grad(logp.sum(), head)
        gradient[chunk] = of_head.float()
    error = (gradient[1] - gradient[1024]).norm() / gradient[1024].norm()
    # The sum itself is rounded to bfloat16, by up to 2^-9. Added up there, a hundred
    # roundings would make it several times that.
    assert error < 2**-9


def test_padding_does_not_change_a_score(engine, policy, prompts):
    rollouts = sample(engine, prompts[:4])
    with torch.no_grad():
        logp, top_logp = Policy(policy)(rollouts)
        for row in range(len(rollouts.text)):
            alone = rollouts.select([row])
            assert alone.mask.all()  # no padding is left in a row by itself
            length = alone.mask.shape[1]
            logp_alone, top_logp_alone = Policy(policy)(alone)
            assert torch.allclose(logp_alone[0], logp[row, :length], atol=1e-5)
            assert torch.allclose(top_logp_alone[0], top_logp[row, :length], atol=1e-5)


def test_behavior_log_probabilities_are_those_after_the_temperature(
    engine, policy, prompts
):
    for temperature in 0.6, HOT:
        rollouts = sample(engine, prompts[:8], temperature=temperature)
        assert gap(policy, rollouts, temperature).max() < AGREE
        # Against the policy itself, at temperature 1, it is off-policy data.
        assert gap(policy, rollouts).max() > 0.1


# log pi_b of the K likeliest tokens, and the KL


def support_of(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Which tokens top-p or top-k leave, [M, V] bool.

    The nucleus ends with the token by which its probability reaches top_p.
    """
    probability, order = logits.softmax(dim=-1).sort(descending=True)
    before = probability.cumsum(dim=-1) - probability  # of the likelier tokens
    rank = torch.arange(logits.shape[1]).expand_as(order)
    inside = before < top_p
    if top_k > 0:
        inside = inside & (rank < top_k)
    return torch.zeros_like(inside).scatter(1, order, inside)


def test_the_engine_lists_the_likeliest_tokens_of_pi_b_in_order(
    build_engine, policy, prompts
):
    engine = build_engine(top_logprobs=3)
    rollouts = sample(engine, prompts[:8], temperature=HOT)
    assert rollouts.top_tokens.shape == (*rollouts.mask.shape, 3)
    with torch.no_grad():
        log_pi_b = (logits_of(policy, rollouts) / HOT).log_softmax(dim=-1)  # [M, V]
    listed = rollouts.top_tokens[rollouts.mask]  # [M, 3]
    logp = rollouts.top_logp_behavior[rollouts.mask]  # [M, 3]
    assert torch.allclose(logp, log_pi_b.topk(3).values, atol=AGREE)
    assert torch.allclose(logp, log_pi_b.gather(1, listed), atol=AGREE)
    # Each is another token, and they do not depend on what was sampled.
    assert (listed.sort(dim=-1).values.diff(dim=-1) > 0).all()
    token = sampled_tokens(rollouts)
    assert (token[:, None] != listed).all(dim=-1).any()


def test_asked_for_more_tokens_than_there_are_the_engine_lists_the_vocabulary(
    build_engine, policy, prompts
):
    rollouts = sample(build_engine(top_logprobs=50), prompts[:2])
    listed = rollouts.top_tokens[rollouts.mask].sort(dim=-1).values
    assert torch.equal(listed, torch.arange(20).expand_as(listed))


@pytest.fixture(scope="module")
def pi_b() -> torch.nn.Module:
    """tiny in float64, whose copy in the engine samples."""
    return AutoModelForCausalLM.from_pretrained("tiny").double()


@pytest.fixture(scope="module")
def pi_theta(pi_b) -> torch.nn.Module:
    """What it has become after something like an update, in float64."""
    return moved(copy.deepcopy(pi_b))


def full_kl(log_pi_theta: torch.Tensor, log_pi_b: torch.Tensor) -> torch.Tensor:
    """KL(pi_theta || pi_b) over the vocabulary, [M], of log-probabilities [M, V].

    Tokens that neither can sample are left out.
    """
    both = log_pi_theta > -torch.inf
    difference = torch.where(both, log_pi_theta - log_pi_b, 0.0)
    return (log_pi_theta.exp() * difference).sum(dim=-1)


def gradient_vector(value: torch.Tensor, model: torch.nn.Module) -> torch.Tensor:
    """The gradient of a 0-d value on all weights, as one float64 vector."""
    gradients = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def test_with_the_whole_vocabulary_the_kl_and_its_gradient_are_those_of_the_full_logits(
    engine, policy, prompts, pi_b, pi_theta
):
    rollouts = sample(engine, prompts[:4], temperature=HOT)
    float32 = copy.deepcopy(pi_theta).float()
    _, top_logp = Policy(float32)(rollouts)
    kl = kl_of_positions(top_logp, rollouts, Config(temperature=HOT))[rollouts.mask]

    log_pi_theta = logits_of(pi_theta, rollouts).log_softmax(dim=-1)
    log_pi_b = (logits_of(pi_b, rollouts).detach() / HOT).log_softmax(dim=-1)
    expected = full_kl(log_pi_theta, log_pi_b)
    assert expected.mean() > 0.01
    assert (kl - expected).abs().max() < 1e-5

    gradient = gradient_vector(kl.mean(), float32)
    expected_gradient = gradient_vector(expected.mean(), pi_theta)
    error = (gradient - expected_gradient).norm() / expected_gradient.norm()
    assert error < 1e-4


def test_with_three_tokens_the_kl_is_that_of_three_and_one_bucket_a_lower_bound(
    build_engine, policy, prompts, pi_b, pi_theta
):
    rollouts = sample(build_engine(top_logprobs=3), prompts[:4], temperature=HOT)
    float32 = copy.deepcopy(pi_theta).float()
    with torch.no_grad():
        _, top_logp = Policy(float32)(rollouts)
        kl = kl_of_positions(top_logp, rollouts, Config(temperature=HOT))
        p = logits_of(pi_theta, rollouts).softmax(dim=-1)  # [M, V]
        b = (logits_of(pi_b, rollouts) / HOT).softmax(dim=-1)
    kl = kl[rollouts.mask]

    # The three likeliest tokens of pi_b, then the sum of the 17 others.
    order = b.argsort(dim=-1, descending=True)
    p = p.gather(1, order)
    b = b.gather(1, order)
    p_of_four = torch.cat([p[:, :3], p[:, 3:].sum(dim=-1, keepdim=True)], dim=-1)
    b_of_four = torch.cat([b[:, :3], b[:, 3:].sum(dim=-1, keepdim=True)], dim=-1)
    of_four = full_kl(p_of_four.log(), b_of_four.log())
    # A bucket below REST_FLOOR = 1e-5 changes it by less than 1e-4.
    assert (kl - of_four).abs().max() < 1e-4
    whole = full_kl(p.log(), b.log())
    assert (kl <= whole + 1e-6).all()
    assert kl.mean() < whole.mean() - 1e-4


@pytest.mark.parametrize("top_p, top_k", [(0.8, 0), (1.0, 2)])
def test_under_top_p_or_top_k_the_kl_is_that_of_both_policies_on_the_support(
    top_p, top_k, engine, policy, prompts, pi_b, pi_theta
):
    rollouts = sample(engine, prompts[:4], temperature=HOT, top_p=top_p, top_k=top_k)
    float32 = copy.deepcopy(pi_theta).float()
    _, top_logp = Policy(float32)(rollouts)
    cfg = Config(temperature=HOT, top_p=top_p, top_k=top_k)
    kl = kl_of_positions(top_logp, rollouts, cfg)[rollouts.mask]

    behavior_logits = logits_of(pi_b, rollouts).detach() / HOT
    outside = ~support_of(behavior_logits, top_p, top_k)
    log_pi_b = behavior_logits.masked_fill(outside, -torch.inf).log_softmax(dim=-1)
    # pi_theta renormalized to the support.
    logits = logits_of(pi_theta, rollouts).masked_fill(outside, -torch.inf)
    expected = full_kl(logits.log_softmax(dim=-1), log_pi_b)
    assert expected.mean() > 0.01
    assert (kl - expected).abs().max() < 1e-5
    # Over the whole vocabulary it would be infinite.
    whole = kl_divergence(top_logp, rollouts.top_logp_behavior)[rollouts.mask]
    assert whole.isinf().any()

    gradient = gradient_vector(kl.mean(), float32)
    expected_gradient = gradient_vector(expected.mean(), pi_theta)
    error = (gradient - expected_gradient).norm() / expected_gradient.norm()
    assert error < 1e-4


@pytest.mark.parametrize("top_p, top_k", [(0.8, 0), (1.0, 2)])
def test_behavior_log_probabilities_are_renormalized_to_the_support(
    top_p, top_k, engine, policy, prompts
):
    rollouts = sample(engine, prompts[:8], top_p=top_p, top_k=top_k)
    with torch.no_grad():
        logits = logits_of(policy, rollouts)
    support = support_of(logits, top_p, top_k)
    token = sampled_tokens(rollouts)
    assert support.gather(1, token[:, None]).all()
    log_pi_b = logits.masked_fill(~support, -torch.inf).log_softmax(dim=-1)
    expected = log_pi_b.gather(1, token[:, None])[:, 0]
    assert torch.allclose(rollouts.logp_behavior[rollouts.mask], expected, atol=AGREE)
    # The listed ones too; a token outside has log-probability -inf.
    listed = rollouts.top_tokens[rollouts.mask]
    top_logp_behavior = rollouts.top_logp_behavior[rollouts.mask]
    expected = log_pi_b.gather(1, listed)
    assert torch.allclose(top_logp_behavior, expected, atol=AGREE)


def test_without_top_tokens_there_is_nothing_to_take_the_kl_over(
    build_engine, policy, prompts
):
    rollouts = sample(build_engine(top_logprobs=0), prompts[:2])
    with torch.no_grad():
        logp, top_logp = Policy(policy)(rollouts)
    assert rollouts.top_tokens.shape == (*rollouts.mask.shape, 0)
    assert top_logp.shape == (*rollouts.mask.shape, 0)
    assert gap(policy, rollouts).max() < AGREE
    assert kl_of_positions(top_logp, rollouts, Config(top_logprobs=0)) is None


# Rows, ends, seeds


def test_rows_keeps_the_numbers_of_each_row_and_trims_the_padding(
    engine, policy, prompts
):
    rollouts = sample(engine, prompts[:8])
    rollouts.reward = torch.arange(32.0)
    lengths = rollouts.mask.sum(dim=1)
    shortest = lengths.argsort()[:3].tolist()
    chosen = rollouts.select(shortest)
    columns = chosen.mask.shape[1]
    assert columns == lengths[shortest].max() < rollouts.mask.shape[1]
    assert chosen.reward.tolist() == shortest
    assert chosen.text == [rollouts.text[row] for row in shortest]
    for name in "logp_behavior", "top_tokens", "top_logp_behavior":
        expected = getattr(rollouts, name)[shortest, :columns]
        assert torch.equal(getattr(chosen, name), expected), name
    assert not rollouts.select([]).mask.any()


def test_the_end_of_sequence_token_is_part_of_the_response_and_truncated_ones_lack_it(
    engine, policy, prompts
):
    rollouts = engine.sample(prompts[:16], 1, list(range(16)), max_tokens=30)
    length = rollouts.mask.sum(dim=1)
    last_position = rollouts.prompt_length + length - 1
    last = rollouts.tokens.gather(1, last_position[:, None])[:, 0]
    ended = last == engine.tokenizer.eos_token_id
    assert 0 < ended.sum() < 16
    assert torch.equal(ended, ~rollouts.truncated)
    assert (length[rollouts.truncated] == 30).all()


def test_a_response_depends_on_its_seed_and_prompt_not_on_the_batch_around_it(
    engine, policy, prompts
):
    seeds = [10 * prompt for prompt in range(8)]
    together = engine.sample(prompts[:8], 2, seeds, max_tokens=64)
    for prompt in 0, 5:
        alone = engine.sample([prompts[prompt]], 2, [seeds[prompt]], max_tokens=64)
        assert alone.text == together.text[2 * prompt : 2 * prompt + 2]
    # Response 1 to a prompt has the noise of seed + 1.
    assert together.text[0] != together.text[1]
    second = engine.sample([prompts[0]], 1, [seeds[0] + 1], max_tokens=64)
    assert second.text == together.text[1:2]
