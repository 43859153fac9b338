"""P3O end to end: sample with vLLM, reward, update the policy, sync the weights.

    torchrun train.py                # the embedded default, on two CPU cores
    torchrun --nproc-per-node 8 train.py --config recipes/gsm8k-8gpu.yaml

`learn` is the loop; `accumulate_gradient` computes the gradient of one batch B. A run
writes out_dir/{config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoints/,
model/}. Steps are numbered from 1: weights "7" are those after step 7, and weights "0"
are the initial ones. A collective is a function that all ranks have to call together.
"""

import json
import math
import os
import random
import sys
import time
from collections import defaultdict, deque
from functools import lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

if "--verbose" not in sys.argv:
    # torch reads it when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
import torch.distributed as dist
from pydantic import Field
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from eval import evaluate
from loss import (
    KL_ESTIMATORS,
    MAX_LOG_RATIO,
    OBJECTIVES,
    Batch,
    Objective,
    effective_sample_size,
    group_advantage,
    kl_divergence,
    restrict_to_support,
)
from policy import (
    SHARED_TOKENS,
    Policy,
    build_policy,
    full_weights,
    sequence_of_response,
)
from reward import load_task, score
from rollout import (
    Engine,
    Rollouts,
    init_distributed,
    noise_seeds,
    prompts_of_rank,
)
from support.checkpoints import (
    NotSaved,
    load_checkpoint,
    save_checkpoint,
    save_model,
    write_whole,
)
from support.checks import (
    check_on_policy,
    check_out_dir,
    check_run,
    claim_folder,
    samples_fully,
)
from support.flags import (
    Amount,
    Count,
    Flags,
    NamedValues,
    OneRankFailed,
    PositiveAmount,
    PositiveCount,
    Probability,
    Refused,
    Temperature,
    find_objective,
    parse_flags,
)
from support.log import Log
from support.probe import PROBE_EVERY, SyncProbe
from support.prompts import Split, check_model, check_trainable, encode_problems
from support.ranks import catch_signals, run_script, say, watch_ranks
from support.tasks import task_of


class Config(Flags):
    """A run. How far its data is off-policy is set by temperature (against
    policy_temperature), top_p, top_k, rollout_quantization, lag, and passes x
    minibatches; rounding adds a little."""

    model: str = "tiny"
    """the initial policy: a model folder or a hub name"""
    task: str = "tiny"
    """a name of support/tasks.py, a JSONL file or folder, or a hub dataset"""
    out_dir: str = ""
    """where the run writes; by default runs/ and the time"""

    # The objective
    objective: str = "p3o"
    """p3o, reinforce, grpo, or module:name, as experiments.objectives:dapo"""
    objective_args: NamedValues = {}
    """its hyper-parameters: name=value ..."""
    scale_advantage: bool = True
    """divide the advantage by its group's standard deviation"""

    # A step samples one rollout batch of prompts_per_step x group_size responses, and
    # makes passes x minibatches optimizer steps on it. The batch B of (11) and (12) is
    # that of one optimizer step: a minibatch.
    steps: PositiveCount = 60
    """rollout batches to learn from"""
    prompts_per_step: PositiveCount = 32
    """prompts of a rollout batch, over all ranks"""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G, the responses to a prompt"""
    passes: PositiveCount = 1
    """how often a rollout batch is gone through"""
    minibatches: PositiveCount = 2
    """optimizer steps of a pass; the batch B of each is a minibatch"""

    # The rollouts
    temperature: Temperature = 1.0
    """of the rollouts; another than policy_temperature is off-policy"""
    top_p: Probability = 1.0
    """of the rollouts; below 1 the KL is over the support: loss.restrict_to_support"""
    top_k: Count = 0
    """of the rollouts, likewise; 0: all tokens"""
    top_logprobs: Count = 20
    """K: the KL is over the K likeliest tokens of pi_b; 0: from the sampled token"""
    rollout_quantization: Literal["none", "fp8_per_channel"] = "none"
    """of the engine's linear layers, weights and activations"""
    lag: Count = 0
    """steps between the sampling of a batch and its use"""
    max_prompt_tokens: Count = 0
    """drop longer prompts; 0: every prompt has to fit"""
    max_response_tokens: PositiveCount = 64
    """truncate longer responses"""

    # The update
    policy_temperature: Temperature = 1.0
    """of pi_theta, in training and evaluation"""
    learning_rate: PositiveAmount = 2e-4
    """of AdamW, constant after the warm-up"""
    warmup_steps: Count = 5
    """optimizer steps of linear warm-up"""
    weight_decay: Amount = 0.0
    """of AdamW"""
    max_grad_norm: PositiveAmount = 1.0
    """clip the gradient to this norm"""

    # The machine
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """the trainer computes in it; auto: bfloat16 on CUDA, else float32"""
    rollout_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """the engine computes in it; on CUDA float32 is partly TF32 beside bfloat16"""
    micro_batch_tokens: PositiveCount = 16384
    """of one forward pass, padding included: it sets the memory, not the result"""
    gradient_checkpointing: bool = False
    """trade a second forward pass for the memory of activations"""
    rollout_tp: PositiveCount = 1
    """ranks of a node that share an engine (tensor parallelism)"""
    kv_cache_gb: PositiveAmount = 0.25
    """an engine's KV cache on each rank, in GB of 2^30 bytes"""
    max_num_seqs: PositiveCount = 256
    """responses that an engine decodes at the same time"""

    # What is measured and kept
    eval_every: Count = 10
    """steps between evaluations, beside those before and after; 0: no others"""
    eval_problems: Count = 512
    """held-out problems to evaluate on; 0: all"""
    save_every: Count = 0
    """steps between checkpoints; 0: none"""
    keep_checkpoints: PositiveCount = 2
    """how many of the newest checkpoints stay"""
    resume: bool = False
    """go on from the newest checkpoint of out_dir"""
    report_to: Literal["none", "wandb", "tensorboard"] = "none"
    """besides metrics.jsonl"""
    seed: Count = 0
    """of the order of the problems and of the rollouts' noise"""
    verbose: bool = False
    """show the messages of vLLM and torch"""


