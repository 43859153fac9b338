"""The two sides of the ratio, on a real vLLM engine: what it samples from, and that the trainer
scores the same tokens under the same weights. Both compute in float32: they agree to 1e-4 nats,
and the signals are of 0.1 nats."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from policy import Policy
from rollout import fp8_round

AGREE = 1e-4  # nats


def sample(engine, prompts, n=4, **sampling):
    return engine.sample(
        prompts, n, [100 * i for i in range(len(prompts))], max_tokens=64, **sampling
    )


def gap(model, rollouts, temperature=1.0):
    """|log pi_theta - log pi_b| of every response token, [M]."""
    with torch.no_grad():
        logp = Policy(model, temperature)(rollouts)
    return (logp - rollouts.logp_behavior)[rollouts.mask].abs()


def logits_of(model, rollouts):
    """Full logits at the response tokens [M, V] and the tokens [M], by the plain forward pass."""
    row, t = rollouts.mask.nonzero(as_tuple=True)
    position = rollouts.prompt_length[row] + t
    with torch.no_grad():
        logits = model(rollouts.tokens).logits
    return logits[row, position - 1], rollouts.tokens[row, position]


def moved(model, scale=0.02):
    """The same policy after something like an update: noise on every weight."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator))
    return model


def test_engine_and_trainer_agree_on_the_log_probability_of_every_sampled_token(
    engine, policy, prompts
):
    rollouts = sample(engine, prompts[:16])
    assert rollouts.mask.sum() > 1000
    assert gap(policy, rollouts).max() < AGREE


def test_the_policy_gives_log_softmax_of_the_logits_at_the_sampled_token(engine, policy, prompts):
    rollouts = sample(engine, prompts[:4])
    logits, token = logits_of(policy, rollouts)
    for temperature in 1.0, 0.7:
        expected = (logits / temperature).log_softmax(-1).gather(1, token[:, None])[:, 0]
        for chunk in 7, 1024:  # the size of the chunks changes nothing
            logp = Policy(policy, temperature)(rollouts, chunk).detach()
            assert torch.allclose(logp[rollouts.mask], expected, atol=1e-5)
            assert (logp[~rollouts.mask] == 0).all()


def test_gradient_of_the_policy_is_that_of_log_softmax(engine, policy, prompts):
    rollouts = sample(engine, prompts[:4])
    row, t = rollouts.mask.nonzero(as_tuple=True)
    position = rollouts.prompt_length[row] + t
    weights = list(policy.parameters())
    plain = policy(rollouts.tokens).logits[row, position - 1].log_softmax(-1)
    plain = plain.gather(1, rollouts.tokens[row, position][:, None]).sum()
    chunked = Policy(policy)(rollouts, chunk=50).sum()
    pairs = zip(
        torch.autograd.grad(plain, weights), torch.autograd.grad(chunked, weights), strict=True
    )
    for expected, found in pairs:
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_padding_does_not_change_a_score(engine, policy, prompts):
    rollouts = sample(engine, prompts[:4])
    whole = Policy(policy)(rollouts).detach()
    for i in range(len(rollouts.text)):
        one = rollouts.rows([i])
        assert one.mask.all()  # no padding is left in a row by itself
        alone = Policy(policy)(one).detach()
        assert torch.allclose(alone[0], whole[i, : one.mask.shape[1]], atol=1e-5)


def test_rows_keeps_the_numbers_of_each_row_and_trims_the_padding(engine, policy, prompts):
    rollouts = sample(engine, prompts[:8])
    rollouts.reward = torch.arange(32.0)
    lengths = rollouts.mask.sum(1)
    shortest = lengths.argsort()[:3].tolist()
    part = rollouts.rows(shortest)
    assert part.mask.shape[1] == lengths[shortest].max() < rollouts.mask.shape[1]
    assert part.reward.tolist() == shortest
    assert part.text == [rollouts.text[i] for i in shortest]
    assert (part.logp_behavior == rollouts.logp_behavior[shortest, : part.mask.shape[1]]).all()
    assert not rollouts.rows([]).mask.any()


