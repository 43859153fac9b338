"""What study/ and tools/ show of one batch: weights, estimators, the meter."""

import html.parser
import json
import math

import pytest
import torch

from rollout import Rollouts
from study import kl_estimators, meter, tokens, trust

# Five tokens of two responses; the last place of the second is padding.
RATIO = torch.tensor([[0.25, 0.5, 2.0], [1.0, 1.5, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
# e_B = (5.25 / 5)^2 / (7.5625 / 5), by (11): the ratios add up to 5.25, their squares
# (1/16 + 1/4 + 4 + 1 + 9/4) to 7.5625.
ESS = 1.05**2 / 1.5125


@pytest.fixture
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
        advantage=torch.tensor([[1.0], [-2.0]]) * MASK,
    )
    kl = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.0]])
    return tokens.ScoredBatch(rollouts, RATIO.log(), kl)


# Weights


@pytest.mark.parametrize(
    "name, expected",
    [
        # min(rho, e_B) A, with e_B = 0.7289
        ("p3o", [[0.25, 0.5, ESS], [-2 * ESS, -2 * ESS, 0]]),
        # rho A, but 0 where rho > 1.2 and A > 0, or rho < 0.8 and A < 0
        ("grpo", [[0.25, 0.5, 0], [-2, -3, 0]]),
    ],
)
def test_the_weight_of_a_token_is_what_its_objective_says(name, expected, batch):
    weights = batch.weights()[name]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_the_summary_has_the_tokens_that_an_objective_drops(batch):
    lines = [
        line.strip("| ").split(" | ") for line in tokens.summary(batch).split("\n")
    ]
    (grpo,) = [line for line in lines if line[0] == "grpo"]
    # One of five has no weight; the sizes are 0.25, 0.5, 0, 2 and 3.
    assert grpo == ["grpo", "0.200", "1.150", "3.00"]


# Estimates of the KL


