"""P3O end to end: sample with vLLM, reward, update the policy, sync the weights.

    python train.py                          # the embedded default, on two CPU cores
    torchrun --nproc-per-node 8 train.py --config recipes/gsm8k-8gpu.yaml

`main` is the loop, and `update` makes one optimizer step. The flags are the fields of
support/config.py. A run writes out_dir/{config.json, metrics.jsonl, samples.jsonl,
curves.png, checkpoints/, model/}. Steps are numbered from 1: weights "7" are those
after step 7, and weights "0" are the initial ones. A collective is a function that all
ranks have to call together.
"""

import copy
import math
import os
import pkgutil
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no warnings of torch's C++
import torch
import torch.distributed as dist
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
from reward import compute_rewards
from rollout import Engine, Rollouts, noise_seed, prompts_of_rank
from support.checkpoints import (
    check_out_dir,
    load_checkpoint,
    make_out_dir,
    save_checkpoint,
    save_model,
)
from support.command import Refused, parse_flags, run_script
from support.config import Config
from support.log import Log
from support.machine import init_distributed
from support.models import ACTIVATIONS, activation_bytes, check_model, folder_of
from support.tasks import Dataset, load_split

SYNC_CHECK_EVERY = 5  # steps between two checks of the sync


def main() -> None:
    cfg = parse_flags(Config)
    objective = find_objective(cfg.objective, cfg.objective_args)
    run = PreparedRun(cfg)
    engine, policy, optimizer = run.engine, run.policy, run.optimizer
    queue, log = run.queue, run.log

    engine.load_weights(full_weights(policy), version=str(run.step))
    check_sync(engine, policy, run.train.prompts)
    log.write(run.metrics | save_and_evaluate(run.step, run, cfg))
    for step in range(run.step + 1, cfg.steps + 1):
        # 1 Rollout, 2 reward: batches are sampled `lag` steps before they are used, and
        # wait in the queue. With lag 4, step 8 samples step 12's batch from weights 7.
        while len(queue) <= cfg.lag and step + len(queue) <= cfg.steps:
            queue.append(sample_batch(engine, cfg, step + len(queue), run.train, log))
        rollouts = queue.popleft()

        # 3 Update: rank r of w has the groups r, r + w, ... of the batch. So the ranks'
        # first minibatches, taken together, hold the same groups whatever w is.
        engine.sleep()  # It lends its memory to the trainer.
        rows_of_rank = torch.arange(len(rollouts.text))
        minibatches = rows_of_rank.chunk(cfg.minibatches)
        updates = []  # the statistics of each
        for rows in minibatches * cfg.passes:  # a tuple, repeated
            set_learning_rate(optimizer, step, len(updates), cfg)
            with log.phase("update"):
                stats = update(policy, optimizer, objective, rollouts, rows, cfg, step)
            updates.append(stats)

        # 4 Sync. Every few steps check_sync compares engine and policy, and ends all
        # ranks if they are further apart than rounding explains.
        with log.phase("sync"):
            engine.load_weights(full_weights(policy), version=str(step))
        if is_due(SYNC_CHECK_EVERY, step, cfg):
            check_sync(engine, policy, run.train.prompts)

        # 5 Save, evaluate, add a line to metrics.jsonl: means over the updates, but for
        # the least e_B and the first update's mismatch.
        metrics = log.metrics_of(step, rollouts)
        for name in updates[0]:
            metrics[name] = fmean(stats[name] for stats in updates)
        metrics["ess_min"] = min(stats["ess"] for stats in updates)
        metrics["mismatch_mean"] = updates[0]["mismatch_mean"]  # before any update
        if cfg.save_every and is_due(cfg.save_every, step, cfg):
            save_checkpoint(run.out, step, policy, optimizer, queue, metrics)
        log.write(metrics | save_and_evaluate(step, run, cfg))
    log.finish()


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    objective: Callable[..., torch.Tensor],
    rollouts: Rollouts,
    rows: torch.Tensor,
    cfg: Config,
    step: int,
) -> dict[str, float]:
    """Make one optimizer step on B, the `rows` of all ranks; return its statistics.

    `objective` is loss.p3o, or what --objective names. e_B and the gradient are those
    of the whole B, however it is split into ranks and parts. Raises
    FloatingPointError, on all ranks, where e_B or the gradient is not finite. A
    collective.
    """
    device = next(policy.parameters()).device
    *others, last = micro_batches(rollouts, rows, cfg.micro_batch_tokens, device)

    # First e_B, which needs rho of all tokens of B. Only the last part keeps its graph.
    # The others are computed again below, now with a gradient. A lone part is forwarded
    # only once.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for part in others:
        with torch.no_grad():
            logp, _ = policy(part)  # log pi_theta of the sampled tokens, [N, T]
        sums += ratio_sums(logp - part.logp_behavior, part.mask)
    output_of_last = policy(last)
    sums += ratio_sums(output_of_last[0] - last.logp_behavior, last.mask)
    dist.all_reduce(sums)
    token_count, ratio_sum, _ = sums.tolist()  # |B|, and the sums of rho and rho^2
    e_b = effective_sample_size(sums).item()  # (11): mean[rho]^2 / mean[rho^2]
    if not math.isfinite(e_b):
        raise FloatingPointError(
            f"step {step}: e_B is not finite, as some ratio is not, or is beyond "
            "e^350: lower the learning rate, and see ess_min of the steps before"
        )

    # Then the gradient of (12). It adds up over the parts and the ranks.
    totals = defaultdict(float)  # of each statistic, over the tokens of B
    for part in (last, *others):
        logp, top_logp = output_of_last if part is last else policy(part)
        kl = kl_of_positions(top_logp, part, cfg)  # [N, T]
        # P3O's: -sg(min(rho, e_B)) A log pi_theta + (1 - e_B) KL, [N, T]
        loss = objective(logp, part.logp_behavior, part.advantage, kl, e_b)
        share = loss[part.mask].sum() / token_count  # this part's share of the mean
        # FSDP averages the ranks' gradients. We need their sum.
        (share * dist.get_world_size()).backward()

        log_ratio = (logp - part.logp_behavior).detach()  # [N, T]
        statistics = {
            "loss": loss.detach(),
            "kl": kl.detach(),
            "above_ess": log_ratio.exp() > e_b,
            "mismatch_mean": log_ratio.abs(),
        }
        for name, of_tokens in statistics.items():
            totals[name] += of_tokens[part.mask].double().sum()
    for total in totals.values():
        dist.all_reduce(total)
    grad_norm = apply_gradient(policy, optimizer, cfg, step)
    return {
        "ess": e_b,
        **{name: total.item() / token_count for name, total in totals.items()},
        "ratio": ratio_sum / token_count,
        "grad_norm": grad_norm,
    }


