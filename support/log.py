"""Writes a run's metrics: a line for each step, and a table and a figure at the end.

Rank 0 writes metrics.jsonl. These metrics describe the step's rollout batch, over all
ranks:

    weight_version       the step after which the weights that sampled the batch were
                         synced
    reward               mean reward
    groups_with_signal   share of the groups whose rewards are not all equal
    response_tokens      mean length, including the end of sequence
    truncated            share of the responses that max_response_tokens cut
    unmarked             share of the responses without the \\boxed{} or #### in which
                         the task's verifier expects the answer; 0 if it expects none
    entropy              entropy of pi_b in nats per token, estimated from its samples:
                         the mean of -log pi_b

These are means over the updates of the step. Each update's value is over its whole
batch B:

    loss                 mean of the objective over the tokens of B
    ess                  e_B (11)
    mismatch_kl          KL(pi_theta || pi_b) in nats per token
    ratio                mean of rho
    above_ess            share of the tokens with rho > e_B, whose weight P3O caps. In a
                         fresh batch it can be anything from 0.1 to 0.9, because e_B and
                         all ratios are about 1; the cap then changes almost nothing.
    grad_norm            norm of the gradient before clipping

These come from a single update:

    ess_min              the lowest e_B of the step's updates
    logprob_abs_diff     mean |log pi_theta - log pi_b|, in nats per token, before the
                         step's first update

rollout_seconds, reward_seconds, update_seconds, sync_seconds and peak_memory_gb are
those of rank 0. With a lag, the first step samples several batches and the last steps
sample none. If the policy was evaluated, the line also has heldout_pass@1 (sampled at
policy_temperature) and heldout_greedy. Both evaluate the policy, never an fp8 copy.

The seconds in a printed line are those of the whole step, including its checks, its
checkpoint and its evaluation. The time left assumes that the remaining steps take as
long as the mean step so far.
"""

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from support.command import Refused, Stopped
from support.tasks import Dataset

PHASES = ("rollout", "reward", "update", "sync")
ROW_FILES = ("metrics.jsonl", "samples.jsonl")


@dataclass
class Log:
    """Collects the seconds of the phases of a step, then writes the step's metrics."""

    out: Path
    tokenizer: PreTrainedTokenizerBase
    group_size: int
    steps: int  # of the whole run
    done: int  # the step after which this start of the run begins
    dataset: Dataset | None = None  # the problems trained on, for metrics_of

    def __post_init__(self) -> None:
        """Delete the rows of steps that a resumed run has to repeat."""
        self.seconds: dict[str, float] = defaultdict(float)
        self.start = self.start_of_steps = self.start_of_step = time.perf_counter()
        if self.done > 0 and dist.get_rank() == 0:
            for name in ROW_FILES:
                rewind(self.out / name, self.done)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a with-block to phase `name` of the step."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def metrics_of(self, step: int, rollouts: Any) -> dict[str, Any]:
        """Return the metrics of a step's batch, and the seconds and memory it took.

        `rollouts` is a rollout.Rollouts, from which rank 0 saves samples. A collective.
        """
        responses = {
            "reward": rollouts.reward,
            "response_tokens": rollouts.mask.sum(dim=1),
            "truncated": rollouts.truncated,
            "unmarked": torch.tensor(
                [self.dataset.is_unmarked(text) for text in rollouts.text]
            ),
            "entropy": -rollouts.logp_behavior.sum(dim=1),
        }  # [N] each
        gathered: list = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, responses)
        metrics = {"step": step, "weight_version": rollouts.weight_version}
        for name in responses:
            values = torch.cat([rank[name] for rank in gathered]).double()
            metrics[name] = values.mean().item()
            if name == "reward":
                groups = values.view(-1, self.group_size)  # [P, G]
                has_signal = groups.amax(dim=1) > groups.amin(dim=1)
                metrics["groups_with_signal"] = has_signal.double().mean().item()
        metrics["entropy"] /= metrics["response_tokens"]
        metrics |= {f"{phase}_seconds": self.seconds[phase] for phase in PHASES}
        metrics["peak_memory_gb"] = peak_memory_gb()
        self.seconds.clear()
        if dist.get_rank() == 0:
            self.append_samples(step, rollouts)
        return metrics

    def write(self, metrics: dict[str, Any]) -> None:
        """Add a step's line to metrics.jsonl, on rank 0, and print its main numbers."""
        if dist.get_rank() > 0:
            return
        step, now = metrics["step"], time.perf_counter()
        path = self.out / "metrics.jsonl"
        if 0 < step == self.done:
            # The checkpoint that this run resumed from was written before the line of
            # its step. If the line is there, it may have an evaluation to keep.
            metrics = rewind(path, step) | metrics
            rewind(path, step - 1)
        append_row(path, metrics)
        line = f"step {step:4d}"
        if step > 0:
            line += f"  reward {metrics['reward']:.3f}  e_B {metrics['ess']:.4f}"
            line += f"  KL {metrics['mismatch_kl']:.1e}"
            line += f"  tokens {metrics['response_tokens']:.1f}"
        if step == self.done:
            self.start_of_steps = now
        else:
            left = (self.steps - step) * (now - self.start_of_steps)
            left = timedelta(seconds=round(left / (step - self.done)))
            line += f"  {now - self.start_of_step:.1f} s  {left} left"
        if "heldout_greedy" in metrics:
            line += f"  held-out pass@1 {metrics['heldout_pass@1']:.3f} sampled,"
            line += f"  {metrics['heldout_greedy']:.3f} greedy"
        print(line, flush=True)
        if step == 1 and metrics["reward"] == 0:
            print(
                f"every reward of step 1 is 0: {metrics['truncated']:.0%} of the "
                "responses were cut at max_response_tokens, and the verifier misses a "
                f"\\boxed{{}} or #### in {metrics['unmarked']:.0%}; see "
                f"{self.out}/samples.jsonl",
                flush=True,
            )
        self.start_of_step = now

    def append_samples(self, step: int, rollouts: Any) -> None:
        """Save the first response to each of rank 0's first two prompts, with rewards.

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
        """Print the final table and draw curves.png from metrics.jsonl, on rank 0."""
        if dist.get_rank() > 0:
            return
        rows = [json.loads(line) for line in open(self.out / "metrics.jsonl")]
        evaluated = [row for row in rows if "heldout_greedy" in row]
        steps = [row for row in rows if row["step"] > 0]
        print(f"\n{'':24}  before   after")
        for name in ("pass@1", "greedy"):
            before, after = [evaluated[i][f"heldout_{name}"] for i in (0, -1)]
            print(f"{'held-out ' + name:24}{before:8.3f}{after:8.3f}")
        for phase in PHASES:
            seconds = sum(row[f"{phase}_seconds"] for row in steps)
            print(f"seconds in {phase:21}{seconds:8.1f}")
        seconds = time.perf_counter() - self.start
        print(f"{'seconds since this start':32}{seconds:8.1f}")
        if not any(row["groups_with_signal"] for row in steps):
            print(
                "\nno group ever had a signal, so nothing was learned: the responses "
                "to each prompt all had the same reward (samples.jsonl has some)"
            )
        draw_curves(rows, self.out / "curves.png")
        print(f"\n{self.out}: metrics.jsonl, samples.jsonl, curves.png, model/")


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a JSONL file. Raises Stopped if that fails, as on a full disk."""
    try:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise Stopped(f"{path} cannot be written: {error}") from error


