"""A line for each step of TRL's GRPOTrainer, for experiments/bench.py.

    python experiments/trl_step.py MODEL FILE PROMPTS GROUP_SIZE MAX_TOKENS STEPS \\
        DTYPE GENERATOR

It needs `pip install trl==1.16.0 accelerate==1.15.0`. FILE is a JSON list of prompts,
which are used in their order, PROMPTS a step. GENERATOR is transformers or vllm, which
then runs in the same process, in DTYPE. The rewards are made up. A line has the mean
length of the step's responses, and the seconds of its rollout and of its sync. When it
is printed the step has ended.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# What vLLM on a CPU reads: GB of its KV cache, and that threads may run on any core.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
import torch
from datasets import Dataset
from transformers import AutoConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation


class TimedTrainer(GRPOTrainer):
    """Knows the seconds of its last rollout, prompts to texts, and of its last sync."""

    rollout_seconds = 0.0
    sync_seconds = 0.0  # stays 0 where transformers generates: it has no copy

    def _generate(self, prompts: list) -> Any:
        self.sync_seconds = 0.0
        start = time.perf_counter()
        generated = super()._generate(prompts)
        # TRL syncs within it.
        self.rollout_seconds = time.perf_counter() - start - self.sync_seconds
        return generated

    def time_syncs(self, sync: Callable[[], None]) -> None:
        """Have TRL's vLLM synced by `sync`, and know how long it takes."""

        def timed() -> None:
            start = time.perf_counter()
            sync()
            self.sync_seconds = time.perf_counter() - start

        self.vllm_generation.sync_weights = timed


class Printer(TrainerCallback):
    """A line at the end of each step, when its logs are there."""

    def __init__(self, trainer: TimedTrainer) -> None:
        self.trainer = trainer

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict | None = None, **more: Any
    ) -> None:
        if logs and "completions/mean_length" in logs:
            tokens = logs["completions/mean_length"]
            rollout, sync = self.trainer.rollout_seconds, self.trainer.sync_seconds
            line = f"tokens {tokens} rollout {rollout} sync {sync}"
            print(f"step {state.global_step} {line}", flush=True)


def reload(trainer: GRPOTrainer, dtype: torch.dtype) -> None:
    """A sync of the weights into TRL's vLLM that works on a CPU: rollout.Engine's.

    TRL 1.16 calls load_weights of vLLM's model. On a CPU vLLM has packed the weights of
    its layers by then and dropped those that load_weights would fill: AttributeError.
    """
    llm = trainer.vllm_generation.llm
    weights = trainer.model.named_parameters(remove_duplicate=False)
    copies = ((name, weight.detach().to(dtype, copy=True)) for name, weight in weights)
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
    llm.reset_prefix_cache()


def every_other_is_right(completions: list, **columns: Any) -> list[float]:
    return [float(place % 2) for place in range(len(completions))]


def chats_of(file: str) -> list[dict]:
    """The prompts as TRL takes them."""
    prompts = json.loads(Path(file).read_text())
    return [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]


def main(
    model: str,
    file: str,
    prompts: int,
    group_size: int,
    max_tokens: int,
    steps: int,
    dtype: str,
    generator: str,
) -> None:
    config = AutoConfig.from_pretrained(model)
    if generator == "vllm":
        # TRL leaves the dtype to vLLM, which would take bfloat16 for float32 weights.
        vllm_generation.LLM = partial(vllm_generation.LLM, dtype=dtype)
    trainer = TimedTrainer(
        model=model,
        args=GRPOConfig(
            output_dir="runs/trl",
            # In one forward pass. TRL never has all logits at once.
            per_device_train_batch_size=prompts * group_size,
            num_generations=group_size,
            max_completion_length=max_tokens,
            max_steps=steps,
            shuffle_dataset=False,
            # As ours: its responses stay as long as they are.
            learning_rate=1e-9,
            use_cpu=not torch.cuda.is_available(),
            # Float32 weights, and products in bfloat16 if that is asked for, as ours.
            model_init_kwargs={"dtype": "float32"},
            bf16=dtype == "bfloat16",
            gradient_checkpointing=False,
            use_vllm=generator == "vllm",
            vllm_mode="colocate",
            vllm_max_model_length=min(512, config.max_position_embeddings),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(chats_of(file)),
        reward_funcs=every_other_is_right,
    )
    trainer.add_callback(Printer(trainer))
    if generator == "vllm":
        sync = trainer.vllm_generation.sync_weights
        if not torch.cuda.is_available():
            sync = partial(reload, trainer, getattr(torch, dtype))
        trainer.time_syncs(sync)
    trainer.train()


if __name__ == "__main__":
    model, file, *sizes, dtype, generator = sys.argv[1:]
    main(model, file, *(int(size) for size in sizes), dtype, generator)
