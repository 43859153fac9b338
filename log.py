"""What a run tells: a progress line and a line of metrics a step, at the end a table and a figure.

Rank 0 writes into out_dir, each line whole or not at all: an interrupted run leaves valid files.
"""

import json
import resource
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from config import Config
from rollout import Rollouts

PHASES = ("rollout", "reward", "update", "sync")


class Log:
    """Collects the seconds of the phases of a step, then writes what the step did."""

    def __init__(self, cfg: Config, tokenizer: PreTrainedTokenizerBase, start: int) -> None:
        """Forget what a run that resumes at step `start` has written of later steps."""
        self.out, self.group_size, self.tokenizer = Path(cfg.out_dir), cfg.group_size, tokenizer
        self.seconds: dict[str, float] = defaultdict(float)
        if dist.get_rank() > 0:
            return
        for path in (self.out / "metrics.jsonl", self.out / "samples.jsonl") if cfg.resume else ():
            whole = [line for line in open(path) if line.endswith("\n")]
            kept = [line for line in whole if json.loads(line)["step"] <= start]
            write_whole(path, "".join(kept))
        self.report = reporter(cfg, start)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of a with-block to phase `name` of the step."""
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start

    def begin(self, pass_at_1: float) -> None:
        """The line of step 0: the policy before training."""
        if dist.get_rank() == 0:
            row = {"step": 0, "heldout_pass@1": pass_at_1}
            self.append("metrics.jsonl", row)
            self.report(row)
            print(f"step    0  held-out pass@1 {pass_at_1:.3f}", flush=True)

    def step(
        self, step: int, rollouts: Rollouts, history: list[dict], pass_at_1: float | None
    ) -> None:
        """A line of metrics.jsonl from all ranks' rollouts and the statistics of the updates.

        The statistics are means over the updates, but mismatch_* is of the first minibatch before
        its update: what the engine did and, where set, temperature and lag. entropy is that of
        pi_b, the mean of -log pi_b of its samples. A collective.
        """
        length = rollouts.mask.sum(1)  # [N]
        columns = (rollouts.reward, length, rollouts.truncated, rollouts.logp_behavior.sum(1))
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, torch.stack([c.float() for c in columns]))
        if dist.get_rank() > 0:
            return
        reward, length, truncated, logp = torch.cat(everyone, dim=1)  # [N] each, of all ranks
        groups = reward.view(-1, self.group_size)  # [P, G]
        seconds, tokens = sum(self.seconds.values()), length.sum().item()
        row = {
            "step": step,
            "weight_version": rollouts.weight_version,
            "reward": reward.mean().item(),
            "groups_with_signal": (groups.amax(1) > groups.amin(1)).float().mean().item(),
            "response_tokens": length.mean().item(),
            "truncated": truncated.mean().item(),
            "entropy": -logp.sum().item() / tokens,
        }
        row |= {name: sum(h[name] for h in history) / len(history) for name in history[0]}
        row |= {name: value for name, value in history[0].items() if "mismatch" in name}
        row["ess_min"] = min(h["ess"] for h in history)
        row |= {f"{phase}_seconds": self.seconds[phase] for phase in PHASES}
        row["tokens_per_second"] = tokens / seconds
        if torch.cuda.is_available():
            # Of torch, which does not know that what an engine had is free while it sleeps.
            row["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 2**30
        else:
            row["peak_memory_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if pass_at_1 is not None:
            row["heldout_pass@1"] = pass_at_1
        for i in range(0, min(2 * self.group_size, len(rollouts.text)), self.group_size):
            prompt = self.tokenizer.decode(rollouts.tokens[i, : rollouts.prompt_length[i]])
            sample = {"step": step, "reward": reward[i].item(), "prompt": prompt}
            self.append("samples.jsonl", sample | {"response": rollouts.text[i]})
        self.append("metrics.jsonl", row)  # the last: where it stands, the step is done
        self.report(row)
        self.seconds.clear()
        print(
            f"step {step:4d}  reward {row['reward']:.3f}  e_B {row['ess']:.4f}  "
            f"|log rho| {row['mismatch_mean']:.4f}  tokens {row['response_tokens']:.1f}  "
            f"{seconds:.2f} s"
            + (f"  held-out pass@1 {pass_at_1:.3f}" if pass_at_1 is not None else ""),
            flush=True,
        )

    def append(self, name: str, row: dict) -> None:
        with open(self.out / name, "a") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self) -> None:
        """The final table and curves.png, from metrics.jsonl."""
        rows = [json.loads(line) for line in open(self.out / "metrics.jsonl")]
        before, steps = rows[0], rows[1:]
        print(f"\n{'':24}  before   after")
        accuracy = [row["heldout_pass@1"] for row in (before, rows[-1])]
        print(f"{'held-out pass@1':24}{accuracy[0]:8.3f}{accuracy[1]:8.3f}")
        for phase in PHASES:
            print(f"seconds in {phase:13}{'':8}{sum(r[f'{phase}_seconds'] for r in steps):8.1f}")
        draw_curves(rows, self.out / "curves.png")
        print(f"\n{self.out}: metrics.jsonl, samples.jsonl, curves.png, model/")


def write_whole(path: Path, text: str) -> None:
    """Replace a file: whoever reads it, after a kill too, finds the old text or the new one."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.replace(path)


def reporter(cfg: Config, start: int) -> Callable[[dict], None]:
    """What takes a row of metrics to cfg.report_to, and forgets what follows step `start` there."""
    out = Path(cfg.out_dir)
    if cfg.report_to == "wandb":
        import wandb

        if not (out / "wandb_id").exists():  # by which a resumed run finds itself
            (out / "wandb_id").write_text(uuid.uuid4().hex)
        options = dict(id=(out / "wandb_id").read_text(), name=out.name, dir=out, resume="allow")
        # It ignores a step that it has already: a resumed run would say the same of it.
        run = wandb.init(project="p3o", config=asdict(cfg), **options)
        return lambda row: run.log(row, step=row["step"])
    if cfg.report_to == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(out, purge_step=start + 1 if cfg.resume else None)

        def report(row: dict) -> None:
            for name, value in row.items():
                if isinstance(value, float):  # neither the step nor a text
                    writer.add_scalar(name, value, row["step"])
            writer.flush()  # a run may end without a farewell

        return report
    return lambda row: None


def draw_curves(rows: list[dict], path: Path) -> None:
    """Reward, held-out pass@1, e_B and the entropy of the sampling policy, by step."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(14, 3), layout="constrained")
    titles = {
        "reward": "reward",
        "heldout_pass@1": "held-out pass@1",
        "ess": "e_B",
        "entropy": "entropy of pi_b, nats a token",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        points = [(row["step"], row[name]) for row in rows if name in row]
        axis.plot(*zip(*points, strict=True), marker=".")
        axis.set(title=title, xlabel="step")
    axes[2].set_ylim(0, 1.05)  # the range of e_B: else rounding looks like news
    figure.savefig(path, dpi=120)
    plt.close(figure)
