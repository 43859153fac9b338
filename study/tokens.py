"""One batch as a page: each token colored by its weight in the gradient.

    python study/tokens.py --temperature 1.4      # a batch sampled from tiny/
    python study/tokens.py --model runs/NAME/model --step 61 --sampled_by tiny
                                                        # a very stale one

It writes a single HTML file (--page), which any browser shows without a network. An
objective is chosen at the top of the page. A token that it makes likelier is blue, one
that it makes rarer is orange. The pointer shows ratio, cap, KL and advantage. A table
of what each objective does with the batch is printed.

The flags are those of train.py, and four more. One rank only.
"""

import html
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from loss import LOSSES, effective_sample_size, ratio_sums
from policy import build_policy
from rollout import Engine, Rollouts
from study.runs import table
from support.command import PositiveCount, parse_flags, run_script
from support.log import Log
from support.machine import init_distributed
from tools import objectives

TEMPLATE = Path(__file__).resolve().with_name("tokens_template.html")
COMPARED: dict[str, Callable[..., Tensor]] = LOSSES | {
    name: getattr(objectives, name)
    for name in """dapo gspo cispo tis
        m2po a3po bapo asymre rec opmd sapo
        ipo sequence_mask dppo_tv icepop vespo opsm""".split()
}


class Config(train.Config):
    """A batch to look at: the flags of train.py, and four more."""

    prompts_per_step: PositiveCount = 8
    """prompts of the batch"""
    minibatches: PositiveCount = 1
    """the page shows the whole batch"""
    step: PositiveCount = 1
    """the batch of which step"""
    sampled_by: str = ""
    """a model folder that samples in place of --model"""
    show: PositiveCount = 64
    """responses on the page; e_B is that of all responses of the step"""
    page: str = "runs/tokens.html"
    """the file to write"""


class ScoredBatch(NamedTuple):
    """A batch B as an optimizer step meets it, before the update."""

    rollouts: Rollouts  # N responses, with reward and advantage
    log_ratio: Tensor  # [N, T] log rho, 0 where there is no token
    kl: Tensor  # [N, T] KL(pi_theta || pi_b) at each position, nats

    def e_b(self) -> float:
        """e_B (11)."""
        sums = ratio_sums(self.log_ratio, self.rollouts.mask)
        return effective_sample_size(sums).item()

    def weights(self) -> dict[str, Tensor]:
        """`token_weights` of each objective that is compared, [N, T] each."""
        logp_behavior, advantage = self.rollouts.logp_behavior, self.rollouts.advantage
        return {
            name: token_weights(
                objective, self.log_ratio, logp_behavior, advantage, self.e_b()
            )
            for name, objective in COMPARED.items()
        }


def token_weights(
    objective: Callable[..., Tensor],
    log_ratio: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    e_b: float,
) -> Tensor:
    """What each token of a batch weighs in the gradient: w_t, [N, T], by autograd.

    grad L = -1/|B| sum_t w_t grad log pi_theta(y_t), with w_t = A_t for REINFORCE. Of
    P3O this is the first term of (12). The second, the KL, is about all tokens that
    could have stood at a position.
    """
    logp = (logp_behavior + log_ratio).detach().requires_grad_()
    loss = objective(logp, logp_behavior, advantage, torch.zeros_like(logp), e_b)
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    return -gradient


def sample_and_score(cfg: Config) -> tuple[ScoredBatch, Engine]:
    """All responses of a step: sampled, rewarded, and scored by the policy.

    And the engine that sampled them.
    """
    tokenizer, problems, _, max_model_len = train.load_data(cfg)
    mesh = init_distributed()
    engine = Engine(
        cfg.sampled_by or cfg.model,
        max_model_len,
        quantization=cfg.rollout_quantization,
        dtype=cfg.rollout_dtype,
        top_logprobs=cfg.top_logprobs,
    )
    log = Log(Path(), tokenizer, cfg.group_size, cfg.steps, done=0)
    rollouts = train.sample_batch(engine, cfg, cfg.step, problems, log)
    policy = build_policy(cfg.model, mesh, temperature=cfg.policy_temperature)
    device = next(policy.parameters()).device
    batch = rollouts.select(torch.arange(len(rollouts.text)), device)
    with torch.no_grad():
        logp, top_logp = policy(batch)
    log_ratio = (logp - batch.logp_behavior).cpu()
    kl = train.kl_at_positions(top_logp, batch, cfg).cpu()
    return ScoredBatch(rollouts, log_ratio, kl), engine


def summary(batch: ScoredBatch) -> str:
    """A table of what each objective does with the tokens whose advantage is not 0."""
    judged = batch.rollouts.advantage != 0
    rows = [["objective", "tokens without weight", "mean weight", "largest weight"]]
    for name, weight in batch.weights().items():
        size = weight[judged].abs()
        dropped = (size == 0).float().mean()
        rows.append([name, f"{dropped:.3f}", f"{size.mean():.3f}", f"{size.max():.2f}"])
    return table(rows)


def page_data(
    batch: ScoredBatch, tokenizer: Any, group_size: int, show: int
) -> dict[str, Any]:
    """What the page shows, as JSON can hold it: the first `show` responses.

    Weights are those in the whole batch, one a token and objective, in the order of
    COMPARED.
    """
    rollouts = batch.rollouts
    weights = batch.weights()
    responses = []
    for row in range(min(show, len(rollouts.text))):
        prompt_length = int(rollouts.prompt_length[row])
        tokens = []
        for t in range(int(rollouts.mask[row].sum())):
            token = {
                "text": tokenizer.decode(rollouts.tokens[row, prompt_length + t]),
                "ratio": batch.log_ratio[row, t].exp().item(),
                "kl": batch.kl[row, t].item(),
                "weights": [weight[row, t].item() for weight in weights.values()],
            }
            tokens.append(token)
        response = {
            "prompt": tokenizer.decode(rollouts.tokens[row, :prompt_length]),
            "reward": rollouts.reward[row].item(),
            "advantage": rollouts.advantage[row, 0].item(),
            "tokens": tokens,
        }
        responses.append(response)
    return {
        "objectives": list(weights),
        "ess": batch.e_b(),
        "token_count": int(rollouts.mask.sum()),
        "response_count": len(rollouts.text),
        "group_size": group_size,
        "largest_advantage": rollouts.advantage.abs().max().item(),
        "largest_kl": batch.kl.max().item(),
        "responses": responses,
    }


def render(data: dict[str, Any], title: str) -> str:
    """The page. What the model wrote can neither end the script nor become a tag.

    It stands in a script element of type application/json, without any < of its own,
    and the page's script takes it from there as text (textContent).
    """
    embedded = json.dumps(data).replace("<", "\\u003c")
    head, foot = TEMPLATE.read_text().split("{{DATA}}")
    return head.replace("{{TITLE}}", html.escape(title)) + embedded + foot


def main() -> None:
    cfg = parse_flags(Config)
    batch, engine = sample_and_score(cfg)
    title = f"{cfg.model}, step {cfg.step}, T = {cfg.temperature:g}"
    if cfg.sampled_by:
        title += f", sampled by {cfg.sampled_by}"
    data = page_data(batch, engine.tokenizer, cfg.group_size, cfg.show)
    path = Path(cfg.page)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(data, title))
    print(summary(batch))
    print(f"{path}: e_B {data['ess']:.4f}, {data['token_count']} tokens")


if __name__ == "__main__":
    run_script(main)
