"""Trains with TRL's GRPOTrainer and prints a line for each step, for tools/bench.py.

    python tools/trl_step.py JOB

JOB is a JSON file with model, dtype, prompts in the order of their use,
prompts_per_step, group_size, max_tokens, steps, a folder to write to, and the
generator: transformers, or vllm in the same process. Rewards are made up. A line is
printed when its step has ended. It has a JSON object with the mean length of the step's
responses and the seconds of its rollout and of its sync, named as in metrics.jsonl.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

# For vLLM on a CPU: the KV cache in GB, and threads that may run on any core.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
import torch
from datasets import Dataset
from transformers import AutoConfig
from trl import GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

CUDA = torch.cuda.is_available()


class TimedTrainer(GRPOTrainer):
    """Prints the seconds of each rollout (prompts to texts) and of each sync."""

    rollout_seconds = 0.0
    # It stays 0 with transformers, which generates with the policy itself.
    sync_seconds = 0.0

    def _generate(self, prompts: list) -> Any:
        self.sync_seconds = 0.0
        start = time.perf_counter()
        generated = super()._generate(prompts)
        # TRL syncs within _generate.
        self.rollout_seconds = time.perf_counter() - start - self.sync_seconds
        return generated

    def log(self, logs: dict[str, Any], *more: Any) -> None:
        super().log(logs, *more)  # This adds TRL's own metrics to `logs`.
        if "completions/mean_length" in logs:
            row = {
                "response_tokens": logs["completions/mean_length"],
                "rollout_seconds": self.rollout_seconds,
                "sync_seconds": self.sync_seconds,
            }
            print("step", json.dumps(row), flush=True)

    def timed_sync(self, dtype: torch.dtype) -> None:
        """Sync as TRL does, or on a CPU as rollout.Engine does.

        TRL 1.16 calls load_weights of vLLM's model. On a CPU that call has no effect:
        vLLM has packed the weights of its layers, and has dropped the tensors that
        load_weights fills.
        """
        start = time.perf_counter()
        if CUDA:
            vllm_generation.VLLMGeneration.sync_weights(self.vllm_generation)
        else:
            llm = self.vllm_generation.llm
            weights = self.model.named_parameters(remove_duplicate=False)
            copies = (
                (name, weight.detach().to(dtype, copy=True)) for name, weight in weights
            )
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": copies})
            llm.reset_prefix_cache()
        self.sync_seconds = time.perf_counter() - start


def reward_every_other(completions: list, **columns: Any) -> list[float]:
    """Return made-up rewards: 0, 1, 0, 1, ..."""
    return [float(number % 2) for number in range(len(completions))]


def main(job: dict[str, Any]) -> None:
    model, dtype, use_vllm = job["model"], job["dtype"], job["generator"] == "vllm"
    if use_vllm:
        # TRL does not set vLLM's dtype, which would be bfloat16 for float32 weights.
        vllm_generation.LLM = partial(vllm_generation.LLM, dtype=dtype)
    context = AutoConfig.from_pretrained(model).max_position_embeddings
    chats = [
        {"prompt": [{"role": "user", "content": prompt}]} for prompt in job["prompts"]
    ]
    trainer = TimedTrainer(
        model=model,
        args=GRPOConfig(
            output_dir=job["folder"],
            # One forward pass has all responses, but TRL computes logits in parts.
            per_device_train_batch_size=job["prompts_per_step"] * job["group_size"],
            num_generations=job["group_size"],
            max_completion_length=job["max_tokens"],
            max_steps=job["steps"],
            shuffle_dataset=False,
            # As in our run, the rate is so small that responses keep their length.
            learning_rate=1e-9,
            use_cpu=not CUDA,
            # As in our run, weights are in float32 and matrix products in `dtype`.
            model_init_kwargs={"dtype": "float32"},
            bf16=dtype == "bfloat16",
            gradient_checkpointing=False,
            use_vllm=use_vllm,
            vllm_mode="colocate",
            vllm_max_model_length=min(512, context),
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        ),
        train_dataset=Dataset.from_list(chats),
        reward_funcs=reward_every_other,
    )
    if use_vllm:
        sync = partial(trainer.timed_sync, getattr(torch, dtype))
        trainer.vllm_generation.sync_weights = sync
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
