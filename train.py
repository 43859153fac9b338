"""P3O end to end: sample with vLLM, reward, update the policy, sync the weights.

    torchrun train.py                # the embedded default, on two CPU cores
    torchrun --nproc-per-node 8 train.py --config recipes/gsm8k-8gpu.yaml

`main` is the loop; `update` makes one optimizer step. A run writes
out_dir/{config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, model/}.
Steps are numbered from 1: weights "7" are those after step 7, and weights "0" are the
initial ones. A collective is a function that all ranks have to call together.
"""

import inspect
import math
import os
import pkgutil
import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Annotated, Any, Literal, Self

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings of torch's C++
import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch.optim import AdamW

from eval import heldout_accuracy
from loss import (
    LOSSES,
    effective_sample_size,
    group_advantage,
    kl_divergence,
    ratio_sums,
    restrict_to_support,
)
from policy import Policy, build_policy, check_sync, full_weights
from reward import Split, load_split
from rollout import (
    Engine,
    Rollouts,
    init_distributed,
    noise_seed,
    prompts_of_rank,
)
from support.checkpoints import (
    check_out_dir,
    load_checkpoint,
    make_out_dir,
    save_checkpoint,
    save_model,
)
from support.command import (
    Amount,
    Count,
    Dtype,
    Flags,
    NumberOrText,
    PositiveAmount,
    PositiveCount,
    Probability,
    Refused,
    Temperature,
    parse_flags,
    run_script,
)
from support.cpu import default_dtype, default_rollout_dtype
from support.log import Log
from support.tasks import check_model

SYNC_CHECK_EVERY = 5  # steps between two checks of the sync


class Config(Flags):
    """A run. Rounding makes its data off-policy, and so do these fields: temperature
    (another than policy_temperature), top_p, top_k, rollout_quantization, lag, passes
    and minibatches. --config FILE.yaml sets any field."""

    model: str = "tiny"
    """the initial policy: a model folder or a hub name"""
    task: str = "tiny"
    """a name of support/tasks.py, a JSONL file or folder, or a hub dataset"""
    out_dir: str = ""
    """where the run writes; by default runs/ and the time"""

    # The objective
    objective: str = "p3o"
    """p3o, reinforce, grpo, or module:name, as experiments.objectives:dapo"""
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
    """nucleus of the rollouts; below 1 the KL changes: loss.restrict_to_support"""
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
    warmup_steps: Count = 5
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
    """tokens of a forward pass, padding included: sets the memory, not the result"""
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


def find_loss(
    name: str, hyper_parameters: dict[str, float | str]
) -> Callable[..., torch.Tensor]:
    """The objective of this name, a function of the five arguments of loss.p3o.

    The name is one of loss.LOSSES, or module:name. Raises Refused where there is none,
    or where it does not take such a hyper-parameter.
    """
    try:
        loss_fn = LOSSES[name] if name in LOSSES else pkgutil.resolve_name(name)
        # Five stand-ins for its arguments.
        inspect.signature(loss_fn).bind(*range(5), **hyper_parameters)
    except Exception as error:  # a module of the user's may raise any
        raise Refused(
            f"there is no objective {name!r} that takes {hyper_parameters}: {error}; "
            f"give {', '.join(LOSSES)} or module:name, and its own hyper-parameters"
        ) from None
    return partial(loss_fn, **hyper_parameters)


