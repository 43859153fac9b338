#!/usr/bin/env bash
# Tokens that a policy samples, decoded to text and encoded again, need not come back as
# the same tokens, so log-probabilities must be computed on the sampled tokens. One
# would expect a sequence of random tokens to come back almost never: neighbors that
# happen to form a known word would be merged, and partial characters would be replaced.
#
# With a public tokenizer of 131,072 tokens, about one in five sequences of 50 random
# tokens comes back unchanged, and so do 96% of random pairs. Of single tokens, only
# those that are not valid UTF-8 fail: 1.1% of all tokens.
#
# Source: the tokenizer's pattern splits the text before it merges anything. Most tokens
# begin a new piece, because they begin with a space or another kind of character.
#
# If you test whether your trainer keeps the sampled tokens, a few short random answers
# may not reveal that it encodes them again. Count over many answers, or use pairs that
# are known to merge.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q --no-compile tiktoken==0.14.0
"$folder/env/bin/pip" install -q --no-compile --no-deps mistral-common==1.13.1
"$folder/env/bin/python" - <<'PYTHON'
import base64
import json
import random
from importlib.metadata import files, version

import tiktoken

print("tiktoken", version("tiktoken"), " mistral-common", version("mistral-common"))
name = "tekken_240911.json"
path = next(f.locate() for f in files("mistral-common") if f.name == name)
data = json.loads(path.read_text())
config = data["config"]
size = config["default_vocab_size"] - config["default_num_special_tokens"]
ranks = {base64.b64decode(t["token_bytes"]): t["rank"] for t in data["vocab"][:size]}
tokenizer = tiktoken.Encoding(
    name, pat_str=config["pattern"], mergeable_ranks=ranks, special_tokens={}
)


def survives(tokens):
    return tokenizer.encode_ordinary(tokenizer.decode(tokens)) == tokens


share = {1: sum(survives([token]) for token in range(size)) / size}
random.seed(0)
for length in (2, 10, 50):
    sequences = [random.choices(range(size), k=length) for _ in range(3000)]
    share[length] = sum(map(survives, sequences)) / len(sequences)
for length, value in share.items():
    print(f"share of token sequences of length {length} that come back: {value:.3f}")
assert 0.98 < share[1] < 0.995 and 0.93 < share[2] < 0.97, "the shares changed"
assert 0.15 < share[50] < 0.27, "the shares changed"
PYTHON
