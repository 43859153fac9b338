"""P3O end to end: sample with vLLM, reward, update the policy, sync the weights.

    python train.py                          # the embedded policy (tiny/), on a CPU
    torchrun --nproc-per-node 8 train.py --config recipes/gsm8k-8gpu.yaml

`main` is the loop, and `update` makes one optimizer step. The flags are the fields of
support/config.py. A run writes out_dir/{config.json, metrics.jsonl, samples.jsonl,
curves.png, model/} and, if asked to, checkpoints/ and resumes.jsonl. These terms are
used throughout:

    group           the group_size responses to one prompt
    rollout batch   the prompts_per_step groups that are sampled together
    step            learning from one rollout batch; steps are numbered from 1
    pass            going once through the rollout batch; a step makes --passes
                    of these
    minibatch       the batch B of one update, over all ranks; a pass has --minibatches
                    of these
    update          one optimizer step
    micro-batch     the responses of one forward pass on one rank; its size affects
                    memory, and P3O's results only by rounding
    lag             the steps between the sampling of a rollout batch and its use; the
                    first batches are used sooner
    weights "7"     the weights after step 7; weights "0" are the initial ones
    collective      a function that all ranks have to call together
"""

from support.command import Refused, run_script
from support.config import Config

if __name__ == "__main__":
    Config.refuse_wrong_flags()  # before the imports below, which take seconds

import copy
import math
import pkgutil
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from statistics import fmean
from typing import Any

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
    restrict_to_kept_tokens,
)
from policy import Policy, build_policy, full_weights, sync
from reward import check_verifier, compute_rewards
from rollout import Engine, Rollouts, noise_seed, prompts_of_rank
from support.checkpoints import (
    check_out_dir,
    load_checkpoint,
    make_out_dir,
    save_checkpoint,
    save_model,
)
from support.log import Log
from support.machine import init_distributed
from support.models import check_model
from support.tasks import Dataset, check_same_on_ranks, load_split

SYNC_CHECK_EVERY = 5  # steps
# On a CPU a micro-batch should keep at most about this many numbers for its backward
# pass: 4 GB in float32.
MAX_ACTIVATIONS = 2**30