def test_the_end_of_sequence_token_is_part_of_the_response_and_truncated_ones_lack_it(
    engine, policy, prompts
):
    rollouts = engine.sample(prompts[:16], 1, list(range(16)), max_tokens=30)
    last = rollouts.tokens.gather(1, (rollouts.prompt_length + rollouts.mask.sum(1) - 1)[:, None])
    ended = last[:, 0] == engine.tokenizer.eos_token_id
    assert 0 < ended.sum() < 16
    assert (ended == ~rollouts.truncated).all()
    assert (rollouts.mask.sum(1)[rollouts.truncated] == 30).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_sync_brings_engine_and_trainer_together_and_a_skipped_one_shows(
    tied, build_engine, prompts, tmp_path
):
    tiny = AutoModelForCausalLM.from_pretrained("tiny")
    if not tied:
        config = tiny.config
        config.tie_word_embeddings = False
        weights = {name: w.clone() for name, w in tiny.state_dict().items()}
        tiny = LlamaForCausalLM(config)
        tiny.load_state_dict(weights)
    tiny.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained("tiny").save_pretrained(tmp_path)
    engine = build_engine(tmp_path)
    assert gap(tiny, sample(engine, prompts[:4])).max() < AGREE

    moved(tiny)
    stale = sample(engine, prompts[:4])
    assert stale.weight_version != "1"
    assert gap(tiny, stale).max() > 0.1  # the skipped sync

    engine.load_weights(tiny.state_dict().items(), version="1")
    fresh = sample(engine, prompts[:4])
    assert fresh.weight_version == "1"
    assert gap(tiny, fresh).max() < AGREE


def test_a_sync_forgets_the_prefixes_that_the_old_weights_computed(engine, policy, prompts):
    same = [prompts[0]] * 4  # so the prefix cache has what it needs
    sample(engine, same)
    engine.load_weights(moved(policy).state_dict().items(), version="1")
    assert gap(policy, sample(engine, same)).max() < AGREE


def test_behavior_log_probabilities_are_those_after_the_temperature(engine, policy, prompts):
    for temperature in 0.6, 1.4:
        rollouts = sample(engine, prompts[:8], temperature=temperature)
        assert gap(policy, rollouts, temperature).max() < AGREE
        assert gap(policy, rollouts).max() > 0.1  # against the policy itself: off-policy data


def test_behavior_log_probabilities_are_renormalized_over_the_nucleus_and_the_top_k(
    engine, policy, prompts
):
    rollouts = sample(engine, prompts[:8], top_k=2)
    logits, token = logits_of(policy, rollouts)
    kept = logits >= logits.topk(2).values[:, -1:]
    assert kept.gather(1, token[:, None]).all()
    expected = logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, token[:, None])[:, 0]
    assert torch.allclose(rollouts.logp_behavior[rollouts.mask], expected, atol=AGREE)

    rollouts = sample(engine, prompts[:8], top_p=0.8)
    logits, token = logits_of(policy, rollouts)
    ordered, order = logits.softmax(-1).sort(descending=True)
    outside = ordered.cumsum(-1) - ordered >= 0.8  # the tokens before it already make up 0.8
    kept = torch.ones_like(outside).scatter(1, order, ~outside)
    expected = logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, token[:, None])[:, 0]
    assert torch.allclose(rollouts.logp_behavior[rollouts.mask], expected, atol=AGREE)


def test_a_response_depends_on_its_seed_and_prompt_not_on_the_batch_around_it(
    engine, policy, prompts
):
    together = engine.sample(prompts[:8], 2, [10 * i for i in range(8)], max_tokens=64)
    for i in 0, 5:
        alone = engine.sample([prompts[i]], 2, [10 * i], max_tokens=64)
        assert alone.text == together.text[2 * i : 2 * i + 2]
    assert together.text[0] != together.text[1]  # response 1 has the noise of seed + 1
    child = engine.sample([prompts[0]], 1, [1], max_tokens=64)
    assert child.text == together.text[1:2]


def test_fp8_round_is_a_round_trip_through_float8_with_one_scale_an_output_channel():
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    weight[3] *= 1000  # a large channel does not cost the others their precision
    rounded = fp8_round(weight)
    # e4m3 has 3 bits of mantissa: at most 1/16 relative error for normal numbers of a channel.
    normal = weight.abs() > weight.abs().amax(1, keepdim=True) * 2**-6 / 448 * 2
    error = ((rounded - weight).abs() / weight.abs())[normal]
    assert 0.01 < error.mean() and error.max() <= 1 / 16
    assert torch.equal(fp8_round(rounded), rounded)
    assert torch.equal(fp8_round(torch.zeros(2, 2)), torch.zeros(2, 2))
