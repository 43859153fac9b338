"""P3O end to end: sample with vLLM, check answers, update, sync the weights; `main` is the loop.

    torchrun train.py                                     # the embedded default, on two CPU cores
    torchrun --nproc-per-node 8 train.py --config recipes/NAME.yaml --out_dir runs/NAME
    torchrun --nproc-per-node 8 train.py --config recipes/NAME.yaml --dry_run    # does it fit?

Every field of Config is a flag of the same name. A run writes out_dir/{config.json, metrics.jsonl,
samples.jsonl, curves.png, checkpoints/, model/} and never into the folder of another run.
"""

import inspect
import json
import math
import os
import random
import shutil
import signal
import sys
import time
from collections import defaultdict, deque
from dataclasses import asdict
from pathlib import Path

if "--verbose" not in sys.argv:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch reads it when it is imported
import torch
import torch.distributed as dist
from torch.nn.functional import pad
from transformers import PreTrainedTokenizerBase

from checkpoint import check_resume, load_checkpoint, save_checkpoint
from config import (
    Config,
    Refused,
    check_config,
    hyper_parameters,
    load_model_files,
    load_prompts,
    parse_config,
)
from eval import evaluate, noise_seeds
from log import Log, write_whole
from loss import (
    MAX_LOG_RATIO,
    OBJECTIVES,
    batch_quantities,
    effective_sample_size,
    group_advantage,
)
from memory import dry_run
from policy import Policy, build_policy, full_weights
from reward import score
from rollout import Engine, Rollouts, init_distributed