def main() -> None:
    cfg = Config.from_flags()
    objective = find_objective(cfg.objective, cfg.objective_args)
    run = Run(cfg)
    engine, policy, optimizer = run.engine, run.policy, run.optimizer
    queue, log = run.queue, run.log

    sync(engine, policy, run.step, run.train.prompts)
    log.write(run.metrics | save_and_evaluate(run.step, run, cfg))
    for step in range(run.step + 1, cfg.steps + 1):
        # 1 Rollout, 2 reward: a rollout batch is sampled up to `lag` steps before its
        # step and waits in the queue. With lag 4, the batch of step 12 is sampled at
        # the start of step 8, by weights "7".
        while len(queue) <= cfg.lag and step + len(queue) <= cfg.steps:
            queue.append(sample_batch(engine, cfg, step + len(queue), run.train, log))
        rollouts = queue.popleft()

        # 3 Update: rank r of w has the groups r, r + w, ... of the rollout batch. So
        # each minibatch, taken over all ranks, has the same groups for any w.
        engine.sleep()  # The trainer borrows the engine's memory.
        minibatches = torch.arange(len(rollouts.text)).chunk(cfg.minibatches)
        updates = []  # the statistics of each update
        for rows in minibatches * cfg.passes:  # a tuple, repeated
            updates_made = (step - 1) * cfg.passes * cfg.minibatches + len(updates)
            optimizer.param_groups[0]["lr"] = learning_rate(updates_made, cfg)
            with log.phase("update"):
                stats = update(policy, optimizer, objective, rollouts, rows, cfg, step)
            updates.append(stats)

        # 4 Sync: the engine gets the new weights. Every few steps `sync` also compares
        # engine and policy, and stops the run if they differ too much.
        engine.wake_up()
        check_on = run.train.prompts if is_due(SYNC_CHECK_EVERY, step, cfg) else []
        with log.phase("sync"):
            sync(engine, policy, step, check_on)

        # 5 Save, evaluate, log: the statistics are averaged over the updates. But
        # ess_min is the smallest e_B, and logprob_abs_diff is from the first update.
        metrics = log.metrics_of(step, rollouts)
        for name in updates[0]:
            metrics[name] = fmean(stats[name] for stats in updates)
        metrics["ess_min"] = min(stats["ess"] for stats in updates)
        metrics["logprob_abs_diff"] = updates[0]["logprob_abs_diff"]
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
    """Make one optimizer step on the batch B and return its statistics.

    B has the response tokens in `rows` of `rollouts`, over all ranks. `objective` is
    loss.p3o or the function that --objective names. e_B and P3O's gradient are those of
    the whole B, however it is divided among ranks and micro-batches. Raises
    FloatingPointError, on all ranks, if e_B or the gradient is not finite. A
    collective.
    """
    device = next(policy.parameters()).device
    # These are the micro-batches of this rank.
    *others, last = own = micro_batches(
        rollouts, rows, max_micro_batch_tokens(cfg, policy), device
    )

    # Compute e_B first: it needs rho of all tokens of B. Only the last micro-batch
    # keeps its graph here; the others are run again below, with a gradient. A batch
    # that is a single micro-batch therefore needs only one forward pass.
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for micro_batch in own:
        with torch.set_grad_enabled(micro_batch is last):
            output = policy(micro_batch)  # log pi_theta of the sampled and top tokens
        sums += ratio_sums(output[0] - micro_batch.logp_behavior, micro_batch.mask)
    dist.all_reduce(sums)
    token_count, ratio_sum, _ = sums.tolist()  # |B|, and the sums of rho and rho^2
    e_b = effective_sample_size(sums).item()  # (11): mean[rho]^2 / mean[rho^2]

    # Then sum the gradient of the loss over the micro-batches and the ranks.
    totals = defaultdict(float)  # the sum of each statistic over the tokens of B
    for micro_batch in (last, *others):
        # log pi_theta of the sampled tokens, [N, T], and of the top tokens, [N, T, K];
        # `output` is still that of the last micro-batch.
        logp, top_logp = output if micro_batch is last else policy(micro_batch)
        kl = kl_at_positions(top_logp, micro_batch, cfg)  # [N, T]
        # For P3O: -sg(min(rho, e_B)) A log pi_theta + (1 - e_B) KL, [N, T]
        loss = objective(
            logp, micro_batch.logp_behavior, micro_batch.advantage, kl, e_b
        )
        share = loss[micro_batch.mask].sum() / token_count  # its share of mean_B
        # FSDP averages the gradients of the ranks, but the loss needs their sum.
        (share * dist.get_world_size()).backward()

        log_ratio = (logp - micro_batch.logp_behavior).detach()  # [N, T]
        statistics = {
            "loss": loss.detach(),
            "mismatch_kl": kl.detach(),
            "above_ess": log_ratio.exp() > e_b,
            "logprob_abs_diff": log_ratio.abs(),
        }
        for name, values in statistics.items():
            totals[name] += values[micro_batch.mask].double().sum()
    for total in totals.values():
        dist.all_reduce(total)
    grad_norm = apply_gradient(policy, optimizer, cfg, step, e_b)
    return {
        "ess": e_b,
        **{name: total.item() / token_count for name, total in totals.items()},
        "ratio": ratio_sum / token_count,
        "grad_norm": grad_norm,
    }


def sample_batch(
    engine: Engine, cfg: Config, step: int, train: Dataset, log: Log
) -> Rollouts:
    """Sample this rank's share of a rollout batch, with rewards and advantages.

    Groups are numbered from the start of the run. A group's number determines its
    problem and its sampling noise, so the samples do not depend on the number of ranks
    (up to rounding). A collective.
    """
    first = (step - 1) * cfg.prompts_per_step
    groups = [first + index for index in prompts_of_rank(cfg.prompts_per_step)]
    indices = problem_indices(cfg.seed, len(train.prompts), groups)
    # A run's evaluations use seed 0 for their noise, and its rollouts cfg.seed + 1. So
    # the two hardly ever share noise.
    seeds = [noise_seed(cfg.seed + 1, group, cfg.group_size) for group in groups]
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
        rollouts.reward = torch.tensor(  # [N]
            compute_rewards(train, indices, rollouts.text)
        )
        rollouts.gold = train.golds(indices, cfg.group_size)  # [N]
        group_reward = rollouts.reward.view(-1, cfg.group_size)  # [P, G]
        advantage = group_advantage(group_reward, cfg.scale_advantage)  # (3), [P, G]
        # Every token has the advantage of its response.
        rollouts.advantage = advantage.view(-1, 1) * rollouts.mask  # [N, T]
    return rollouts