def read_rows(path: Path, done: int) -> tuple[list[dict[str, Any]], int]:
    """Return a file's rows of the first `done` steps, and their length in bytes.

    Reading ends before a row of a later step or a line that cannot be read, such as one
    that a kill has cut. A missing file has no rows.
    """
    rows, length = [], 0
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for line in lines:
        try:
            row = json.loads(line)
            if row["step"] > done or not line.endswith(b"\n"):
                break
        except (ValueError, LookupError, TypeError, RecursionError):
            break
        rows.append(row)
        length += len(line)
    return rows, length


def check_rows(path: Path, done: int) -> None:
    """Raise Refused if a damaged line would cost a resumed run rows of earlier steps.

    Only the row of step `done` may be missing, because it is written after the
    checkpoint of that step.
    """
    rows, _ = read_rows(path, done)
    last = rows[-1]["step"] if rows else 0
    if path.exists() and last < done - 1:
        raise Refused(
            f"--resume: {path}, line {len(rows) + 1}, is not a row of step {last} or "
            f"{last + 1}: correct or remove the line, or delete the file to continue "
            "without its rows"
        )


def rewind(path: Path, done: int) -> dict[str, Any]:
    """Cut a JSONL file after its rows of the first `done` steps.

    Returns the row of step `done`, or {} if the file does not have it.
    """
    rows, length = read_rows(path, done)
    with open(path, "a") as file:
        os.truncate(file.fileno(), length)
    return rows[-1] if rows and rows[-1]["step"] == done else {}


def peak_memory_gb() -> float:
    """Return the most memory that this rank has used, in GB of 2^30 bytes.

    On CUDA it is torch's count, which includes the memory of a sleeping engine.
    """
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def draw_curves(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy, reward, 1 - e_B beside the KL, and entropy, by step."""
    import matplotlib.pyplot as plt

    for row in rows:
        if "ess" in row:
            row["1 - ess"] = 1 - row["ess"]  # the weight of the KL
    panels = {
        "held-out accuracy": ("heldout_pass@1", "heldout_greedy"),
        "rollouts": ("reward",),
        "distance from on-policy": ("1 - ess", "mismatch_kl"),
        "entropy, nats per token": ("entropy",),
    }
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.2), layout="constrained")
    for axis, (title, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            points = [(row["step"], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points, strict=True), marker=".", markersize=4, label=name)
        axis.set(title=title, xlabel="step")
        axis.legend()
    axes[0].set(ylim=(0, 1.02))
    axes[2].set(yscale="log")
    figure.savefig(path, dpi=120)
    plt.close(figure)
