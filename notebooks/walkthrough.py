# %% [markdown]
# # One training step by hand
#
# This notebook makes one step of `train.py`, one line at a time. The policy comes with
# this repository (`tiny/`). It has 0.64 million parameters, adds two numbers column by
# column, and often forgets the carry. The notebook takes about a minute on two CPU
# cores.
#
# - Sections 1 and 2 sample a batch with the real engine and check the answers.
# - Sections 3 and 4 measure how far off-policy the batch is.
# - Sections 5 and 6 compute both terms of the loss, and the weight of every token.
# - Sections 7 and 8 update the policy, and use the same batch again as stale data.
# - Section 9 samples a hot batch, at temperature 1.4.
#
# Equation numbers are reportedly those of the paper (arXiv 2605.12380). Everything
# imported from this repository is also used by the trainer.

# %%
import os
import sys
from html import escape
from pathlib import Path

ROOT = Path.cwd() if Path("loss.py").exists() else Path.cwd().parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

import torch
from IPython.display import HTML

from loss import (
    effective_sample_size,
    group_advantage,
    kl_divergence,
    p3o,
    ratio_sums,
)
from policy import build_policy, sync
from reward import compute_rewards
from rollout import Engine, noise_seed
from support.machine import init_distributed
from support.models import check_model
from support.tasks import load_split

mesh = init_distributed()
engine = Engine("tiny", 128, dtype="float32", top_logprobs=20)
policy = build_policy("tiny", mesh)
# Ten times the default learning rate, so that ten updates have a visible effect.
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)

# %% [markdown]
# ## 1. Sample
#
# We sample G = 8 responses to each of 16 problems. For every sampled token the engine
# reports **log pi_b**, its log-probability under the distribution that it was really
# drawn from. At each position the engine also reports the 20 likeliest tokens with
# their log-probabilities. The vocabulary of this policy has only 20 tokens, so these
# are the whole distribution.

# %%
G = 8
tokenizer, _ = check_model("tiny")
train = load_split("tiny", tokenizer, "train", limit=16, room=64, drop_long=False)
problems, prompts = train.problems, train.prompts


def sample(temperature, seed):
    """Return 128 responses; the G responses to a problem are neighbors."""
    seeds = [noise_seed(seed, group, G) for group in range(len(prompts))]
    return engine.sample(prompts, G, seeds, temperature=temperature, max_tokens=64)


rollouts = sample(temperature=1.0, seed=0)
for response in range(G):
    print(f"{problems[0]['prompt']}: {rollouts.text[response]}")

# %% [markdown]
# ## 2. Reward and advantage
#
# A response is right if its last word is the sum. Its advantage compares its reward r
# with those of its group, the eight responses to the same problem:
#
# $$A = \frac{r - \mathrm{mean}(r)}{\mathrm{std}(r)} \qquad (3)$$

# %%
reward = torch.tensor(compute_rewards(train, list(range(16)), rollouts.text))  # [N]
advantage = group_advantage(reward.view(-1, G)).view(-1, 1)  # (3), [N, 1]
print(f"{reward.mean():.2f} of the responses are right")
for response in range(G):
    right = "right" if reward[response] else "wrong"
    print(f"A = {advantage[response].item():+.3f}  {right}  {rollouts.text[response]}")

# %% [markdown]
# A right answer in a group of mostly wrong ones has a large advantage. If all responses
# of a group are right, or all are wrong, each has an advantage of 0.

# %%
for problem, share in zip(problems, reward.view(-1, G).mean(dim=1), strict=True):
    print(f"{problem['prompt']:>10}  {share:.3f} right")

# %% [markdown]
# ## 3. The ratios and e_B
#
# The trainer scores the same tokens with its own forward pass. Token $y_t$ follows the
# prompt $x$ and the tokens $y_{<t}$ of the response. Its ratio is
#
# $$\rho_t = \frac{\pi_\theta(y_t \mid x, y_{<t})}{\pi_b(y_t \mid x, y_{<t})}
# \qquad (7)$$
#
# On a fresh batch all ratios are 1 up to rounding, because vLLM and the trainer agree
# on the probability of every token. The **normalized effective sample size** of the
# ratios is
#
# $$e_B = \frac{\mathrm{mean}_B[\rho]^2}{\mathrm{mean}_B[\rho^2]}
# = \frac{1}{1 + \mathrm{CV}(\rho)^2} \qquad (11)$$
#
# The batch B has all response tokens, mean_B is the mean over them, and CV, the
# coefficient of variation, is the standard deviation divided by the mean.

# %%
mask = rollouts.mask  # [N, T] bool
logp, top_logp = policy(rollouts)  # [N, T] and [N, T, 20], with their graphs


