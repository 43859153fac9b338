"""What a run tells: a line of metrics a step, and at its end a table and a figure.

Rank 0 writes into out_dir, whole lines: a run that was interrupted leaves valid files.
metrics.jsonl has, over all ranks, of the step's rollout batch:

    weight_version       the weights that sampled it: the number of steps they had
    reward               mean reward
    groups_with_signal   share of the groups whose rewards are not all equal
    response_tokens      mean length, with the end of sequence
    truncated            share of the responses that max_response_tokens cut
    entropy              of pi_b, from its samples: mean of -log pi_b, nats a token

as means over its updates, each of the whole batch B of the update:

    loss                 what was minimized; for P3O policy_loss + (1 - e_B) kl_loss
    capped               share of tokens with rho > e_B, or that the objective cuts
    ess                  e_B (11)
    kl                   KL(pi_theta || pi_b), nats a token
    ratio, ratio_q1 ...  mean of rho, and its 1%, 50% and 99% quantiles
    ess_central ...      e_B and mean rho, the outer 1% of tokens at each end drawn in
    grad_norm            before clipping
    learning_rate        of the update

of one update:

    ess_min              the smallest e_B of the updates
    mismatch_mean, _max  |log rho| at the first update: of engine, lag, temperature

and rollout_seconds, reward_seconds, update_seconds, sync_seconds and peak_memory_gb,
these of rank 0 alone, and tokens_per_second, the response tokens of the batch by these
seconds. With lag the first step samples several batches, and the last steps none.

Where the policy was evaluated it has heldout_pass@1 (sampled at policy_temperature) and
heldout_greedy: of the policy, never of an fp8 copy of it.
"""

import importlib.util
import json
import resource
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from support.checkpoints import write_whole
from support.flags import OneRankFailed, Refused
from support.tasks import prompt_text

PHASES = ("rollout", "reward", "update", "sync")
ACCURACIES = ("heldout_pass@1", "heldout_greedy")


