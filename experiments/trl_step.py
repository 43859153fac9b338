"""Seconds of a step of TRL's GRPOTrainer on CPU, for experiments/bench.py.

    python experiments/trl_step.py MODEL TASK PROMPTS GROUP_SIZE MAX_TOKENS

It needs `pip install trl==1.16.0`. transformers generates, everything is in float32,
and the rewards are made up. Prints the median over the steps after the first.
"""

import statistics
import sys
import time
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reward import load_task
from support.tasks import task_of

STEPS = 5


class Clock(TrainerCallback):
    """The time at the end of each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *arguments, **keywords) -> None:
        self.times.append(time.perf_counter())


def every_other_is_right(completions: list, **columns) -> list[float]:
    return [float(place % 2) for place in range(len(completions))]


def main(model: str, task: str, prompts: int, group_size: int, max_tokens: int) -> None:
    instruction = task_of(task).instruction
    chats = []
    for problem in load_task(task, "train"):
        content = problem["prompt"]
        if instruction:
            content = f"{instruction}\n\n{content}"
        chats.append({"prompt": [{"role": "user", "content": content}]})
    clock = Clock()
    trainer = GRPOTrainer(
        model=model,
        args=GRPOConfig(
            output_dir="runs/trl",
            per_device_train_batch_size=prompts * group_size,
            num_generations=group_size,
            max_completion_length=max_tokens,
            max_steps=STEPS,
            # As ours: its responses stay as long as they are.
            learning_rate=1e-9,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(chats),
        reward_funcs=every_other_is_right,
        callbacks=[clock],
    )
    trainer.train()
    times = clock.times
    seconds = [times[step] - times[step - 1] for step in range(1, STEPS)]
    print(statistics.median(seconds))


if __name__ == "__main__":
    model, task, *sizes = sys.argv[1:]
    main(model, task, *(int(size) for size in sizes))