def sample_batch(
    engine: Engine, cfg: Config, step: int, train: Dataset, log: Log
) -> Rollouts:
    """This rank's share of a step's rollout batch, with rewards and advantages.

    The groups of a run are numbered from its start. This number, its place, decides
    the group's problem and noise. So any number of ranks draws the same samples, up
    to rounding. A collective.
    """
    first = (step - 1) * cfg.prompts_per_step
    places = [first + index for index in prompts_of_rank(cfg.prompts_per_step)]
    indices = problems_at(cfg.seed, len(train.prompts), places)
    # Evaluations use noise seed 0, so rollouts use others.
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
        rollouts.reward = torch.tensor(
            compute_rewards(train, indices, rollouts.text)
        )  # [N]
        of_groups = rollouts.reward.view(-1, cfg.group_size)  # [P, G]
        rollouts.gold = [train.problems[i]["answer"] for i in indices]
        advantage = group_advantage(of_groups, cfg.scale_advantage)  # (3), [P, G]
        # Every token has the advantage of its response.
        rollouts.advantage = advantage.view(-1, 1) * rollouts.mask  # [N, T]
    return rollouts


def find_objective(
    name: str, hyper_parameters: dict[str, float | str]
) -> Callable[..., torch.Tensor]:
    """The objective of this name, a function of the five arguments of loss.p3o.

    The name is one of loss.LOSSES, or module:name. Raises Refused where there is none,
    or where it does not take such hyper-parameters.
    """
    try:
        objective = LOSSES[name] if name in LOSSES else pkgutil.resolve_name(name)
        # Try it on zeros. Some objectives remember what they saw, so try a copy.
        tensors = (torch.zeros(1, 2) for _ in range(4))
        loss = copy.deepcopy(objective)(*tensors, 1.0, **hyper_parameters)  # [1, 2]
        loss[torch.ones(1, 2).bool()].sum()
    except Exception as error:  # a module of the user's may raise any
        raise Refused(
            f"there is no objective {name!r} that takes {hyper_parameters}: {error}; "
            f"give {', '.join(LOSSES)} or module:name, and its own hyper-parameters"
        ) from None
    return partial(objective, **hyper_parameters)


class PreparedRun:
    """What main works with."""

    def __init__(self, cfg: Config) -> None:
        """Check the flags, the data and the model, build the engines and the policy.

        What the user can get wrong comes first, and raises Refused before anything
        slow is built. With --resume a run is as its newest checkpoint left it. A
        collective.
        """
        cfg.model = folder_of(cfg.model)
        check_out_dir(cfg)
        self.tokenizer, self.train, self.heldout, max_model_len = load_data(cfg)

        mesh = init_distributed()
        self.out = make_out_dir(cfg)
        self.engine, self.evaluator = build_engines(cfg, max_model_len)
        self.engine.sleep()  # The policy is built in the memory that this lends out.
        with self.engine.as_current():
            self.policy = build_policy(
                cfg.model,
                mesh,
                cfg.dtype,
                cfg.policy_temperature,
                cfg.gradient_checkpointing,
            )
        self.optimizer = AdamW(
            self.policy.parameters(),
            lr=cfg.learning_rate,
            weight_decay=cfg.weight_decay,
            fused=True,
        )
        # The last step that was done, its metrics before its evaluation, and the
        # batches that were sampled ahead.
        self.step, self.metrics, queue = 0, {"step": 0}, []
        if cfg.resume:
            self.step, self.metrics, queue = load_checkpoint(
                self.out, self.policy, self.optimizer
            )
        self.queue = deque(Rollouts(**fields) for fields in queue)
        self.log = Log(
            self.out, self.tokenizer, cfg.group_size, cfg.steps, done=self.step
        )