@lru_cache(maxsize=2)
def shuffled_epoch(seed: int, epoch: int, problem_count: int) -> list[int]:
    """The order of the problems in an epoch."""
    return random.Random(f"{seed} {epoch}").sample(range(problem_count), problem_count)


def problem_numbers(cfg: Config, step: int, problem_count: int) -> list[int]:
    """Which problems are sampled for a step: the next ones of the shuffled epochs."""
    first = (step - 1) * cfg.prompts_per_step
    numbers = []
    for place in range(first, first + cfg.prompts_per_step):
        epoch, place_in_epoch = divmod(place, problem_count)
        numbers.append(shuffled_epoch(cfg.seed, epoch, problem_count)[place_in_epoch])
    return numbers


def weights_that_sample(cfg: Config, step: int) -> int:
    """Which weights sample a step's batch: those of `lag` steps before the newest.

    Step 7 updates weights 6. At lag 4 its batch is sampled by weights 2.
    """
    return max(0, step - 1 - cfg.lag)


def sample_step(
    engine: Engine, cfg: Config, step: int, prompts: list[list[int]]
) -> Rollouts:
    """Phase 1, rollout: this rank's share of the responses for a step. A collective.

    The noise of a group depends on its place in the run alone, so it is the same for
    any number of ranks, and the samples are, to rounding.
    """
    numbers = problem_numbers(cfg, step, len(prompts))
    seeds = noise_seeds(
        cfg.seed + 1,  # Seed 0 is that of the evaluations (heldout_accuracy).
        first=(step - 1) * cfg.prompts_per_step,
        count=cfg.prompts_per_step,
        spacing=cfg.group_size,
    )
    groups = prompts_of_rank(cfg.prompts_per_step)
    return engine.sample(
        [prompts[numbers[group]] for group in groups],
        cfg.group_size,
        [seeds[group] for group in groups],
        max_tokens=cfg.max_response_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
    )


def add_reward(
    rollouts: Rollouts, cfg: Config, step: int, problems: list[dict[str, str]]
) -> None:
    """Phase 2, reward: check this rank's responses, compare each with its group."""
    numbers = problem_numbers(cfg, step, len(problems))
    answers = []
    for group in prompts_of_rank(cfg.prompts_per_step):
        answers += [problems[numbers[group]]["answer"]] * cfg.group_size
    reward = score(rollouts.text, answers, task_of(cfg.task).verifier)
    rollouts.reward = torch.tensor(reward)  # [N]
    groups = rollouts.reward.view(-1, cfg.group_size)  # [P, G]
    advantage = group_advantage(groups, cfg.scale_advantage)  # (3), [P, G]
    rollouts.advantage = advantage.flatten()  # [N]


