"""Writes a run's metrics: a line for each step, and a figure at the end.

Rank 0 writes metrics.jsonl. These metrics describe the step's rollout batch, over all
ranks:

    weight_version       the step whose weights sampled the batch; 0 is the initial
                         weights
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

rollout_seconds, reward_seconds, update_seconds, sync_seconds and peak_memory_gb (since
the start of the process) are those of rank 0. With a lag, the first step samples
several batches and the last steps sample none. If the policy was evaluated, the line
also has heldout_pass@1 (sampled at policy_temperature) and heldout_greedy. Both
evaluate the policy, never an fp8 copy.

The seconds in a printed line are the sum of the four above.
"""

import json
import resource
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from support.command import Stopped
from support.tasks import Dataset

PHASES = ("rollout", "reward", "update", "sync")
ROW_FILES = ("metrics.jsonl", "samples.jsonl")
# The metrics in curves.png, each in a panel of its own.
CURVES = """
    heldout_pass@1 heldout_greedy reward response_tokens ess mismatch_kl entropy
    grad_norm
""".split()


@dataclass
class Log:
    """Collects the seconds of the phases of a step, then writes the step's metrics."""

    out: Path
    tokenizer: PreTrainedTokenizerBase
    group_size: int
    dataset: Dataset  # the problems trained on
    # If the run is resumed, the text that each of ROW_FILES had when the checkpoint was
    # saved. `write` restores it.
    rows: dict[str, str]
    seconds: Counter[str] = field(default_factory=Counter)  # of the phases of a step

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a with-block to phase `name` of the step."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def metrics_of(self, step: int, rollouts: Any) -> dict[str, Any]:
        """Return the metrics of a step's batch, its seconds, and the peak memory.

        `rollouts` is a rollout.Rollouts, from which rank 0 saves samples. A collective.
        """
        groups = rollouts.reward.view(-1, self.group_size)  # [P, G]
        responses = {
            "reward": rollouts.reward,
            "groups_with_signal": groups.amax(dim=1) > groups.amin(dim=1),  # [P]
            "response_tokens": rollouts.mask.sum(dim=1),
            "truncated": rollouts.truncated,
            "unmarked": torch.tensor(
                [self.dataset.is_unmarked(text) for text in rollouts.text]
            ),
            "entropy": -rollouts.logp_behavior.sum(dim=1),
        }  # [N] each, unless another shape is given
        metrics = {"step": step, "weight_version": rollouts.weight_version}
        for name, values in responses.items():
            # All ranks have equally many responses.
            mean = values.double().mean() / dist.get_world_size()
            dist.all_reduce(mean)
            metrics[name] = mean.item()
        metrics["entropy"] /= metrics["response_tokens"]
        metrics |= {f"{phase}_seconds": self.seconds[phase] for phase in PHASES}
        # On CUDA torch also counts what a sleeping engine has released.
        metrics["peak_memory_gb"] = (
            torch.cuda.max_memory_allocated() / 2**30
            if torch.cuda.is_available()
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        )
        self.seconds.clear()
        if dist.get_rank() == 0:
            self.append_samples(step, rollouts)
        return metrics

    def write(self, metrics: dict[str, Any]) -> None:
        """Add a step's line to metrics.jsonl, on rank 0, and print its main numbers.

        The text at the top of this file says what each name in the line means.
        """
        if dist.get_rank() > 0:
            return
        # The log is restored only here, so that a resume that fails earlier leaves it
        # unchanged.
        for name, text in self.rows.items():
            (self.out / name).write_text(text)
        self.rows = {}
        step = metrics["step"]
        append_row(self.out / "metrics.jsonl", metrics)
        line = f"step {step:4d}"
        if step > 0:
            seconds = sum(metrics[f"{phase}_seconds"] for phase in PHASES)
            line += (
                f"  reward {metrics['reward']:.3f}  e_B {metrics['ess']:.4f}"
                f"  KL {metrics['mismatch_kl']:.1e}"
                f"  tokens {metrics['response_tokens']:.1f}"
                f"  {seconds:.1f} s"
            )
        if "heldout_greedy" in metrics:
            line += (
                f"  held-out pass@1 {metrics['heldout_pass@1']:.3f} sampled,"
                f"  {metrics['heldout_greedy']:.3f} greedy"
            )
        print(line)
        if step == 1 and metrics["groups_with_signal"] == 0:
            print(
                "In step 1 nothing was learned from rewards, because they are equal "
                f"in each group: {metrics['truncated']:.0%} of responses were cut at "
                f"max_response_tokens, and {metrics['unmarked']:.0%} lack a "
                "\\boxed{} or #### that the verifier needs; see "
                f"{self.out}/samples.jsonl"
            )

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
        """Draw curves.png from metrics.jsonl, on rank 0, and list the run's files."""
        if dist.get_rank() > 0:
            return
        from pandas import read_json  # comes with datasets; takes a second to import

        rows = read_json(self.out / "metrics.jsonl", lines=True).set_index("step")
        axes = rows[CURVES].plot(
            subplots=True, layout=(2, 4), figsize=(15, 6), style=".-"
        )
        axes[0, 0].figure.savefig(self.out / "curves.png", dpi=120)
        print(f"{self.out}: metrics.jsonl, samples.jsonl, curves.png, model/")


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Add a line to a JSONL file. Raises Stopped if that fails, as on a full disk."""
    try:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
    except OSError as error:
        raise Stopped(f"{path} cannot be written: {error}") from error
