"""P3O end to end: sample with vLLM, check the answers, update with the ESS-adaptive loss, sync the weights, repeat.

    python train.py                                        # the embedded default, on two CPU cores
    torchrun --nproc-per-node 8 train.py --config recipes/gsm8k.yaml --out_dir runs/gsm8k

Every field of Config is a flag of the same name; --config reads a YAML file of them, and flags override it. A run writes
out_dir/{config.json, metrics.jsonl, samples.jsonl, curves.png, checkpoints/, model/}. Read `main` first.
"""

import inspect
import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import pad
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, HfArgumentParser

from eval import evaluate, noise_seeds
from loss import OBJECTIVES, batch_quantities, effective_sample_size, group_advantage
from reward import encode_prompt, load_task, score, task_of
from rollout import QUANTIZATIONS, Batch, Engine, Rollouts, init_distributed, response_logp

DTYPES = ("float32", "bfloat16")


def flag(default, help: str):
    """A configuration field with its sentence, which `python train.py --help` prints."""
    make = (
        {"default_factory": lambda: list(default)}
        if isinstance(default, list)
        else {"default": default}
    )
    return field(**make, metadata={"help": help})


@dataclass
class Config:
    """One run. Mismatch is set by the six fields from temperature to lag and by passes and minibatches, by nothing else."""

    model: str = flag("tiny", "the initial policy: a model folder or a hub name")
    task: str = flag("tiny", "a task of reward.TASKS, a JSONL file, a folder or a hub dataset")
    out_dir: str = flag("", "where the run writes; left empty, runs/ and the time")
    objective: str = flag("p3o", f"one of {', '.join(OBJECTIVES)}")
    objective_args: list[str] = flag(
        [], "its hyper-parameters as name=value, such as eps=0.4 of grpo"
    )
    scale_advantage: bool = flag(
        True, "divide the advantage by the standard deviation of its group"
    )
    steps: int = flag(80, "rollout batches")
    prompts_per_step: int = flag(32, "prompts in a rollout batch, over all ranks")
    group_size: int = flag(8, "G, the responses to a prompt")
    passes: int = flag(1, "how often a rollout batch is used")
    minibatches: int = flag(1, "optimizer steps in a pass: each takes its share of the prompts")
    temperature: float = flag(
        1.0, "of the rollouts; other than policy_temperature it is off-policy data"
    )
    top_p: float = flag(1.0, "of the rollouts; tokens outside the nucleus cannot be learned about")
    top_k: int = flag(0, "of the rollouts; 0 is all tokens")
    rollout_quantization: str = flag("none", f"one of {', '.join(QUANTIZATIONS)}")
    lag: int = flag(0, "steps between the sampling of a rollout batch and its use")
    policy_temperature: float = flag(
        1.0, "of pi_theta, the distribution that is trained and evaluated"
    )
    max_prompt_tokens: int = flag(
        0, "drop longer prompts; 0 wants all to fit into the model's context"
    )
    max_response_tokens: int = flag(64, "longer responses are truncated")
    learning_rate: float = flag(2e-4, "of AdamW, after the warm-up; constant from there")
    warmup_steps: int = flag(5, "optimizer steps of linear warm-up")
    weight_decay: float = flag(0.0, "of AdamW")
    max_grad_norm: float = flag(1.0, "gradients are clipped to this norm")
    dtype: str = flag(
        "auto", "the trainer's compute precision; auto: bfloat16 on CUDA, else float32"
    )
    rollout_dtype: str = flag("bfloat16", "the engine's compute precision")
    micro_batch_tokens: int = flag(
        16384, "padded tokens in a forward pass: changes memory, not results"
    )
    gradient_checkpointing: bool = flag(False, "recompute the activations in the backward pass")
    kv_cache_gb: float = flag(0.25, "memory of the engine's KV cache on each rank")
    max_num_seqs: int = flag(256, "responses that the engine decodes at once on each rank")
    eval_every: int = flag(
        10, "steps between evaluations on held-out problems; 0: only before and after"
    )
    eval_problems: int = flag(512, "held-out problems to evaluate on; 0 is all")
    save_every: int = flag(0, "steps between checkpoints; 0: none")
    resume: bool = flag(False, "go on from the newest checkpoint in out_dir")
    seed: int = flag(0, "of the order of the prompts and the noise of the sampling")
    verbose: bool = flag(False, "let vLLM and torch print what they have to say")


