"""P3O end to end: sample with vLLM, check the answers, update the policy, sync the
weights.

    torchrun train.py                # the embedded default, on two CPU cores
    torchrun --nproc-per-node 8 train.py --config recipes/gsm8k-8gpu.yaml

`main` is the loop; `accumulate_gradient` computes the gradient of one batch B. A run
writes out_dir/{config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoints/,
model/}. Steps are numbered from 1: weights "7" are those after step 7, and weights "0"
are the initial ones.
"""

import json
import math
import os
import random
import signal
import sys
import time
from collections import defaultdict, deque
from functools import lru_cache
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
from policy import Policy, build_policy, full_weights
from reward import load_task, score
from rollout import Engine, Rollouts, init_distributed, noise_seeds
from support.checkpoints import (
    load_checkpoint,
    save_checkpoint,
    save_model,
    write_whole,
)
from support.checks import check_on_policy, check_run
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
from support.prompts import Split, check_model, encode_problems
from support.tasks import task_of


class Config(Flags):
    """A run. How far its data is off-policy is set by temperature, top_p, top_k,
    rollout_quantization, lag and passes x minibatches; rounding adds a little."""

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

    # The batch
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
    """the engine computes in it"""
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


def problems_of_step(cfg: Config, step: int, problem_count: int) -> list[int]:
    """Which problems are sampled for a step: the next ones of the shuffled epochs."""
    first = (step - 1) * cfg.prompts_per_step
    problems = []
    for place in range(first, first + cfg.prompts_per_step):
        epoch, place_in_epoch = divmod(place, problem_count)
        problems.append(shuffled_epoch(cfg.seed, epoch, problem_count)[place_in_epoch])
    return problems


def weights_that_sample(cfg: Config, step: int) -> int:
    """Which weights sample a step's batch: those of `lag` steps before the newest."""
    return max(0, step - 1 - cfg.lag)


def sample_step(
    engine: Engine, cfg: Config, step: int, prompts: list[list[int]]
) -> Rollouts:
    """1 rollout: this rank's share of the responses for a step. A collective.

    Rank r of w has groups r, r + w, r + 2w, ... of the step. The noise of a group
    depends on its place alone, so the samples are the same for any number of ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = problems_of_step(cfg, step, len(prompts))
    seeds = noise_seeds(
        cfg.seed + 1,  # Evaluations have seed 0.
        first=(step - 1) * cfg.prompts_per_step,
        count=cfg.prompts_per_step,
        spacing=cfg.group_size,
    )
    return engine.sample(
        [prompts[problem] for problem in problems[rank::world]],
        cfg.group_size,
        seeds[rank::world],
        max_tokens=cfg.max_response_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
    )


def add_reward(
    rollouts: Rollouts, cfg: Config, step: int, problems: list[dict[str, str]]
) -> None:
    """2 reward: check each of this rank's responses, and compare it with its group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    answers = []
    for problem in problems_of_step(cfg, step, len(problems))[rank::world]:
        answers += [problems[problem]["answer"]] * cfg.group_size
    reward = score(rollouts.text, answers, task_of(cfg.task).verifier)
    rollouts.reward = torch.tensor(reward)  # [N]
    groups = rollouts.reward.view(-1, cfg.group_size)  # [P, G]
    advantage = group_advantage(groups, cfg.scale_advantage)  # (3), [P, G]
    rollouts.advantage = advantage.flatten()  # [N]