@pytest.fixture
def pair():
    """Two policies over 64 tokens, [2, 64], and noise for their logits."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 2, 64, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", kl_estimators.KINDS)
def test_pi_b_is_as_far_away_as_the_e_b_that_was_asked_for(kind, pair):
    logp_behavior = kl_estimators.behavior_at(kind, *pair, ess=0.6)
    ratio = (pair[0].log_softmax(dim=-1) - logp_behavior).exp()
    # chi^2(pi_theta || pi_b) = E_b[(rho - 1)^2]
    chi_squared = (logp_behavior.exp() * (ratio - 1) ** 2).sum(dim=-1)
    assert (1 / (1 + chi_squared)).tolist() == pytest.approx([0.6, 0.6])


def test_is_has_no_bias_and_k3_and_too_few_tokens_have_one(pair):
    logits = pair[0]
    logp_behavior = kl_estimators.behavior_at("rounded", *pair, ess=0.6)
    # d KL / d logit v = pi(v) (log(pi(v) / pi_b(v)) - KL)
    logp = logits.log_softmax(dim=-1)
    log_ratio = logp - logp_behavior
    kl = (logp.exp() * log_ratio).sum(dim=-1, keepdim=True)
    exact = logp.exp() * (log_ratio - kl)
    biases = {}
    for name, estimator in kl_estimators.SAMPLED.items():
        mean, _ = kl_estimators.sampled_gradient(estimator, logits, logp_behavior)
        biases[name] = (mean - exact).norm() / exact.norm()
    for k in (1, 5, 20, 64):
        bound = kl_estimators.top_gradient(logits, logp_behavior, k)
        biases[k] = (bound - exact).norm() / exact.norm()
    assert biases["is"] < 1e-9 and biases[64] < 1e-9  # 64 tokens are all
    assert biases["k3"] > 0.1
    assert biases[1] > biases[5] > biases[20] > 0.01


def test_the_noise_is_the_standard_deviation_over_draws_by_hand():
    # pi_theta = (1/2, 1/2), pi_b = (1/4, 3/4): rho = 2 and 2/3. The gradient is rho log
    # rho times (1/2, -1/2) for the first token, and times (-1/2, 1/2) for the second.
    # Two values, drawn with 1/4 and 3/4, deviate by sqrt(3)/4 of their distance.
    logits = torch.zeros(1, 2, dtype=torch.float64)
    logp_behavior = torch.tensor([[1 / 4, 3 / 4]], dtype=torch.float64).log()
    estimator = kl_estimators.SAMPLED["is"]
    _, noise = kl_estimators.sampled_gradient(estimator, logits, logp_behavior)
    distance = (2 * math.log(2) + 2 / 3 * math.log(2 / 3)) / math.sqrt(2)
    assert noise.item() == pytest.approx(math.sqrt(3) / 4 * distance)


# The meter


def test_the_meter_gives_the_numbers_of_a_batch_that_can_be_done_by_hand():
    ratio = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])  # 9 is padding
    mask = torch.tensor([[True, True, False], [True, False, False]])
    found = meter.measure(ratio.log(), mask)
    # e_B = mean(1, 2, 3)^2 / mean(1, 4, 9) = 4 / (14/3) = 6/7
    assert found["e_B"] == pytest.approx(6 / 7)
    assert found["rho q50"] == pytest.approx(2)
    assert found["max |log rho|"] == pytest.approx(1.0986123)  # log 3
    # mean of rho log rho - rho + 1 = (0 + 0.386294 + 1.295837) / 3
    assert found["KL, sampled token"] == pytest.approx(0.560710, rel=1e-5)


@pytest.mark.parametrize(
    "pi, pi_b, restrict, right",
    [
        # For each K that the engine lists, in nats: 1/2 log 2 + 1/2 log(2/3), and
        # 1/2 log 2 + 1/4 log(1/2).
        ([8, 4, 2, 1, 1], [4, 8, 2, 1, 1], False, {1: 0.143841, 5: 0.173287}),
        # After top-k 2, on whose tokens pi_theta is (3/4, 1/4): 3/4 log(3/2) + 1/4
        # log(1/2). Of the first alone there is nothing.
        ([12, 4, 2, 1, 1], [1, 1, 0, 0, 0], True, {1: 0.0, 5: 0.130812}),
    ],
)
def test_the_meter_gives_the_kl_by_hand(pi, pi_b, restrict, right):
    logp, logp_behavior = [
        (torch.tensor([each]) / sum(each)).log() for each in (pi, pi_b)
    ]
    found = meter.kl_by_listed_tokens(logp, logp_behavior, restrict)
    assert found == pytest.approx(right, rel=1e-4, abs=1e-6)


# Trust


def test_e_b_is_compared_with_constants_and_with_the_e_b_of_other_batches():
    count = len(trust.CONDITIONS)
    at_levels = [0.1] * len(trust.LEVELS)
    at_levels[trust.LEVELS.index(0.9)] = 0.6
    # At its own e_B each batch has 0.5, at another's 0.3.
    cosine = [
        at_levels + [0.5 if other == own else 0.3 for other in range(count)]
        for own in range(count)
    ]
    found = trust.comparisons([{"cosine": cosine, "ess": [0.9] * count}])
    assert found["at e_B"] == pytest.approx([0.5])
    assert found["less c = 0.9, the best"] == pytest.approx([-0.1])
    assert found["less c = 1.0"] == pytest.approx([0.4])
    assert found["less the e_B of another batch"] == pytest.approx([0.2])


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


def test_the_pages_data_are_those_of_the_batch(batch):
    data = tokens.page_data(batch, Letters(), group_size=1, show=64)
    assert data["ess"] == pytest.approx(ESS)
    assert (data["token_count"], data["response_count"]) == (5, 2)
    first, second = data["responses"]
    assert first["prompt"] == "j"  # token 9
    assert (second["reward"], second["advantage"]) == (0, -2)
    assert [token["text"] for token in second["tokens"]] == ["d", "e"]  # no padding
    last = second["tokens"][1]
    assert (last["ratio"], last["mismatch_kl"]) == pytest.approx((1.5, 0.5))
    by_name = dict(zip(data["objectives"], last["weights"], strict=True))
    assert by_name["p3o"] == pytest.approx(-2 * ESS)
    # A page of some responses has the weights of the whole batch.
    some = tokens.page_data(batch, Letters(), group_size=1, show=1)
    assert some["responses"] == data["responses"][:1]


def test_what_the_model_wrote_is_neither_a_tag_nor_the_end_of_the_script(batch):
    data = tokens.page_data(batch, Letters(), group_size=1, show=64)
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
