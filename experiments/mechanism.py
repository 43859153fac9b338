"""What the objectives do with the tokens of one stale, one hot and one fp8 batch.

    python experiments/mechanism.py    # experiments/results/mechanism.{json,png}

The batches are sampled as in the laboratory (experiments/mismatch.py):
    stale    "lag 16", step 17: tiny/ sampled it, and the policy that scores it has had
             16 updates of P3O, at RATE_OF_STALE instead of the laboratory's rate
    hot      "T = 1.4", step 1: tiny/ samples at 1.4 and scores at 1
    fp8      "fp8", step 1: vLLM samples tiny/ rounded to fp8, tiny/ scores

The figure has their ratios, with the cap e_B, and three questions to each objective:
what it makes of tokens that the policy has made much rarer than pi_b, of those that it
has made much likelier, and how many tokens it drops. The json has besides them the
largest weights, the KL, and e_B in micro-batches of MICRO_BATCH_TOKENS, on which an
objective must not depend.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
import numpy as np
from matplotlib import pyplot as plt
from torch import Tensor
from torch.distributed import DeviceMesh

from experiments.mismatch import LEARNING_RATE, ROOT, Cell, flags_of
from experiments.token_weights import (
    COMPARED,
    ScoredBatch,
    sample_and_score,
    token_weights,
)
from loss import effective_sample_size
from policy import build_policy
from rollout import Engine, init_distributed
from support.flags import parse_flags
from support.prompts import Split
from train import Config, load_data, rows_of_micro_batches

RESULTS = ROOT / "experiments" / "results"
TINY = str(ROOT / "tiny")
LAG = 16  # steps, of the stale batch
# Larger than the laboratory's, so that 16 updates move the policy visibly.
RATE_OF_STALE = 5e-4
MICRO_BATCH_TOKENS = 600

# Beyond these a ratio is far from 1: about what a clip range of 0.2 takes for far.
RARER, LIKELIER = 0.8, 1.25

OF_RARER = f"|w| / |A| where rho < {RARER}"
OF_LIKELIER = f"|w| / |A| where rho > {LIKELIER}"
DROPPED = "share without weight"
LARGEST = "largest |w|"
COLORS = {"stale": "#5E3C99", "hot": "#E66101", "fp8": "#999999"}


def config_of(mismatch: str, learning_rate: float) -> Config:
    """The configuration of P3O's first run in a setting of the laboratory."""
    cell = Cell(mismatch, learning_rate, "p3o", seed=0)
    script, *flags = flags_of(cell, done={}, folder=RESULTS)
    return parse_flags(Config, flags)


def train_for(steps: int, cfg: Config, out: Path) -> None:
    """Run train.py for so many steps of this configuration."""
    settings = cfg.model_copy(
        update={"steps": steps, "eval_every": 0, "eval_problems": 1}
    )
    changed = settings.model_dump(exclude_defaults=True)
    flags = [f"--{name}={value}" for name, value in changed.items()]
    command = [sys.executable, "train.py", *flags, f"--out_dir={out}"]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def sample_batches(
    engine: Engine, fp8_engine: Engine, mesh: DeviceMesh, train: Split
) -> dict[str, ScoredBatch]:
    """The three batches, from engines that have the weights of tiny/."""
    stale = config_of("lag 16", RATE_OF_STALE)
    hot = config_of("T = 1.4", LEARNING_RATE)
    fp8 = config_of("fp8", LEARNING_RATE)
    initial = build_policy(TINY, mesh)
    with tempfile.TemporaryDirectory() as scratch:
        # Up to step LAG + 1 all batches are sampled by the initial weights.
        train_for(LAG, stale, Path(scratch, "run"))
        trained = build_policy(f"{scratch}/run/model", mesh)
    return {
        "stale": sample_and_score(engine, trained, stale, LAG + 1, train),
        "hot": sample_and_score(engine, initial, hot, 1, train),
        "fp8": sample_and_score(fp8_engine, initial, fp8, 1, train),
    }


def summarize(batch: ScoredBatch) -> dict[str, Any]:
    """What mechanism.json says of a batch."""
    mask = batch.rollouts.mask
    ess = effective_sample_size(batch.log_ratio, mask).item()
    ratio = batch.log_ratio[mask].exp()  # [|B|]
    rows = list(range(len(mask)))
    ess_of_micro_batches = [
        effective_sample_size(batch.log_ratio[some], mask[some]).item()
        for some in rows_of_micro_batches(batch.rollouts, rows, MICRO_BATCH_TOKENS)
    ]
    return {
        "e_B": ess,
        "tokens": len(ratio),
        "share above the cap": (ratio > ess).float().mean().item(),
        f"tokens with rho < {RARER}": int((ratio < RARER).sum()),
        f"tokens with rho > {LIKELIER}": int((ratio > LIKELIER).sum()),
        "smallest rho": ratio.min().item(),
        "largest rho": ratio.max().item(),
        "KL, nats a token": batch.kl[mask].mean().item(),
        "e_B of micro-batches": {
            "least": min(ess_of_micro_batches),
            "median": median(ess_of_micro_batches),
            "most": max(ess_of_micro_batches),
        },
        "objectives": {
            name: summarize_weights(weights_in(batch, name), batch) for name in COMPARED
        },
    }