class Refused(Exception):
    """What stops a run for a reason that the user can act on: its message is all that is printed."""


class Policy(torch.nn.Module):
    """A language model whose forward gives log pi_theta of the response tokens, [B, T].

    FSDP gathers the root's weights (embedding, head) only around the root's forward: hence a module.
    """

    def __init__(self, model: torch.nn.Module, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, batch: Batch) -> torch.Tensor:
        return response_logp(self.model, batch, self.temperature)


def build_policy(cfg: Config, mesh: DeviceMesh) -> Policy:
    """float32 master weights, sharded within a node and, on a mesh of two dimensions, replicated across."""
    model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    policy = Policy(model, cfg.policy_temperature).to(mesh.device_type)
    precision = MixedPrecisionPolicy(getattr(torch, cfg.dtype), reduce_dtype=torch.float32)
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(policy, mesh=mesh, mp_policy=precision).train()


def full_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Every weight under its Hugging Face name, gathered one at a time: a collective."""
    for name, weight in policy.model.state_dict().items():  # named_parameters omits a tied head
        yield name, weight.full_tensor()


@cache
def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    return random.Random(f"{seed} {epoch}").sample(range(count), count)


def problems_of_step(cfg: Config, step: int, count: int) -> list[int]:
    """Consecutive slices of freshly shuffled epochs: a function of seed and step alone."""
    positions = range(step * cfg.prompts_per_step, (step + 1) * cfg.prompts_per_step)
    return [epoch_order(cfg.seed, i // count, count)[i % count] for i in positions]


def micro_batches(rollouts: Rollouts, rows: list[int], max_tokens: int) -> list[list[int]]:
    """Rows by length, cut where a micro-batch would pad to over max_tokens; as many on every rank."""
    length = [
        len(p) + len(r) for p, r in zip(rollouts.prompt_ids, rollouts.response_ids, strict=True)
    ]
    micros: list[list[int]] = [[]]
    for row in sorted(rows, key=length.__getitem__):  # so the row that comes is the longest so far
        if micros[-1] and (len(micros[-1]) + 1) * length[row] > max_tokens:
            micros.append([])
        micros[-1].append(row)
    most = torch.tensor(len(micros))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return micros + [[]] * (int(most) - len(micros))  # FSDP needs every rank in every forward


def gather_batch(micros: list[torch.Tensor]) -> torch.Tensor:
    """Micro-batches [C, B_i, T_i] of all ranks -> the whole minibatch [C, B, T], padded with zeros."""
    size = torch.tensor([sum(m.shape[1] for m in micros), max(m.shape[2] for m in micros)])
    dist.all_reduce(size, dist.ReduceOp.MAX)
    rows, columns = size.tolist()
    mine = torch.cat([pad(m, (0, columns - m.shape[2])) for m in micros], dim=1)
    mine = pad(mine, (0, 0, 0, rows - mine.shape[1])).contiguous()  # [C, rows, columns]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return torch.cat(everyone, dim=1)


def accumulate_gradient(policy: Policy, rollouts: Rollouts, rows: list[int], cfg: Config) -> dict:
    """Gradient of the objective on one minibatch (`rows` are this rank's part); returns statistics.

    B of (2) to (5) is the minibatch of all ranks, so how it is cut into micro-batches and ranks
    changes nothing. Raises FloatingPointError on a ratio or loss that is not finite.
    """
    device = next(policy.parameters()).device
    micros = micro_batches(rollouts, rows, cfg.micro_batch_tokens)
    batches = [rollouts.batch(micro, device) for micro in micros]
    # e_B needs all ratios before any gradient; a single micro-batch keeps its graph for it instead.
    with torch.set_grad_enabled(len(batches) == 1):
        logps = [policy(b) for b in batches]  # [B_i, T_i]
    parts = [
        torch.stack([logp.detach() - b.logp_behavior, b.advantage[:, None].expand_as(logp), b.mask])
        for logp, b in zip(logps, batches, strict=True)
    ]
    log_ratio, advantage, mask = gather_batch(parts)  # [B, T]
    mask = mask.bool()
    ess = effective_sample_size(log_ratio, mask)  # logged for every objective
    hyper = hyper_parameters(cfg)
    whole = batch_quantities(cfg.objective, log_ratio, advantage, mask, **hyper)
    stats: dict[str, float] = defaultdict(float)
    for b in batches:
        logp = logps[0] if len(batches) == 1 else policy(b)  # [B_i, T_i]
        prox = {} if b.logp_prox is None else {"logp_prox": b.logp_prox}
        loss, part = OBJECTIVES[cfg.objective](
            logp, b.logp_behavior, b.advantage, b.mask, **whole, **prox, **hyper
        )
        (loss * dist.get_world_size()).backward()  # FSDP averages over the ranks; the loss is a sum
        for name, value in part.items():
            stats[name] += float(value)
    total = torch.tensor(list(stats.values()), dtype=torch.float64)
    dist.all_reduce(total)
    stats = dict(zip(stats, total.tolist(), strict=True))
    log_rho = log_ratio[mask].sort().values  # [M]
    for q in (0.01, 0.5, 0.99):
        stats[f"ratio_q{q}"] = log_rho[round(q * (len(log_rho) - 1))].exp().item()
    mismatch = log_rho.abs()  # [M]
    return stats | dict(
        ess=ess.item(), mismatch_mean=mismatch.mean().item(), mismatch_max=mismatch.max().item()
    )


def update(policy, optimizer, schedule, rollouts: Rollouts, cfg: Config, step: int) -> list[dict]:
    """All optimizer steps on one rollout batch; returns the statistics of each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    once = cfg.passes * cfg.minibatches == 1
    if "logp_prox" in inspect.signature(OBJECTIVES[cfg.objective]).parameters and not once:
        rollouts.logp_prox = score_rollouts(policy, rollouts, cfg)
    history: list[dict] = []
    for number in range(cfg.passes):
        # Whole groups, shuffled by their place in the step: the same minibatches on any number of ranks.
        shuffled = random.Random(f"{cfg.seed} {step} {number}").sample(
            range(cfg.prompts_per_step), cfg.prompts_per_step
        )
        for part in range(cfg.minibatches):
            groups = [
                g // world for g in sorted(shuffled[part :: cfg.minibatches]) if g % world == rank
            ]
            rows = [g * cfg.group_size + j for g in groups for j in range(cfg.group_size)]
            stats = accumulate_gradient(policy, rollouts, rows, cfg)
            if not history and not planned_mismatch(cfg):
                check_on_policy(stats, step)
            norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), cfg.max_grad_norm)
            stats |= dict(
                grad_norm=norm.full_tensor().item(), learning_rate=schedule.get_last_lr()[0]
            )
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            history.append(stats)
    return history


