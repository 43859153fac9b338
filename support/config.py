"""The fields of a training run and of an evaluation, and the rules between them.

Every field is a flag of train.py or eval.py and a key of --config FILE.yaml. The text
below a field describes it in --help. Importing this file does not import torch, so
that --help and the refusal of a wrong flag take no time.
"""

import os
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from support.command import Flags, Refused

# Fields that a resumed run may change because they do not affect what it learns.
# `steps` has a rule of its own (see check_out_dir): with a lag, a run samples no
# batches in its last steps, but a longer run would.
NEUTRAL_FIELDS = {
    "out_dir",
    "eval_every",
    "save_every",
    "resume",
    "verbose",
    "commits",
    # These set how much memory a run takes. They affect results only by rounding,
    # except with the objectives that need all of B at once (tools/objectives.py).
    "micro_batch_tokens",
    "gradient_checkpointing",
    "rollout_tp",
    "kv_cache_gb",
    "max_num_seqs",
}
# Fields that may also change at a resume from a checkpoint, so that a run that has
# diverged can continue.
ADJUSTABLE_FIELDS = {"learning_rate", "warmup_updates"}

# A folder, in which ~ is the home folder, or the name of a model or task.
Folder = Annotated[str, AfterValidator(os.path.expanduser)]
# vLLM refuses a temperature above 2, and replaces one below 0.01 by 0.01.
Temperature = Annotated[float, Field(ge=0.01, le=2)]
# A number if the text can be read as one, else the text.
NumberOrText = Annotated[float | str, Field(union_mode="left_to_right")]
EngineDtype = Literal["auto", "float32", "bfloat16", "float16"]


class SharedConfig(Flags):
    """The fields that a training run and an evaluation have in common."""

    model: Folder = "tiny"
    """a model folder, the out_dir of a run, or owner/name[@revision] on the hub"""
    verifier: str = ""
    """replace the task's verifier: exact, gsm8k, math, or module:name, a function of
    your own (recipes/README.md)"""
    out_dir: Folder = ""
    """the folder to write to; by default a new one in runs/, named after the time"""
    max_response_tokens: PositiveInt = 64
    """truncate responses after this many tokens; 64 is too few for most tasks"""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """sample from the most likely tokens that together have this probability; below 1,
    the KL of a training run changes: see loss.restrict_to_kept_tokens"""
    seed: NonNegativeInt = 0
    """determines the sampling noise and, in training, the order of the problems"""
    rollout_tp: PositiveInt = 1
    """how many ranks of a node share an engine (tensor parallelism)"""
    kv_cache_gb: PositiveFloat = 0.25
    """size of an engine's KV cache on each rank, in GB of 2^30 bytes"""
    max_num_seqs: PositiveInt = 256
    """the most responses that an engine decodes at once"""
    verbose: bool = False
    """show the messages of vLLM and torch"""


