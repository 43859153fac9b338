# %% [markdown]
# # One training step by hand
#
# This notebook does what a step of `train.py` does, one line at a time, with the
# embedded policy: 0.64 million parameters that add two numbers column by column, and
# that prefer to forget the carries. It takes about a minute on two CPU cores.
#
# - Sample a batch with the real engine, and check the answers: 1 and 2.
# - Measure how far off-policy it is: 3 and 4.
# - Compute both terms of the loss, and look at the weight of every token: 5 and 6.
# - Update, and meet the same batch again as stale data: 7 and 8.
# - Meet a hot batch, sampled at temperature 1.4: 9 and 10.
#
# Equation numbers are those of the paper (arXiv 2605.12380). Everything that is
# imported from this repository is what the trainer itself uses.

# %%
import os
import sys
from html import escape
from pathlib import Path

ROOT = Path.cwd() if Path("loss.py").exists() else Path.cwd().parent
os.chdir(ROOT)
sys.path.insert(0, str(ROOT))

import torch

from loss import (
    effective_sample_size,
    group_advantage,
    kl_divergence,
    p3o,
    ratio_sums,
)
from policy import build_policy, full_weights
from reward import compute_rewards
from rollout import Engine, noise_seed
from support.machine import init_distributed
from support.models import check_model
from support.tasks import load_split

mesh = init_distributed()
engine = Engine("tiny", 128, dtype="float32", top_logprobs=20)
policy = build_policy("tiny", mesh)
# Ten times the trainer's learning rate, so that ten steps show something.
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.0)

# %% [markdown]
# ## 1. Sample
#
# Sixteen problems, and G = 8 responses to each. The engine reports **log pi_b** of
# every token that it sampled: of the distribution that it really drew from. The
# vocabulary of this policy has 20 tokens, so the 20 likeliest ones that it also
# reports are all of pi_b.

# %%
G = 8
tokenizer, _ = check_model("tiny")
train = load_split("tiny", tokenizer, "train", limit=16, room=64, drop_long=False)
problems, prompts = train.problems, train.prompts


def sample(temperature, seed):
    """128 responses, eight neighbors of which answer the same problem."""
    seeds = [noise_seed(seed, place, G) for place in range(len(prompts))]
    return engine.sample(prompts, G, seeds, temperature=temperature, max_tokens=64)


rollouts = sample(temperature=1.0, seed=0)
for response in range(G):
    print(f"{problems[0]['prompt']}: {rollouts.text[response]}")

# %% [markdown]
# ## 2. Reward and advantage
#
# A response is right if its last word is the sum. The advantage compares it with the
# seven others of its group:
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
# A right answer in a group of mostly wrong ones has a large advantage. In a group
# whose responses are all right, or all wrong, the advantage of each is zero.

# %%
for group, of_group in enumerate(reward.view(-1, G).mean(dim=1).tolist()):
    print(f"{problems[group]['prompt']:>10}  {of_group:.3f} right")

# %% [markdown]
# ## 3. The ratios and e_B
#
# The trainer scores the same tokens with its own forward pass:
#
# $$\rho_t = \frac{\pi_\theta(y_t \mid x, y_{<t})}{\pi_b(y_t \mid x, y_{<t})}
# \qquad (7)$$
#
# On a fresh batch all of them are 1, to rounding: two programs, vLLM and this
# trainer, agree on the probability of every token. The **normalized effective sample
# size** of the ratios is
#
# $$e_B = \frac{\mathrm{mean}_B[\rho]^2}{\mathrm{mean}_B[\rho^2]}
# = \frac{1}{1 + \mathrm{CV}(\rho)^2} \qquad (11)$$

# %%
mask = rollouts.mask  # [N, T] bool
logp, top_logp = policy(rollouts)  # [N, T] and [N, T, 20], with their graphs


def describe(log_ratio, mask):
    """The ratios of a batch by their quantiles, and e_B by (11)."""
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
# e_B sees the sampled tokens. The KL of (12) compares the whole distributions at each
# position:
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
# On a fresh batch min(rho, e_B) is nearly 1 and 1 - e_B nearly 0: this is REINFORCE
# with the group's mean as its baseline.

