"""P3O end to end: sample with vLLM, check the answers, update the policy, sync the
weights.

    torchrun train.py                               # the embedded default, on two CPU
    cores torchrun --nproc-per-node 8 train.py --config recipes/gsm8k-8gpu.yaml
    --out_dir runs/8gpu

`main` is the loop, `accumulate_gradient` computes the gradient of one batch B. A run
writes out_dir/{config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoints/,
model/}. Steps are numbered from 1: weights "7" are those after step 7, weights "0" the
initial ones.
"""

import json
import math
import os
import random
import signal
import sys
import time
from collections import defaultdict, deque
from pathlib import Path
from typing import Annotated, Literal

if "--verbose" not in sys.argv:
    # torch reads it when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import torch
import torch.distributed as dist
from pydantic import Field
from torch.nn.functional import pad

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
    check_resume,
    load_checkpoint,
    save_checkpoint,
    save_model,
    write_whole,
)
from support.flags import (
    Amount,
    Count,
    Flags,
    NamedValues,
    PositiveAmount,
    PositiveCount,
    Probability,
    Refused,
    Temperature,
    find_objective,
    parse_flags,
)
from support.log import Log, check_reporter
from support.prompts import Split, check_model, encode_problems
from support.tasks import task_of


class Config(Flags):
    """A run. How far its data is off-policy is set by temperature, top_p, top_k,
    rollout_quantization, lag and passes x minibatches, and by nothing else."""

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
    steps: PositiveCount = 80
    """rollout batches to learn from"""
    prompts_per_step: PositiveCount = 32
    """prompts of a rollout batch, over all ranks"""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G, the responses to a prompt"""
    passes: PositiveCount = 1
    """how often a rollout batch is gone through"""
    minibatches: PositiveCount = 1
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
    """of one forward pass, padding included: it decides over memory, not the result"""
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
    """steps between evaluations; 0: before and after"""
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
    """of the order of the problems and of the sampling noise"""
    verbose: bool = False
    """show the messages of vLLM and torch"""


def problems_of_step(cfg: Config, step: int, problem_count: int) -> list[int]:
    """Which problems are sampled for a step: slices of epochs, each shuffled by the
    seed.
    """
    first = (step - 1) * cfg.prompts_per_step
    problems = []
    for place in range(first, first + cfg.prompts_per_step):
        epoch, place_in_epoch = divmod(place, problem_count)
        order = random.Random(f"{cfg.seed} {epoch}").sample(
            range(problem_count), problem_count
        )
        problems.append(order[place_in_epoch])
    return problems


def weights_that_sample(cfg: Config, step: int) -> int:
    """The weights that sample the batch of a step: of the step before, or `lag`
    earlier.
    """
    return max(0, step - 1 - cfg.lag)


def sample_step(
    engine: Engine, cfg: Config, step: int, prompts: list[list[int]]
) -> Rollouts:
    """1 rollout: this rank's share of the responses for a step. A collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = problems_of_step(cfg, step, len(prompts))
    seeds = noise_seeds(
        cfg.seed + 1,  # not those of the evaluation
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
    rollouts: Rollouts, cfg: Config, step: int, train: Split, verifier: str
) -> None:
    """2 reward: check each response, and compare it with its group."""
    rank, world = dist.get_rank(), dist.get_world_size()
    problems = problems_of_step(cfg, step, len(train.problems))[rank::world]
    answers = []
    for problem in problems:
        answers += [train.problems[problem]["answer"]] * cfg.group_size
    rollouts.reward = torch.tensor(score(rollouts.text, answers, verifier))  # [N]
    groups = rollouts.reward.view(-1, cfg.group_size)  # [P, G]
    rollouts.advantage = group_advantage(
        groups, cfg.scale_advantage
    ).flatten()  # (3), [N]