def describe(log_ratio, mask):
    """Print quantiles of the ratios and e_B by (11); return e_B."""
    ratio = log_ratio.detach()[mask].exp().double()
    quantiles = torch.tensor([0.01, 0.5, 0.99], dtype=torch.float64)
    low, middle, high = ratio.quantile(quantiles).tolist()
    print(f"{len(ratio)} tokens; rho: 1% {low:.4f}, 50% {middle:.4f}, 99% {high:.4f}")
    ess = effective_sample_size(ratio_sums(log_ratio, mask))
    variation = ratio.std(correction=0) / ratio.mean()
    print(f"e_B = {ess:.6f}, and 1 / (1 + CV^2) = {1 / (1 + variation**2):.6f}")
    return float(ess)


ess = describe(logp - rollouts.logp_behavior, mask)
assert ess > 0.999

# %% [markdown]
# ## 4. The KL, position by position
#
# e_B depends on the sampled tokens only. The KL of the loss (12), in section 5,
# compares the whole distributions at each position:
#
# $$\mathrm{KL}(\pi_\theta \| \pi_b)
# = \sum_v \pi_\theta(v) \log \frac{\pi_\theta(v)}{\pi_b(v)}$$

# %%
kl = kl_divergence(top_logp, rollouts.top_logp_behavior)  # [N, T], with its graph
print(f"largest KL of a position: {kl.detach()[mask].max():.2e} nats")

# %% [markdown]
# ## 5. Both terms of the loss
#
# $$L = \mathrm{mean}_B\big[-\mathrm{sg}(\min(\rho_t, e_B))\, A_t \log \pi_\theta(y_t)
# + (1 - e_B)\, \mathrm{KL}_t\big] \qquad (12)$$
#
# Here sg stops the gradient, so the capped ratio is only a weight. On a fresh batch
# min(rho, e_B) is nearly 1 and 1 - e_B is nearly 0. The loss is then that of REINFORCE
# with the group's mean as its baseline.

# %%
token_loss = p3o(logp, rollouts.logp_behavior, advantage, kl, ess)  # (12), [N, T]
loss = token_loss[mask].mean()
pull = (1 - ess) * kl[mask].mean()
print(f"loss                {loss:+.6f}")
print(f"  policy term       {loss - pull:+.6f}")
print(f"  (1 - e_B) KL term {pull:+.6f}")
reinforce = (-advantage * logp)[mask].mean()
print(f"REINFORCE           {reinforce:+.6f}")
assert torch.isclose(loss.float(), reinforce, atol=1e-3)

# %% [markdown]
# ## 6. The weight of each token
#
# The negative gradient of the policy term is the mean of v_t grad log pi_theta(y_t),
# where v_t = min(rho_t, e_B) A_t is the weight of token t. The update makes green
# tokens likelier and red tokens rarer, and a stronger color means a larger weight. On a
# fresh batch all tokens of a response have the same weight, the response's advantage,
# whether a token is the mistake or not.