def rows_of_minibatches(cfg: Config, step: int, pass_number: int) -> list[list[int]]:
    """This rank's rows of each minibatch of a pass over the rollouts.

    A minibatch has whole groups, by their place in the step: on any number of ranks it
    is the same set of responses.
    """
    shuffle = random.Random(f"{cfg.seed} {step} {pass_number}")
    groups = shuffle.sample(range(cfg.prompts_per_step), cfg.prompts_per_step)
    my_groups = prompts_of_rank(cfg.prompts_per_step)
    minibatches = []
    for minibatch in range(cfg.minibatches):
        rows = []
        for group in groups[minibatch :: cfg.minibatches]:
            if group in my_groups:
                first_row = my_groups.index(group) * cfg.group_size
                rows += range(first_row, first_row + cfg.group_size)
        minibatches.append(rows)
    return minibatches


def rows_of_micro_batches(
    rollouts: Rollouts, rows: list[int], max_tokens: int, sharing: int = 1
) -> list[list[int]]:
    """The rows in micro-batches of at most max_tokens each, padding included.

    Rows that share a sequence of the policy (Policy.sharing) stay together. A sequence
    that is longer than max_tokens is alone. Every rank gets equally many micro-batches,
    some of them perhaps empty: FSDP needs all ranks in every forward pass. A
    collective.
    """
    sequence_of_row = sequence_of_response(rollouts, sharing).tolist()
    response_length = rollouts.mask.sum(dim=1).tolist()
    rows_of_sequence: dict[int, list[int]] = defaultdict(list)
    for row in rows:
        rows_of_sequence[sequence_of_row[row]].append(row)
    length = {}  # of a sequence, tokens
    for sequence, its_rows in rows_of_sequence.items():
        length[sequence] = int(rollouts.prompt_length[its_rows[0]])
        length[sequence] += sum(response_length[row] for row in its_rows)

    micro_batches = []
    newest: list[int] = []
    # By length, to pad little; so each sequence is the longest so far, and pads the
    # others.
    for sequence in sorted(rows_of_sequence, key=length.__getitem__):
        if newest and (len(newest) + 1) * length[sequence] > max_tokens:
            micro_batches.append(newest)
            newest = []
        newest.append(sequence)
    micro_batches.append(newest)
    most = torch.tensor(len(micro_batches))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    while len(micro_batches) < most:
        micro_batches.append([])
    return [
        [row for sequence in micro_batch for row in rows_of_sequence[sequence]]
        for micro_batch in micro_batches
    ]


def gather_batch(
    micro_batches: list[Rollouts], logps: list[torch.Tensor], step: int
) -> Batch:
    """The whole batch B, from the micro-batches of all ranks and their log pi_theta.

    A collective. Raises FloatingPointError, on all ranks, with the first response that
    has a ratio or an advantage that cannot be used.
    """
    my_rows = sum(logp.shape[0] for logp in logps)
    my_columns = max(logp.shape[1] for logp in logps)
    shape = torch.tensor([my_rows, my_columns])
    # Every rank is padded to the largest one.
    dist.all_reduce(shape, dist.ReduceOp.MAX)
    rows, columns = shape.tolist()
    stacks = []
    for micro_batch, logp in zip(micro_batches, logps, strict=True):
        log_ratio = logp.detach() - micro_batch.logp_behavior
        advantage = micro_batch.advantage[:, None].expand_as(logp)
        stack = torch.stack([log_ratio, advantage, micro_batch.mask])  # [3, N_i, T_i]
        stacks.append(pad(stack, (0, columns - logp.shape[1])))
    mine = torch.cat(stacks, dim=1)  # [3, my_rows, columns]
    mine = pad(mine, (0, 0, 0, rows - my_rows))  # [3, rows, columns]
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    log_ratio, advantage, mask = torch.cat(of_ranks, dim=1)  # [N, T] each
    mask = mask.bool()

    is_usable = (log_ratio.abs() <= MAX_LOG_RATIO) & advantage.isfinite()
    is_usable |= ~mask
    if not is_usable.all():
        first = int(is_usable.all(dim=1).int().argmin())
        rank, row = divmod(first, rows)
        text = text_of_response(rank, row, micro_batches)
        raise FloatingPointError(
            f"step {step}, rank {rank}: |log rho| is over {MAX_LOG_RATIO} nats, or the "
            f"advantage is not finite, in response {text!r}: look at the sync, the "
            "alignment of tokens, the learning rate, and how far temperature and "
            "policy_temperature are apart"
        )
    return Batch(
        log_ratio=log_ratio,
        advantage=advantage,
        mask=mask,
        ess=effective_sample_size(log_ratio, mask),  # (11)
        token_count=int(mask.sum()),
    )


