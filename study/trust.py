"""Does e_B choose the right amount of trust? A test at one step instead of whole runs.

    python study/trust.py              # all of it: about an hour on a core
    python study/trust.py --figure     # draws what has been measured

P3O caps a token's weight by e_B and weighs the KL by 1 - e_B. Any constant c in (0, 1]
could stand in its place. For the policies of STEPS along a run, and for ten batches
each, of varied age, temperature and precision, this measures how good each c would have
been: the cosine between

    g(c)      the gradient of P3O (12) on the batch, with c in place of e_B
    g*        the on-policy gradient, of FRESH fresh responses of that policy

It is also what a step along g(c) gains, to first order, as a share of what an equally
long step along g* gains in expected advantage. trust.md compares the batch's own e_B
with constants and with the e_B of another batch of the same policy. A finished policy
is a line of trust.jsonl, and is not measured again.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from loss import effective_sample_size, kl_divergence, p3o, ratio_sums
from policy import Policy, build_policy, full_weights
from rollout import Engine, Rollouts
from study.figures import panels, save
from study.runs import RESULTS, commit_here, table, text_of
from support.command import run_script
from support.log import Log
from support.machine import init_distributed

LEARNING_RATE = 5e-4  # 2.5 times the laboratory's, so that the policy moves visibly
STEPS = set(range(3, 61, 3))  # of the run: the policies that are measured
FRESH = 32  # batches of 256 responses for g*
LEVELS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0]
OLD = 16  # steps from which on a batch counts as old in the table


class Condition(NamedTuple):
    """How a batch was sampled."""

    lag: int  # steps before the policy
    temperature: float
    quantization: str


CONDITIONS = [
    Condition(0, 1.0, "none"),
    Condition(0, 1.0, "fp8_per_channel"),
    Condition(1, 1.0, "none"),
    Condition(4, 1.0, "none"),
    Condition(16, 1.0, "none"),
    Condition(32, 1.0, "none"),
    Condition(0, 0.6, "none"),
    Condition(0, 1.4, "none"),
    Condition(4, 1.4, "fp8_per_channel"),
    Condition(16, 0.8, "fp8_per_channel"),
]


class Laboratory:
    """The engines, the problems, and the weights of all steps of one run of P3O."""

    def __init__(self) -> None:
        self.cfg = train.Config(minibatches=1, learning_rate=LEARNING_RATE)
        tokenizer, self.problems, _, max_model_len = train.load_data(self.cfg)
        self.log = Log(Path(), tokenizer, self.cfg.group_size, self.cfg.steps, done=0)
        mesh = init_distributed()
        self.engines = {
            "none": Engine("tiny", max_model_len, top_logprobs=20),
            "fp8_per_channel": Engine(
                "tiny",
                max_model_len,
                quantization="fp8_per_channel",
                dtype="bfloat16",
                top_logprobs=20,
            ),
        }
        policy = build_policy("tiny", mesh)
        optimizer = AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.history = []  # the weights after each step, from 0 on
        for step in range(1, self.cfg.steps + 2):
            weights = {name: weight.clone() for name, weight in full_weights(policy)}
            self.history.append(weights)
            rollouts = self.sample(step - 1, CONDITIONS[0], number=step)
            rows = torch.arange(len(rollouts.text))
            train.update(policy, optimizer, p3o, rollouts, rows, self.cfg, step)
        # Without FSDP, whose gradients are shards.
        self.policy = Policy(AutoModelForCausalLM.from_pretrained("tiny"))

    def sample(self, step: int, condition: Condition, number: int) -> Rollouts:
        """256 rewarded responses by the weights after a step.

        `number` decides over problems and noise, as a step's does in train.py.
        """
        engine = self.engines[condition.quantization]
        engine.load_weights(self.history[step].items(), version=str(step))
        cfg = self.cfg.model_copy(update={"temperature": condition.temperature})
        return train.sample_batch(engine, cfg, number, self.problems, self.log)

    def gradient(self, loss: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The gradient of the tokens' mean loss as one vector. The graph is kept."""
        parameters = list(self.policy.parameters())
        parts = torch.autograd.grad(loss[mask].mean(), parameters, retain_graph=True)
        return torch.cat([part.flatten() for part in parts]).double()

    def measure(self, step: int) -> dict[str, Any]:
        """All batches of one policy: e_B, and cosines at all levels and all e_Bs."""
        self.policy.model.load_state_dict(self.history[step])
        numbers = itertools.count(1000 * step)
        fresh = torch.zeros(())
        for _ in range(FRESH):
            batch = self.sample(step, CONDITIONS[0], next(numbers))
            logp, _ = self.policy(batch)
            fresh = fresh + self.gradient(-batch.advantage * logp, batch.mask) / FRESH
        batches, ess = [], []
        for condition in CONDITIONS:
            old = max(0, step - condition.lag)
            batch = self.sample(old, condition, next(numbers))
            logp, top_logp = self.policy(batch)
            kl = kl_divergence(top_logp, batch.top_logp_behavior)
            batches.append((batch, logp, kl))
            sums = ratio_sums(logp - batch.logp_behavior, batch.mask)
            ess.append(effective_sample_size(sums).item())
        cosines = []  # [batch][LEVELS, then the e_B of each batch]
        for batch, logp, kl in batches:
            of_batch = []
            for level in LEVELS + ess:
                loss = p3o(logp, batch.logp_behavior, batch.advantage, kl, level)
                gradient = self.gradient(loss, batch.mask)
                of_batch.append(torch.cosine_similarity(gradient, fresh, dim=0).item())
            cosines.append(of_batch)
        return {"step": step, "commit": commit_here(), "ess": ess, "cosine": cosines}