def problems_of_step(cfg: Config, step: int, count: int) -> list[int]:
    """prompts_per_step problems of `count`: slices of freshly shuffled epochs, by seed and step."""
    first = step * cfg.prompts_per_step
    places = range(first, first + cfg.prompts_per_step)
    epochs = {place // count for place in places}
    order = {e: random.Random(f"{cfg.seed} {e}").sample(range(count), count) for e in epochs}
    return [order[place // count][place % count] for place in places]


def micro_batches(rollouts: Rollouts, rows: list[int], max_tokens: int) -> list[list[int]]:
    """Cut rows so that none pads to over max_tokens, into equally many parts on every rank."""
    length = (rollouts.prompt_length + rollouts.mask.sum(1)).tolist()
    parts: list[list[int]] = [[]]
    for row in sorted(rows, key=length.__getitem__):  # so each row is the longest so far
        if parts[-1] and (len(parts[-1]) + 1) * length[row] > max_tokens:
            parts.append([])
        parts[-1].append(row)
    most = torch.tensor(len(parts))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return parts + [[]] * (int(most) - len(parts))  # FSDP has every rank run every forward pass


def gather_batch(parts: list[torch.Tensor]) -> torch.Tensor:
    """Micro-batches [C, N_i, T_i] of all ranks -> their whole minibatch [C, N, T], zero-padded."""
    size = torch.tensor([sum(p.shape[1] for p in parts), max(p.shape[2] for p in parts)])
    dist.all_reduce(size, dist.ReduceOp.MAX)
    rows, columns = size.tolist()
    mine = torch.cat([pad(p, (0, columns - p.shape[2])) for p in parts], dim=1)
    mine = pad(mine, (0, 0, 0, rows - mine.shape[1]))  # [C, rows, columns]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.cat(everyone, dim=1)


def accumulate_gradient(policy: Policy, rollouts: Rollouts, rows: list[int], cfg: Config) -> dict:
    """The objective's gradient on one minibatch, given this rank's rows of it; returns statistics.

    B of (2) to (5) is the minibatch on all ranks: its cut into micro-batches and ranks changes
    nothing. Raises FloatingPointError on a ratio or a loss that is not finite.
    """
    device = next(policy.parameters()).device
    cut = micro_batches(rollouts, rows, cfg.micro_batch_tokens)
    micros = [rollouts.rows(part, device) for part in cut]
    # e_B takes all ratios before any gradient. A single micro-batch keeps its graph for that.
    with torch.set_grad_enabled(len(micros) == 1):
        logps = [policy(micro) for micro in micros]  # [N_i, T_i]
    parts = [
        torch.stack([lp.detach() - m.logp_behavior, m.advantage[:, None].expand_as(lp), m.mask])
        for lp, m in zip(logps, micros, strict=True)
    ]
    log_ratio, advantage, mask = gather_batch(parts)  # [N, T]
    mask = mask.bool()
    check_numbers(log_ratio, advantage, mask, [rollouts.text[i] for part in cut for i in part])
    ess = effective_sample_size(log_ratio, mask)  # logged for every objective
    hyper = hyper_parameters(cfg)
    whole = batch_quantities(cfg.objective, log_ratio, advantage, mask, **hyper)
    stats: dict[str, float] = defaultdict(float)
    for micro in micros:
        logp = logps[0] if len(micros) == 1 else policy(micro)  # [N_i, T_i]
        prox = {} if micro.logp_prox is None else {"logp_prox": micro.logp_prox}
        behavior = micro.logp_behavior, micro.advantage, micro.mask
        loss, part = OBJECTIVES[cfg.objective](logp, *behavior, **whole, **prox, **hyper)
        (loss * dist.get_world_size()).backward()  # FSDP averages over ranks, the loss is a sum
        for name, value in part.items():
            stats[name] += float(value)
    total = torch.tensor(list(stats.values()), dtype=torch.float64)
    dist.all_reduce(total)
    log_ratio = log_ratio[mask].sort().values  # [M], M response tokens
    mismatch = log_ratio.abs()
    quantiles = {f"ratio_q{q}": log_ratio[(len(mismatch) - 1) * q // 100] for q in (1, 50, 99)}
    stats = dict(zip(stats, total.tolist(), strict=True))
    stats |= {name: value.exp().item() for name, value in quantiles.items()}
    stats |= {"mismatch_mean": mismatch.mean().item(), "mismatch_max": mismatch.max().item()}
    return stats | {"ess": ess.item()}


def check_numbers(
    log_ratio: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor, mine: list[str]
) -> None:
    """Raises FloatingPointError, on all ranks alike, with the first response that cannot be used.

    Of the minibatch [N, T] that gather_batch put together; `mine` are this rank's responses in it.
    """
    good = (log_ratio.abs() <= MAX_LOG_RATIO) & advantage.isfinite() | ~mask  # [N, T]
    if good.all():
        return
    owner, row = divmod(int(good.all(1).int().argmin()), len(mask) // dist.get_world_size())
    response = [mine[row] if dist.get_rank() == owner else ""]
    dist.broadcast_object_list(response, src=owner)
    raise FloatingPointError(
        f"rank {owner}: log rho is not within {MAX_LOG_RATIO} nats, or the advantage not finite, "
        f"in response {response[0]!r}: look at the sync, the alignment of tokens, the learning rate"
    )


def check_on_policy(cfg: Config, stats: dict) -> None:
    """Raises Refused where engine and trainer are two policies without being asked to be."""
    full = cfg.temperature == cfg.policy_temperature and cfg.top_p == 1 and cfg.top_k == 0
    if not full or cfg.rollout_quantization != "none" or cfg.lag > 0:
        return
    if stats["ess"] < 0.9 or abs(stats["ratio"] - 1) > 0.1:
        raise Refused(
            f"a batch that should be on-policy has e_B {stats['ess']:.3f}, mean ratio "
            f"{stats['ratio']:.3f}, mean |log rho| {stats['mismatch_mean']:.3f}: look at the "
            "weight sync (a tied head?), the temperature, rollout_dtype, the alignment of tokens"
        )


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    rollouts: Rollouts,
    cfg: Config,
    step: int,
) -> list[dict]:
    """All optimizer steps on one rollout batch; returns the statistics of each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    takes_prox = "logp_prox" in inspect.signature(OBJECTIVES[cfg.objective]).parameters
    if takes_prox and cfg.passes * cfg.minibatches > 1:  # else the update's own logp is logp_prox
        rollouts.logp_prox = torch.zeros_like(rollouts.logp_behavior)
        for rows in micro_batches(
            rollouts, list(range(len(rollouts.text))), cfg.micro_batch_tokens
        ):
            with torch.no_grad():
                logp = policy(rollouts.rows(rows, next(policy.parameters()).device))
            rollouts.logp_prox[rows, : logp.shape[1]] = logp.cpu()
    history = []
    for number in range(cfg.passes):
        # Whole groups, by their place in the step: the same minibatches on any number of ranks.
        shuffle = random.Random(f"{cfg.seed} {step} {number}")
        order = shuffle.sample(range(cfg.prompts_per_step), cfg.prompts_per_step)
        for part in range(cfg.minibatches):
            places = [p // world for p in order[part :: cfg.minibatches] if p % world == rank]
            rows = [p * cfg.group_size + j for p in places for j in range(cfg.group_size)]
            try:
                stats = accumulate_gradient(policy, rollouts, rows, cfg)
                norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
                stats["grad_norm"] = norm.full_tensor().item()
                if not math.isfinite(stats["grad_norm"]):
                    raise FloatingPointError("all ranks: the gradient is not finite")
            except FloatingPointError as error:
                raise FloatingPointError(f"step {step}, {error}") from error
            if not history:
                check_on_policy(cfg, stats)
            stats["learning_rate"] = schedule.get_last_lr()[0]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append(stats)
    return history


def save_model(policy: Policy, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A folder that transformers and vLLM load, there as a whole or not at all: a collective."""
    rank = dist.get_rank()
    # The float32 weights, gathered one by one, and kept in rank 0's main memory alone.
    gathered = ((name, w.full_tensor()) for name, w in policy.model.state_dict().items())
    weights = {name: weight.cpu() for name, weight in gathered if rank == 0}
    if rank == 0:
        unfinished = folder.with_name(f"{folder.name}.new")
        policy.model.save_pretrained(unfinished, state_dict=weights)
        tokenizer.save_pretrained(unfinished)
        shutil.rmtree(folder, ignore_errors=True)  # of a run that had fewer steps
        unfinished.rename(folder)


def main() -> None:
    # What the user can get wrong comes first, before anything slow is built.
    cfg = parse_config()
    check_config(cfg)
    if cfg.dry_run:
        if os.environ.get("RANK", "0") == "0":
            print(dry_run(cfg, int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        return
    if cfg.resume:
        check_resume(cfg)
    try:
        tokenizer, context = load_model_files(cfg.model, cfg.rollout_tp)
        drop = cfg.max_prompt_tokens > 0
        room = cfg.max_prompt_tokens or context - cfg.max_response_tokens
        problems, prompts, verifier, _ = load_prompts(cfg.task, "train", tokenizer, room, drop)
        heldout = load_prompts(cfg.task, "heldout", tokenizer, room, drop, cfg.eval_problems)
    except ValueError as error:
        raise Refused(str(error)) from error
    longest = max(map(len, prompts + heldout.prompts)) + cfg.max_response_tokens
    if longest > context:
        raise Refused(
            f"prompt and response need {longest} tokens, {cfg.model} has room for {context}"
        )

    # Setup: process group, engine in it, and, while the engine sleeps, the policy.
    mesh = init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    # One clock, and one list of problems: the judge's time limit could differ between the ranks.
    name = cfg.out_dir or time.strftime(f"runs/%Y%m%d-%H%M%S-{os.getpid()}")
    shared = [name, problems, prompts, heldout, longest]
    dist.broadcast_object_list(shared)
    cfg.out_dir, problems, prompts, heldout, longest = shared
    if rank == 0:
        Path(cfg.out_dir).mkdir(parents=True, exist_ok=True)
        write_whole(Path(cfg.out_dir, "config.json"), json.dumps(asdict(cfg), indent=1) + "\n")
    options = dict(dtype=cfg.rollout_dtype, kv_cache_gb=cfg.kv_cache_gb, verbose=cfg.verbose)
    options |= dict(tp=cfg.rollout_tp, max_num_seqs=cfg.max_num_seqs, can_sleep=True)
    engine = Engine(cfg.model, longest, quantization=cfg.rollout_quantization, **options)
    # What is evaluated is the policy, not its fp8 copy; but on CUDA, where a process can have only
    # one engine that sleeps, it is the copy, and eval.py measures model/ afterwards.
    two = cfg.rollout_quantization != "none" and not torch.cuda.is_available()
    evaluator = Engine(cfg.model, longest, **options) if two else engine
    engine.sleep()
    policy = build_policy(cfg, mesh)
    optimizer = torch.optim.AdamW(
        policy.parameters(), cfg.learning_rate, weight_decay=cfg.weight_decay, fused=True
    )
    warm_up = torch.optim.lr_scheduler.LambdaLR
    schedule = warm_up(optimizer, lambda n: min(1.0, (n + 1) / max(1, cfg.warmup_steps)))
    queue: deque[Rollouts] = deque()  # sampled and not yet used
    start = load_checkpoint(cfg, policy, optimizer, schedule, queue) if cfg.resume else -cfg.lag
    log = Log(cfg, tokenizer, start)
    stop: list[int] = []  # signals: the step that they interrupt is finished and saved
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))

    def heldout_accuracy() -> float:
        if evaluator is not engine:
            evaluator.load_weights(full_weights(policy), version="evaluation")
        own = dict(max_tokens=cfg.max_response_tokens, temperature=cfg.policy_temperature)
        correct = evaluate(evaluator, *heldout[:3], **own)
        return sum(correct) / len(correct)

    sampling = dict(max_tokens=cfg.max_response_tokens, temperature=cfg.temperature)
    sampling |= dict(top_p=cfg.top_p, top_k=cfg.top_k)
    engine.load_weights(full_weights(policy), version=str(max(0, start)))
    if not cfg.resume:
        log.begin(heldout_accuracy())
    for step in range(start, cfg.steps):
        # 1 rollout: each rank samples for its share of the prompts
        with log.phase("rollout"):
            mine = problems_of_step(cfg, step + cfg.lag, len(prompts))[rank::world]
            first, count = (step + cfg.lag) * cfg.prompts_per_step, cfg.prompts_per_step
            seeds = noise_seeds(cfg.seed + 1, first, count, cfg.group_size)[rank::world]
            sampled = [prompts[i] for i in mine], cfg.group_size, seeds
            rollouts = engine.sample(*sampled, **sampling)
            engine.sleep()
        # 2 reward and advantage
        with log.phase("reward"):
            answers = [problems[i]["answer"] for i in mine for _ in range(cfg.group_size)]
            rollouts.reward = torch.tensor(score(rollouts.text, answers, verifier))
            groups = rollouts.reward.view(-1, cfg.group_size)  # [P, G]
            rollouts.advantage = group_advantage(groups, cfg.scale_advantage).flatten()  # [N]
        # 3 update, on the batch of `lag` steps ago; the steps below 0 fill the queue
        queue.append(rollouts)
        if step < 0:
            engine.load_weights(full_weights(policy), version="0")
            log.seconds.clear()
            continue
        rollouts = queue.popleft()
        sampled_with = str(max(0, step - cfg.lag))
        if rollouts.weight_version != sampled_with:
            versions = f"weights {rollouts.weight_version}, not by weights {sampled_with}"
            raise Refused(f"step {step}: a batch was sampled by {versions}: was a sync left out?")
        with log.phase("update"):
            history = update(policy, optimizer, schedule, rollouts, cfg, step)
        # 4 sync: the new weights into the engine
        with log.phase("sync"):
            engine.load_weights(full_weights(policy), version=str(step + 1))
        # 5 log; now and then evaluate and save
        done = step + 1
        last = done == cfg.steps
        due = last or (cfg.eval_every and done % cfg.eval_every == 0)
        accuracy = heldout_accuracy() if due else None
        if last:  # before its line of metrics: a run that has that line is finished
            save_model(policy, tokenizer, Path(cfg.out_dir, "model"))
        log.step(done, rollouts, history, accuracy)
        stopped = torch.tensor(max(stop, default=0))  # a signal finds the ranks at different places
        dist.all_reduce(stopped, dist.ReduceOp.MAX)
        if stopped or (cfg.save_every and (last or done % cfg.save_every == 0)):
            save_checkpoint(cfg, done, policy, optimizer, schedule, queue)
        if stopped and not last:
            raise Refused(f"stopped by signal {int(stopped)} after step {done}: --resume goes on")
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
