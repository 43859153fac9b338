"""What every objective's value and gradient should be: plain Python floats, loops and `math`, one
token at a time, gradients by hand. It shares no code with loss.py and imports no torch.

oracle(name, logp, logp_behavior, advantage, mask, **hyper) takes nested lists [B][T] and gives the
loss of the whole batch and its gradient with respect to logp, [B][T]."""

import math

DEFAULTS = {
    "p3o": {"kl_estimator": "k3", "ess": None},
    "reinforce": {},
    "grpo": {"eps": 0.2},
    "dapo": {"eps_low": 0.2, "eps_high": 0.28},
    "gspo": {"eps_low": 3e-4, "eps_high": 4e-4},
    "cispo": {"eps_high": 4.0},
    "decoupled": {"eps": 0.2, "c_w": 5.0, "logp_prox": None},
    "tis": {"C": 2.0},
    "m2po": {"tau": 0.04},
}


def effective_sample_size(log_ratios):
    """mean(rho)^2 / mean(rho^2) of a list; divided by the largest, no ratio is inf."""
    top = max(log_ratios)
    ratios = [math.exp(x - top) for x in log_ratios]
    mean = math.fsum(ratios) / len(ratios)
    return mean**2 / (math.fsum(r * r for r in ratios) / len(ratios))


def clipped(ratio, a, low, high):
    """min(ratio a, clip(ratio) a) and its derivative with respect to log ratio."""
    if a > 0 and ratio > 1 + high:
        return (1 + high) * a, 0.0
    if a < 0 and ratio < 1 - low:
        return (1 - low) * a, 0.0
    return ratio * a, ratio * a


def m2po_dropped(tokens, tau):
    """Of {position: (a, log rho)}, drop the largest (log rho)^2 until the mean of the rest fits."""
    away = {p: x * x for p, (a, x) in tokens.items() if a * x > 0}
    gone = set()
    while away and math.fsum(away.values()) / len(away) > tau:
        top = max(away.values())
        gone |= {p for p, square in away.items() if square == top}  # ties go together
        away = {p: square for p, square in away.items() if square < top}
    return gone


def oracle(name, logp, logp_behavior, advantage, mask, **hyper):
    h = DEFAULTS[name] | hyper
    rows, columns = len(mask), len(mask[0])
    tokens = {}
    for i in range(rows):
        for t in range(columns):
            if mask[i][t]:
                tokens[i, t] = (advantage[i][t], logp[i][t] - logp_behavior[i][t])
    n = len(tokens)
    loss, gradient = 0.0, [[0.0] * columns for _ in range(rows)]

    if name == "gspo":
        sequences = [[p for p in tokens if p[0] == i] for i in range(rows)]
        sequences = [s for s in sequences if s]
        for s in sequences:
            ratio = math.exp(math.fsum(tokens[p][1] for p in s) / len(s))
            parts = [clipped(ratio, tokens[p][0], h["eps_low"], h["eps_high"]) for p in s]
            loss -= math.fsum(value for value, _ in parts) / len(s) / len(sequences)
            slope = math.fsum(d for _, d in parts) / len(s) / len(sequences)
            for i, t in s:  # d log s / d logp_t = 1 / |s|
                gradient[i][t] = -slope / len(s)
        return loss, gradient

    if name == "p3o":
        ess = h["ess"]
        if ess is None:
            ess = effective_sample_size([x for _, x in tokens.values()])
    if name == "m2po":
        gone = m2po_dropped(tokens, h["tau"])

    for (i, t), (a, x) in tokens.items():
        ratio, lp = math.exp(x), logp[i][t]
        if name == "p3o":
            weight = min(ratio, ess)
            if h["kl_estimator"] == "k3":
                kl, slope = x + 1 / ratio - 1, 1 - 1 / ratio
            else:
                kl, slope = ratio * x - ratio + 1, ratio * x
            value, derivative = -weight * a * lp + (1 - ess) * kl, -weight * a + (1 - ess) * slope
        elif name == "reinforce":
            value, derivative = -a * lp, -a
        elif name in ("cispo", "tis"):
            weight = min(ratio, 1 + h["eps_high"] if name == "cispo" else h["C"])
            value, derivative = -weight * a * lp, -weight * a
        elif name in ("grpo", "dapo"):
            low, high = (h["eps"],) * 2 if name == "grpo" else (h["eps_low"], h["eps_high"])
            value, derivative = (-v for v in clipped(ratio, a, low, high))
        elif name == "decoupled":
            prox = logp[i][t] if h["logp_prox"] is None else h["logp_prox"][i][t]
            weight = min(math.exp(prox - logp_behavior[i][t]), h["c_w"])
            parts = clipped(math.exp(lp - prox), a, h["eps"], h["eps"])
            value, derivative = (-weight * v for v in parts)
        elif name == "m2po":
            value = derivative = 0.0 if (i, t) in gone else -ratio * a
        loss += value / n
        gradient[i][t] = derivative / n
    return loss, gradient