def text_of_response(rank: int, row: int, micro_batches: list[Rollouts]) -> str:
    """The text of a rank's row of the minibatch, on every rank. A collective."""
    texts = [text for micro_batch in micro_batches for text in micro_batch.text]
    text = [texts[row] if dist.get_rank() == rank else ""]
    dist.broadcast_object_list(text, src=rank)
    return text[0]


def kl_of_positions(
    top_logp: torch.Tensor, micro_batch: Rollouts, cfg: Config
) -> torch.Tensor | None:
    """KL(pi_theta || pi_b) by position, with its gradient: [N, T]; None if K is 0."""
    if top_logp.shape[-1] == 0:
        return None
    top_logp_behavior = micro_batch.top_logp_behavior
    if not samples_fully(cfg):
        top_logp, top_logp_behavior = restrict_to_support(top_logp, top_logp_behavior)
    return kl_divergence(top_logp, top_logp_behavior)


def accumulate_gradient(
    policy: Policy,
    rollouts: Rollouts,
    rows: list[int],
    objective: Objective,
    cfg: Config,
    step: int,
) -> dict[str, float]:
    """Add the gradient on one minibatch to the policy's; returns its statistics.

    `rows` are this rank's. The batch B of (11) and (12) is the minibatch on all ranks:
    how it is divided into micro-batches and among ranks changes neither e_B nor the
    gradient. A collective. Raises FloatingPointError, on all ranks, where |log rho| is
    over MAX_LOG_RATIO or an advantage is not finite. Raises OneRankFailed where a
    rank's loss is not finite, or cannot be computed.
    """
    device = next(policy.parameters()).device
    micro_batches = [
        rollouts.select(rows_of_one, device)
        for rows_of_one in rows_of_micro_batches(
            rollouts, rows, cfg.micro_batch_tokens, policy.sharing
        )
    ]
    # e_B needs the ratios of the whole batch before there is any gradient. With several
    # micro-batches that takes one more forward pass for each, about a third more
    # computation. A single one keeps its graph, and needs no second pass.
    is_single = len(micro_batches) == 1
    logps = []
    with torch.set_grad_enabled(is_single):
        for micro_batch in micro_batches:
            first_output = policy(micro_batch)
            logps.append(first_output[0])
    batch = gather_batch(micro_batches, logps, step)

    # What the loss has to know of the whole batch: for P3O e_B and the token count.
    hyper_parameters = objective.hyper_parameters
    of_batch = objective.batch_quantities(batch, **hyper_parameters)
    keywords = {**hyper_parameters, **of_batch}
    sums: dict[str, float] = defaultdict(float)
    for micro_batch in micro_batches:
        output = first_output if is_single else policy(micro_batch)
        logp, top_logp = output  # [N_i, T_i] and [N_i, T_i, K]
        with torch.set_grad_enabled(objective.takes_kl):
            kl = kl_of_positions(top_logp, micro_batch, cfg)
        if objective.takes_kl:
            keywords["kl"] = kl
        if objective.takes_logp_prox:
            keywords["logp_prox"] = micro_batch.logp_prox
        try:
            loss, stats = objective.loss(
                logp,
                micro_batch.logp_behavior,
                micro_batch.advantage,
                micro_batch.mask,
                **keywords,
            )
        except FloatingPointError as error:
            raise OneRankFailed(
                f"step {step}: {error}; responses are counted from 0 in a micro-batch, "
                f"and the first of this one is {micro_batch.text[0]!r}"
            ) from error
        # The losses of the ranks add up to (12), but FSDP averages their gradients.
        (loss * dist.get_world_size()).backward()
        for name, value in stats.items():
            sums[name] += float(value)
        if kl is not None:
            total_kl = float(kl.detach()[micro_batch.mask].sum())
            sums["kl"] += total_kl / batch.token_count
    totals = torch.tensor(list(sums.values()), dtype=torch.float64)
    dist.all_reduce(totals)
    statistics = ratio_statistics(batch)
    # With K > 0 this replaces the KL's estimate from the sampled tokens.
    statistics.update(zip(sums, totals.tolist(), strict=True))
    return statistics


