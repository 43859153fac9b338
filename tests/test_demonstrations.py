"""What experiments/ shows of the objectives: weights, KL estimators, a page."""

import html.parser
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments import kl_estimators, mechanism, objectives_figure, tokens
from experiments.token_weights import COMPARED, ScoredBatch, token_weights
from loss import kl_divergence
from rollout import Rollouts
from support.flags import Refused, parse_flags

ROOT = Path(__file__).parents[1]
# Five tokens of two responses; the last place of the second is padding.
RATIO = torch.tensor([[0.25, 0.5, 2.0], [1.0, 1.5, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
ADVANTAGE = torch.tensor([1.0, -2.0], dtype=torch.float64)
# e_B = (5.25 / 5)^2 / (7.5625 / 5), by (11): the ratios add up to 5.25, their squares
# (1/16 + 1/4 + 4 + 1 + 9/4) to 7.5625.
ESS = 1.05**2 / 1.5125


def batch():
    """The five tokens as a batch: 'a', 'b', 'c' to one prompt, 'd', 'e' to another."""
    rollouts = Rollouts(
        tokens=torch.tensor([[9, 0, 1, 2], [9, 3, 4, 0]]),
        prompt_length=torch.tensor([1, 1]),
        mask=MASK,
        logp_behavior=torch.full((2, 3), -1.0, dtype=torch.float64),
        top_tokens=torch.zeros(2, 3, 0, dtype=torch.long),
        top_logp_behavior=torch.zeros(2, 3, 0),
        truncated=torch.tensor([False, False]),
        text=["abc", "de"],
        weight_version="0",
        reward=torch.tensor([1.0, 0.0]),
        advantage=ADVANTAGE,
    )
    kl = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]])
    return ScoredBatch(rollouts, RATIO.log(), kl)


def weights_of(name):
    """w_t of the five tokens, by row."""
    rollouts = batch().rollouts
    weights = token_weights(
        COMPARED[name], RATIO.log(), rollouts.logp_behavior, ADVANTAGE, MASK
    )
    return weights.tolist()


# Weights


@pytest.mark.parametrize(
    "name, expected",
    [
        # min(rho, e_B) A, with e_B = 0.7289
        ("p3o", [[0.25, 0.5, ESS], [-2 * ESS, -2 * ESS, 0]]),
        # A
        ("reinforce", [[1, 1, 1], [-2, -2, 0]]),
        # rho A, but 0 where rho > 1.2 and A > 0, or rho < 0.8 and A < 0
        ("grpo", [[0.25, 0.5, 0], [-2, -3, 0]]),
        # min(rho, 2) A
        ("tis", [[0.25, 0.5, 2], [-2, -3, 0]]),
    ],
)
def test_the_weight_of_a_token_is_what_its_objective_says(name, expected):
    for row, expected_row in zip(weights_of(name), expected, strict=True):
        assert row == pytest.approx(expected_row)


def test_gspos_weight_is_the_same_for_all_tokens_of_a_response():
    # The mean log rho of the first is log(0.25) / 3: its ratio 0.63 is below 1, and A
    # is above 0, so it is free. 5 tokens in 2 responses of 3 and 2: 0.63 * 5 / (2 * 3).
    first, second = weights_of("gspo")
    assert first == pytest.approx([0.25 ** (1 / 3) * 5 / 6] * 3)
    # 1.5^(1/2) is above 1, but A is below 0: free as well. -2 * 1.22 * 5 / (2 * 2).
    assert second == pytest.approx([-2 * 1.5**0.5 * 5 / 4] * 2 + [0])


def test_the_figure_has_every_objective_that_is_compared():
    drawn = {
        curve.objective
        for curves in objectives_figure.PANELS.values()
        for curve in curves
    }
    assert drawn == {*COMPARED}


def test_the_exact_kls_pull_on_a_token_is_pi_b_times_that_of_the_estimator_is():
    # d KL / d log pi(v) = pi(v) log rho(v) = pi_b(v) * rho log rho: the mean over draws
    # of pi_b is the same.
    log_ratio = objectives_figure.LOG_RATIO
    expected = -log_ratio.exp() * log_ratio
    exact = objectives_figure.weight_of_exact_kl()
    assert torch.allclose(exact, expected)
    assert torch.allclose(objectives_figure.weight_of_estimator("is"), expected)
    k3 = objectives_figure.weight_of_estimator("k3")
    assert torch.allclose(k3, (-log_ratio).exp() - 1)


# Estimators of the KL


