"""Does e_B choose the right amount of trust? A test at one step instead of whole runs.

    python experiments/trust.py              # all of it: about an hour on a core
    python experiments/trust.py --figure     # draws what has been measured

P3O caps a token's weight by e_B and weighs the KL by 1 - e_B. Any constant c in (0, 1]
could stand in its place. For POLICIES policies along a run, and for ten batches each,
of varied age, temperature and precision, this measures how good each c would have been:

    g(c)      the gradient of P3O (12) on the batch, with c in place of e_B
    g*        the on-policy gradient, of FRESH fresh responses of that policy
    cosine    cos(g(c), g*): is it the right direction?
    gain      <g(c), g*> / |g*|^2: what a small step gains, to first order, as a share
              of what g* gains at the same learning rate

What is gained is that objective whose gradient g* is: the expected advantage, which is
the reward divided by its group's standard deviation. The cosine is the same share for
steps of equal length.

It reports the score of the batch's own e_B, less that of the best single c for all
batches, and less that of the e_B of another batch of the same policy, and the rank
correlation of e_B with the best c of the batch. Intervals are bootstrapped over
policies, since the batches of a policy share its g*. A finished policy is a line of
trust.jsonl: the script can be stopped and started at will.
"""

import argparse
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
import transformers
from scipy.stats import rankdata

import train
from loss import effective_sample_size, group_advantage, kl_divergence, p3o_loss
from policy import Policy, build_policy, full_weights
from reward import load_task, score
from rollout import Engine, Rollouts, init_distributed, noise_seeds
from support.flags import parse_flags
from support.prompts import check_model, encode_problems

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments/results"
RUN = ["--steps=60", "--prompts_per_step=16", "--minibatches=1", "--learning_rate=5e-4"]
POLICIES = 20
FRESH = 8192  # responses for g*
PROMPTS, GROUP = 32, 8  # of a batch
LEVELS = [0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0]
# Reported beside the best level, which is 0.9 in direction.
NEAR_BEST = (0.8, 0.95)
# Steps from which on a batch counts as old in the report.
OLD = 16
RESAMPLES = 10_000


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

Weights = list[tuple[str, torch.Tensor]]