def minibatches_of_pass(cfg: Config, step: int, number: int) -> list[list[int]]:
    """This rank's rows of each minibatch of a pass over the rollouts.

    A minibatch has whole groups, by their place in the step: on any number of ranks it
    is the same set of responses.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    shuffle = random.Random(f"{cfg.seed} {step} {number}")
    groups = shuffle.sample(range(cfg.prompts_per_step), cfg.prompts_per_step)
    minibatches = []
    for minibatch in range(cfg.minibatches):
        rows = []
        for group in groups[minibatch :: cfg.minibatches]:
            if group % world == rank:  # as in sample_step
                first_row = group // world * cfg.group_size
                rows += range(first_row, first_row + cfg.group_size)
        minibatches.append(rows)
    return minibatches


def micro_batches(
    rollouts: Rollouts, rows: list[int], max_tokens: int
) -> list[list[int]]:
    """The rows in micro-batches of at most max_tokens each, padding included.

    A row that is longer than that is alone.
    Every rank gets equally many, some of them perhaps empty: FSDP needs all ranks in
    every forward pass. A collective.
    """
    length = (rollouts.prompt_length + rollouts.mask.sum(dim=1)).tolist()
    micros: list[list[int]] = [[]]
    # By length, to pad little; so each row is the longest so far, and pads the others.
    for row in sorted(rows, key=length.__getitem__):
        if micros[-1] and (len(micros[-1]) + 1) * length[row] > max_tokens:
            micros.append([])
        micros[-1].append(row)
    most = torch.tensor(len(micros))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    for _ in range(int(most) - len(micros)):
        micros.append([])
    return micros


def gather_batch(micros: list[Rollouts], logps: list[torch.Tensor], step: int) -> Batch:
    """The whole batch B, from the micro-batches of all ranks and their log pi_theta.

    A collective. Raises FloatingPointError, on all ranks, with the first response that
    has a ratio or an advantage that cannot be used.
    """
    my_rows = sum(logp.shape[0] for logp in logps)
    my_columns = max(logp.shape[1] for logp in logps)
    shape = torch.tensor([my_rows, my_columns])
    dist.all_reduce(shape, dist.ReduceOp.MAX)  # Every rank is padded to the largest.
    rows, columns = shape.tolist()
    stacks = []
    for micro, logp in zip(micros, logps, strict=True):
        log_ratio = logp.detach() - micro.logp_behavior
        advantage = micro.advantage[:, None].expand_as(logp)
        stack = torch.stack([log_ratio, advantage, micro.mask])  # [3, N_i, T_i]
        stacks.append(pad(stack, (0, columns - logp.shape[1])))
    mine = pad(
        torch.cat(stacks, dim=1), (0, 0, 0, rows - my_rows)
    )  # [3, rows, columns]
    of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mine)
    log_ratio, advantage, mask = torch.cat(of_ranks, dim=1)  # [N, T] each
    mask = mask.bool()

    usable = (log_ratio.abs() <= MAX_LOG_RATIO) & advantage.isfinite() | ~mask
    if not usable.all():
        rank, row = divmod(int(usable.all(dim=1).int().argmin()), rows)
        text = text_of_response(rank, row, micros)
        raise FloatingPointError(
            f"step {step}, rank {rank}: |log rho| is over {MAX_LOG_RATIO} nats, or the "
            f"advantage is not finite, in response {text!r}: look at the sync, the "
            "alignment of tokens, the learning rate"
        )
    return Batch(
        log_ratio=log_ratio,
        advantage=advantage,
        mask=mask,
        ess=effective_sample_size(log_ratio, mask),  # (11)
        token_count=int(mask.sum()),
    )


def text_of_response(rank: int, row: int, micros: list[Rollouts]) -> str:
    """The text of a rank's row of the minibatch, on every rank. A collective."""
    texts = [text for micro in micros for text in micro.text]
    text = [texts[row] if dist.get_rank() == rank else ""]
    dist.broadcast_object_list(text, src=rank)
    return text[0]


def kl_of_positions(
    top_logp: torch.Tensor, micro: Rollouts, cfg: Config
) -> torch.Tensor | None:
    """KL(pi_theta || pi_b) by position, with its gradient: [N, T]; None if K is 0."""
    if top_logp.shape[-1] == 0:
        return None
    top_logp_behavior = micro.top_logp_behavior
    if cfg.top_p < 1 or cfg.top_k > 0:
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
    """Add the objective's gradient on one minibatch to the policy's; returns
    statistics.

    `rows` are this rank's. The batch B of (11) and (12) is the minibatch on all ranks:
    how it is divided into micro-batches and among ranks changes neither e_B nor the
    gradient. A collective. Raises FloatingPointError, on all ranks, where a ratio is
    not finite, and OneRankFailed where a rank's loss is not.
    """
    device = next(policy.parameters()).device
    micros = [
        rollouts.rows(micro_rows, device)
        for micro_rows in micro_batches(rollouts, rows, cfg.micro_batch_tokens)
    ]
    # e_B takes the ratios of the whole batch before any gradient. With several
    # micro-batches that is a pass of its own, one more forward for each; a single one
    # keeps its graph for the loss.
    single = len(micros) == 1
    with torch.set_grad_enabled(single):
        outputs = [policy(micro) for micro in micros]  # [N_i, T_i] and [N_i, T_i, K]
    batch = gather_batch(micros, [logp for logp, _ in outputs], step)

    hyper_parameters = objective.hyper_parameters
    keywords = hyper_parameters | objective.batch_quantities(batch, **hyper_parameters)
    sums: dict[str, float] = defaultdict(float)
    for micro in micros:
        logp, top_logp = outputs[0] if single else policy(micro)
        kl = kl_of_positions(top_logp, micro, cfg)
        if objective.takes_kl:
            keywords["kl"] = kl
        if objective.takes_logp_prox:
            keywords["logp_prox"] = micro.logp_prox
        try:
            loss, stats = objective(
                logp, micro.logp_behavior, micro.advantage, micro.mask, **keywords
            )
        except FloatingPointError as error:
            raise OneRankFailed(f"step {step}: {error}") from error
        # The losses of the ranks add up to (12), but FSDP averages their gradients.
        (loss * dist.get_world_size()).backward()
        for name, value in stats.items():
            sums[name] += float(value)
        if kl is not None:
            sums["kl"] += float(kl.detach()[micro.mask].sum()) / batch.token_count
    totals = torch.tensor(list(sums.values()), dtype=torch.float64)
    dist.all_reduce(totals)
    return ratio_statistics(batch) | dict(zip(sums, totals.tolist(), strict=True))


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