def minibatches_of_pass(cfg: Config, step: int, number: int) -> list[list[int]]:
    """This rank's rows of each minibatch of a pass over the rollouts.

    A minibatch has whole groups, by their place in the step: it is the same set of
    responses on any number of ranks.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    shuffle = random.Random(f"{cfg.seed} {step} {number}")
    groups = shuffle.sample(range(cfg.prompts_per_step), cfg.prompts_per_step)
    minibatches = []
    for minibatch in range(cfg.minibatches):
        rows = []
        for group in groups[minibatch :: cfg.minibatches]:
            if group % world == rank:  # as in sample_step
                first = group // world * cfg.group_size
                rows += range(first, first + cfg.group_size)
        minibatches.append(rows)
    return minibatches


def micro_batches(
    rollouts: Rollouts, rows: list[int], max_tokens: int
) -> list[list[int]]:
    """The rows in micro-batches of at most max_tokens each, padding included.

    Every rank gets equally many, some of them perhaps empty: FSDP needs all ranks in
    every forward pass.
    """
    length = (rollouts.prompt_length + rollouts.mask.sum(dim=1)).tolist()
    micros: list[list[int]] = [[]]
    for row in sorted(
        rows, key=length.__getitem__
    ):  # so each row is the longest so far
        if micros[-1] and (len(micros[-1]) + 1) * length[row] > max_tokens:
            micros.append([])
        micros[-1].append(row)
    most = torch.tensor(len(micros))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    micros += [[] for _ in range(int(most) - len(micros))]
    return micros


def gather_batch(micros: list[Rollouts], logps: list[torch.Tensor]) -> Batch:
    """The whole batch B, from the micro-batches of all ranks and their log pi_theta."""
    columns = max(logp.shape[1] for logp in logps)
    rows = sum(logp.shape[0] for logp in logps)
    size = torch.tensor([rows, columns])
    dist.all_reduce(size, dist.ReduceOp.MAX)
    rows, columns = size.tolist()
    quantities = []  # [3, N_i, columns] each
    for micro, logp in zip(micros, logps, strict=True):
        log_ratio = logp.detach() - micro.logp_behavior
        advantage = micro.advantage[:, None].expand_as(logp)
        stacked = torch.stack([log_ratio, advantage, micro.mask])
        quantities.append(pad(stacked, (0, columns - logp.shape[1])))
    mine = torch.cat(quantities, dim=1)
    mine = pad(
        mine, (0, 0, 0, rows - mine.shape[1])
    )  # [3, rows, columns] on every rank
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    log_ratio, advantage, mask = torch.cat(everyone, dim=1)  # [N, T] each
    mask = mask.bool()
    unusable = ~(log_ratio.abs() <= MAX_LOG_RATIO) | ~advantage.isfinite()
    if (unusable & mask).any():
        where = int((unusable & mask).any(dim=1).int().argmax())
        rank, row = divmod(where, rows)
        text = text_on_rank(rank, row, micros)
        raise FloatingPointError(
            f"rank {rank}: |log rho| is over {MAX_LOG_RATIO} nats, or the advantage not "
            f"finite, in response {text!r}: look at the sync, the alignment of tokens, the "
            "learning rate"
        )
    return Batch(
        log_ratio=log_ratio,
        advantage=advantage,
        mask=mask,
        ess=effective_sample_size(log_ratio, mask),  # (11)
        token_count=int(mask.sum()),
    )


def text_on_rank(rank: int, row: int, micros: list[Rollouts]) -> str:
    """The text of a response of the minibatch, from the rank that has it. A collective."""
    texts = [text for micro in micros for text in micro.text]
    text = [texts[row] if dist.get_rank() == rank else ""]
    dist.broadcast_object_list(text, src=rank)
    return text[0]


def kl_of_positions(
    top_logp: torch.Tensor, micro: Rollouts, cfg: Config
) -> torch.Tensor | None:
    """KL(pi_theta || pi_b) at each position, [N, T], with its gradient; None if K is 0."""
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
) -> dict[str, float]:
    """Add the objective's gradient on one minibatch to the policy's; returns
    statistics.

    `rows` are this rank's. The batch B of (11) and (12) is the minibatch on all ranks:
    how it is divided into micro-batches and among ranks changes neither e_B nor the
    gradient. Raises FloatingPointError, on all ranks, where a ratio or a loss is not
    finite.
    """
    device = next(policy.parameters()).device
    micros = [
        rollouts.rows(micro_rows, device)
        for micro_rows in micro_batches(rollouts, rows, cfg.micro_batch_tokens)
    ]
    # e_B takes the ratios of the whole batch, and so a first pass without gradient,
    # unless there is only one micro-batch: then its forward pass is kept for the
    # gradient.
    single = len(micros) == 1
    with torch.set_grad_enabled(single):
        outputs = [
            policy(micro) for micro in micros
        ]  # log pi_theta: [N_i, T_i], [..., K]
    batch = gather_batch(micros, [logp for logp, _ in outputs])
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
        loss, stats = objective(
            logp, micro.logp_behavior, micro.advantage, micro.mask, **keywords
        )
        # FSDP averages gradients over the ranks; the loss is a sum over them.
        (loss * dist.get_world_size()).backward()
        for name, value in stats.items():
            sums[name] += float(value)
        if kl is not None:
            sums["kl"] += float(kl.detach()[micro.mask].sum()) / batch.token_count
    totals = torch.tensor(list(sums.values()), dtype=torch.float64)
    dist.all_reduce(totals)
    stats = dict(zip(sums, totals.tolist(), strict=True))
    return statistics_of(batch) | stats


def statistics_of(batch: Batch) -> dict[str, float]:
    """e_B, and what the ratios of the whole batch look like."""
    log_ratio = batch.log_ratio[batch.mask].double().sort().values  # [|B|]
    last = batch.token_count - 1
    low = log_ratio[last // 100]
    high = log_ratio[last - last // 100]
    # A single token can decide over e_B. Here the outer 1% at each end count as the
    # next.
    central = log_ratio.clamp(low, high)[None]
    central_ess = effective_sample_size(central, torch.ones_like(central).bool())
    return {
        "ess": batch.ess.item(),
        "ess_central": central_ess.item(),
        "ratio": log_ratio.exp().mean().item(),
        "ratio_central": central.exp().mean().item(),
        "ratio_q1": low.exp().item(),
        "ratio_q50": log_ratio[last // 2].exp().item(),
        "ratio_q99": high.exp().item(),
        "mismatch_mean": log_ratio.abs().mean().item(),
        "mismatch_max": log_ratio.abs().max().item(),
        # From the sampled tokens; accumulate_gradient has a better one where K > 0.
        "kl": KL_ESTIMATORS["is"](log_ratio).mean().item(),
    }


def check_on_policy(
    cfg: Config, stats: dict[str, float], step: int, first: bool
) -> None:
    """Compare engine and trainer on a batch that should be on-policy.

    Where no mismatch was asked for, the ratios before the update are those of rounding.
    If most of them are not near 1, the run is refused in its first step; later, when
    there is something to lose, it is warned of.
    """
    full = (
        cfg.temperature == cfg.policy_temperature and cfg.top_p == 1 and cfg.top_k == 0
    )
    if not full or cfg.rollout_quantization != "none" or cfg.lag > 0:
        return
    if stats["ess_central"] >= 0.9 and abs(stats["ratio_central"] - 1) <= 0.1:
        return
    complaint = (
        f"step {step}: a batch that should be on-policy has e_B {stats['ess_central']:.3f} and "
        f"mean ratio {stats['ratio_central']:.3f} without its outer 2% of tokens, and mean "
        f"|log rho| {stats['mismatch_mean']:.3f}: look at the weight sync (a tied head?), the "
        "temperature, rollout_dtype, the alignment of tokens"
    )
    if first:
        raise Refused(complaint)
    if dist.get_rank() == 0:
        print(f"warning: {complaint}", file=sys.stderr, flush=True)


def score_before_update(
    policy: Policy, rollouts: Rollouts, cfg: Config
) -> torch.Tensor:
    """log pi_theta of all responses before the step's first update: [N, T]. A
    collective.
    """
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
    first: bool,
) -> list[dict[str, float]]:
    """3 update: all optimizer steps on one rollout batch; returns the statistics of
    each.
    """
    if objective.takes_logp_prox:
        rollouts.logp_prox = score_before_update(policy, rollouts, cfg)
    history = []
    for number in range(1, cfg.passes + 1):
        for rows in minibatches_of_pass(cfg, step, number):
            try:
                stats = accumulate_gradient(policy, rollouts, rows, objective, cfg)
                norm = torch.nn.utils.clip_grad_norm_(
                    policy.parameters(), cfg.max_grad_norm
                )
                stats["grad_norm"] = norm.full_tensor().item()
                if not math.isfinite(stats["grad_norm"]):
                    raise FloatingPointError("all ranks: the gradient is not finite")
            except FloatingPointError as error:
                raise FloatingPointError(f"step {step}, {error}") from error
            if not history:
                check_on_policy(cfg, stats, step, first)
            stats["learning_rate"] = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append(stats)
    return history


def load_problems(
    cfg: Config, split: str, tokenizer, room: int, limit: int = 0
) -> Split:
    """Problems and prompts of a split. A ValueError says what is wrong with them."""
    return encode_problems(
        load_task(cfg.task, split)[: limit or None],
        tokenizer,
        instruction=task_of(cfg.task).instruction,
        room=room,
        drop_long=cfg.max_prompt_tokens > 0,
        name=f"{split} prompts of {cfg.task}",
    )


def check_config(cfg: Config) -> None:
    """Raises Refused on fields that do not go together, before anything slow is built."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if cfg.prompts_per_step < max(world, cfg.minibatches):
        raise Refused(
            f"prompts_per_step is {cfg.prompts_per_step}: give each of the {world} ranks and "
            f"each of the {cfg.minibatches} minibatches at least one"
        )
    if ranks_of_node % cfg.rollout_tp:
        raise Refused(
            f"rollout_tp is {cfg.rollout_tp}: it has to divide a node's {ranks_of_node} ranks"
        )
    if cfg.top_logprobs > 0 and "kl_estimator" in cfg.objective_args:
        raise Refused(
            "objective_args has kl_estimator, by which the KL is estimated from the sampled "
            "tokens alone: add --top_logprobs 0"
        )
    estimator = cfg.objective_args.get("kl_estimator", "is")
    if cfg.objective == "p3o" and estimator not in KL_ESTIMATORS:
        known = " or ".join(KL_ESTIMATORS)
        raise Refused(f"objective_args has kl_estimator={estimator}: give {known}")
    check_reporter(cfg.report_to)
    if cfg.resume:
        check_resume(cfg.out_dir, cfg.steps, cfg.model_dump())
    elif cfg.out_dir and Path(cfg.out_dir, "config.json").exists():
        raise Refused(
            f"{cfg.out_dir} holds another run: choose another out_dir, or --resume"
        )