def load_data(cfg: Config) -> tuple[Any, Dataset, Dataset, int]:
    """The model's tokenizer, the problems to train on, and those held out.

    On a CPU it may lower micro_batch_tokens. The last value is how many tokens the
    engine needs: those of the longest prompt and max_response_tokens. Raises Refused if
    there is no such model or task, or if a prompt does not fit and may not be dropped,
    or if none is left.
    """
    tokenizer, config = check_model(cfg.model, cfg.rollout_tp, to_train=True)
    if not (torch.cuda.is_available() or cfg.gradient_checkpointing):
        # On a CPU memory is dear, and smaller parts take no longer.
        of_token = activation_bytes(config, getattr(torch, cfg.dtype).itemsize)
        cfg.micro_batch_tokens = min(cfg.micro_batch_tokens, ACTIVATIONS // of_token)
    room = config.max_position_embeddings - cfg.max_response_tokens
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
    prompts = train.prompts + heldout.prompts
    return tokenizer, train, heldout, max(map(len, prompts)) + cfg.max_response_tokens


def build_engines(cfg: Config, max_model_len: int) -> tuple[Engine, Engine]:
    """The engine that samples rollouts, and the one that evaluates.

    One engine does both, unless rollouts are in fp8. Then a second one evaluates, in
    rollout_dtype and without fp8, so that accuracy is that of the policy. vLLM lets
    only one engine of a process sleep, so the second stays awake. The two share a table
    of positions in vLLM, so the second may sample only while the first is awake.
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


def save_and_evaluate(step: int, run: PreparedRun, cfg: Config) -> dict[str, float]:
    """Save the model after the last step, and evaluate the policy where that is due.

    Returns its held-out accuracy, if it was evaluated. The model is saved first, as an
    evaluation may fail. A resumed run begins with this, for the step of its checkpoint.
    A collective.
    """
    policy = run.policy
    if step == cfg.steps:
        save_model(policy.model, full_weights(policy), run.tokenizer, run.out / "model")
    if step and not is_due(cfg.eval_every, step, cfg):
        return {}
    if cfg.rollout_quantization != "none":
        # The evaluator is a second engine, which the sync has not reached.
        run.evaluator.load_weights(full_weights(policy), version=str(step))
        check_sync(run.evaluator, policy, run.heldout.prompts)
    return heldout_accuracy(
        run.evaluator, run.heldout, cfg.policy_temperature, cfg.max_response_tokens
    )


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, updates_of_step: int, cfg: Config
) -> None:
    """The rate of the next update: it rises over the first warmup_updates of the run.

    `updates_of_step` are those that this step has made already.
    """
    updates = (step - 1) * cfg.passes * cfg.minibatches + updates_of_step
    warm_up = min(1.0, (updates + 1) / max(1, cfg.warmup_updates))
    optimizer.param_groups[0]["lr"] = warm_up * cfg.learning_rate


def is_due(every: int, step: int, cfg: Config) -> bool:
    """True at the last step, and every `every` steps if that is not 0."""
    return step == cfg.steps or (every > 0 and step % every == 0)


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


def micro_batches(
    rollouts: Rollouts, rows: torch.Tensor, max_tokens: int, device: torch.device
) -> list[Rollouts]:
    """These responses in parts of at most max_tokens each, padding included.

    A single response may be longer. FSDP needs all ranks in every forward pass. So the
    longest sequence of all ranks sets how many responses a part holds, and as Config
    gives all ranks equally many, they have equally many parts. Responses are sorted by
    length, so that little of a part is padding. A collective.
    """
    length = rollouts.prompt_length + rollouts.mask.sum(dim=1)  # [N]
    longest_sequence = length[rows].max()
    dist.all_reduce(longest_sequence, dist.ReduceOp.MAX)
    rows_of_part = max(1, max_tokens // int(longest_sequence))
    by_length = rows[length[rows].argsort(stable=True)]
    return [rollouts.select(part, device) for part in by_length.split(rows_of_part)]


def kl_of_positions(
    top_logp: torch.Tensor, part: Rollouts, cfg: Config
) -> torch.Tensor:
    """KL(pi_theta || pi_b) at each position of a part, with its gradient: [N, T]."""
    both = top_logp, part.top_logp_behavior  # [N, T, K] each
    if cfg.top_p < 1 or cfg.top_k:
        both = restrict_to_support(*both)
    return kl_divergence(*both)


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
        raise FloatingPointError(
            f"step {step}: the gradient is not finite: lower learning_rate, or raise "
            "warmup_updates, and --resume if there is a checkpoint"
        )
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm


if __name__ == "__main__":
    run_script(main)
