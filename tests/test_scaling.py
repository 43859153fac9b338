"""The model of scaling: its arithmetic, and the page that has its table."""

import pytest
from conftest import ROOT

from study.scaling import ScalingConfig, report, step_on
from support.command import parse_flags
from tools.memory import shape_of

FLAGS = [
    f"--config={ROOT}/recipes/deepscaler-8gpu-fp8.yaml",
    f"--model={ROOT}/tests/data/configs/Qwen3-4B-Thinking-2507",
]
# Weights, those of the linear layers, and bytes of a token in the cache: 36 layers x 2
# x 8 heads x 128 elements of 2 bytes.
TOTAL, LINEAR, CACHED = 4_022_468_096, 3_633_315_840, 147_456


@pytest.fixture(scope="module")
def cfg():
    return parse_flags(ScalingConfig, FLAGS)


@pytest.fixture(scope="module")
def shape(cfg):
    return shape_of(cfg.model)


def test_the_page_has_the_table_that_the_script_prints(cfg):
    assert report(cfg) in (ROOT / "recipes/README.md").read_text()


def test_an_update_on_one_node_by_hand(cfg, shape):
    # 18 prompts a GPU, with 8 responses of 1,024 + 8,192 tokens: 1,327,104 tokens. A
    # micro-batch of 34,816 has room for two responses of the greatest length, 17,408:
    # 72 micro-batches. A pass takes 2 operations for each of 4.02e9 weights and token,
    # and attention in 36 layers of 4,096 to 4,608 others 4 x 36 x 4,096 x 4,608. There
    # are a forward pass, again for checkpointing, two for backward, and 71 of 72 for
    # e_B.
    forward = 1_327_104 * (2 * TOTAL + 4 * 36 * 4096 * 4608)
    seconds = (4 + 71 / 72) * forward / (0.32 * 989e12)
    assert step_on(cfg, shape, nodes=1, prompts=144).update == pytest.approx(seconds)


def test_the_longest_response_sets_the_rollout_of_many_nodes(cfg, shape):
    # On 6 nodes a GPU has 24 responses. 24 GB hold 34 sequences that are half done,
    # with 1,024 + 4,096 tokens: all are decoded at the same time, until the longest has
    # 16,384 tokens. A decoding step reads the weights, in fp8, and the cache.
    weights = 2 * TOTAL - LINEAR
    seconds = 16_384 * (weights + 24 * 5120 * CACHED) / (0.6 * 3.35e12)
    step = step_on(cfg, shape, nodes=6, prompts=144)
    assert step.rollout == pytest.approx(seconds)
    # On one node it has 144, which is 4.2 rounds of 34: all but the last take as many
    # steps as the mean response has tokens.
    steps = (144 / 34 - 1) * 8192 + 16_384
    seconds = steps * (weights + 34 * 5120 * CACHED) / (0.6 * 3.35e12)
    step = step_on(cfg, shape, nodes=1, prompts=144)
    assert step.rollout == pytest.approx(seconds)
