"""What a model says to a few held-out problems, as rows of a Markdown table.

    python experiments/completions.py tiny --problems 10
    python experiments/completions.py runs/tiny/model --temperature 0    # greedy

Run it with the model before training and after: the noise of a problem is the same.
"""

import argparse
import os
import sys
from pathlib import Path

# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reward import load_task, score
from rollout import Engine, init_distributed, noise_seeds
from support.prompts import check_model, encode_problems
from support.tasks import task_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model folder or a hub name")
    parser.add_argument("--task", default="tiny", help="as train.py takes it")
    parser.add_argument("--problems", type=int, default=8, help="how many")
    parser.add_argument("--max_response_tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy")
    args = parser.parse_args()
    task = task_of(args.task)
    tokenizer, context = check_model(args.model)
    split = encode_problems(
        load_task(args.task, "heldout")[: args.problems],
        tokenizer,
        instruction=task.instruction,
        room=context - args.max_response_tokens,
        drop_long=False,
        name=f"heldout prompts of {args.task}",
    )

    init_distributed()
    longest = max(len(prompt) for prompt in split.prompts) + args.max_response_tokens
    engine = Engine(args.model, longest)
    rollouts = engine.sample(
        split.prompts,
        1,
        noise_seeds(0, first=0, count=len(split.prompts), spacing=1),
        temperature=args.temperature,
        max_tokens=args.max_response_tokens,
    )
    answers = [problem["answer"] for problem in split.problems]
    rewards = score(rollouts.text, answers, task.verifier)
    for problem, text, reward in zip(
        split.problems, rollouts.text, rewards, strict=True
    ):
        verdict = "right" if reward else "wrong"
        print(f"| {problem['prompt']} | {text!r} | {verdict} |")
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # no such model or task, or prompts without room
        sys.exit(f"completions.py: {error}")