# %%
of_tokens = p3o(logp, rollouts.logp_behavior, advantage, kl, ess)  # (12), [N, T]
loss = of_tokens[mask].mean()
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
# A step against the gradient of the policy term goes along the mean of
# v_t grad log pi_theta(y_t), with v_t = min(rho_t, e_B) A_t. Green tokens are
# reinforced, red ones made rarer; the stronger the color, the larger the weight. On a
# fresh batch all tokens of a response have the same weight, its advantage, whether they
# are the mistake or not.


# %%
class Html:
    """What a notebook shows as HTML."""

    def __init__(self, text):
        self.text = text

    def _repr_html_(self):
        return self.text


def colored(values, scale, batch, rows):
    """The tokens of some responses: green above 0, red below, full color at `scale`."""
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
    return Html("".join(lines))


def weights_of(logp, kl, ess):
    """v_t of each token: minus the gradient of its loss to its log pi_theta."""
    leaf = logp.detach().requires_grad_()
    constant_kl = kl.detach()  # so that only the policy term has a gradient
    of_tokens = p3o(leaf, rollouts.logp_behavior, advantage, constant_kl, ess)
    (gradient,) = torch.autograd.grad(of_tokens.sum(), leaf)
    return -gradient


rows = [int(advantage.argmax()), int(advantage.argmin())]  # a right and a wrong one
colored(weights_of(logp, kl, ess), 3.0, rollouts, rows)

# %% [markdown]
# ## 7. The update
#
# `loss.backward()`, clip the gradient to norm 1, step. Afterwards the same batch is
# no longer quite on-policy: it was sampled by the weights before the step.


# %%
def update(policy, optimizer, loss):
    """One optimizer step; the norm of the gradient before it was clipped."""
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
# Nine more steps on the same samples. The policy moves away from the one that
# sampled; the farther it is, the lower is e_B.

# %%
for step in range(2, 11):
    logp, top_logp = policy(rollouts)
    kl = kl_divergence(top_logp, rollouts.top_logp_behavior)
    sums = ratio_sums(logp - rollouts.logp_behavior, mask)
    ess = effective_sample_size(sums).item()  # (11)
    of_tokens = p3o(logp, rollouts.logp_behavior, advantage, kl, ess)  # (12)
    print(f"step {step:2}: e_B = {ess:.4f}, mean KL {kl[mask].mean():.4f} nats")
    update(policy, optimizer, of_tokens[mask].mean())

logp, top_logp = policy(rollouts)
kl = kl_divergence(top_logp, rollouts.top_logp_behavior)
stale_ess = describe(logp - rollouts.logp_behavior, mask)
assert stale_ess < 0.95

# %% [markdown]
# The KL grows, and then shrinks again: as e_B falls, the cap cuts what drives the
# policy on, and the KL pulls it back. REINFORCE, which has neither, goes on from the
# same start without a brake.

# %%
other = build_policy("tiny", mesh)
other_optimizer = torch.optim.AdamW(other.parameters(), lr=1e-3, weight_decay=0.0)
for step in range(1, 11):
    other_logp, other_top_logp = other(rollouts)
    other_kl = kl_divergence(other_top_logp, rollouts.top_logp_behavior)
    sums = ratio_sums(other_logp - rollouts.logp_behavior, mask)
    other_ess = effective_sample_size(sums)
    mean_kl = other_kl.detach()[mask].mean()
    print(f"step {step:2}: e_B = {other_ess:.4f}, mean KL {mean_kl:.4f} nats")
    update(other, other_optimizer, (-advantage * other_logp)[mask].mean())
# That is after nine steps, and already more than P3O's after ten.
assert mean_kl > kl.detach()[mask].mean()

# %% [markdown]
# Now e_B has an effect on both terms of (12). Every ratio above e_B is cut to it, and
# the KL pulls with 1 - e_B. The colors are the weights v_t = min(rho_t, e_B) A_t on the
# same scale as above: they are paler, and a token that training has made rare, with a
# small rho, is nearly white.