def find_objective(
    name: str, hyper_parameters: dict[str, float | str]
) -> Callable[..., torch.Tensor]:
    """Return the objective of this name. It takes the arguments of loss.p3o.

    The name is one of loss.LOSSES or module:name. Raises Refused if there is no such
    objective, if it does not accept these hyper-parameters, or if its loss has no
    gradient or does not favor good responses.
    """
    try:
        objective = LOSSES.get(name) or pkgutil.resolve_name(name)
        # Try it on a good and a bad response, with ratios of 1. An objective may be an
        # object with a state, so a copy is tried.
        logp, logp_behavior, kl = torch.zeros(3, 2, 2)
        logp.requires_grad = True
        advantage = torch.tensor([[1.0, 1.0], [-1.0, -1.0]])
        loss = copy.deepcopy(objective)(
            logp, logp_behavior, advantage, kl, 1.0, **hyper_parameters
        )
        loss[logp == 0].sum().backward()  # Indexing also checks the loss's shape.
        good, bad = logp.grad.sum(dim=1)
        if not good < bad:  # true for NaN too
            raise ValueError(
                "its loss does not favor responses with a positive advantage (are its "
                "first two arguments swapped, is a minus sign missing, or is every "
                "token dropped?)"
            )
    except Exception as error:  # the user's module may raise anything
        raise Refused(
            f"the objective {name!r} with {hyper_parameters} cannot be used: {error}; "
            f"give {', '.join(LOSSES)} or module:name, with its hyper-parameters"
        ) from None
    return partial(objective, **hyper_parameters)


class Run:
    """Holds what main needs: data, engines, policy, optimizer, log and queue.

    With --resume, the policy, the optimizer and the queue are those of the newest
    checkpoint.
    """

    def __init__(self, cfg: Config) -> None:
        """Check the user's input, then build everything.

        The checks come first, so that most mistakes raise Refused before anything slow
        is built. A collective.
        """
        check_out_dir(cfg)
        tokenizer, self.train, self.heldout, max_model_len = load_data(cfg)

        mesh = init_distributed()
        check_same_on_ranks(cfg, self.train, self.heldout)
        self.out = make_out_dir(cfg)
        # The policy is built before the engines, because vLLM changes transformers'
        # classes.
        self.policy = build_policy(
            cfg.model,
            mesh,
            cfg.dtype,
            cfg.policy_temperature,
            cfg.gradient_checkpointing,
        )
        self.engine, self.evaluator = build_engines(cfg, max_model_len)
        if mesh.device_type == "cuda" and cfg.dtype == "bfloat16":
            # Policy multiplies the hidden states by the head in float32. TF32 is
            # precise enough for this: both factors have bfloat16 values, which it
            # represents exactly. In the backward pass it rounds the gradient of the
            # logits to 11 bits. The setting is global, and building an engine resets
            # it, so we set it now.
            torch.set_float32_matmul_precision("high")
        self.optimizer = AdamW(
            self.policy.parameters(), weight_decay=cfg.weight_decay, fused=True
        )
        # load_checkpoint returns the checkpoint's step (0 if there is none), the
        # metrics of this step, the rollout batches that had been sampled ahead, and the
        # lines of metrics.jsonl and samples.jsonl.
        self.step, self.metrics, queue, rows = load_checkpoint(
            self.out, self.policy, self.optimizer
        )
        self.queue = deque(Rollouts(**fields) for fields in queue)
        self.log = Log(self.out, tokenizer, cfg.group_size, self.train, rows)


def load_data(cfg: Config) -> tuple[Any, Dataset, Dataset, int]:
    """Return the tokenizer, the training and held-out problems, and max_model_len.

    max_model_len, which the engine needs, is the length of the longest prompt plus
    max_response_tokens. Raises Refused if the model or the task cannot be used, if a
    prompt is too long and may not be dropped, or if no prompt is left.
    """
    tokenizer, context_length = check_model(cfg.model, cfg.rollout_tp, to_train=True)
    room = context_length - cfg.max_response_tokens
    room = min(room, cfg.max_prompt_tokens or room)
    load = partial(
        load_split,
        cfg.task,
        tokenizer,
        room=room,
        drop_long=cfg.max_prompt_tokens > 0,
        verifier=cfg.verifier,
    )
    train, heldout = load("train"), load("heldout", limit=cfg.eval_problems)
    check_verifier(train)
    prompts = train.prompts + heldout.prompts
    return tokenizer, train, heldout, max(map(len, prompts)) + cfg.max_response_tokens