def comparisons(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Per policy, the mean cosine at a batch's own e_B less that of its rivals.

    The best single level is chosen over all policies and batches, so it knows more than
    e_B does.
    """
    cosines = np.array([row["cosine"] for row in rows])  # [policies, batches, levels]
    at_levels = cosines[:, :, : len(LEVELS)]
    at_ess = cosines[:, :, len(LEVELS) :]  # [policies, batches, batches]
    own = np.diagonal(at_ess, axis1=1, axis2=2)  # [policies, batches]
    others = (at_ess.sum(axis=2) - own) / (len(CONDITIONS) - 1)
    is_old = [condition.lag >= OLD for condition in CONDITIONS]
    best = LEVELS[at_levels.mean(axis=(0, 1)).argmax()]
    found = {"at e_B": own.mean(axis=1)}
    for level in sorted({0.8, best, 0.95, 1.0}):
        rival = at_levels[:, :, LEVELS.index(level)]
        name = f"less c = {level}" + (", the best" if level == best else "")
        found[name] = (own - rival).mean(axis=1)
    found["less the e_B of another batch"] = (own - others).mean(axis=1)
    title = f"the same of batches {OLD} steps old or older"
    found[title] = (own - others)[:, is_old].mean(axis=1)
    return found


def report(rows: list[dict[str, Any]], folder: Path) -> None:
    """trust.md, and trust.png: the cosine by level, with the mean e_B as a dot."""
    head = [f"{len(rows)} policies", "cosine ± half of a 95% interval over policies"]
    lines = [head]
    for name, values in comparisons(rows).items():
        lines.append([name, text_of(list(values), "+")])
    (folder / "trust.md").write_text(table(lines))
    cosines = np.array([row["cosine"] for row in rows]).mean(axis=0)
    ess = np.array([row["ess"] for row in rows]).mean(axis=0)
    figure, (axis,) = panels(1, height=4.2)
    distrust = [max(1 - level, 1e-3) for level in LEVELS]
    for place, condition in enumerate(CONDITIONS):
        precision = "" if condition.quantization == "none" else ", fp8"
        label = f"lag {condition.lag}, T = {condition.temperature}{precision}"
        (line,) = axis.plot(distrust, cosines[place, : len(LEVELS)], label=label)
        own = cosines[place, len(LEVELS) + place]
        axis.plot(max(1 - ess[place], 1e-3), own, "o", color=line.get_color())
    axis.set(xscale="log", xlabel="1 - c (0.001: c = 1)")
    axis.set_ylabel("cosine of g(c) and the on-policy gradient")
    # The policies' batches have different e_Bs, so a dot may lie off its line.
    axis.set_title("A dot is the mean at each batch's own $e_B$")
    figure.legend(loc="outside right center")
    save(figure, folder / "trust.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--figure", action="store_true", help="only draw and report")
    args = parser.parse_args()
    path = args.folder / "trust.jsonl"
    rows = [json.loads(line) for line in open(path)] if path.exists() else []
    if not args.figure:
        laboratory = Laboratory()
        for step in sorted(STEPS - {row["step"] for row in rows}):
            rows.append(laboratory.measure(step))
            with open(path, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(f"policy of step {step} is measured", flush=True)
    report(rows, args.folder)


if __name__ == "__main__":
    run_script(main)
