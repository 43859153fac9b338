"""What each token of a batch weighs in the gradient of each objective.

All objectives here but one have gradients of the same form, and differ in w_t alone:

    grad L = -1/|B| sum_t w_t grad log pi_theta(y_t | x, y_<t)

w_t is A_t for REINFORCE. The one is P3O: the first term of (12) has this form, with w_t
= min(rho_t, e_B) A_t, but the second, the KL, is about all tokens that could have stood
at a position and not about the sampled one. It is looked at by itself.

The scripts that draw these weights get their batches here as well: sampled and rewarded
by the functions of train.py, then scored by a policy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from experiments import objectives
from loss import OBJECTIVES, Objective
from policy import Policy
from rollout import Engine, Rollouts
from support.prompts import Split
from train import (
    Config,
    add_reward,
    kl_of_positions,
    rows_of_micro_batches,
    sample_step,
)

COMPARED: dict[str, Objective] = {
    "p3o": OBJECTIVES["p3o"],
    "reinforce": OBJECTIVES["reinforce"],
    "grpo": OBJECTIVES["grpo"],
    "dapo": objectives.dapo,
    "gspo": objectives.gspo,
    "cispo": objectives.cispo,
    "tis": objectives.tis,
    "m2po": objectives.m2po,
    "decoupled": objectives.decoupled,
}


class ScoredBatch(NamedTuple):
    """A batch B as an optimizer step meets it, before the update."""

    rollouts: Rollouts  # N responses, with reward and advantage
    log_ratio: Tensor  # [N, T] log rho, 0 where there is no token
    kl: Tensor  # [N, T] KL(pi_theta || pi_b) at each position, nats, likewise


def token_weights(
    objective: Objective,
    log_ratio: Tensor,
    logp_behavior: Tensor,
    advantage: Tensor,
    mask: Tensor,
    **batch_quantities: float | Tensor,
) -> Tensor:
    """w_t of every token, by autograd: [N, T], 0 where there is no token.

    log_ratio, logp_behavior and mask are [N, T], advantage is [N] or [N, T]. The
    tensors are the whole batch, unless batch_quantities (such as ess) say otherwise. Of
    P3O it is the first term of (12). `decoupled` is before its first update on a
    rollout batch, when pi_prox is pi_theta.
    """
    logp = (logp_behavior + log_ratio).detach().requires_grad_()
    keywords = dict(objective.hyper_parameters)
    if objective.takes_kl:
        keywords["kl"] = torch.zeros_like(log_ratio)
    loss, _ = objective.loss(
        logp, logp_behavior, advantage, mask, **keywords, **batch_quantities
    )
    (gradient,) = torch.autograd.grad(loss, logp)
    return -gradient * mask.sum()


def sample_and_score(
    engine: Engine,
    policy: Policy,
    cfg: Config,
    step: int,
    train: Split,
) -> ScoredBatch:
    """All responses of a step: sampled by the engine, rewarded, scored by the policy.

    It is on one rank. The KL takes the K likeliest tokens: cfg.top_logprobs above 0.
    """
    rollouts = sample_step(engine, cfg, step, train.prompts)
    add_reward(rollouts, cfg, step, train.problems)
    device = next(policy.parameters()).device
    log_ratio = torch.zeros_like(rollouts.logp_behavior)
    kl = torch.zeros_like(rollouts.logp_behavior)
    rows = list(range(len(rollouts.text)))
    for some in rows_of_micro_batches(rollouts, rows, cfg.micro_batch_tokens):
        micro_batch = rollouts.select(some, device)
        with torch.no_grad():
            logp, top_logp = policy(micro_batch)
            micro_kl = kl_of_positions(top_logp, micro_batch, cfg)
        columns = logp.shape[1]
        log_ratio[some, :columns] = (logp - micro_batch.logp_behavior).cpu()
        kl[some, :columns] = micro_kl.float().cpu()
    return ScoredBatch(rollouts, log_ratio * rollouts.mask, kl * rollouts.mask)