def ratio_statistics(batch: Batch) -> dict[str, float]:
    """e_B, and what the ratios of the whole batch look like."""
    log_ratio = batch.log_ratio[batch.mask].double().sort().values  # [|B|]
    last = batch.token_count - 1
    low, middle, high = log_ratio[[last // 100, last // 2, last - last // 100]]
    # A single token can decide over e_B. Here the outer 1% at each end are drawn in.
    central = log_ratio.clamp(low, high)[None]  # [1, |B|]
    central_ess = effective_sample_size(central, torch.ones_like(central).bool())
    return {
        "ess": batch.ess.item(),
        "ess_central": central_ess.item(),
        "ratio": log_ratio.exp().mean().item(),
        "ratio_central": central.exp().mean().item(),
        "ratio_q1": low.exp().item(),
        "ratio_q50": middle.exp().item(),
        "ratio_q99": high.exp().item(),
        "mismatch_mean": log_ratio.abs().mean().item(),
        "mismatch_max": log_ratio.abs().max().item(),
        # From the sampled tokens; accumulate_gradient has it from K tokens where K > 0.
        "kl": KL_ESTIMATORS["is"](log_ratio).mean().item(),
    }


def compute_logp_prox(policy: Policy, rollouts: Rollouts, cfg: Config) -> torch.Tensor:
    """log pi_theta of all responses before the step's first update: [N, T]."""
    device = next(policy.parameters()).device
    logp_prox = torch.zeros_like(rollouts.logp_behavior)
    rows = list(range(len(rollouts.text)))
    for rows_of_one in rows_of_micro_batches(
        rollouts, rows, cfg.micro_batch_tokens, policy.sharing
    ):
        with torch.no_grad():
            logp, _ = policy(rollouts.select(rows_of_one, device))
        # For no rows there is a response of padding, which has no place here.
        logp_prox[rows_of_one, : logp.shape[1]] = logp[: len(rows_of_one)].cpu()
    # A pass without gradient leaves the root gathered, with weights that an optimizer
    # step would make old.
    policy.reshard()
    return logp_prox


def furthest_response(policy: Policy, rollouts: Rollouts, cfg: Config) -> str:
    """The text of the response with the largest |log rho| of all. A collective."""
    log_ratio = compute_logp_prox(policy, rollouts, cfg) - rollouts.logp_behavior
    distance = (log_ratio.abs() * rollouts.mask).amax(dim=1)  # [N]
    mine = int(distance.argmax())
    of_ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (float(distance[mine]), rollouts.text[mine]))
    _, text = max(of_ranks)
    return text


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    rollouts: Rollouts,
    objective: Objective,
    cfg: Config,
    step: int,
    is_first: bool,
) -> list[dict[str, float]]:
    """Phase 3, update: all optimizer steps on a rollout batch; statistics of each.

    Raises FloatingPointError and OneRankFailed as accumulate_gradient does,
    FloatingPointError also where the gradient is not finite, and Refused where a batch
    should be on-policy and is not (check_on_policy). is_first: this process has not
    made a step before, and nothing is lost if the batch is refused.
    """
    if objective.takes_logp_prox:
        rollouts.logp_prox = compute_logp_prox(policy, rollouts, cfg)
    history = []
    for pass_number in range(1, cfg.passes + 1):
        for rows in rows_of_minibatches(cfg, step, pass_number):
            stats = accumulate_gradient(policy, rollouts, rows, objective, cfg, step)
            norm = torch.nn.utils.clip_grad_norm_(
                policy.parameters(), cfg.max_grad_norm
            )
            stats["grad_norm"] = norm.full_tensor().item()
            if not math.isfinite(stats["grad_norm"]):
                raise FloatingPointError(f"step {step}: the gradient is not finite")
            if not history:
                furthest = partial(furthest_response, policy, rollouts, cfg)
                check_on_policy(cfg, stats, step, is_first, furthest)
            stats["learning_rate"] = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append(stats)
    return history