def build_engines(cfg: Config, max_model_len: int) -> tuple[Engine, Engine]:
    """Build the engine that samples rollouts and the engine that evaluates.

    They are one engine, unless rollouts are in fp8. Then a second engine evaluates, in
    rollout_dtype and without fp8, so that the accuracy is the policy's. vLLM allows
    only one engine of a process to sleep, so the second one stays awake. But it may
    sample only while the first is awake, because vLLM keeps one table of rotary
    embeddings for both, in memory that the first lends out while it sleeps.
    """
    build = partial(
        Engine,
        cfg.model,
        max_model_len,
        # Start with random weights, so that a weight that `sync` misses is noticed.
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
    return engine, (engine if cfg.rollout_quantization == "none" else build())


def save_and_evaluate(step: int, run: Run, cfg: Config) -> dict[str, float]:
    """Save the model after the last step; evaluate the policy if that is due.

    Returns the held-out accuracies, or {} without an evaluation. The model is saved
    first, because an evaluation may fail. A run also calls this before its first step:
    for step 0, or for the step of the checkpoint from which it resumes. A collective.
    """
    policy = run.policy
    if step == cfg.steps:
        save_model(policy.model, full_weights(policy), run.out / "model")
    if step and not is_due(cfg.eval_every, step, cfg):
        return {}
    if run.evaluator is not run.engine:
        sync(run.evaluator, policy, step, run.heldout.prompts)
    return heldout_accuracy(
        run.evaluator, run.heldout, cfg.policy_temperature, cfg.max_response_tokens
    )


def learning_rate(updates_made: int, cfg: Config) -> float:
    """Return the learning rate of the run's next update.

    It rises during the first cfg.warmup_updates updates, then it is constant.
    """
    return cfg.learning_rate * min(1.0, (updates_made + 1) / max(1, cfg.warmup_updates))


def is_due(every: int, step: int, cfg: Config) -> bool:
    """Return whether `step` is the last or, if every > 0, a multiple of `every`."""
    return step == cfg.steps or (every > 0 and step % every == 0)


def problem_indices(seed: int, problem_count: int, groups: Iterable[int]) -> list[int]:
    """Return the index of the problem of each of these groups.

    Groups are numbered from the start of the run. Each epoch has its own order.
    """
    shuffled = {
        epoch: random.Random(f"{seed} {epoch}").sample(
            range(problem_count), problem_count
        )
        for epoch in {group // problem_count for group in groups}
    }
    return [shuffled[group // problem_count][group % problem_count] for group in groups]


def micro_batches(
    rollouts: Rollouts, rows: torch.Tensor, max_tokens: int, device: torch.device
) -> list[Rollouts]:
    """Divide these rows into micro-batches of at most max_tokens, padding included.

    Only a micro-batch of a single response may have more tokens. FSDP needs all ranks
    in every forward pass, so all ranks need equally many micro-batches. Config ensures
    that they have equally many rows, and the longest sequence of all ranks determines
    how many responses a micro-batch has. Sequences (a prompt and its response) are
    sorted by the integer part of log2(length), which limits the padding. Within a
    micro-batch they have the order of the rollout batch. So most responses to the same
    prompt are neighbors, and the policy computes the prompt only once for them (see
    policy.distinct_tokens). A collective.
    """
    length = rollouts.prompt_length + rollouts.mask.sum(dim=1)  # [N]
    longest_sequence = length[rows].max()
    dist.all_reduce(longest_sequence, dist.ReduceOp.MAX)
    size = max(1, max_tokens // int(longest_sequence))
    by_length = rows[length[rows].log2().floor().argsort(stable=True)]
    return [
        rollouts.select(chunk.sort().values, device) for chunk in by_length.split(size)
    ]


def max_micro_batch_tokens(cfg: Config, policy: Policy) -> int:
    """Return cfg.micro_batch_tokens, lowered on a CPU to keep to MAX_ACTIVATIONS.

    For each token, the layers keep about 2 * weights / hidden_size numbers for the
    backward pass.
    """
    if torch.cuda.is_available():
        return cfg.micro_batch_tokens
    weights = sum(map(torch.numel, policy.model.base_model.layers.parameters()))
    limit = MAX_ACTIVATIONS * policy.model.config.hidden_size // (2 * weights)
    return min(cfg.micro_batch_tokens, limit)


def kl_at_positions(
    top_logp: torch.Tensor, micro_batch: Rollouts, cfg: Config
) -> torch.Tensor:
    """Return KL(pi_theta || pi_b) at each position, with its gradient: [N, T]."""
    both = top_logp, micro_batch.top_logp_behavior  # [N, T, K] each
    if cfg.top_p < 1 or cfg.top_k:
        both = restrict_to_kept_tokens(*both)
    return kl_divergence(*both)


def apply_gradient(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    cfg: Config,
    step: int,
    e_b: float,
) -> float:
    """Clip the gradient, make the optimizer step, and clear the gradient.

    Returns the norm of the gradient before clipping. Raises FloatingPointError, on all
    ranks and before the optimizer step, if this norm or e_B is not finite. e_B is not
    finite if a ratio is not finite; for ratios above about e^350 see
    loss.effective_sample_size. A collective.
    """
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
    grad_norm = norm.full_tensor().item()
    if not math.isfinite(e_b + grad_norm):
        raise FloatingPointError(
            f"step {step}: e_B is {e_b:.2g} and the norm of the gradient is "
            f"{grad_norm:.2g}, but both have to be finite (ess_min of earlier steps "
            "shows where the trouble began): lower learning_rate or raise "
            "warmup_updates (above the number of updates made), and continue with "
            "--resume or, without a checkpoint, start again in a new out_dir"
        )
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm


if __name__ == "__main__":
    run_script(main)
