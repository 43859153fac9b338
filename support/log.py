"""What a run tells: a line of metrics a step, and at its end a table and a figure.

Rank 0 writes metrics.jsonl. Of the step's rollout batch, over all ranks, it has:

    weight_version       the step after which the weights that sampled it were synced
    reward               mean reward
    groups_with_signal   share of the groups whose rewards are not all equal
    response_tokens      mean length, with the end of sequence
    truncated            share of the responses that max_response_tokens cut
    entropy              of pi_b, from its samples: mean of -log pi_b, nats a token

Of the step's updates it has means. Each update's value is over its whole batch B:

    loss                 the objective's mean over the tokens of B
    ess                  e_B (11)
    mismatch_kl          KL(pi_theta || pi_b), nats per token
    ratio                mean of rho
    above_ess            share of the tokens with rho > e_B, which P3O caps: 0.1 to 0.9
                         of a fresh batch, by next to nothing
    grad_norm            before clipping

Of a single update it has:

    ess_min              e_B of the update where it is smallest
    logprob_abs_diff     mean |log pi_theta - log pi_b| before the first update

Of rank 0 alone it has rollout_seconds, reward_seconds, update_seconds, sync_seconds and
peak_memory_gb. With lag the first step samples several batches, and the last
steps none. Where the policy was evaluated it has heldout_pass@1 (sampled at
policy_temperature) and heldout_greedy: of the policy, never of an fp8 copy of it.

The seconds of a printed line are of the whole step, with its checks, its checkpoint and
its evaluation. The time left is that of the remaining steps at their mean.
"""

import json
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from support.command import Stopped

PHASES = ("rollout", "reward", "update", "sync")