# %%
is_cut = (logp - rollouts.logp_behavior).exp() > stale_ess
mean_kl = kl[mask].mean()
print(f"share of tokens with rho > e_B: {is_cut[mask].double().mean():.2f}")
print(f"mean KL {mean_kl:.4f} nats, (1 - e_B) KL {(1 - stale_ess) * mean_kl:.4f}")
colored(weights_of(logp, kl, stale_ess), 3.0, rollouts, rows)

# %% [markdown]
# Where does the KL act? Here the color is KL_t. Most of it is at few positions: where
# ten updates have changed the mind of the policy.

# %%
by_size = kl.detach()[mask].sort(descending=True).values
largest = by_size[: len(by_size) // 20]
share = float(largest.sum() / by_size.sum())
print(f"5% of the positions have {share:.0%} of the KL")
colored(kl.detach(), 1.0, rollouts, rows)

# %% [markdown]
# What others do with the same stale batch: the weight of the tokens of the wrong
# response whose ratio is farthest from 1. GRPO drops a token of a wrong answer whose
# ratio is below 0.8; REINFORCE gives every token A.

# %%
row = rows[1]
log_ratio = (logp - rollouts.logp_behavior).detach()[row]
a = advantage[row].item()
farthest = log_ratio.abs().argsort(descending=True)[:8].sort().values.tolist()
print("place token   rho    REINFORCE   GRPO   P3O, first term")
for column in farthest:
    token = tokenizer.decode(rollouts.tokens[row, rollouts.prompt_length[row] + column])
    rho = log_ratio[column].exp().item()
    grpo = 0.0 if rho < 0.8 else rho * a
    capped = min(rho, stale_ess) * a
    print(f"{column:5} {token!r:6} {rho:6.3f} {a:10.3f} {grpo:8.3f} {capped:10.3f}")

# %% [markdown]
# ## 9. A hot batch
#
# The new weights go to the engine, and it samples at temperature 1.4. The weights are
# the newest, but pi_b is a hotter distribution than pi_theta, and e_B sees it.

# %%
engine.load_weights(full_weights(policy), version="10")
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
# The ratio is low where heat chose a token that the policy hardly would: rho < 1 is
# red. These are the tokens that heat has put there.

# %%
colored(log_ratio.clamp(max=0.0), 3.0, batch, range(4))

# %% [markdown]
# ## 10. What the KL pulls at in a hot batch
#
# Here pi_b is pi_theta's own copy at temperature T, and the pull toward it is a known
# thing. At every position, with H the entropy of pi_theta,
#
# $$\nabla \mathrm{KL}(\pi_\theta \| \pi_b)
# = -\left(1 - \tfrac{1}{T}\right) \nabla H(\pi_\theta)$$
#
# since log pi_b is log pi_theta / T, less a constant. For T > 1 the pull raises the
# entropy of pi_theta; for T < 1 it lowers it. The target is not fixed: as pi_theta
# grows hotter, so does the copy that the next batch is sampled from.

# %%
T = 1.4
logits = torch.randn(20, dtype=torch.float64, requires_grad=True)
log_policy = logits.log_softmax(dim=0)
log_behavior = (logits / T).log_softmax(dim=0).detach()
entropy = -(log_policy.exp() * log_policy).sum()
(grad_kl,) = torch.autograd.grad(
    kl_divergence(log_policy, log_behavior), logits, retain_graph=True
)
(grad_entropy,) = torch.autograd.grad(entropy, logits)
gap = (grad_kl + (1 - 1 / T) * grad_entropy).abs().max()
print(f"largest entry of the gradient {grad_kl.abs().max():.4f}, of the gap {gap:.1e}")
assert gap < 1e-12

# %% [markdown]
# ## What was seen
#
# - On a fresh batch P3O is REINFORCE with a baseline: e_B = 1, and the KL is 0, to
#   rounding.
# - e_B needs no setting. It fell by itself as the batch grew stale, and at another
#   temperature.
# - No token was dropped: min(rho, e_B) A is never 0 where rho and A are not.
#
# What e_B does over a whole run is in the third panel of `curves.png`, which every
# run of `train.py` draws. What happens where it matters is measured in
# `study/`.