def weights_in(batch: ScoredBatch, name: str) -> Tensor:
    """w_t of an objective, [N, T]."""
    return token_weights(
        COMPARED[name],
        batch.log_ratio,
        batch.rollouts.logp_behavior,
        batch.rollouts.advantage,
        batch.rollouts.mask,
    )


def summarize_weights(weights: Tensor, batch: ScoredBatch) -> dict[str, float | None]:
    """What an objective does with a batch, from its weights [N, T].

    Of the tokens whose advantage is not 0. None where there are no tokens to ask about.
    """
    mask = batch.rollouts.mask
    advantage = batch.rollouts.advantage[:, None].expand_as(mask)
    judged = mask & (advantage != 0)
    size = weights[judged].abs()  # [M]
    relative = size / advantage[judged].abs()  # [M]
    ratio = batch.log_ratio[judged].exp()  # [M]
    return {
        OF_RARER: mean_of(relative[ratio < RARER]),
        OF_LIKELIER: mean_of(relative[ratio > LIKELIER]),
        DROPPED: (size == 0).float().mean().item(),
        LARGEST: size.max().item(),
    }


def mean_of(values: Tensor) -> float | None:
    """The mean, or None of no values: NaN is no JSON."""
    return values.mean().item() if len(values) > 0 else None


def draw(
    batches: dict[str, ScoredBatch], found: dict[str, dict[str, Any]], path: Path
) -> None:
    """The ratios of the batches above, the three questions below."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 7.5), layout="constrained")
    for axis, (kind, batch) in zip(axes[0], batches.items(), strict=True):
        draw_ratios(axis, kind, batch, found[kind]["e_B"])
    axes[0, 0].set_ylabel("tokens")
    for axis, question in zip(axes[1], (OF_RARER, OF_LIKELIER, DROPPED), strict=True):
        draw_answers(axis, question, found)
    for axis in axes[1, 1:]:
        axis.set_yticklabels([])
    axes[1, 2].legend(loc="lower right", title="batch")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_ratios(axis: plt.Axes, kind: str, batch: ScoredBatch, ess: float) -> None:
    """A histogram of rho, with the cap. All batches have the same bins."""
    ratio = batch.log_ratio[batch.rollouts.mask].exp().numpy()
    bins = np.geomspace(1e-4, 10, 76)
    axis.hist(ratio.clip(1e-4, 10), bins=bins, color=COLORS[kind])
    axis.axvline(ess, color="black", linewidth=1, label=f"cap $e_B$ = {ess:.4f}")
    axis.set(xscale="log", yscale="log", ylim=(0.7, 1e4), title=kind)
    axis.set_xlabel(r"ratio $\rho = \pi_\theta / \pi_b$")
    axis.legend(loc="upper left")


def draw_answers(
    axis: plt.Axes, question: str, found: dict[str, dict[str, Any]]
) -> None:
    """A bar an objective and batch. No bar: no such tokens."""
    for number, (kind, summary) in enumerate(found.items()):
        for place, answers in enumerate(summary["objectives"].values()):
            axis.barh(
                place + 0.27 * (number - 1),
                answers[question] or 0.0,
                height=0.27,
                color=COLORS[kind],
                label=kind if place == 0 else None,
            )
    axis.set_yticks(range(len(COMPARED)), list(COMPARED))
    axis.invert_yaxis()  # P3O at the top
    axis.set_xlabel(question)
    axis.grid(axis="x", alpha=0.3)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    mesh = init_distributed()
    cfg = Config(model=TINY)
    data = load_data(cfg)
    options = {"top_logprobs": cfg.top_logprobs}
    engine = Engine(TINY, data.longest, **options)
    fp8_engine = Engine(TINY, data.longest, quantization="fp8_per_channel", **options)
    batches = sample_batches(engine, fp8_engine, mesh, data.train)
    found = {title: summarize(batch) for title, batch in batches.items()}
    path = RESULTS / "mechanism.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    draw(batches, found, path.with_suffix(".png"))
    for kind, summary in found.items():
        print(
            f"\n{kind}: {summary['tokens']} tokens, e_B {summary['e_B']:.4f}, "
            f"rho {summary['smallest rho']:.3g} to {summary['largest rho']:.3g}, "
            f"KL {summary['KL, nats a token']:.2g} nats a token"
        )
        questions = (OF_RARER, OF_LIKELIER, DROPPED, LARGEST)
        print(f"{'':10}", *(f"{question:>24}" for question in questions))
        for name, answers in summary["objectives"].items():
            cells = [
                "no such token"
                if answers[question] is None
                else f"{answers[question]:.3f}"
                for question in questions
            ]
            print(f"{name:10}", *(f"{cell:>24}" for cell in cells))
    print(f"\n{path} and .png")
    engine.close()


if __name__ == "__main__":
    main()
