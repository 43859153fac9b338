"""The policy computes each distinct beginning of its sequences once."""

import pytest
import torch
from config_fields import build as build_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from policy import build_policy, distinct_tokens
from rollout import Rollouts

# Two prompts begin with the instruction 1, 2, 3. Prompt 1, 2, 3, 4 has three responses,
# which begin with 7, and prompt 1, 2, 3, 5, 6 has two equal ones. In the second row,
# the last token is that of the row above, after another one. Token 0 is in the third
# row, where the second row is padding.
PROMPT_LENGTHS = [4, 4, 4, 5, 5]
ROWS = [
    [1, 2, 3, 4, 7, 8, 9, 7],
    [1, 2, 3, 4, 7, 9, 9],
    [1, 2, 3, 4, 7, 9, 9, 0, 5],
    *[[1, 2, 3, 5, 6, 4, 2]] * 2,
]
# The tokens that no row above has after the same ones.
PICTURE = ["########", ".....##", ".......##", "...####", "......."]
POSITIONS = [
    (row, column)
    for row, picture in enumerate(PICTURE)
    for column, sign in enumerate(picture)
    if sign == "#"
]


def small_batch() -> Rollouts:
    rows = [torch.tensor(row) for row in ROWS]
    prompt_length = torch.tensor(PROMPT_LENGTHS)
    length = torch.tensor([len(row) for row in ROWS]) - prompt_length
    mask = torch.arange(5) < length[:, None]
    return Rollouts(
        tokens=pad_sequence(rows, batch_first=True, padding_value=-1),
        prompt_length=prompt_length,
        mask=mask,
        logp_behavior=torch.zeros(5, 5),
        top_tokens=torch.arange(3).expand(5, 5, 3),
        top_logp_behavior=torch.zeros(5, 5, 3),
        truncated=torch.zeros(5).bool(),
        text=[""] * 5,
        weight_version="0",
    )


def test_a_token_is_computed_once_for_all_neighbors_that_begin_with_the_same_tokens():
    tokens = small_batch().tokens
    index, computed = distinct_tokens(tokens)
    assert list(zip(*(axis.tolist() for axis in computed), strict=True)) == POSITIONS
    is_token = tokens >= 0
    assert torch.equal(tokens[computed][index][is_token], tokens[is_token])
    # The third row has the prompt and 7 of the first row, 9, 9 of the second, and two.
    assert index[2].tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11]
    assert index[4, :7].tolist() == index[3, :7].tolist() == [0, 1, 2, 12, 13, 14, 15]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_the_log_probabilities_and_the_gradient_are_those_of_computing_all_rows(
    gradient_checkpointing, group, tmp_path
):
    # The second of the two layers sees no further back than two tokens.
    layers = ["full_attention", "sliding_attention"]
    build_model("gemma3_text", {"sliding_window": 2, "layer_types": layers}, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    policy = build_policy(
        str(tmp_path), group, gradient_checkpointing=gradient_checkpointing
    )
    widths = []
    policy.model.base_model.layers[1].mlp.register_forward_pre_hook(
        lambda _, inputs: widths.append(inputs[0].shape)
    )
    rollouts = small_batch()
    row, column = rollouts.mask.nonzero(as_tuple=True)
    position = rollouts.prompt_length[row] + column
    logits = model(rollouts.tokens.clamp(0)).logits[row, position - 1]
    tokens = rollouts.tokens[row, position, None]
    listed = torch.cat([tokens, rollouts.top_tokens[row, column]], dim=1)
    expected = logits.log_softmax(dim=-1).gather(1, listed)
    logp, top_logp = policy(rollouts)
    found = torch.cat([logp[..., None], top_logp], dim=-1)[rollouts.mask]
    weights = torch.arange(found.numel()).view_as(found) / found.numel()
    for each in found, expected:
        (each * weights).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(policy.parameters(), model.parameters(), strict=True):
        gradient = ours.grad.full_tensor()
        torch.testing.assert_close(gradient, theirs.grad, rtol=1e-4, atol=1e-5)
    # 16 tokens are computed instead of 5 rows of 9, with checkpointing twice.
    assert widths == [(1, len(POSITIONS), 64)] * (1 + gradient_checkpointing)