@pytest.fixture
def pair():
    """Two pairs of a policy and a noisy copy of it, over 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 64, generator=generator, dtype=torch.float64)
    noise = torch.randn(2, 64, generator=generator, dtype=torch.float64)
    return logits, noise


@pytest.mark.parametrize("kind", kl_estimators.KINDS)
def test_the_strength_is_solved_for_so_that_e_b_is_the_one_that_was_asked(kind, pair):
    logits, noise = pair
    strength = kl_estimators.strength_of(kind, logits, noise, ess=0.6)
    logp_behavior = kl_estimators.behavior(kind, logits, noise, strength)
    ratio = (logits.log_softmax(dim=-1) - logp_behavior).exp()
    # chi^2(pi_theta || pi_b) = E_b[(rho - 1)^2]
    chi_squared = (logp_behavior.exp() * (ratio - 1) ** 2).sum(dim=-1)
    assert (1 / (1 + chi_squared)).tolist() == pytest.approx([0.6, 0.6])


def test_is_has_no_bias_and_k3_and_too_few_tokens_have_one(pair):
    logits, noise = pair
    logp_behavior = kl_estimators.behavior("rounded", logits, noise, torch.ones(2))
    found = kl_estimators.compare(logits, logp_behavior)
    for name in ("is", "top 64"):  # 64 tokens are all
        assert found[name]["value"].tolist() == pytest.approx([1, 1])
        assert found[name]["bias"].tolist() == pytest.approx([0, 0], abs=1e-9)
    assert (found["k3"]["bias"] > 0.1).all()
    # A bound from below, which grows with K, and is no function of the draw.
    for fewer, more in (("top 1", "top 5"), ("top 5", "top 20"), ("top 20", "top 64")):
        assert (found[fewer]["value"] < found[more]["value"]).all()
    assert (found["top 5"]["noise"] == 0).all()


def test_the_noise_is_the_standard_deviation_over_draws(pair):
    # Over 200,000 draws: the root of the mean squared distance of a draw's gradient
    # from their mean. Measured: within 0.5%.
    logits, noise = (x[:1] for x in pair)
    logp_behavior = kl_estimators.behavior("rounded", logits, noise, torch.ones(1))
    generator = torch.Generator().manual_seed(1)
    draws = torch.multinomial(
        logp_behavior[0].exp(), 200_000, replacement=True, generator=generator
    )
    logp = logits.log_softmax(dim=-1)[0]
    log_ratio = logp - logp_behavior[0]
    for name, weight in (
        ("is", log_ratio.exp() * log_ratio),  # d/d log rho of rho log rho - rho + 1
        ("k3", 1 - (-log_ratio).exp()),  # of log rho + 1/rho - 1
    ):
        score = torch.eye(64, dtype=torch.float64)[draws] - logp.exp()
        gradient = weight[draws][:, None] * score  # [draws, 64]
        distance = gradient - gradient.mean(dim=0)
        sampled = distance.square().sum(dim=1).mean().sqrt().item()
        computed = kl_estimators.noise_of(name, logits, logp_behavior).item()
        assert computed == pytest.approx(sampled, rel=0.02)


def test_the_exact_kl_is_the_sum_over_the_vocabulary(pair):
    logits, noise = pair
    logp = logits.log_softmax(dim=-1)
    logp_behavior = kl_estimators.behavior("hotter", logits, noise, torch.ones(2))
    exact = kl_estimators.exact_kl(logits, logp_behavior)
    assert torch.allclose(exact, kl_divergence(logp, logp_behavior), atol=1e-12)


# The mechanism


def test_the_mechanism_counts_what_an_objective_makes_of_far_tokens(group):
    summary = mechanism.summarize(batch())
    assert summary["e_B"] == pytest.approx(ESS)
    assert summary["tokens"] == 5
    assert summary["share above the cap"] == pytest.approx(3 / 5)  # 2, 1, 1.5 > 0.7289
    assert summary["tokens with rho < 0.8"] == 2  # 0.25, 0.5
    assert summary["tokens with rho > 1.25"] == 2  # 2, 1.5
    assert summary["KL, nats a token"] == pytest.approx(0.3)  # (0.1 + ... + 0.5) / 5
    grpo = summary["objectives"]["grpo"]  # weights 0.25, 0.5, 0; -2, -3 at A = 1; -2
    assert grpo[mechanism.OF_RARER] == pytest.approx((0.25 + 0.5) / 2)
    assert grpo[mechanism.OF_LIKELIER] == pytest.approx((0 + 1.5) / 2)
    assert grpo[mechanism.DROPPED] == pytest.approx(1 / 5)
    assert grpo[mechanism.LARGEST] == pytest.approx(3)


def test_the_mechanism_says_none_where_there_are_no_far_tokens(group):
    near = batch()._replace(log_ratio=torch.zeros(2, 3, dtype=torch.float64))
    p3o = mechanism.summarize(near)["objectives"]["p3o"]
    assert p3o[mechanism.OF_RARER] is None
    assert p3o[mechanism.OF_LIKELIER] is None
    json.dumps(p3o, allow_nan=False)  # it is valid JSON


def test_the_mechanisms_batches_are_the_laboratorys():
    stale = mechanism.config_of("lag 16", mechanism.RATE_OF_STALE)
    assert (stale.lag, stale.prompts_per_step) == (mechanism.LAG, 16)
    assert stale.learning_rate == mechanism.RATE_OF_STALE
    assert mechanism.config_of("T = 1.4", 2e-4).temperature == 1.4
    assert mechanism.config_of("fp8", 2e-4).rollout_quantization == "fp8_per_channel"


# The page of tokens


class Letters:
    """A tokenizer whose token 0 is 'a'. Token 1 is what a hostile model would write."""

    def decode(self, ids):
        ids = ids.tolist()
        if isinstance(ids, int):
            ids = [ids]
        return "".join("</script><b>" if i == 1 else chr(ord("a") + i) for i in ids)


class Page(html.parser.HTMLParser):
    """The elements of a page, and the text of its data and title."""

    def __init__(self, text):
        super().__init__()
        self.inside = ""
        self.elements = []
        self.texts = {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.inside = dict(attributes).get("id", tag)
        self.elements.append(self.inside)

    def handle_data(self, text):
        self.texts[self.inside] = self.texts.get(self.inside, "") + text


def test_the_pages_data_are_those_of_the_batch():
    data = tokens.page_data(batch(), Letters(), group_size=1, show=64)
    assert data["ess"] == pytest.approx(ESS)
    assert (data["token_count"], data["response_count"]) == (5, 2)
    assert data["largest_advantage"] == 2
    first, second = data["responses"]
    assert first["prompt"] == "j"  # token 9
    assert (second["reward"], second["advantage"]) == (0, -2)
    assert [token["text"] for token in second["tokens"]] == ["d", "e"]  # no padding
    last = second["tokens"][1]
    assert last["ratio"] == pytest.approx(1.5)
    assert last["kl"] == pytest.approx(0.5)
    by_name = dict(zip(data["objectives"], last["weights"], strict=True))
    assert by_name["p3o"] == pytest.approx(-2 * ESS)
    assert by_name["reinforce"] == pytest.approx(-2)


def test_a_page_of_some_responses_has_the_weights_of_the_whole_batch():
    whole = tokens.page_data(batch(), Letters(), group_size=1, show=64)
    some = tokens.page_data(batch(), Letters(), group_size=1, show=1)
    assert some["responses"] == whole["responses"][:1]
    assert some["ess"] == whole["ess"]


def test_what_the_model_wrote_is_neither_a_tag_nor_the_end_of_the_script():
    data = tokens.page_data(batch(), Letters(), group_size=1, show=64)
    assert data["responses"][0]["tokens"][1]["text"] == "</script><b>"
    clean = Page(tokens.render({"responses": []}, "title"))
    page = Page(tokens.render(data, "</title><b>{{DATA}}"))
    assert page.elements == clean.elements  # no element more
    assert json.loads(page.texts["data"]) == data  # and nothing is lost


def test_the_page_loads_nothing():
    text = tokens.render({"responses": []}, "title")
    assert "default-src 'none'" in text
    assert "src=" not in text and "href" not in text and "url(" not in text
    assert "innerHTML" not in text  # the script sets text alone


def test_a_runs_flags_are_those_of_its_configuration_and_its_next_step(tmp_path):
    config = tokens.train.Config(steps=60, temperature=1.4, prompts_per_step=16)
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump()))
    with pytest.raises(Refused, match="no finished run"):
        tokens.flags_of_run(str(tmp_path))
    (tmp_path / "model").mkdir()
    flags = tokens.flags_of_run(str(tmp_path))
    cfg = parse_flags(tokens.Config, [*flags, "--temperature=1.2"])
    assert cfg.model == str(tmp_path / "model")
    assert (cfg.step, cfg.prompts_per_step) == (61, 16)
    assert cfg.temperature == 1.2  # what is given by hand overrides the run's


@pytest.mark.slow  # a process with an engine of its own
def test_tokens_py_writes_a_page_of_a_batch_from_tiny(tmp_path):
    path = tmp_path / "page.html"
    flags = ["--temperature=1.4", "--prompts_per_step=2", f"--page={path}"]
    subprocess.run(
        [sys.executable, "experiments/tokens.py", *flags], cwd=ROOT, check=True
    )
    data = json.loads(Page(path.read_text()).texts["data"])
    assert len(data["responses"]) == 16
    assert 0.9 < data["ess"] < 0.9999  # e_B sees the temperature
    assert all(
        len(token["weights"]) == len(COMPARED)
        for response in data["responses"]
        for token in response["tokens"]
    )
