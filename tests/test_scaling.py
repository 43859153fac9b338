"""The model of scaling: its arithmetic, and the page that has its tables."""

import pytest
import transformers
from conftest import ROOT

from experiments.scaling import ScalingConfig, report, step_on
from support.flags import parse_flags

MODEL = "tests/data/configs/Qwen3-4B-Thinking-2507"


@pytest.fixture(scope="module")
def paper_recipe() -> ScalingConfig:
    flags = ["--config=recipes/deepscaler-8gpu-fp8.yaml", f"--model={MODEL}"]
    return parse_flags(ScalingConfig, flags)


@pytest.fixture(scope="module")
def qwen() -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.from_pretrained(MODEL)


def test_the_page_has_the_tables_that_the_script_prints(paper_recipe):
    assert report(paper_recipe) in (ROOT / "docs/scaling.md").read_text()


def test_an_update_on_one_node_by_hand(paper_recipe, qwen):
    # 18 prompts a rank of 8 responses of 1,024 + 8,192 tokens: 1,327,104 tokens. Of
    # 4.02e9 weights a forward pass takes 8.04e9 operations a token, and attention in 36
    # layers of 4,096 to 4,608 others 4 x 36 x 4,096 x 4,608 = 2.72e9: 1.43e16 for all
    # tokens. Five such passes (e_B, forward, again for checkpointing, two for backward)
    # at 0.4 x 989e12 a second take 180 seconds.
    step = step_on(paper_recipe, qwen, nodes=1)
    forward = 1_327_104 * (2 * 4_022_468_096 + 4 * 36 * 4096 * 4608)
    assert step.update == pytest.approx(5 * forward / (0.4 * 989e12))
    assert step.exposed == 0


def test_the_longest_response_sets_the_rollout_of_many_nodes(paper_recipe, qwen):
    # On 8 nodes a rank has 24 responses. A token's cache has 36 layers x 2 x 8 heads x
    # 128 elements of 2 bytes, 147,456, so 24 GB hold 34 sequences that are half done,
    # with 1,024 + 4,096 tokens: all 24 are decoded at the same time, until the longest
    # has 16,384 tokens. A step reads the weights, of which 3.63e9 of 4.02e9 are in
    # linear layers, a byte each, and the cache of the 24.
    weights = 2 * 4_022_468_096 - 3_633_315_840
    cache = 24 * 5120 * 147_456
    seconds = 16_384 * (weights + cache) / (0.6 * 3.35e12)
    assert step_on(paper_recipe, qwen, nodes=8).rollout == pytest.approx(seconds)
    # On one node it has 144: 34 at the same time are 4.2 rounds. All but the last take
    # the mean response of 8,192 steps.
    steps = (144 / 34 - 1) * 8192 + 16_384
    cache = 34 * 5120 * 147_456
    seconds = steps * (weights + cache) / (0.6 * 3.35e12)
    assert step_on(paper_recipe, qwen, nodes=1).rollout == pytest.approx(seconds)


def test_nothing_crosses_the_network_on_one_node(paper_recipe, qwen):
    assert step_on(paper_recipe, qwen, nodes=1).network_gb == 0
    assert step_on(paper_recipe, qwen, nodes=2).network_gb > 1