class Log:
    """Collects the seconds of the phases of a step, then writes what the step did."""

    def __init__(
        self,
        out: Path,
        tokenizer: PreTrainedTokenizerBase,
        group_size: int,
        steps: int,
        done: int,
    ) -> None:
        """Lines of `done` steps stay; what a killed run wrote of later ones goes."""
        self.out = out
        self.tokenizer = tokenizer
        self.group_size = group_size
        self.steps = steps
        self.done = done
        self.seconds: dict[str, float] = defaultdict(float)
        self.start = self.start_of_steps = self.start_of_step = time.perf_counter()
        if done > 0 and dist.get_rank() == 0:
            for name in ("metrics.jsonl", "samples.jsonl"):
                keep_steps(out / name, done)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a with-block to phase `name` of the step."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def metrics_of(self, step: int, rollouts: Any) -> dict[str, Any]:
        """The metrics of a step's batch, and what the step took: seconds and memory.

        `rollouts` is a rollout.Rollouts, from which rank 0 keeps samples. A collective.
        """
        per_response = torch.stack(
            [
                rollouts.reward,
                rollouts.mask.sum(dim=1).float(),
                rollouts.truncated.float(),
                rollouts.logp_behavior.sum(dim=1),
            ]
        )
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, per_response)
        reward, length, truncated, logp = torch.cat(gathered, dim=1)  # [N] of all ranks
        groups = reward.view(-1, self.group_size)  # [P, G]
        has_signal = groups.amax(dim=1) > groups.amin(dim=1)
        metrics = {
            "step": step,
            "weight_version": rollouts.weight_version,
            "reward": reward.mean().item(),
            "groups_with_signal": has_signal.float().mean().item(),
            "response_tokens": length.mean().item(),
            "truncated": truncated.mean().item(),
            "entropy": -logp.sum().item() / length.sum().item(),
        }
        metrics |= {f"{phase}_seconds": self.seconds[phase] for phase in PHASES}
        metrics["peak_memory_gb"] = peak_memory_gb()
        self.seconds.clear()
        if dist.get_rank() == 0:
            self.append_samples(step, rollouts)
        return metrics

    def write(self, metrics: dict[str, Any]) -> None:
        """Add a step's line to metrics.jsonl, by rank 0, and print its main numbers."""
        if dist.get_rank() > 0:
            return
        step, now = metrics["step"], time.perf_counter()
        path = self.out / "metrics.jsonl"
        if 0 < step == self.done:
            # Of a resumed run: the line may be there, or the run was killed before it.
            written = json.loads(path.read_text().splitlines()[-1])
            if written["step"] == step:
                metrics = written | metrics  # It may have been evaluated as its last.
            keep_steps(path, step - 1)
        append_row(path, metrics)
        columns = [f"step {step:4d}"]
        if step > 0:
            columns.append(f"reward {metrics['reward']:.3f}")
            columns.append(f"e_B {metrics['ess']:.4f}")
            columns.append(f"KL {metrics['mismatch_kl']:.1e}")
            columns.append(f"tokens {metrics['response_tokens']:.1f}")
        if step == self.done:
            self.start_of_steps = now
        else:
            columns.append(f"{now - self.start_of_step:.1f} s")
            of_steps = (now - self.start_of_steps) / (step - self.done)
            left = (self.steps - step) * of_steps
            columns.append(f"{duration(left)} left")
        if "heldout_greedy" in metrics:
            columns.append(f"held-out pass@1 {metrics['heldout_pass@1']:.3f} sampled,")
            columns.append(f"{metrics['heldout_greedy']:.3f} greedy")
        print("  ".join(columns), flush=True)
        self.start_of_step = now

    def append_samples(self, step: int, rollouts: Any) -> None:
        """The first response to each of rank 0's first two prompts, with its reward.

        The prompt is the whole text that was sent, with the template's special tokens.
        """
        for row in range(0, len(rollouts.text), self.group_size)[:2]:
            prompt = rollouts.tokens[row, : rollouts.prompt_length[row]]
            sample = {
                "step": step,
                "reward": rollouts.reward[row].item(),
                "prompt": self.tokenizer.decode(prompt),
                "response": rollouts.text[row],
                "answer": rollouts.gold[row],
            }
            append_row(self.out / "samples.jsonl", sample)

    def finish(self) -> None:
        """The final table and curves.png, from metrics.jsonl, by rank 0."""
        if dist.get_rank() > 0:
            return
        rows = [json.loads(line) for line in open(self.out / "metrics.jsonl")]
        evaluated = [row for row in rows if "heldout_greedy" in row]
        before, after, steps = evaluated[0], evaluated[-1], rows[1:]
        print(f"\n{'':24}  before   after")
        for name, title in (("pass@1", "sampled"), ("greedy", "greedy ")):
            values = [row[f"heldout_{name}"] for row in (before, after)]
            print(f"held-out pass@1, {title}{values[0]:8.3f}{values[1]:8.3f}")
        for phase in PHASES:
            seconds = sum(row[f"{phase}_seconds"] for row in steps)
            print(f"seconds in {phase:13}{'':8}{seconds:8.1f}")
        seconds = time.perf_counter() - self.start
        print(f"{'seconds of this start':32}{seconds:8.1f}")
        if not any(row["groups_with_signal"] for row in steps):
            print(
                "\nno group ever had a signal, so nothing was learned: the responses "
                "to each prompt all had the same reward (samples.jsonl has some)"
            )
        draw_curves(rows, self.out / "curves.png")
        print(f"\n{self.out}: metrics.jsonl, samples.jsonl, curves.png, model/")


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a JSONL file. Raises Stopped, as on a full disk."""
    try:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise Stopped(f"{path} cannot be written: {error}") from error


def duration(seconds: float) -> str:
    """Seconds as people say them: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def keep_steps(path: Path, done: int) -> None:
    """Drop the lines of a JSONL file that are of later steps, or were cut by a kill."""
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= done:
            kept.append(line)
    shorter = path.with_name(f"{path.name}.new")
    shorter.write_text("".join(kept))
    shorter.replace(path)  # Even a kill right here leaves the old file or the new one.


def peak_memory_gb() -> float:
    """The most memory that this rank has had, in GB of 2^30 bytes.

    On CUDA it is torch's count, which does not know that a sleeping engine's is free.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy, reward, 1 - e_B with the KL, and entropy, by step."""
    import matplotlib.pyplot as plt

    for row in rows:
        if "ess" in row:
            row["kl_weight"] = 1 - row["ess"]
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.2), layout="constrained")

    def plot(axis: Any, name: str, label: str) -> None:
        points = [(row["step"], row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), marker=".", markersize=4, label=label)

    plot(axes[0], "heldout_pass@1", "sampled")
    plot(axes[0], "heldout_greedy", "greedy")
    axes[0].set(title="held-out pass@1", ylim=(0, 1.02))
    plot(axes[1], "reward", "reward")
    axes[1].set(title="mean reward of the rollouts", ylim=(0, 1.02))
    plot(axes[2], "kl_weight", r"$1 - e_B$, the KL's weight")
    plot(axes[2], "mismatch_kl", "KL, nats per token")
    axes[2].set(title="how far off-policy", yscale="log")
    plot(axes[3], "entropy", "entropy")
    axes[3].set(title=r"entropy of $\pi_b$, nats a token", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("step")
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