class Config(SharedConfig):
    """Train a policy with P3O or another objective. The rollouts are off-policy through
    rounding and through any of these fields: temperature (if it differs from
    policy_temperature), top_p, top_k, rollout_dtype, rollout_quantization, lag, passes
    and minibatches. --config FILE.yaml sets any field."""

    task: Folder = "tiny"
    """a task named in support/tasks.py, a JSONL file or folder, or a hub dataset"""

    # The objective
    objective: str = "p3o"
    """p3o, reinforce, grpo, or module:name, such as tools.objectives:dapo"""
    objective_args: dict[str, NumberOrText] = {}
    """a hyper-parameter of the objective, name=value, where the value is a number or a
    text; repeat the flag for each; added to those of the last --config that has any"""
    scale_advantage: bool = True
    """divide the advantage by the standard deviation of its group"""

    # A step learns from a rollout batch of prompts_per_step x group_size responses. It
    # makes passes x minibatches optimizer steps on it. The batch B of loss.py is one
    # minibatch, from which one optimizer step is made.
    steps: PositiveInt = 60
    """how many rollout batches to learn from"""
    prompts_per_step: PositiveInt = 32
    """prompts in a rollout batch; a multiple of ranks x minibatches"""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G, the number of responses to a prompt"""
    passes: PositiveInt = 1
    """how many times to learn from each rollout batch"""
    minibatches: PositiveInt = 2
    """optimizer steps in a pass; the batch B of each is one minibatch"""

    # The rollouts
    temperature: Temperature = 1.0
    """sampling temperature of the rollouts"""
    top_k: NonNegativeInt = 0
    """sample from the k most likely tokens; 0: all; like top_p, this changes the KL"""
    top_logprobs: PositiveInt = 20
    """K: the KL is over the K most likely tokens of pi_b and a bucket of all others"""
    rollout_quantization: Literal["none", "fp8_per_channel"] = "none"
    """how the engine's linear layers compute while it samples rollouts; none: in
    rollout_dtype; fp8 is slow on a CPU without instructions for bfloat16"""
    lag: NonNegativeInt = 0
    """steps between the sampling of a batch and its use; fewer for the first batches"""
    max_prompt_tokens: NonNegativeInt = 0
    """drop prompts with more tokens than this; 0: refuse a prompt that does not fit"""

    # The update
    policy_temperature: Temperature = 1.0
    """temperature of pi_theta, in training and evaluation"""
    learning_rate: PositiveFloat = 1e-4
    """learning rate of AdamW, constant after the warm-up"""
    warmup_updates: NonNegativeInt = 5
    """optimizer steps over which the learning rate rises to its value"""
    weight_decay: NonNegativeFloat = 0.0
    """weight decay of AdamW"""
    max_grad_norm: PositiveFloat = 1.0
    """clip the gradient to this norm"""

    # The machine
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """the dtype in which the trainer computes; auto: bfloat16 on a GPU that has it
    (compute capability 8.0 or higher), else float32"""
    rollout_dtype: EngineDtype = "auto"
    """the dtype in which the engine computes; auto: bfloat16 if the machine is fast at
    it or rollouts are in fp8, else float16 on a GPU and float32 on a CPU; fp8 needs
    bfloat16 or float16; float16 is closer to float32, but weights and activations above
    65504 overflow; bfloat16 is slow on a CPU without instructions for it"""
    micro_batch_tokens: PositiveInt = 16384
    """the most tokens in a forward pass, including padding; if one sequence is
    longer, all responses are run one by one; affects memory, and P3O's results only by
    rounding; lowered on a CPU if the activations would take over 4 GB in float32"""
    gradient_checkpointing: bool = False
    """compute activations twice instead of keeping them"""

    # What is measured and saved
    eval_every: NonNegativeInt = 10
    """evaluate every N steps; 0: only before and after training"""
    eval_problems: NonNegativeInt = 512
    """evaluate on the first N held-out problems; 0: all"""
    save_every: NonNegativeInt = 0
    """write a checkpoint every N steps and after the last one; 0: never"""
    resume: bool = False
    """continue from the newest checkpoint in out_dir; start from step 1 if out_dir is
    free, or if its run saves checkpoints but was stopped before the first one"""

    @model_validator(mode="after")
    def check_and_settle(self) -> Self:
        """Refuse fields that contradict each other; replace "auto" by a dtype."""
        world = int(os.environ.get("WORLD_SIZE", 1))
        if self.prompts_per_step % (world * self.minibatches):
            raise Refused(
                f"prompts_per_step is {self.prompts_per_step}: give a multiple of "
                f"{world * self.minibatches}, so that each of the {world} ranks has "
                f"equally many prompts in each of the {self.minibatches} minibatches"
            )
        # Imported here, because it imports torch, which takes seconds.
        from support.machine import default_dtype, has_fast_bfloat16

        if self.dtype == "auto":
            self.dtype = default_dtype("float32")
        if self.rollout_dtype == "auto":
            # vLLM does not offer fp8 together with float32.
            is_bfloat16 = self.rollout_quantization != "none" or has_fast_bfloat16()
            self.rollout_dtype = "bfloat16" if is_bfloat16 else default_dtype("float16")
        return self


class EvalConfig(SharedConfig):
    """Evaluate a model: pass@k on one or several tasks. --config FILE.yaml sets any of
    the fields below; recipes are for train.py."""

    task: list[Folder] = ["tiny"]
    """names, folders, files or datasets, separated by commas: gsm8k,math (in a YAML
    file a list: [gsm8k, math])"""
    split: Literal["train", "heldout"] = "heldout"
    """which problems of each task"""
    samples: PositiveInt = 1
    """n, the number of responses to a problem"""
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    """sampling temperature; 0: greedy; vLLM raises values below 0.01 to 0.01"""
    limit: NonNegativeInt = 0
    """evaluate only the first N problems of each task; 0: all"""
    drop_long: bool = False
    """drop prompts that are too long to leave room for a response"""
    dtype: EngineDtype = "auto"
    """the dtype in which the engine computes; auto: float32 on a CPU, and on a GPU
    bfloat16 or, if the GPU lacks bfloat16, float16"""

    @model_validator(mode="after")
    def check_and_settle(self) -> Self:
        """Refuse fields that contradict each other; replace "auto" by a dtype."""
        if self.samples > 1 and self.temperature == 0:
            raise Refused("at temperature 0 all samples are equal: give --samples 1")
        if self.dtype == "auto":
            from support.machine import default_dtype  # see Config

            self.dtype = default_dtype("float16")
        return self