def score_rollouts(policy: Policy, rollouts: Rollouts, cfg: Config) -> list[list[float]]:
    """log pi_theta of every response token, [N][R_i], without gradient."""
    logp: dict[int, list[float]] = {}
    with torch.no_grad():
        for rows in micro_batches(
            rollouts, list(range(len(rollouts.text))), cfg.micro_batch_tokens
        ):
            batch = rollouts.batch(rows, next(policy.parameters()).device)
            scored = policy(batch).cpu()  # [B, T]
            logp |= {
                row: values[: len(rollouts.response_ids[row])].tolist()
                for row, values in zip(rows, scored)
            }
    return [logp[row] for row in range(len(rollouts.text))]


def planned_mismatch(cfg: Config) -> bool:
    truncated = cfg.top_p < 1 or cfg.top_k > 0 or cfg.temperature != cfg.policy_temperature
    return truncated or cfg.rollout_quantization != "none" or cfg.lag > 0


def check_on_policy(stats: dict, step: int) -> None:
    """A fresh batch must look fresh: raises Refused where the engine and the trainer are two policies."""
    if stats["ess"] < 0.9 or abs(stats["ratio"] - 1) > 0.1:
        raise Refused(
            f"step {step}: engine and trainer disagree on a batch that should be on-policy: e_B "
            f"{stats['ess']:.3f}, mean rho {stats['ratio']:.3f}, mean |log rho| {stats['mismatch_mean']:.3f}; look at "
            "the weight sync (a tied head?), the sampling temperature, rollout_dtype, and the alignment of the tokens"
        )


