"""The configuration of a training run: its fields, and what does not go together.

Every field is a flag of train.py and a key of --config FILE.yaml. `python train.py
--help` prints them with these sentences.
"""

import os
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from support.command import (
    Amount,
    Count,
    Dtype,
    Flags,
    Folder,
    NumberOrText,
    PositiveAmount,
    PositiveCount,
    Probability,
    Temperature,
)
from support.machine import default_dtype, default_rollout_dtype

# Fields that a resumed run may change, as they do not change what it learns. With a lag
# `steps` does: a run samples nothing that its last step will not use.
MAY_DIFFER = {
    *("out_dir", "eval_every", "save_every", "resume", "verbose"),
    *("environment", "commits"),
    # These set the memory, of which a run may have had too little. They change nothing
    # but rounding.
    *("micro_batch_tokens", "gradient_checkpointing", "rollout_tp"),
    *("kv_cache_gb", "max_num_seqs"),
}


class Config(Flags):
    """A run. Rounding makes its data off-policy, and so do these fields: temperature
    (another than policy_temperature), top_p, top_k, rollout_quantization, lag, passes
    and minibatches. --config FILE.yaml sets any field."""

    model: str = "tiny"
    """the initial policy: a model folder or a hub name"""
    task: str = "tiny"
    """a name of support/tasks.py, a JSONL file or folder, or a hub dataset"""
    out_dir: Folder = ""
    """where the run writes; by default runs/ and the time"""

    # The objective
    objective: str = "p3o"
    """p3o, reinforce, grpo, or module:name, as tools.objectives:dapo"""
    objective_args: dict[str, NumberOrText] = {}
    """a hyper-parameter of it, name=value; may be given several times"""
    scale_advantage: bool = True
    """divide the advantage by its group's standard deviation"""

    # A step learns from a rollout batch of prompts_per_step x group_size responses. It
    # makes passes x minibatches optimizer steps on it. The batch B of (11) and (12) is
    # that of one optimizer step: a minibatch.
    steps: PositiveCount = 60
    """rollout batches to learn from"""
    prompts_per_step: PositiveCount = 32
    """prompts of a rollout batch; a multiple of ranks x minibatches"""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G, the responses to a prompt"""
    passes: PositiveCount = 1
    """how many times to learn from each rollout batch"""
    minibatches: PositiveCount = 2
    """optimizer steps of a pass; the batch B of each is a minibatch"""

    # The rollouts
    temperature: Temperature = 1.0
    """sampling temperature of the rollouts"""
    top_p: Probability = 1.0
    """nucleus of the rollouts; below 1 the KL changes: loss.restrict_to_kept_tokens"""
    top_k: Count = 0
    """sample among the k likeliest tokens only; 0: all. The KL changes as with top_p"""
    top_logprobs: PositiveCount = 20
    """K: the KL is over the K likeliest tokens of pi_b and one bucket of all others"""
    rollout_quantization: Literal["none", "fp8_per_channel"] = "none"
    """how the engine's linear layers compute while it samples rollouts"""
    lag: Count = 0
    """steps between the sampling of a batch and its use; fewer for the first batches"""
    max_prompt_tokens: Count = 0
    """drop longer prompts; 0: every prompt has to fit"""
    max_response_tokens: PositiveCount = 64
    """truncate longer responses"""

    # The update
    policy_temperature: Temperature = 1.0
    """temperature of pi_theta, in training and evaluation"""
    learning_rate: PositiveAmount = 1e-4
    """learning rate of AdamW, constant after the warm-up"""
    warmup_updates: Count = 5
    """optimizer steps over which the learning rate rises to its value"""
    weight_decay: Amount = 0.0
    """weight decay of AdamW"""
    max_grad_norm: PositiveAmount = 1.0
    """clip the gradient to this norm"""

    # The machine
    dtype: Dtype = "auto"
    """the trainer computes in it; auto: bfloat16 on CUDA, else float32"""
    rollout_dtype: Dtype = "auto"
    """the engine computes in it; auto: bfloat16 where that is fast, else float32"""
    micro_batch_tokens: PositiveCount = 16384
    """tokens of a forward pass, padding included: sets the memory, not the result; on a
    CPU fewer, where their activations would take over 2 GB"""
    gradient_checkpointing: bool = False
    """compute activations twice instead of keeping them"""
    rollout_tp: PositiveCount = 1
    """ranks of a node that share an engine (tensor parallelism)"""
    kv_cache_gb: PositiveAmount = 0.25
    """an engine's KV cache on each rank, in GB of 2^30 bytes"""
    max_num_seqs: PositiveCount = 256
    """responses that an engine decodes at the same time"""

    # What is measured and kept
    eval_every: Count = 10
    """evaluate every so many steps; 0: only before and after training"""
    eval_problems: Count = 512
    """how many held-out problems to evaluate on; 0: all"""
    save_every: Count = 0
    """write a checkpoint every so many steps and after the last; 0: none"""
    resume: bool = False
    """go on from the newest checkpoint of out_dir"""
    seed: Count = 0
    """decides the order of the problems and the noise of the rollouts"""
    verbose: bool = False
    """show the messages of vLLM and torch"""

    @model_validator(mode="after")
    def check_and_settle(self) -> Self:
        """Refuse what does not go together, and settle "auto" for this machine."""
        world = int(os.environ.get("WORLD_SIZE", 1))
        if self.prompts_per_step % (world * self.minibatches):
            raise ValueError(
                f"prompts_per_step is {self.prompts_per_step}: give a multiple of "
                f"{world * self.minibatches}, so that each of the {world} ranks has "
                f"equally many prompts in each of the {self.minibatches} minibatches"
            )
        if self.rollout_quantization != "none" and self.rollout_dtype == "float32":
            raise ValueError("rollout_dtype is float32: fp8 rollouts need bfloat16")
        if self.dtype == "auto":
            self.dtype = default_dtype()
        if self.rollout_dtype == "auto":
            self.rollout_dtype = default_rollout_dtype(self.rollout_quantization)
        return self