def score_before_update(
    policy: Policy, rollouts: Rollouts, cfg: Config
) -> torch.Tensor:
    """log pi_theta of all responses before the step's first update: [N, T]."""
    device = next(policy.parameters()).device
    logp_prox = torch.zeros_like(rollouts.logp_behavior)
    rows = list(range(len(rollouts.text)))
    for micro_rows in micro_batches(rollouts, rows, cfg.micro_batch_tokens):
        with torch.no_grad():
            logp, _ = policy(rollouts.rows(micro_rows, device))
        logp_prox[micro_rows, : logp.shape[1]] = logp[: len(micro_rows)].cpu()
    return logp_prox


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
    """3 update: all optimizer steps on one rollout batch; the statistics of each.

    Raises FloatingPointError on a number that is not finite. is_first: this process has
    not made a step before, and nothing is lost if the batch is refused.
    """
    if objective.takes_logp_prox:
        rollouts.logp_prox = score_before_update(policy, rollouts, cfg)
    history = []
    for number in range(1, cfg.passes + 1):
        for rows in minibatches_of_pass(cfg, step, number):
            stats = accumulate_gradient(policy, rollouts, rows, objective, cfg, step)
            norm = torch.nn.utils.clip_grad_norm_(
                policy.parameters(), cfg.max_grad_norm
            )
            stats["grad_norm"] = norm.full_tensor().item()
            if not math.isfinite(stats["grad_norm"]):
                raise FloatingPointError(f"step {step}: the gradient is not finite")
            if not history:
                check_on_policy(cfg, stats, step, is_first)
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