def problems_at(seed: int, problem_count: int, places: Iterable[int]) -> list[int]:
    """Which problem the group at each of these places has, as an index.

    A group's place is its number from the start of the run. Each epoch is shuffled.
    """
    shuffled = {}
    for epoch in {place // problem_count for place in places}:
        shuffled[epoch] = random.Random(f"{seed} {epoch}").sample(
            range(problem_count), problem_count
        )
    return [shuffled[place // problem_count][place % problem_count] for place in places]


def sample_batch(
    engine: Engine, cfg: Config, step: int, train: Split, log: Log
) -> Rollouts:
    """This rank's share of a step's rollout batch, with rewards and advantages.

    The groups of a run are numbered from its start. This number, the group's place,
    decides its problem and its noise. So any number of ranks draws the same samples, up
    to rounding. A collective.
    """
    first = (step - 1) * cfg.prompts_per_step
    places = [first + index for index in prompts_of_rank(cfg.prompts_per_step)]
    indices = problems_at(cfg.seed, len(train.prompts), places)
    # The evaluations have seed 0, so the rollouts begin at 1.
    seeds = [noise_seed(cfg.seed + 1, place, cfg.group_size) for place in places]
    with log.phase("rollout"):
        rollouts = engine.sample(
            [train.prompts[i] for i in indices],
            cfg.group_size,
            seeds,
            max_tokens=cfg.max_response_tokens,
            temperature=cfg.temperature,
            top_p=cfg.top_p,
            top_k=cfg.top_k,
        )
    with log.phase("reward"):
        rollouts.reward = torch.tensor(train.score(indices, rollouts.text))  # [N]
        of_groups = rollouts.reward.view(-1, cfg.group_size)  # [P, G]
        advantage = group_advantage(of_groups, cfg.scale_advantage)  # (3), [P, G]
        # Every token has the advantage of its response.
        rollouts.advantage = advantage.view(-1, 1) * rollouts.mask  # [N, T]
    return rollouts


def micro_batches(
    rollouts: Rollouts, rows: torch.Tensor, max_tokens: int, device: torch.device
) -> list[Rollouts]:
    """These responses in parts of at most max_tokens each, padding included.

    A single response may be longer. How many a part holds is set by the longest prompt
    with its response, on any rank. So every rank has equally many parts, as FSDP needs
    all ranks in every forward pass. Every part has rows, as Config makes sure that
    every rank has equally many prompts in a minibatch. Responses are sorted by length,
    so that little of a part is padding. A collective.
    """
    length = rollouts.prompt_length + rollouts.mask.sum(dim=1)  # [N]
    longest = length[rows].max()
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    rows_of_part = max(1, max_tokens // int(longest))
    by_length = rows[length[rows].argsort(stable=True)]
    return [rollouts.select(part, device) for part in by_length.split(rows_of_part)]


def kl_of_positions(
    top_logp: torch.Tensor, part: Rollouts, cfg: Config
) -> torch.Tensor:
    """KL(pi_theta || pi_b) at each position of a part, with its gradient: [N, T]."""
    both = top_logp, part.top_logp_behavior  # [N, T, K] each
    if cfg.top_p < 1 or cfg.top_k > 0:
        both = restrict_to_support(*both)
    return kl_divergence(*both)


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., torch.Tensor],
    rollouts: Rollouts,
    rows: torch.Tensor,
    cfg: Config,
    step: int,
) -> dict[str, float]:
    """Make one optimizer step on B, these rows of every rank, and return its metrics.

    How B is divided into micro-batches and ranks changes e_B and the gradient by
    rounding alone. Raises FloatingPointError, on all ranks, where e_B or the gradient
    is not finite. A collective.
    """
    device = next(policy.parameters()).device
    parts = micro_batches(rollouts, rows, cfg.micro_batch_tokens, device)
    # First, e_B: it needs rho on all of B before any token has its weight. Only the
    # last part builds a graph, which is used below. The others are computed twice.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for part in parts:
        with torch.set_grad_enabled(part is parts[-1]):
            output = policy(part)
        sums += ratio_sums(output[0] - part.logp_behavior, part.mask)
    dist.all_reduce(sums)
    token_count = sums[0].item()
    e_b = effective_sample_size(sums).item()  # (11)
    if not math.isfinite(e_b):
        raise FloatingPointError(
            f"step {step}: e_B is not finite, as some ratio is not, or is beyond "
            "e^350: lower the learning rate, and see ess_min of the steps before"
        )

    totals = torch.zeros(4, dtype=torch.float64, device=device)
    for part in reversed(parts):
        logp, top_logp = output if part is parts[-1] else policy(part)
        kl = kl_of_positions(top_logp, part, cfg)  # [N, T]
        loss = loss_fn(logp, part.logp_behavior, part.advantage, kl, e_b)  # [N, T]
        share = loss[part.mask].sum() / token_count  # this part's share of the mean
        # FSDP averages the ranks' gradients. We need their sum.
        (share * dist.get_world_size()).backward()

        log_ratio = (logp - part.logp_behavior).detach()  # [N, T]
        is_cut = (log_ratio.exp() > e_b).double()
        of_tokens = torch.stack([loss, kl, is_cut, log_ratio.abs()])  # [4, N, T]
        totals += of_tokens.detach()[:, part.mask].sum(dim=1)
    dist.all_reduce(totals)
    mean_loss, mean_kl, clip_fraction, mismatch_mean = (totals / token_count).tolist()
    grad_norm = apply_gradient(policy, optimizer, cfg, step)
    return {
        "loss": mean_loss,
        "ess": e_b,
        "kl": mean_kl,
        "ratio": sums[1].item() / token_count,
        "clip_fraction": clip_fraction,
        "mismatch_mean": mismatch_mean,
        "grad_norm": grad_norm,
    }


def apply_gradient(
    policy: Policy, optimizer: torch.optim.Optimizer, cfg: Config, step: int
) -> float:
    """Clip the gradient, make the step, and clear the gradient.

    Returns its norm before clipping. Raises FloatingPointError, on all ranks, where
    that is not finite. A collective.
    """
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
    grad_norm = norm.full_tensor().item()
    if not math.isfinite(grad_norm):
        raise FloatingPointError(f"step {step}: the gradient is not finite")
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def load_data(cfg: Config) -> tuple[Any, Split, Split, int]:
    """The model's tokenizer, the problems to train on, and those held out.

    The last value is how many tokens the engine needs: those of the longest prompt and
    max_response_tokens. Raises Refused if there is no such model or task, or if a
    prompt does not fit and may not be dropped, or if none is left.
    """
    tokenizer, context = check_model(cfg.model, cfg.rollout_tp, to_train=True)
    room = context - cfg.max_response_tokens
    if cfg.max_prompt_tokens:
        room = min(room, cfg.max_prompt_tokens)
    load = partial(
        load_split,
        cfg.task,
        tokenizer,
        room=room,
        drop_long=cfg.max_prompt_tokens > 0,
    )
    train, heldout = load("train"), load("heldout", limit=cfg.eval_problems)
    longest = max(len(prompt) for prompt in train.prompts + heldout.prompts)
    return tokenizer, train, heldout, longest + cfg.max_response_tokens


def is_due(every: int, step: int, cfg: Config) -> bool:
    """True at the last step, and every `every` steps if that is not 0."""
    return step == cfg.steps or (every > 0 and step % every == 0)


def build_engines(cfg: Config, max_model_len: int) -> tuple[Engine, Engine]:
    """The engine that samples rollouts, and the one that evaluates.

    One engine does both, unless rollouts are in fp8. Then a second one evaluates, in
    rollout_dtype and without fp8, so that accuracy is that of the policy. vLLM lets
    only one engine of a process sleep, so the second stays awake. It may sample only
    while the first is awake, as vLLM keeps one table of positions for both.
    """
    build = partial(
        Engine,
        cfg.model,
        max_model_len,
        # Random weights, so that check_sync notices what the first sync leaves out.
        load_format="dummy",
        tp=cfg.rollout_tp,
        dtype=cfg.rollout_dtype,
        kv_cache_gb=cfg.kv_cache_gb,
        max_num_seqs=cfg.max_num_seqs,
        verbose=cfg.verbose,
    )
    engine = build(
        quantization=cfg.rollout_quantization,
        top_logprobs=cfg.top_logprobs,
        can_sleep=True,
    )
    evaluator = engine if cfg.rollout_quantization == "none" else build()
    return engine, evaluator


def evaluate_policy(
    evaluator: Engine, policy: Policy, heldout: Split, cfg: Config
) -> dict[str, float]:
    """Held-out accuracy of the policy, sampled and greedy, after its sync.

    A collective.
    """
    if cfg.rollout_quantization != "none":
        # The sync has not reached this second engine.
        evaluator.load_weights(full_weights(policy), version="evaluation")
        check_sync(evaluator, policy, heldout.prompts)
    return heldout_accuracy(
        evaluator, heldout, cfg.policy_temperature, cfg.max_response_tokens
    )


def main() -> None:
    # What the user can get wrong comes first, before anything slow is built.
    cfg = parse_flags(Config)
    check_out_dir(cfg)
    loss_fn = find_loss(cfg.objective, cfg.objective_args)
    tokenizer, train, heldout, longest = load_data(cfg)

    mesh = init_distributed()
    out = make_out_dir(cfg)
    engine, evaluator = build_engines(cfg, longest)
    engine.sleep()  # The policy is built in the memory that this lends out.
    policy = build_policy(
        cfg.model, mesh, cfg.dtype, cfg.policy_temperature, cfg.gradient_checkpointing
    )
    optimizer = AdamW(policy.parameters(), weight_decay=cfg.weight_decay, fused=True)
    done, waiting = load_checkpoint(out, policy, optimizer) if cfg.resume else (0, [])
    queue = deque(Rollouts(**fields) for fields in waiting)  # sampled ahead
    updates = done * cfg.passes * cfg.minibatches  # optimizer steps so far
    log = Log(out, tokenizer, cfg.group_size, done)

    engine.load_weights(full_weights(policy), version=str(done))
    first_distance = check_sync(engine, policy, train.prompts)
    if done == 0:
        log.before(evaluate_policy(evaluator, policy, heldout, cfg))
    for step in range(done + 1, cfg.steps + 1):
        # 1 rollout, 2 reward: sample ahead until `lag` batches wait behind this one. So
        # at lag 4 the batch of step 12 is sampled in step 8, by weights 7.
        while len(queue) <= cfg.lag and step + len(queue) <= cfg.steps:
            queue.append(sample_batch(engine, cfg, step + len(queue), train, log))
        rollouts = queue.popleft()

        # 3 update: rank r of w has the groups r, r + w, ... So the minibatches, which
        # are cut in order, have the same groups on any number of ranks.
        engine.sleep()
        history = []  # of the updates of this step
        rows_of_rank = torch.arange(len(rollouts.text))
        minibatches = rows_of_rank.chunk(cfg.minibatches)
        for rows in minibatches * cfg.passes:  # a tuple, repeated
            updates += 1
            warm_up = min(1.0, updates / max(1, cfg.warmup_steps))
            optimizer.param_groups[0]["lr"] = warm_up * cfg.learning_rate
            with log.phase("update"):
                stats = update(policy, optimizer, loss_fn, rollouts, rows, cfg, step)
            history.append(stats)

        # 4 sync. Every few steps check_sync ends all ranks if engine and policy differ.
        with log.phase("sync"):
            engine.load_weights(full_weights(policy), version=str(step))
        if is_due(SYNC_CHECK_EVERY, step, cfg):
            check_sync(engine, policy, train.prompts, first_distance)

        # 5 evaluate, log, save
        accuracy = {}
        if is_due(cfg.eval_every, step, cfg):
            accuracy = evaluate_policy(evaluator, policy, heldout, cfg)
        log.step(step, rollouts, history, accuracy)
        if cfg.save_every and is_due(cfg.save_every, step, cfg):
            save_checkpoint(out, step, policy, optimizer, queue)
    save_model(policy.model, full_weights(policy), tokenizer, out / "model")
    log.finish()


if __name__ == "__main__":
    run_script(main)
