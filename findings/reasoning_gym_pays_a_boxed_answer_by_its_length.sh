#!/usr/bin/env bash
# One would expect a data set's scorer either to accept a correct answer inside \boxed{}
# or dollar signs, which most models that were trained on mathematics write, or to
# reject it, in the same way for every problem.
#
# The common scorer of reasoning-gym does neither. If the gold answer is only a part of
# the answer, the reward is the length of the gold answer over that of the answer, in
# characters. So "\boxed{156}" earns 0.3, and the same wrapping around a sentence earns
# 0.8. In three quarters of the data sets tried here a box earns a share. The others give
# it next to nothing, and none of them gives it 1.
#
# Source: ProceduralDataset.score_answer in reasoning_gym/dataset.py.
#
# If you train on these data sets, remove the wrapping before you call score_answer.
# Otherwise problems with long answers pay more than problems with short answers, and
# the policy is rewarded for dropping the box and the full stop.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile reasoning-gym==0.1.25
"$folder/env/bin/python" -W ignore - <<'PYTHON'
from importlib.metadata import version

import reasoning_gym

NAMES = """acre aiw base_conversion basic_arithmetic binary_alternation caesar_cipher
    chain_sum complex_arithmetic count_bits count_primes decimal_arithmetic dice gcd
    isomorphic_strings lcm leg_counting letter_counting number_sequence products
    polynomial_multiplication rotate_matrix simple_equations simple_geometry
    simple_integration spell_backward syllogism word_sequence_reversal zebra_puzzles"""
WRAPPINGS = {"gold": "%s", "$gold$": "$%s$", "boxed": "\\boxed{%s}", "gold.": "%s."}

print("reasoning-gym", version("reasoning-gym"))
print("mean score of the gold answer, by how it is written:", *WRAPPINGS)
full = dict.fromkeys(WRAPPINGS, 0)
partial = 0
for name in NAMES.split():
    data = reasoning_gym.create_dataset(name, size=10, seed=1)
    means = {}
    for label, wrapping in WRAPPINGS.items():
        scores = [data.score_answer(wrapping % row["answer"], row) for row in data]
        means[label] = sum(scores) / len(scores)
        full[label] += min(scores) == 1
    partial += 0.05 < means["boxed"] < 0.95
    print(f"{name:27}", *(f"{mean:.2f}" for mean in means.values()))
count = len(NAMES.split())
print(f"data sets of {count} that give every such answer 1:", full)
print(f"data sets of {count} that give a boxed answer something in between:", partial)
assert full["gold"] == count, "the gold answers no longer score 1"
assert full["boxed"] <= 2 and partial >= count / 3, "wrapped answers score differently"
PYTHON
