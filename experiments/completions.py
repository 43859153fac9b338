"""What one model says to a few held-out problems, as rows of a Markdown table.

    python experiments/completions.py MODEL --task recipes/sums-and-products [--problems 8]
    python experiments/completions.py MODEL --temperature 0    # greedy

Run it with the model before training and after: the noise is the same, problem by problem.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config import load_model_files, load_prompts
from eval import noise_seeds
from reward import score
from rollout import Engine, init_distributed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--task", default="tiny")
    parser.add_argument("--problems", type=int, default=8)
    parser.add_argument("--max_response_tokens", type=int, default=16)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    args = parser.parse_args()
    tokenizer, context = load_model_files(args.model)
    room = context - args.max_response_tokens
    data = load_prompts(args.task, "heldout", tokenizer, room, limit=args.problems)

    init_distributed()
    engine = Engine(args.model, max(map(len, data.prompts)) + args.max_response_tokens)
    seeds = noise_seeds(0, 0, len(data.prompts), 1)
    sampling = dict(temperature=args.temperature, max_tokens=args.max_response_tokens)
    texts = engine.sample(data.prompts, 1, seeds, **sampling).text
    right = score(texts, [problem["answer"] for problem in data.problems], data.verifier)
    for problem, text, ok in zip(data.problems, texts, right, strict=True):
        print(f"| {problem['prompt']} | {text!r} | {'right' if ok else 'wrong'} |")
    engine.close()


if __name__ == "__main__":
    main()