def main() -> None:
    # What the user can get wrong comes first, before anything slow is built.
    cfg = parse_flags(Config)
    check_config(cfg)
    objective = find_objective(OBJECTIVES, cfg.objective, cfg.objective_args)
    try:
        tokenizer, context = check_model(cfg.model, cfg.rollout_tp)
        room = cfg.max_prompt_tokens or context - cfg.max_response_tokens
        train = load_problems(cfg, "train", tokenizer, room)
        heldout = load_problems(
            cfg, "heldout", tokenizer, room, limit=cfg.eval_problems
        )
    except ValueError as error:
        raise Refused(str(error)) from error
    verifier = task_of(cfg.task).verifier
    longest_prompt = max(len(prompt) for prompt in train.prompts + heldout.prompts)
    longest = longest_prompt + cfg.max_response_tokens
    if longest > context:
        raise Refused(
            f"prompt and response need {longest} tokens, {cfg.model} has room for {context}"
        )

    # Setup: the process group, the engine, and, while the engine sleeps, the policy.
    mesh = init_distributed()
    rank = dist.get_rank()
    # The clock and the folder are rank 0's, and so is the list of problems: on a hub's
    # data the verifier could leave out others on another rank.
    cfg.out_dir = cfg.out_dir or time.strftime(f"runs/%Y%m%d-%H%M%S-{os.getpid()}")
    shared = [cfg.out_dir, train, heldout, longest]
    dist.broadcast_object_list(shared)
    cfg.out_dir, train, heldout, longest = shared
    out = Path(cfg.out_dir)
    if rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        write_whole(out / "config.json", json.dumps(cfg.model_dump(), indent=1) + "\n")
    engine = Engine(
        cfg.model,
        longest,
        tp=cfg.rollout_tp,
        quantization=cfg.rollout_quantization,
        dtype=cfg.rollout_dtype,
        top_logprobs=cfg.top_logprobs,
        kv_cache_gb=cfg.kv_cache_gb,
        max_num_seqs=cfg.max_num_seqs,
        can_sleep=True,
        verbose=cfg.verbose,
    )
    # What is evaluated is the policy, not the copy of it that an fp8 engine has. The
    # second engine never sleeps: vLLM allows one engine that does in a process.
    evaluator = engine
    if cfg.rollout_quantization != "none":
        evaluator = Engine(
            cfg.model,
            longest,
            tp=cfg.rollout_tp,
            dtype=cfg.rollout_dtype,
            kv_cache_gb=cfg.kv_cache_gb,
            max_num_seqs=cfg.max_num_seqs,
            verbose=cfg.verbose,
        )
    engine.sleep()
    policy = build_policy(
        cfg.model,
        mesh,
        dtype=cfg.dtype,
        temperature=cfg.policy_temperature,
        gradient_checkpointing=cfg.gradient_checkpointing,
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(),
        cfg.learning_rate,
        weight_decay=cfg.weight_decay,
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min(1.0, (done + 1) / max(1, cfg.warmup_steps))
    )
    queue: deque[Rollouts] = deque()  # sampled and rewarded, not yet learned from
    done = 0  # steps
    if cfg.resume:
        done = load_checkpoint(out, policy, optimizer, schedule, queue, cfg.group_size)
    log = Log(out, tokenizer, cfg.group_size, cfg.report_to, cfg.model_dump(), done)
    signals: list[int] = []  # Ctrl-C and SIGTERM: the step is finished and saved
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: signals.append(number))

    def evaluation() -> dict[str, float]:
        """Sampled and greedy accuracy of the policy on the held-out problems."""
        if evaluator is not engine:
            evaluator.load_weights(full_weights(policy), version="evaluation")
        accuracy = {}
        for name, temperature in (
            ("heldout_pass@1", cfg.policy_temperature),
            ("heldout_greedy", 0.0),
        ):
            correct = evaluate(
                evaluator,
                heldout.problems,
                heldout.prompts,
                verifier,
                temperature=temperature,
                max_tokens=cfg.max_response_tokens,
            )
            accuracy[name] = sum(correct) / len(correct)
        return accuracy

    engine.load_weights(full_weights(policy), version=str(done))
    if not cfg.resume:
        log.begin(evaluation())
    for step in range(done + 1, cfg.steps + 1):
        # 1 rollout, and 2 reward. Behind the batch of this step `lag` others wait in
        # the queue; the first step samples them all.
        while len(queue) <= cfg.lag:
            sampled_for = step + len(queue)
            with log.phase("rollout"):
                rollouts = sample_step(engine, cfg, sampled_for, train.prompts)
            with log.phase("reward"):
                add_reward(rollouts, cfg, sampled_for, train, verifier)
            queue.append(rollouts)
        engine.sleep()
        # 3 update
        rollouts = queue.popleft()
        expected = weights_that_sample(cfg, step)
        if rollouts.weight_version != str(expected):
            raise Refused(
                f"step {step}: a batch was sampled by weights {rollouts.weight_version}, not "
                f"by weights {expected}: was a sync left out?"
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
                step == done + 1,
            )
        # 4 sync: the new weights into the engine
        with log.phase("sync"):
            engine.load_weights(full_weights(policy), version=str(step))
        # 5 log; now and then evaluate and save
        last = step == cfg.steps
        accuracy = {}
        if last or (cfg.eval_every and step % cfg.eval_every == 0):
            accuracy = evaluation()
        if last:  # before its line of metrics: a run that has that line is finished
            save_model(policy, tokenizer, out / "model")
        log.step(step, rollouts, history, accuracy)
        stopped = torch.tensor(
            max(signals, default=0)
        )  # it finds the ranks at different places
        dist.all_reduce(stopped, dist.ReduceOp.MAX)
        if stopped or (cfg.save_every and (last or step % cfg.save_every == 0)):
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
        if stopped and not last:
            raise Refused(
                f"stopped by signal {int(stopped)} after step {step}: --resume goes on"
            )
    if rank == 0:
        log.finish()
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except (Refused, FloatingPointError) as error:  # almost always on all ranks alike
        if os.environ.get("RANK", "0") == "0":
            print(f"train.py: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:  # before there was a step to finish
        sys.exit(130)