def parse_config(arguments: list[str] | None = None) -> Config:
    """Flags over --config over the defaults."""
    parser = HfArgumentParser(Config, description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", help="a YAML file of these fields; flags override it")
    if path := parser.parse_known_args(arguments)[0].config:
        recipe = yaml.safe_load(Path(path).read_text())
        if unknown := set(recipe) - {f.name for f in fields(Config)}:
            raise Refused(f"{path} has unknown fields: {', '.join(sorted(unknown))}")
        parser.set_defaults(**recipe)
    values = vars(parser.parse_args(arguments))
    del values["config"]
    cfg = Config(**values)
    if cfg.dtype == "auto":
        cfg.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    return cfg


def hyper_parameters(cfg: Config) -> dict[str, float | str]:
    """objective_args as keywords of the objective; raises Refused on a name that it does not have."""
    known = inspect.signature(OBJECTIVES[cfg.objective]).parameters
    batch_wide = {"ess", "token_count", "sequence_count", "cutoff", "logp_prox"}
    names = [
        name for name, p in known.items() if p.kind is p.KEYWORD_ONLY and name not in batch_wide
    ]
    hyper: dict[str, float | str] = {}
    for argument in cfg.objective_args:
        name, _, value = argument.partition("=")
        if name not in names:
            raise Refused(
                f"objective {cfg.objective} has no {argument!r}; it takes {names or 'nothing'} as name=value"
            )
        hyper[name] = value if isinstance(known[name].default, str) else float(value)
    return hyper


def check_config(cfg: Config) -> None:
    """Raises Refused with one sentence on a configuration that cannot run."""
    at_least = dict(
        steps=1,
        prompts_per_step=1,
        group_size=2,
        passes=1,
        minibatches=1,
        lag=0,
        max_response_tokens=1,
    )
    for name, least in at_least.items():
        if getattr(cfg, name) < least:
            raise Refused(f"{name} is {getattr(cfg, name)}; it must be at least {least}")
    if cfg.minibatches > cfg.prompts_per_step:
        raise Refused(
            f"{cfg.minibatches} minibatches cannot share {cfg.prompts_per_step} prompts; set fewer"
        )
    choices = dict(
        objective=OBJECTIVES, rollout_quantization=QUANTIZATIONS, dtype=DTYPES, rollout_dtype=DTYPES
    )
    for name, known in choices.items():
        if getattr(cfg, name) not in known:
            raise Refused(
                f"unknown {name} {getattr(cfg, name)!r}; choose one of {', '.join(known)}"
            )
    hyper_parameters(cfg)
    if not 0 < cfg.temperature <= 2 or not 0 < cfg.top_p <= 1:
        raise Refused(
            f"temperature {cfg.temperature}, top_p {cfg.top_p}: vLLM samples at (0, 2] and (0, 1]"
        )
    if not cfg.resume and Path(cfg.out_dir, "config.json").exists():
        raise Refused(
            f"{cfg.out_dir} holds another run; choose another --out_dir, or --resume true to go on with it"
        )


def load_prompts(
    cfg: Config, tokenizer, context: int, split: str
) -> tuple[list[dict], list[list[int]]]:
    """Problems of the task and their prompts as token ids; those over max_prompt_tokens are dropped."""
    problems = load_task(cfg.task, split)
    prompts = [
        encode_prompt(tokenizer, p["prompt"], task_of(cfg.task).instruction) for p in problems
    ]
    longest = cfg.max_prompt_tokens or context - cfg.max_response_tokens
    keep = [i for i, prompt in enumerate(prompts) if len(prompt) <= longest]
    if len(keep) < len(prompts):
        dropped = f"{len(prompts) - len(keep)} of {len(prompts)} {split} prompts of {cfg.task} are longer than {longest} tokens"
        if not cfg.max_prompt_tokens or not keep:
            raise Refused(
                f"{dropped}, which is what the model's context of {context} leaves them; set --max_prompt_tokens to drop them"
            )
        say(f"dropped: {dropped}")
    return [problems[i] for i in keep], [prompts[i] for i in keep]


def say(text: str) -> None:
    """Print on rank 0."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(text, flush=True)


class Log:
    """metrics.jsonl, samples.jsonl, the progress line, and at the end the table and curves.png; written by rank 0."""

    def __init__(self, cfg: Config) -> None:
        self.cfg, self.out = cfg, Path(cfg.out_dir)
        self.seconds: dict[str, float] = defaultdict(float)
        if dist.get_rank() == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            (self.out / "config.json").write_text(json.dumps(asdict(cfg), indent=1) + "\n")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def write(self, name: str, row: dict) -> None:
        with open(
            self.out / name, "a"
        ) as file:  # one write a line: an interrupted run leaves whole lines
            file.write(json.dumps(row) + "\n")

    def step(
        self, step: int, rollouts: Rollouts, history: list[dict], pass_at_1: float | None
    ) -> None:
        """Gather what the ranks know, average the updates, write one line of each file."""
        local = [
            (reward, len(response), truncated, -sum(logp))
            for reward, response, truncated, logp in zip(
                rollouts.reward.tolist(),
                rollouts.response_ids,
                rollouts.truncated,
                rollouts.logp_behavior,
                strict=True,
            )
        ]
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, local)
        if dist.get_rank() != 0:
            return
        reward, length, truncated, surprise = torch.tensor(
            [row for rows in everyone for row in rows]
        ).T  # [N] each
        groups = reward.view(-1, self.cfg.group_size)  # [P, G]
        spent = dict(self.seconds)
        self.seconds.clear()
        row = dict(
            step=step,
            weight_version=rollouts.weight_version,
            reward=reward.mean().item(),
            groups_with_signal=(groups.amax(1) > groups.amin(1)).float().mean().item(),
            response_tokens=length.mean().item(),
            truncated=truncated.mean().item(),
            entropy=(
                surprise.sum() / length.sum()
            ).item(),  # of pi_b: mean of -log pi_b over its samples
        )
        row |= {name: sum(h[name] for h in history) / len(history) for name in history[0]}
        row |= {
            name: history[0][name] for name in ("mismatch_mean", "mismatch_max")
        }  # before the first update
        row["ess_min"] = min(h["ess"] for h in history)
        row |= {f"{name}_s": round(value, 4) for name, value in spent.items()}
        row["tokens_per_s"] = length.sum().item() / sum(spent.values())
        cuda = torch.cuda.is_available()
        peak = (
            torch.cuda.max_memory_allocated()
            if cuda
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        row["peak_memory_gb"] = peak / 2**30
        if pass_at_1 is not None:
            row["heldout_pass@1"] = pass_at_1
        self.write("metrics.jsonl", row)
        for i in range(min(2, len(rollouts.text))):
            self.write(
                "samples.jsonl",
                dict(
                    step=step,
                    prompt_index=rollouts.prompt_index[i],
                    response=rollouts.text[i],
                    reward=reward[i].item(),
                ),
            )
        heldout = "" if pass_at_1 is None else f"  held-out pass@1 {pass_at_1:.3f}"
        print(
            f"step {step + 1:4d}/{self.cfg.steps}  reward {row['reward']:.3f}  e_B {row['ess']:.4f}  "
            f"mismatch {row['mismatch_mean']:.4f}  length {row['response_tokens']:.1f}  {sum(spent.values()):.2f} s{heldout}",
            flush=True,
        )

    def finish(self, before: float) -> None:
        """The final table and the figure, from metrics.jsonl."""
        if dist.get_rank() != 0:
            return
        rows = [json.loads(line) for line in open(self.out / "metrics.jsonl")]
        print(f"\n{'':24}before    after")
        print(f"{'held-out pass@1':24}{before:6.3f}   {rows[-1]['heldout_pass@1']:6.3f}")
        print(f"{'reward':24}{rows[0]['reward']:6.3f}   {rows[-1]['reward']:6.3f}")
        seconds = {
            name: sum(row[f"{name}_s"] for row in rows)
            for name in ("rollout", "reward", "update", "sync")
        }
        print("".join(f"{name + ', seconds':24}{value:15.1f}\n" for name, value in seconds.items()))
        draw_curves(self.out, rows)
        print(f"{self.out}: metrics.jsonl, samples.jsonl, curves.png, model/")


def draw_curves(out: Path, rows: list[dict]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(14, 3), layout="constrained")
    for axis, name in zip(axes, ("reward", "heldout_pass@1", "ess", "entropy"), strict=True):
        points = [(row["step"] + 1, row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), marker="." if len(points) < len(rows) else None)
        axis.set(title=name.replace("ess", "e_B"), xlabel="step")
    figure.savefig(out / "curves.png", dpi=120)
    plt.close(figure)


def save_checkpoint(cfg: Config, step: int, policy, optimizer, schedule, queue) -> None:
    """checkpoints/step-N, written under another name and renamed when it is complete."""
    folder = Path(cfg.out_dir, "checkpoints")
    unfinished, finished = folder / "unfinished", folder / f"step-{step:06d}"
    if dist.get_rank() == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
    dist.barrier()
    weights, moments = get_state_dict(policy, optimizer)
    state = dict(policy=weights, optimizer=moments, schedule=schedule.state_dict(), step=step)
    state[f"queue_{dist.get_rank()}"] = list(queue)
    dcp.save(state, checkpoint_id=unfinished)
    dist.barrier()
    if dist.get_rank() == 0:
        unfinished.rename(finished)


def load_checkpoint(cfg: Config, policy, optimizer, schedule, queue) -> int:
    """Restore the newest complete checkpoint in place; returns the step to go on with."""
    newest = max(Path(cfg.out_dir, "checkpoints").glob("step-*"), default=None)
    if newest is None:
        raise Refused(
            f"{cfg.out_dir}/checkpoints has no complete checkpoint; start anew without --resume"
        )
    weights, moments = get_state_dict(policy, optimizer)
    state = dict(policy=weights, optimizer=moments, schedule=schedule.state_dict(), step=0)
    state[f"queue_{dist.get_rank()}"] = []
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(
        policy, optimizer, model_state_dict=state["policy"], optim_state_dict=state["optimizer"]
    )
    schedule.load_state_dict(state["schedule"])
    queue.extend(state[f"queue_{dist.get_rank()}"])
    return state["step"]


def save_model(cfg: Config, policy: Policy, tokenizer) -> None:
    """out_dir/model: the policy as a Hugging Face folder, weights in float32."""
    weights = dict(full_weights(policy))
    if dist.get_rank() == 0:
        policy.model.save_pretrained(Path(cfg.out_dir, "model"), state_dict=weights)
        tokenizer.save_pretrained(Path(cfg.out_dir, "model"))


def main() -> None:
    # Everything that the user can get wrong, before anything slow is built.
    cfg = parse_config()
    check_config(cfg)
    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.model)
        context = AutoConfig.from_pretrained(cfg.model).max_position_embeddings
    except (OSError, ValueError) as error:
        raise Refused(f"no model at {cfg.model!r}: {str(error).splitlines()[0]}") from error
    train, prompts = load_prompts(cfg, tokenizer, context, "train")
    heldout, heldout_prompts = load_prompts(cfg, tokenizer, context, "heldout")
    heldout, heldout_prompts = (
        heldout[: cfg.eval_problems or None],
        heldout_prompts[: cfg.eval_problems or None],
    )
    verifier = task_of(cfg.task).verifier

    # Setup: group, engine, policy, optimizer, in this order (rollout.py says why).
    mesh = init_distributed()
    rank, world = dist.get_rank(), dist.get_world_size()
    if not cfg.out_dir:
        name = [time.strftime("runs/%Y%m%d-%H%M%S")]
        dist.broadcast_object_list(name)
        cfg.out_dir = name[0]
    engine = Engine(
        cfg.model,
        max_model_len=min(
            context, max(map(len, prompts + heldout_prompts)) + cfg.max_response_tokens
        ),
        quantization=cfg.rollout_quantization,
        dtype=cfg.rollout_dtype,
        kv_cache_gb=cfg.kv_cache_gb,
        max_num_seqs=cfg.max_num_seqs,
        seed=cfg.seed + rank,
        sleeps=True,
        verbose=cfg.verbose,
    )
    engine.sleep()
    policy = build_policy(cfg, mesh)
    optimizer = torch.optim.AdamW(
        policy.parameters(), cfg.learning_rate, weight_decay=cfg.weight_decay
    )
    schedule = LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / max(1, cfg.warmup_steps)))
    queue: deque[Rollouts] = deque()  # sampled, not yet used: lag + 1 at most
    start = load_checkpoint(cfg, policy, optimizer, schedule, queue) if cfg.resume else -cfg.lag
    log = Log(cfg)
    sampling = dict(
        max_tokens=cfg.max_response_tokens,
        temperature=cfg.temperature,
        top_p=cfg.top_p,
        top_k=cfg.top_k,
    )

    def heldout_accuracy() -> float:
        """pass@1 of the policy's own distribution, at policy_temperature."""
        at = dict(max_tokens=cfg.max_response_tokens, temperature=cfg.policy_temperature)
        correct = evaluate(engine, heldout, heldout_prompts, verifier, seed=cfg.seed, **at)
        return sum(correct) / len(correct)

    engine.load_weights(full_weights(policy), version=str(max(0, start)))
    before = heldout_accuracy()
    say(f"step {start}: held-out pass@1 {before:.3f} on {len(heldout)} problems")
    stop: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop.append(number))
    for step in range(start, cfg.steps):
        # 1 rollout: pi_b is what the engine samples from, with the weights that the last sync gave it
        with log.phase("rollout"):
            mine = problems_of_step(cfg, step + cfg.lag, len(train))[rank::world]
            first = (step + cfg.lag) * cfg.prompts_per_step
            seeds = noise_seeds(cfg.seed + 1, first, cfg.prompts_per_step, cfg.group_size)[
                rank::world
            ]
            rollouts = engine.sample([prompts[i] for i in mine], cfg.group_size, seeds, **sampling)
            engine.sleep()
        # 2 reward, and advantage within each group
        with log.phase("reward"):
            answers = [train[i]["answer"] for i in mine for _ in range(cfg.group_size)]
            rollouts.reward = torch.tensor(score(rollouts.text, answers, verifier))
            groups = rollouts.reward.view(-1, cfg.group_size)  # [P, G]
            rollouts.advantage = group_advantage(groups, cfg.scale_advantage).flatten()  # [N]
        queue.append(rollouts)
        if step < 0:  # filling the queue: a batch is used exactly lag steps after it was sampled
            engine.load_weights(full_weights(policy), version="0")
            continue
        rollouts = queue.popleft()
        if rollouts.weight_version != str(max(0, step - cfg.lag)):
            raise Refused(
                f"step {step}: weights {rollouts.weight_version} sampled this batch, not {max(0, step - cfg.lag)}: was a sync skipped?"
            )
        # 3 update: passes and minibatches over the batch make it ever more off-policy
        with log.phase("update"):
            history = update(policy, optimizer, schedule, rollouts, cfg, step)
        # 4 sync: the new weights into the engine
        with log.phase("sync"):
            engine.load_weights(full_weights(policy), version=str(step + 1))
        # 5 log; now and then evaluate, save
        last = step + 1 == cfg.steps
        accuracy = (
            heldout_accuracy()
            if last or (cfg.eval_every and (step + 1) % cfg.eval_every == 0)
            else None
        )
        log.step(step, rollouts, history, accuracy)
        stopping = torch.tensor(len(stop))  # a signal reaches the ranks at different times
        dist.all_reduce(stopping)
        if stopping or (cfg.save_every and (step + 1) % cfg.save_every == 0):
            save_checkpoint(cfg, step + 1, policy, optimizer, schedule, queue)
        if stopping:
            say(
                f"train.py: stopped by signal {stop[:1]} after step {step}; go on with --resume true"
            )
            break
    save_model(cfg, policy, tokenizer)
    log.finish(before)
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except (Refused, FloatingPointError) as error:
        say(f"train.py: {error}")
        sys.exit(1)