class Laboratory:
    """The engines, the prompts, and the weights of all steps of one run."""

    def __init__(self) -> None:
        mesh = init_distributed()
        tokenizer, context = check_model("tiny")
        self.problems = load_task("tiny", "train")
        split = encode_problems(
            self.problems,
            tokenizer,
            instruction=None,
            room=context - 64,
            drop_long=False,
            name="train prompts",
        )
        self.prompts = split.prompts
        longest = max(len(prompt) for prompt in self.prompts) + 64
        self.engines = {
            name: Engine("tiny", longest, quantization=name, top_logprobs=20)
            for name in ("none", "fp8_per_channel")
        }
        self.weights = self.weights_of_run(mesh)
        model = transformers.AutoModelForCausalLM.from_pretrained("tiny")
        self.policy = Policy(model)  # without FSDP: plain gradients

    def weights_of_run(self, mesh) -> list[Weights]:
        """The weights before and after each step of an on-policy run of P3O."""
        cfg = parse_flags(train.Config, RUN)
        engine = self.engines["none"]
        policy = build_policy("tiny", mesh)
        optimizer, schedule = train.build_optimizer(policy, cfg)
        history = []
        for step in range(1, cfg.steps + 2):
            weights = [(name, weight.clone()) for name, weight in full_weights(policy)]
            history.append(weights)
            engine.load_weights(weights, version=str(step - 1))
            rollouts = train.sample_step(engine, cfg, step, self.prompts)
            train.add_reward(rollouts, cfg, step, self.problems)
            train.update(
                policy,
                optimizer,
                schedule,
                rollouts,
                train.OBJECTIVES["p3o"],
                cfg,
                step,
                is_first=False,
            )
        return history

    def sample(
        self, weights: Weights, condition: Condition, first: int, prompts: int
    ) -> Rollouts:
        """Rewarded responses to prompts first, first + 1, ... of a shuffled order."""
        engine = self.engines[condition.quantization]
        engine.load_weights(weights, version="trust")
        order = random.Random(1).sample(range(len(self.prompts)), len(self.prompts))
        chosen = [order[i % len(order)] for i in range(first, first + prompts)]
        rollouts = engine.sample(
            [self.prompts[i] for i in chosen],
            GROUP,
            noise_seeds(7, first, prompts, GROUP),
            temperature=condition.temperature,
            max_tokens=64,
        )
        answers = [self.problems[i]["answer"] for i in chosen for _ in range(GROUP)]
        reward = torch.tensor(score(rollouts.text, answers, "exact"))
        rollouts.reward = reward
        rollouts.advantage = group_advantage(reward.view(-1, GROUP)).flatten()
        return rollouts

    def gradient(self, loss: torch.Tensor) -> torch.Tensor:
        """The gradient of the policy as one vector, in float64; keeps the graph."""
        parameters = list(self.policy.parameters())
        gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
        return torch.cat([g.flatten() for g in gradients]).double()

    def fresh_gradient(self, weights: Weights, first: int) -> torch.Tensor:
        """g*: the mean of -A grad log pi_theta over FRESH responses of the policy."""
        total, tokens = 0.0, 0
        for part in range(0, FRESH // GROUP, PROMPTS):
            rollouts = self.sample(weights, CONDITIONS[0], first + part, PROMPTS)
            logp, _ = self.policy(rollouts)
            loss = -(rollouts.advantage[:, None] * logp * rollouts.mask).sum()
            total = total + self.gradient(loss)
            tokens += int(rollouts.mask.sum())
        return total / tokens


def measure(laboratory: Laboratory, step: int) -> dict:
    """All batches of one policy: e_B, and both scores at all levels and all e_Bs."""
    weights = laboratory.weights[step]
    laboratory.policy.model.load_state_dict(dict(weights))
    # Other noise for each policy and batch. The task has 4,096 prompts, so the first
    # batches have some of the prompts of g* again.
    first = step * 10_000
    fresh = laboratory.fresh_gradient(weights, first)
    batches: list[Rollouts] = []
    ess = []
    for place, condition in enumerate(CONDITIONS):
        old = laboratory.weights[max(0, step - condition.lag)]
        start = first + 5_000 + place * PROMPTS
        batch = laboratory.sample(old, condition, start, PROMPTS)
        with torch.no_grad():
            logp, _ = laboratory.policy(batch)
        batches.append(batch)
        ess.append(float(effective_sample_size(logp - batch.logp_behavior, batch.mask)))
    levels = LEVELS + ess
    cosine, gain = [], []
    for batch in batches:
        logp, top_logp = laboratory.policy(batch)
        kl = kl_divergence(top_logp, batch.top_logp_behavior)
        scores = []
        for level in levels:
            loss, _ = p3o_loss(
                logp,
                batch.logp_behavior,
                batch.advantage,
                batch.mask,
                kl=kl,
                ess=level,
            )
            gradient = laboratory.gradient(loss)
            product = float(gradient @ fresh)
            scores.append((product, float(gradient.norm())))
        cosine.append([p / (n * float(fresh.norm()) + 1e-30) for p, n in scores])
        gain.append([p / float(fresh @ fresh) for p, _ in scores])
    return {
        "step": step,
        "ess": ess,
        "conditions": [condition._asdict() for condition in CONDITIONS],
        "levels": LEVELS,
        "cosine": cosine,  # [batch][LEVELS, then the ess of each batch]
        "gain": gain,
        "fresh_norm": float(fresh.norm()),
    }


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; 0 where one of them does not vary."""
    ranks_a, ranks_b = rankdata(a), rankdata(b)
    if ranks_a.std() == 0 or ranks_b.std() == 0:
        return 0.0
    return float(np.corrcoef(ranks_a, ranks_b)[0, 1])


def beyond_others(at_ess: np.ndarray) -> np.ndarray:
    """The score at a batch's own e_B less the mean of those at the others' e_B.

    [policies, batches], of scores [policies, batches, batches], whose last axis has the
    batch that an e_B is of. The mean is that over permutations.
    """
    own = np.diagonal(at_ess, axis1=1, axis2=2)
    return own - (at_ess.sum(axis=2) - own) / (own.shape[1] - 1)


def comparisons(rows: list[dict], score_name: str) -> dict[str, np.ndarray]:
    """Per policy: the mean score of e_B less that of its rivals, and the correlation.

    The best single level is chosen over all policies and batches, so it knows more than
    e_B does.
    """
    scores = np.array([row[score_name] for row in rows])  # [policies, batches, levels]
    at_levels = scores[:, :, : len(LEVELS)]
    at_ess = scores[:, :, len(LEVELS) :]  # [policies, batches, batches]
    own = np.diagonal(at_ess, axis1=1, axis2=2)  # [policies, batches]
    best_single = at_levels.mean(axis=(0, 1)).argmax()
    old = [place for place, batch in enumerate(CONDITIONS) if batch.lag >= OLD]
    among_old = at_ess[:, old][:, :, old]
    best_level = np.array(LEVELS)[at_levels.argmax(axis=2)]
    ess = np.array([row["ess"] for row in rows])
    correlation = [spearman(e, b) for e, b in zip(ess, best_level, strict=True)]
    return {
        "score at e_B": own.mean(axis=1),
        f"less the best single c, {LEVELS[best_single]}": (
            own - at_levels[:, :, best_single]
        ).mean(axis=1),
        **{
            f"less c = {level}": (own - at_levels[:, :, LEVELS.index(level)]).mean(
                axis=1
            )
            for level in NEAR_BEST
        },
        "less c = 1 (no KL, cap at 1)": (own - at_levels[:, :, -1]).mean(axis=1),
        "less the e_B of another batch": beyond_others(at_ess).mean(axis=1),
        f"the same of batches {OLD} steps old or older": (
            beyond_others(at_ess)[:, old].mean(axis=1)
        ),
        "the same among these alone": beyond_others(among_old).mean(axis=1),
        "best c of each batch, less that at e_B": (at_levels.max(axis=2) - own).mean(
            axis=1
        ),
        "rank correlation of e_B and the best c": np.array(correlation),
    }


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean and 95% interval, by a bootstrap over policies."""
    noise = np.random.default_rng(0)
    drawn = noise.choice(values, (RESAMPLES, len(values))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(values.mean()), float(low), float(high)


def report(rows: list[dict]) -> str:
    """The comparisons as a table."""
    lines = [f"{len(rows)} policies, {len(CONDITIONS)} batches each", ""]
    lines += ["| | cosine | gain |", "|---|---|---|"]
    cosine, gain = (comparisons(rows, name) for name in ("cosine", "gain"))
    for (name, cosines), (gain_name, gains) in zip(
        cosine.items(), gain.items(), strict=True
    ):
        title = name if name == gain_name else f"{name} (gain: {gain_name.split()[-1]})"
        cells = []
        for values in (cosines, gains):
            mean, low, high = interval(values)
            cells.append(f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict], path: Path) -> None:
    """Both scores by level, one line a condition, with the mean e_B as a dot."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    distrust = [max(1 - level, 1e-3) for level in LEVELS]
    for axis, name in zip(axes, ("cosine", "gain"), strict=True):
        scores = np.array([row[name] for row in rows]).mean(axis=0)
        ess = np.array([row["ess"] for row in rows]).mean(axis=0)
        for place, condition in enumerate(CONDITIONS):
            precision = "" if condition.quantization == "none" else ", fp8"
            label = f"lag {condition.lag}, T = {condition.temperature}{precision}"
            (line,) = axis.plot(distrust, scores[place, : len(LEVELS)], label=label)
            own = scores[place, len(LEVELS) + place]
            axis.plot(max(1 - ess[place], 1e-3), own, "o", color=line.get_color())
        axis.set(xscale="log", xlabel="1 - c, the weight of the KL (0.001: c = 1)")
    axes[0].set_ylabel("cosine of g(c) and the on-policy gradient")
    axes[1].set_ylabel("gain of a small step, share of the on-policy one's")
    axes[0].set_title("a dot is at the batch's own e_B, mean over policies", fontsize=9)
    axes[1].legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=RESULTS)
    parser.add_argument("--figure", action="store_true", help="only draw and report")
    args = parser.parse_args()
    path = args.folder / "trust.jsonl"
    rows = [json.loads(line) for line in open(path)] if path.exists() else []
    steps = [round((i + 1) * 60 / POLICIES) for i in range(POLICIES)]
    if not args.figure:
        laboratory = Laboratory()
        for step in steps:
            if step in {row["step"] for row in rows}:
                continue
            rows.append(measure(laboratory, step))
            with path.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(
                f"policy of step {step}: e_B {np.round(rows[-1]['ess'], 3)}", flush=True
            )
    text = report(rows)
    (args.folder / "trust.md").write_text(text)
    draw(rows, args.folder / "trust.png")
    print(text)
    if not args.figure:
        laboratory.engines["none"].close()


if __name__ == "__main__":
    main()