def build_engines(cfg: Config, longest: int) -> tuple[Engine, Engine]:
    """The engine that samples rollouts, and the one that evaluates.

    They are the same, but for fp8 rollouts: what is evaluated is the policy, not its
    quantized copy. The second engine never sleeps: vLLM allows one that does.
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
            temperature=temperature,
            max_tokens=cfg.max_response_tokens,
        )
        accuracy[name] = sum(correct) / len(correct)
    return accuracy


def catch_signals() -> list[int]:
    """The signals that ask the run to stop, in a list that grows when they come.

    The step that they interrupt is finished and saved. A second Ctrl-C, two seconds
    later or more, ends the process at once (torchrun itself repeats the first one).
    """
    signals: list[int] = []
    first_at = 0.0

    def remember(number: int, frame: Any) -> None:
        nonlocal first_at
        if signals and time.monotonic() - first_at > 2:
            os._exit(128 + number)
        if not signals:
            first_at = time.monotonic()
        signals.append(number)

    signal.signal(signal.SIGINT, remember)
    signal.signal(signal.SIGTERM, remember)
    return signals


def agreed_signal(signals: list[int]) -> int:
    """The signal that any rank has got, 0 if none has. A collective."""
    signal_number = torch.tensor(max(signals, default=0))
    dist.all_reduce(signal_number, dist.ReduceOp.MAX)
    return int(signal_number)


def main() -> None:
    # What the user can get wrong comes first, before anything slow is built.
    cfg = parse_flags(Config)
    check_run(cfg)
    objective = find_objective(OBJECTIVES, cfg.objective, cfg.objective_args)
    data = load_data(cfg)

    # Setup: the process group, the engine, and, while the engine sleeps, the policy.
    mesh = init_distributed()
    rank = dist.get_rank()
    # The folder's name has rank 0's time, and the problems are those that its verifier
    # could read: a time limit could leave out others on another rank.
    cfg.out_dir = cfg.out_dir or time.strftime(f"runs/%Y%m%d-%H%M%S-{os.getpid()}")
    shared = [cfg.out_dir, data]
    dist.broadcast_object_list(shared)
    cfg.out_dir, data = shared
    out = Path(cfg.out_dir)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "config.json", json.dumps(cfg.model_dump(), indent=1) + "\n")
    engine, evaluator = build_engines(cfg, data.longest)
    engine.sleep()
    policy = build_policy(
        cfg.model,
        mesh,
        dtype=cfg.dtype,
        temperature=cfg.policy_temperature,
        gradient_checkpointing=cfg.gradient_checkpointing,
    )
    optimizer, schedule = build_optimizer(policy, cfg)
    queue: deque[Rollouts] = deque()  # sampled and rewarded, not yet learned from
    done = 0  # steps
    if cfg.resume:
        done = load_checkpoint(out, policy, optimizer, schedule, queue, cfg.group_size)
    log = Log(
        out, data.tokenizer, cfg.group_size, cfg.report_to, cfg.model_dump(), done
    )
    signals = catch_signals()

    def sync(version: str) -> None:
        """The policy's weights into the engine."""
        engine.load_weights(full_weights(policy), version)

    def evaluation() -> dict[str, float]:
        if evaluator is not engine:
            evaluator.load_weights(full_weights(policy), version="evaluation")
        return heldout_accuracy(evaluator, cfg, data.heldout)

    saved = done  # the step of the newest checkpoint

    def save(step: int) -> None:
        nonlocal saved
        saved = step
        save_checkpoint(
            out,
            step,
            policy,
            optimizer,
            schedule,
            queue,
            group_size=cfg.group_size,
            keep=cfg.keep_checkpoints,
        )

    sync(version=str(done))
    probe = SyncProbe(engine, policy, data.train.prompts)
    if not cfg.resume:
        log.begin(evaluation())
    first_step = done + 1
    try:
        for step in range(first_step, cfg.steps + 1):
            # 1 rollout and 2 reward. `lag` batches wait in the queue behind the next
            # one; the first step fills it.
            while len(queue) <= cfg.lag:
                sampled_for = step + len(queue)
                with log.phase("rollout"):
                    rollouts = sample_step(engine, cfg, sampled_for, data.train.prompts)
                with log.phase("reward"):
                    add_reward(rollouts, cfg, sampled_for, data.train.problems)
                queue.append(rollouts)
            engine.sleep()
            # 3 update. The batch stays in the queue until it has been learned from, so
            # that a checkpoint of the step before has it.
            rollouts = queue[0]
            expected = str(weights_that_sample(cfg, step))
            if rollouts.weight_version != expected:
                saved = done  # A checkpoint would only bring this batch back.
                raise Refused(
                    f"step {step}: the batch is of weights {rollouts.weight_version}, "
                    f"not of weights {expected}: was a sync left out?"
                )
            with log.phase("update"):
                history = update(
                    policy,
                    optimizer,
                    schedule,
                    rollouts,
                    objective,
                    cfg,
                    step,
                    is_first=step == first_step,
                )
            queue.popleft()
            done = step
            # 4 sync
            with log.phase("sync"):
                sync(version=str(step))
            # 5 log; now and then evaluate, save, and probe the sync
            is_last = step == cfg.steps
            accuracy = {}
            if is_last or (cfg.eval_every and step % cfg.eval_every == 0):
                accuracy = evaluation()
            if is_last:
                # Before its line of metrics: a run that has its last line is finished.
                save_model(policy, data.tokenizer, out / "model")
            log.step(step, rollouts, history, accuracy)
            if cfg.save_every and (is_last or step % cfg.save_every == 0):
                save(step)
            if step % PROBE_EVERY == 0:
                probe.check(engine, policy, step)
            stopped_by = agreed_signal(signals)
            if stopped_by and not is_last:
                raise Refused(
                    f"stopped by signal {stopped_by} after step {step}: --resume goes "
                    "on"
                )
    except (Refused, FloatingPointError):
        # All ranks are here. The weights are those of step `done`, unless some of the
        # updates of the next step have been made. (last_epoch counts updates.)
        updates = done * cfg.passes * cfg.minibatches
        if schedule.last_epoch == updates and done > saved:
            save(done)
        raise
    if rank == 0:
        log.finish()
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except (Refused, FloatingPointError, OneRankFailed) as error:
        rank = int(os.environ.get("RANK", 0))
        where = f"rank {rank}: " if rank > 0 else ""
        print(f"train.py: {where}{error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:  # before there was a step to finish
        sys.exit(130)