# %%
def colored(values, scale, batch, rows):
    """Show tokens green for values above 0 and red below, in full color at `scale`."""
    lines = []
    for row in rows:
        spans = []
        for column in range(int(batch.mask[row].sum())):
            token = batch.tokens[row, batch.prompt_length[row] + column]
            value = float(values[row, column])
            strength = min(1.0, abs(value) / scale)
            color = "0, 150, 60" if value > 0 else "210, 40, 40"
            text = escape(tokenizer.decode(token)).replace(" ", "&nbsp;")
            spans.append(
                f'<span title="{value:.3g}" '
                f'style="background: rgba({color}, {strength:.2f})">{text}</span>'
            )
        problem = problems[row // G]["prompt"]
        lines.append(f"<div><code>{problem}: {''.join(spans)}</code></div>")
    return HTML("".join(lines))


def token_weights(logp, ess):
    """Return v_t, minus the derivative of a token's loss with respect to its logp."""
    leaf = logp.detach().requires_grad_()
    no_kl = torch.zeros_like(leaf)  # Only the policy term counts.
    token_loss = p3o(leaf, rollouts.logp_behavior, advantage, no_kl, ess)
    (gradient,) = torch.autograd.grad(token_loss.sum(), leaf)
    return -gradient


rows = [int(advantage.argmax()), int(advantage.argmin())]  # a right and a wrong one
colored(token_weights(logp, ess), 3.0, rollouts, rows)

# %% [markdown]
# ## 7. The update
#
# An update computes the gradient, clips it to norm 1 and takes an optimizer step.
# Afterwards the batch is slightly off-policy, because the weights before the update
# sampled it.


# %%
def update(policy, optimizer, loss):
    """Take an optimizer step; return the norm of the gradient before clipping."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return norm.full_tensor().item()


norm = update(policy, optimizer, loss)
print(f"norm of the gradient: {norm:.3f}")
with torch.no_grad():
    logp_after, _ = policy(rollouts)
ess_after = describe(logp_after - rollouts.logp_behavior, mask)
assert ess_after < ess

# %% [markdown]
# ## 8. The same batch again, as stale data
#
# We make nine more updates on the same samples. The further the policy moves away from
# the one that sampled the batch, the lower e_B becomes.

# %%
for step in range(2, 11):
    logp, top_logp = policy(rollouts)
    kl = kl_divergence(top_logp, rollouts.top_logp_behavior)
    sums = ratio_sums(logp - rollouts.logp_behavior, mask)
    ess = effective_sample_size(sums).item()  # (11)
    token_loss = p3o(logp, rollouts.logp_behavior, advantage, kl, ess)  # (12)
    print(f"update {step:2}: e_B = {ess:.4f}, mean KL {kl[mask].mean():.4f} nats")
    update(policy, optimizer, token_loss[mask].mean())

logp, top_logp = policy(rollouts)
kl = kl_divergence(top_logp, rollouts.top_logp_behavior)
stale_ess = describe(logp - rollouts.logp_behavior, mask)
assert stale_ess < 0.95

# %% [markdown]
# The KL grows and then shrinks again: as e_B falls, the cap limits the policy term, and
# the KL term pulls the policy back. REINFORCE has neither, and from the same initial
# policy it keeps moving away.

# %%
other = build_policy("tiny", mesh)
other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.0)
for step in range(1, 11):
    other_logp, other_top_logp = other(rollouts)
    other_kl = kl_divergence(other_top_logp, rollouts.top_logp_behavior)
    sums = ratio_sums(other_logp - rollouts.logp_behavior, mask)
    other_ess = effective_sample_size(sums)
    mean_kl = other_kl.detach()[mask].mean()
    print(f"update {step:2}: e_B = {other_ess:.4f}, mean KL {mean_kl:.4f} nats")
    update(other, other_optimizer, (-advantage * other_logp)[mask].mean())
# After nine updates REINFORCE's KL already exceeds P3O's after ten.
assert mean_kl > kl.detach()[mask].mean()

# %% [markdown]
# Now e_B affects both terms of (12). Every ratio above e_B is capped at e_B, and the KL
# has the weight 1 - e_B. The weights v_t = min(rho_t, e_B) A_t below have the same
# color scale as above. They are paler. A token that training has made rare has a small
# rho and is nearly white.

# %%
is_capped = (logp - rollouts.logp_behavior).exp() > stale_ess
mean_kl = kl[mask].mean()
print(f"share of tokens with rho > e_B: {is_capped[mask].double().mean():.2f}")
print(f"mean KL {mean_kl:.4f} nats, (1 - e_B) KL {(1 - stale_ess) * mean_kl:.4f}")
colored(token_weights(logp, stale_ess), 3.0, rollouts, rows)

# %% [markdown]
# Where does the KL act? Here the color is the KL at each position. Most of it is at a
# few positions, at which ten updates have changed the policy's choice.

# %%
by_size = kl.detach()[mask].sort(descending=True).values
largest = by_size[: len(by_size) // 20]
share = float(largest.sum() / by_size.sum())
print(f"5% of the positions have {share:.0%} of the KL")
colored(kl.detach(), 1.0, rollouts, rows)

# %% [markdown]
# ## 9. A hot batch
#
# We copy the new weights to the engine and sample at temperatures 1.0 and 1.4. Engine
# and policy now have the same weights, but at 1.4 pi_b is hotter than pi_theta, which
# lowers e_B.

# %%
sync(engine, policy, 10, [])
hot_ess = {}
for temperature in (1.0, 1.4):
    batch = sample(temperature, seed=1)
    with torch.no_grad():
        batch_logp, batch_top_logp = policy(batch)
    log_ratio = batch_logp - batch.logp_behavior
    print(f"temperature {temperature}")
    hot_ess[temperature] = describe(log_ratio, batch.mask)
    batch_kl = kl_divergence(batch_top_logp, batch.top_logp_behavior)
    print(f"mean KL {batch_kl[batch.mask].mean():.4f} nats\n")
assert hot_ess[1.0] > 0.999 > hot_ess[1.4]

# %% [markdown]
# The ratio is low (red) at tokens that the policy would rarely choose: the higher
# temperature put them there. The KL pulls the policy toward that hotter distribution,
# which raises the policy's entropy (docs/method.md).

# %%
colored(log_ratio.clamp(max=0.0), 3.0, batch, range(4))

# %% [markdown]
# ## Summary
#
# - On a fresh batch P3O is REINFORCE with a baseline: e_B is 1 and the KL is 0, up to
#   rounding.
# - e_B needs no setting. It fell as the batch became stale, and when the temperature of
#   the rollouts changed.
# - P3O drops no token: min(rho, e_B) A is 0 only if A is 0.
#
# Every run of `train.py` draws e_B by step in the panel `ess` of its `curves.png`.
# `study/README.md` compares the objectives on stale, hot and other off-policy data, and
# docs/objectives.md shows how each weights a token.
