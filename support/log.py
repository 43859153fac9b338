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
    kl                   KL(pi_theta || pi_b), nats a token
    ratio                mean of rho
    clip_fraction        share of the tokens with rho > e_B, whatever the objective.
                         P3O caps these: 0.1 to 0.9 of a fresh batch, by next to nothing
    grad_norm            before clipping

Of a single update it has:

    ess_min              e_B of the update where it is smallest
    mismatch_mean        mean |log rho| of the step's first update, before it

Of rank 0 alone it has rollout_seconds, reward_seconds, update_seconds, sync_seconds and
peak_memory_gb. With lag the first step samples several batches, and the last
steps none. Where the policy was evaluated it has heldout_pass@1 (sampled at
policy_temperature) and heldout_greedy: of the policy, never of an fp8 copy of it.
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

from support.command import Refused

PHASES = ("rollout", "reward", "update", "sync")


class Log:
    """Collects the seconds of the phases of a step, then writes what the step did."""

    def __init__(
        self, out: Path, tokenizer: PreTrainedTokenizerBase, group_size: int, done: int
    ) -> None:
        """Lines of `done` steps stay; what a killed run wrote of later ones goes."""
        self.out = out
        self.tokenizer = tokenizer
        self.group_size = group_size
        self.seconds: dict[str, float] = defaultdict(float)
        if done > 0 and dist.get_rank() == 0:
            for name in ("metrics.jsonl", "samples.jsonl"):
                keep_steps(out / name, done)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a with-block to phase `name` of the step."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def before(self, accuracy: dict[str, float]) -> None:
        """A line for step 0, the policy before training."""
        if dist.get_rank() == 0:
            self.append("metrics.jsonl", {"step": 0, **accuracy})
            print(f"step    0{accuracy_text(accuracy)}", flush=True)

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
        mine = [
            rollouts.reward,
            rollouts.mask.sum(dim=1),
            rollouts.truncated,
            rollouts.logp_behavior.sum(dim=1),
        ]
        of_ranks: list = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, torch.stack([each.float() for each in mine]))
        if dist.get_rank() > 0:
            return
        reward, length, truncated, logp = torch.cat(of_ranks, dim=1)  # [N] of all ranks
        groups = reward.view(-1, self.group_size)  # [P, G]
        has_signal = groups.amax(dim=1) > groups.amin(dim=1)
        row = {
            "step": step,
            "weight_version": rollouts.weight_version,
            "reward": reward.mean().item(),
            "groups_with_signal": has_signal.float().mean().item(),
            "response_tokens": length.mean().item(),
            "truncated": truncated.mean().item(),
            "entropy": -logp.sum().item() / length.sum().item(),
        }
        for name in history[0]:
            row[name] = sum(stats[name] for stats in history) / len(history)
        row["ess_min"] = min(stats["ess"] for stats in history)
        row["mismatch_mean"] = history[0]["mismatch_mean"]
        row |= {f"{phase}_seconds": self.seconds[phase] for phase in PHASES}
        row["peak_memory_gb"] = peak_memory_gb()
        row |= accuracy
        self.append_samples(step, rollouts)
        self.append("metrics.jsonl", row)
        print(
            f"step {step:4d}  reward {row['reward']:.3f}  e_B {row['ess']:.4f}  "
            f"KL {row['kl']:.1e}  tokens {row['response_tokens']:.1f}  "
            f"{sum(self.seconds.values()):.2f} s{accuracy_text(accuracy)}",
            flush=True,
        )
        self.seconds.clear()

    def append_samples(self, step: int, rollouts: Any) -> None:
        """The first response to each of rank 0's first two prompts, with their rewards.

        The prompt is the whole text that was sent, with the template's special tokens.
        """
        for row in range(0, len(rollouts.text), self.group_size)[:2]:
            prompt = rollouts.tokens[row, : rollouts.prompt_length[row]]
            sample = {
                "step": step,
                "reward": rollouts.reward[row].item(),
                "prompt": self.tokenizer.decode(prompt),
                "response": rollouts.text[row],
            }
            self.append("samples.jsonl", sample)

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Add a line to a file of the run. Raises Refused, as on a full disk."""
        try:
            with open(self.out / name, "a") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise Refused(f"{self.out / name} cannot be written: {error}") from error

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
        draw_curves(rows, self.out / "curves.png")
        print(f"\n{self.out}: metrics.jsonl, samples.jsonl, curves.png, model/")


def accuracy_text(accuracy: dict[str, float]) -> str:
    """The end of a printed line that has an evaluation."""
    if not accuracy:
        return ""
    sampled, greedy = accuracy["heldout_pass@1"], accuracy["heldout_greedy"]
    return f"  held-out pass@1 {sampled:.3f} sampled, {greedy:.3f} greedy"


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
    plot(axes[2], "kl", "KL, nats a token")
    axes[2].set(title="how far off-policy", yscale="log")
    plot(axes[3], "entropy", "entropy")
    axes[3].set(title=r"entropy of $\pi_b$, nats a token", ylim=(0, None))
    for axis in axes:
        axis.set_xlabel("step")
        axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