class Log:
    """Collects the seconds of the phases of a step, then writes what the step did."""

    def __init__(
        self,
        out: Path,
        tokenizer: PreTrainedTokenizerBase,
        group_size: int,
        report_to: str,
        config: dict[str, Any],
        done: int,
    ) -> None:
        """Lines of `done` steps stay; what a killed run wrote of later ones goes."""
        self.out = out
        self.tokenizer = tokenizer
        self.group_size = group_size
        self.seconds: dict[str, float] = defaultdict(float)
        if dist.get_rank() > 0:
            return
        for name in ("metrics.jsonl", "samples.jsonl"):
            if done > 0:
                keep_steps(out / name, done)
            else:  # of a run that failed before its first step
                (out / name).unlink(missing_ok=True)
        self.report = reporter(out, report_to, config, done)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a with-block to phase `name` of the step."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def evaluation(self, step: int, accuracy: dict[str, float]) -> None:
        """A line that has an evaluation alone: of step 0, the policy before training.

        Also of the last step, if an error came between its update and its line.
        """
        if dist.get_rank() > 0:
            return
        row = {"step": step, **accuracy}
        self.append("metrics.jsonl", row)
        self.report(row)
        print(f"step {step:4d}{accuracy_text(accuracy)}", flush=True)

    def step(
        self,
        step: int,
        rollouts: Any,
        history: list[dict[str, float]],
        accuracy: dict[str, float],
    ) -> None:
        """A line of metrics.jsonl, from all ranks' rollouts and all updates.

        `rollouts` is a rollout.Rollouts. A collective.
        """
        length = rollouts.mask.sum(dim=1)  # [N]
        columns = [
            rollouts.reward,
            length.float(),
            rollouts.truncated.float(),
            rollouts.logp_behavior.sum(dim=1),
        ]
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, torch.stack(columns))
        if dist.get_rank() > 0:
            return
        reward, length, truncated, logp = torch.cat(everyone, dim=1)  # [N] of all ranks
        groups = reward.view(-1, self.group_size)  # [P, G]
        has_signal = groups.amax(dim=1) > groups.amin(dim=1)
        tokens = length.sum().item()
        seconds = sum(self.seconds.values())
        row = {
            "step": step,
            "weight_version": rollouts.weight_version,
            "reward": reward.mean().item(),
            "groups_with_signal": has_signal.float().mean().item(),
            "response_tokens": length.mean().item(),
            "truncated": truncated.mean().item(),
            "entropy": -logp.sum().item() / tokens,
        }
        for name in history[0]:
            row[name] = sum(stats[name] for stats in history) / len(history)
        for name in ("mismatch_mean", "mismatch_max"):
            row[name] = history[0][name]
        row["ess_min"] = min(stats["ess"] for stats in history)
        for phase in PHASES:
            row[f"{phase}_seconds"] = self.seconds[phase]
        row["tokens_per_second"] = tokens / seconds
        row["peak_memory_gb"] = peak_memory_gb()
        row |= accuracy
        self.append_samples(step, rollouts, reward)
        # The last of its files: where this line stands, the step is done.
        self.append("metrics.jsonl", row)
        self.report(row)
        self.seconds.clear()
        print(
            f"step {step:4d}  reward {row['reward']:.3f}  e_B {row['ess']:.4f}  "
            f"KL {row['kl']:.1e}  tokens {row['response_tokens']:.1f}  "
            f"{seconds:.2f} s{accuracy_text(accuracy)}",
            flush=True,
        )

    def append_samples(self, step: int, rollouts: Any, reward: torch.Tensor) -> None:
        """The first response to each of this rank's first two prompts.

        The prompt is the whole text that was sent, with the template's special tokens.
        """
        for row in (0, self.group_size):
            if row < len(rollouts.text):
                prompt = rollouts.tokens[row, : rollouts.prompt_length[row]]
                sample = {
                    "step": step,
                    "reward": reward[row].item(),
                    "prompt": prompt_text(self.tokenizer, prompt.tolist()),
                    "response": rollouts.text[row],
                }
                self.append("samples.jsonl", sample)

    def append(self, name: str, row: dict[str, Any]) -> None:
        try:
            with open(self.out / name, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise OneRankFailed(
                f"{self.out / name} cannot be written: {error.strerror}"
            ) from error

    def finish(self) -> None:
        """The final table and curves.png, from metrics.jsonl."""
        rows = [json.loads(line) for line in open(self.out / "metrics.jsonl")]
        before, after, steps = rows[0], rows[-1], rows[1:]
        if before["step"] > 0:
            print(
                f"\n{self.out}/metrics.jsonl begins at step {before['step']}, as the "
                "file was removed during the run: no table and no curves.png"
            )
            return
        print(f"\n{'':24}  before   after")
        for name, title in zip(ACCURACIES, ("sampled", "greedy"), strict=True):
            print(f"held-out pass@1, {title:7}{before[name]:8.3f}{after[name]:8.3f}")
        for phase in PHASES:
            # A line of an evaluation alone has none.
            seconds = sum(row.get(f"{phase}_seconds", 0.0) for row in steps)
            print(f"seconds in {phase:13}{'':8}{seconds:8.1f}")
        draw_curves(rows, self.out / "curves.png")
        print(f"\n{self.out}: metrics.jsonl, samples.jsonl, curves.png, model/")


def accuracy_text(accuracy: dict[str, float]) -> str:
    """The end of a printed line that has an evaluation."""
    if not accuracy:
        return ""
    sampled, greedy = (accuracy[name] for name in ACCURACIES)
    return f"  held-out pass@1 {sampled:.3f} sampled, {greedy:.3f} greedy"


def keep_steps(path: Path, done: int) -> None:
    """Drop the lines of a JSONL file that are of later steps, or were cut by a kill."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    write_whole(
        path, "".join(line for line in whole if json.loads(line)["step"] <= done)
    )


def peak_memory_gb() -> float:
    """The most memory that this rank has had, in GB of 2^30 bytes.

    On CUDA it is torch's count, which does not know that a sleeping engine's is free.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def check_reporter(report_to: str) -> None:
    """Raises Refused where the package that it needs is not installed."""
    if report_to == "none":
        return
    package = importlib.util.find_spec(report_to)
    if package is None or package.origin is None:  # None: a mere folder of that name
        raise Refused(f"report_to is {report_to!r}, a package: pip install {report_to}")


def reporter(
    out: Path, report_to: str, config: dict[str, Any], done: int
) -> Callable[[dict[str, Any]], None]:
    """A function that reports a line of metrics; lines after `done` are forgotten."""
    if report_to == "wandb":
        import wandb

        id_file = out / "wandb_id"  # by which a resumed run finds itself
        if not id_file.exists():
            write_whole(id_file, uuid.uuid4().hex)
        # It ignores a step that it has already; a resumed run would say the same of it.
        run = wandb.init(
            project="p3o",
            config=config,
            id=id_file.read_text(),
            name=out.name,
            dir=out,
            resume="allow",
        )
        return lambda row: run.log(row, step=row["step"])
    if report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out, purge_step=done + 1 if done else None)

        def report(row: dict[str, Any]) -> None:
            for name, value in row.items():
                if isinstance(value, float):  # neither the step nor a text
                    writer.add_scalar(name, value, row["step"])
            writer.flush()  # a run may end without a farewell

        return report
    return lambda row: None


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy, reward, 1 - e_B with the KL, and entropy, by step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15, 3.2), layout="constrained")

    def plot(
        axis: Any, name: str, label: str, value: Callable = lambda row, name: row[name]
    ):
        points = [(row["step"], value(row, name)) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), marker=".", markersize=4, label=label)

    plot(axes[0], "heldout_pass@1", "sampled")
    plot(axes[0], "heldout_greedy", "greedy")
    axes[0].set(title="held-out pass@1", ylim=(0, 1.02))
    axes[0].legend()
    plot(axes[1], "reward", "reward")
    axes[1].set(title="mean reward of the rollouts", ylim=(0, 1.02))
    plot(axes[2], "ess", r"$1 - e_B$, the KL's weight", lambda row, name: 1 - row[name])
    plot(axes[2], "kl", "KL, nats a token")
    axes[2].set(title="how far off-policy", yscale="log")
    axes[2].legend()
    plot(axes[3], "entropy", "entropy")
    axes[3].set(title=r"entropy of $\pi_b$, nats a token", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)