class Data(NamedTuple):
    """The task as prompts of the model."""

    tokenizer: PreTrainedTokenizerBase
    train: Split
    heldout: Split
    longest: int  # tokens of the longest prompt with a response of full length


def load_data(cfg: Config) -> Data:
    """The problems to train on and those held out. Raises Refused where none are."""
    try:
        tokenizer, context = check_model(cfg.model, cfg.rollout_tp)
        check_trainable(cfg.model)
        splits = {}
        for split, limit in (("train", 0), ("heldout", cfg.eval_problems)):
            splits[split] = encode_problems(
                load_task(cfg.task, split)[: limit or None],
                tokenizer,
                instruction=task_of(cfg.task).instruction,
                room=cfg.max_prompt_tokens or context - cfg.max_response_tokens,
                drop_long=cfg.max_prompt_tokens > 0,
                name=f"{split} prompts of {cfg.task}",
            )
    except ValueError as error:
        raise Refused(str(error)) from error
    prompts = splits["train"].prompts + splits["heldout"].prompts
    longest = max(len(prompt) for prompt in prompts) + cfg.max_response_tokens
    if longest > context:
        raise Refused(
            f"prompt and response need {longest} tokens, but {cfg.model} has room for "
            f"{context}: lower max_prompt_tokens or max_response_tokens"
        )
    return Data(tokenizer, splits["train"], splits["heldout"], longest)


def sharing_of(cfg: Config, longest: int) -> int:
    """How many responses share their prompt's sequence: a whole group, or one.

    A group does if its responses of full length fit with their prompt in SHARED_TOKENS,
    and in a micro-batch. `longest` is the longest prompt with one response, in tokens.
    """
    longest_group = longest + (cfg.group_size - 1) * cfg.max_response_tokens
    is_short = longest_group <= min(SHARED_TOKENS, cfg.micro_batch_tokens)
    return cfg.group_size if is_short else 1


def build_engines(cfg: Config, longest: int) -> tuple[Engine, Engine]:
    """The engine that samples rollouts, and the one that evaluates.

    They are the same, but for fp8 rollouts: what is evaluated is the policy, in
    rollout_dtype, and not its quantized copy. vLLM allows one engine that sleeps in a
    process, so the second one never does.
    """
    options: dict[str, Any] = {
        "tp": cfg.rollout_tp,
        "dtype": cfg.rollout_dtype,
        "kv_cache_gb": cfg.kv_cache_gb,
        "max_num_seqs": cfg.max_num_seqs,
        "verbose": cfg.verbose,
    }
    engine = Engine(
        cfg.model,
        longest,
        quantization=cfg.rollout_quantization,
        top_logprobs=cfg.top_logprobs,
        can_sleep=True,
        **options,
    )
    if cfg.rollout_quantization == "none":
        return engine, engine
    return engine, Engine(cfg.model, longest, **options)


def build_optimizer(
    policy: Policy, cfg: Config
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW, and a learning rate that is constant after a linear warm-up."""
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        cfg.learning_rate,
        weight_decay=cfg.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda updates: min(1.0, (updates + 1) / max(1, cfg.warmup_steps))
    )
    return optimizer, schedule


def heldout_accuracy(
    evaluator: Engine, cfg: Config, heldout: Split
) -> dict[str, float]:
    """Sampled and greedy accuracy of the engine's weights on the held-out problems.

    Sampled accuracy rises whenever a policy grows more certain. Greedy accuracy beside
    it tells whether it has learned.
    """
    temperatures = {"heldout_pass@1": cfg.policy_temperature, "heldout_greedy": 0.0}
    accuracy = {}
    for name, temperature in temperatures.items():
        correct = evaluate(
            evaluator,
            heldout.problems,
            heldout.prompts,
            task_of(cfg.task).verifier,
            seed=0,
            temperature=temperature,
            max_tokens=cfg.max_response_tokens,
        )
        accuracy[name] = sum(correct) / len(correct)
    return accuracy


def agreed_signal(signals: list[int]) -> int:
    """The signal that any rank has got, 0 if none has. A collective."""
    signal_number = torch.tensor(max(signals, default=0))
    dist.all_reduce(signal_number, dist.ReduceOp.MAX)
    return int(signal_number)


class Run:
    """What a run has on its way: weights in trainer and engines, batches that wait.

    Every method is a collective.
    """

    def __init__(
        self, cfg: Config, data: Data, out: Path, mesh: dist.DeviceMesh
    ) -> None:
        self.cfg = cfg
        self.data = data
        self.out = out
        self.engine, self.evaluator = build_engines(cfg, data.longest)
        # The policy is built while the engine sleeps.
        self.engine.sleep()
        self.policy = build_policy(
            cfg.model,
            mesh,
            dtype=cfg.dtype,
            temperature=cfg.policy_temperature,
            gradient_checkpointing=cfg.gradient_checkpointing,
            sharing=sharing_of(cfg, data.longest),
        )
        self.optimizer, self.schedule = build_optimizer(self.policy, cfg)
        # Rollout batches that were sampled and rewarded, and not yet learned from.
        self.queue: deque[Rollouts] = deque()
        self.done = 0  # steps
        if cfg.resume:
            self.done = load_checkpoint(
                out,
                self.policy,
                self.optimizer,
                self.schedule,
                self.queue,
                group_size=cfg.group_size,
                rollouts_type=Rollouts,
            )
        self.saved = self.done  # the step of the newest checkpoint
        self.first_step = self.done + 1
        self.signals = catch_signals()

    def fill_queue(self, step: int, log: Log) -> None:
        """Phases 1 and 2: sample and reward until `lag` batches wait behind the next.

        The first step fills the queue. No batch is sampled that no step will use.
        """
        last = min(step + self.cfg.lag, self.cfg.steps)
        for sampled_for in range(step + len(self.queue), last + 1):
            self.stop_if_asked()
            with log.phase("rollout"):
                prompts = self.data.train.prompts
                rollouts = sample_step(self.engine, self.cfg, sampled_for, prompts)
            self.check_version(rollouts, sampled_for)
            with log.phase("reward"):
                add_reward(rollouts, self.cfg, sampled_for, self.data.train.problems)
            self.queue.append(rollouts)

    def check_version(self, rollouts: Rollouts, step: int) -> None:
        """Raises Refused if a step's batch is not of the weights that it should be."""
        # A run that goes on has no older weights than those it began with.
        expected = max(weights_that_sample(self.cfg, step), self.first_step - 1)
        versions: list = [None] * dist.get_world_size()
        dist.all_gather_object(versions, rollouts.weight_version)
        if set(versions) != {str(expected)}:
            raise Refused(
                f"step {step}: its batch was sampled by weights "
                f"{' and '.join(sorted(set(versions)))}, not by weights {expected}: "
                "was a sync left out?"
            )

    def sync(self) -> None:
        """Phase 4, sync: the policy's weights into the engine."""
        self.engine.load_weights(full_weights(self.policy), str(self.done))

    def evaluate(self) -> dict[str, float]:
        """Held-out accuracy of the policy, whatever samples the rollouts.

        After a sync, which wakes the first engine: vLLM's engines of a process share
        some buffers, and those of the second one are in the memory of the first.
        """
        if self.evaluator is not self.engine:
            weights = full_weights(self.policy)
            self.evaluator.load_weights(weights, version="evaluation")
        return heldout_accuracy(self.evaluator, self.cfg, self.data.heldout)

    def save(self) -> None:
        """Write a checkpoint. Raises NotSaved where it cannot be written."""
        save_checkpoint(
            self.out,
            self.done,
            self.policy,
            self.optimizer,
            self.schedule,
            self.queue,
            group_size=self.cfg.group_size,
            keep=self.cfg.keep_checkpoints,
        )
        self.saved = self.done

    def save_before_the_end(self) -> None:
        """Save the weights of the last step if they are there, and not saved yet."""
        updates = self.done * self.cfg.passes * self.cfg.minibatches
        updates_made = self.schedule.last_epoch  # It counts the optimizer steps.
        is_between_steps = updates_made == updates
        if self.done == self.saved or not is_between_steps:
            return
        try:
            self.save()
        except NotSaved as error:  # What ends the run is said after it.
            say(str(error))

    def stop_if_asked(self) -> None:
        """Raises Refused, with the last step saved, if any rank got a signal to stop.

        Between two steps. Raises NotSaved where the step cannot be saved.
        """
        signal_number = agreed_signal(self.signals)
        if signal_number == 0:
            return
        stopped = f"stopped by signal {signal_number} after step {self.done}"
        if self.done == 0:
            raise Refused(f"{stopped}: nothing is lost")
        if self.done > self.saved:
            try:
                self.save()
            except NotSaved as error:
                raise NotSaved(f"{stopped}: {error}") from error
        raise Refused(f"{stopped}: --resume goes on")


def learn(run: Run, objective: Objective, log: Log) -> None:
    """The loop. Raises Refused and FloatingPointError on all ranks at once."""
    cfg = run.cfg
    run.sync()
    probe = SyncProbe(run.engine, run.policy, run.data.train.prompts)
    if not cfg.resume:
        log.evaluation(0, run.evaluate())
    elif run.done == cfg.steps:
        # An error kept it from its last line, after the last update.
        save_model(run.policy, run.data.tokenizer, run.out / "model")
        log.evaluation(run.done, run.evaluate())
    for step in range(run.first_step, cfg.steps + 1):
        # 1 rollout, 2 reward
        run.fill_queue(step, log)
        with log.phase("sync"):
            run.engine.sleep()

        # 3 update. The batch stays in the queue until it has been learned from, so that
        # a checkpoint of the step before has it.
        rollouts = run.queue[0]
        with log.phase("update"):
            history = update(
                run.policy,
                run.optimizer,
                run.schedule,
                rollouts,
                objective,
                cfg,
                step,
                is_first=step == run.first_step,
            )
        run.queue.popleft()
        run.done = step

        # 4 sync
        with log.phase("sync"):
            run.sync()

        # 5 log; now and then evaluate, save, and probe the sync
        is_last = step == cfg.steps
        accuracy = {}
        if is_last or (cfg.eval_every and step % cfg.eval_every == 0):
            accuracy = run.evaluate()
        if is_last:
            # Before its line of metrics: a run that has its last line is finished.
            save_model(run.policy, run.data.tokenizer, run.out / "model")
        log.step(step, rollouts, history, accuracy)
        if cfg.save_every and (is_last or step % cfg.save_every == 0):
            run.save()
        if step % PROBE_EVERY == 0:
            probe.check(run.engine, run.policy, step)
        if not is_last:
            run.stop_if_asked()


def main() -> None:
    # What the user can get wrong comes first, before anything slow is built.
    cfg = parse_flags(Config)
    objective = find_objective(OBJECTIVES, cfg.objective, cfg.objective_args)
    check_run(cfg, objective, KL_ESTIMATORS)
    data = load_data(cfg)

    mesh = init_distributed()
    # The folder's name has rank 0's time, and the problems are those that its verifier
    # could read: a time limit could leave out others on another rank.
    cfg.out_dir = cfg.out_dir or time.strftime(f"runs/%Y%m%d-%H%M%S-{os.getpid()}")
    shared = [cfg.out_dir, data]
    dist.broadcast_object_list(shared)
    cfg.out_dir, data = shared
    out = Path(cfg.out_dir)
    config = cfg.model_dump()

    with claim_folder(out, partial(check_out_dir, cfg)):
        if dist.get_rank() == 0:
            write_whole(out / "config.json", json.dumps(config, indent=1) + "\n")
        run = Run(cfg, data, out, mesh)
        log = Log(out, data.tokenizer, cfg.group_size, cfg.report_to, config, run.done)
        with watch_ranks():
            try:
                learn(run, objective, log)
            except NotSaved:
                raise
            except Exception as error:
                # These two come on all ranks at once. After another error only a rank
                # that is alone knows that all are here.
                all_are_here = isinstance(error, (Refused, FloatingPointError))
                if all_are_here or dist.get_world_size() == 1:
                    run.save_before_the_end()
                raise
    if dist.get_rank() == 0:
        log.finish()
    run.engine.close()


if __name__ == "__main__":
    try:
        sys.exit(run_script(main))
    except KeyboardInterrupt:  # before there was a step to finish
        sys.exit(130)
