"""A probe of the weight sync: do engine and trainer agree on the same texts?

The engine's label of its weights is a string that was set after a sync. What the sync
did shows only in numbers, and in a run with lag, fp8, top-p or another temperature no
step compares them. So a few fixed texts go through engine and trainer now and then, and
their distance is held against what it was at the start: rounding, and fp8 if it is on.

It is the last of four checks of a sync. rollout.Engine.load_weights refuses a layer
that got nothing, or less than at first. train.Run.check_version refuses a batch with
another label than expected. support.checks.check_on_policy refuses a first batch whose
ratios are not near 1, in a run without any mismatch.
"""

from typing import Any

import torch
import torch.distributed as dist

from support.flags import Refused

PROBE_EVERY = 5  # steps; with the embedded policy a probe takes 2% of a step
PROMPTS = 4
RESPONSE_TOKENS = 32
# How far the distance may rise: to FACTOR times that at the start, and to half of how
# far the policy has moved since then, NATS at most. Rounding grows and falls while a
# policy is trained, tenfold at most in runs that were seen. An engine that got nothing
# stays behind by all that the policy moves (on CUDA, where it has slept, it has nothing
# of use), and a layer with a part of its weights missing is off by nats.
FACTOR = 5
NATS = 0.1
# How far they may be apart before the first step. No other check would see weights that
# were wrong from the start in a run with lag, fp8 or another temperature.
NATS_AT_START = 0.5


class SyncProbe:
    """Fixed texts, and how far engine and trainer were apart on them at the start.

    engine and policy are a rollout.Engine, awake and in sync, and a policy.Policy.
    Raises Refused where they are not in sync.
    """

    def __init__(self, engine: Any, policy: Any, prompts: list[list[int]]) -> None:
        # vLLM scores a text only where a token more has room.
        prompts = [prompt[: engine.max_model_len - 2] for prompt in prompts[:PROMPTS]]
        room = engine.max_model_len - 1 - max(len(prompt) for prompt in prompts)
        self.texts = engine.sample(
            prompts,
            1,
            seeds=list(range(len(prompts))),
            max_tokens=min(RESPONSE_TOKENS, room),
        )
        # Ranks that share an engine have to score the same texts, and rounding may have
        # made another token of one of theirs.
        shared = [self.texts]
        dist.broadcast_object_list(shared)
        self.texts = shared[0]
        self.logp_at_start = self.score(policy)
        self.at_start = self.mean_difference(
            self.logp_at_start, engine.log_probabilities(self.texts)
        )
        if self.at_start > NATS_AT_START:
            raise Refused(
                "before the first step, engine and trainer differ by "
                f"{self.at_start:.3f} nats a token on fixed texts: did the engine get "
                "all weights?"
            )

    def score(self, policy: Any) -> torch.Tensor:
        """log pi_theta of the texts' tokens, [N, T], in nats, at temperature 1.

        A collective.
        """
        device = next(policy.parameters()).device
        texts = self.texts.select(list(range(len(self.texts.text))), device)
        with torch.no_grad():
            logp, _ = policy(texts, temperature=1.0)
        policy.reshard()  # without a backward pass FSDP would keep the root's weights
        return logp.cpu()

    def mean_difference(self, logp: torch.Tensor, other: torch.Tensor) -> float:
        """Mean |logp - other| of the texts' tokens, both [N, T] in nats.

        That of the rank where it is largest. A collective.
        """
        difference = (logp - other).abs()[self.texts.mask].mean()
        # A maximum over ranks could pass over the NaN of one of them.
        difference = difference.nan_to_num(nan=torch.inf)
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        return float(difference)

    def check(self, engine: Any, policy: Any, step: int) -> float:
        """The distance after a step's sync. Raises Refused if it has risen too far."""
        logp = self.score(policy)
        moved = self.mean_difference(logp, self.logp_at_start)
        distance = self.mean_difference(logp, engine.log_probabilities(self.texts))
        if distance > FACTOR * self.at_start + min(NATS, moved / 2):
            raise Refused(
                f"step {step}: after the sync, engine and trainer differ by "
                f"{distance:.3f} nats a token on fixed texts, where it was "
                f"{self.at_start:.4f} at the start, and the policy has moved by "
                f"{moved:.3f}: did the engine get all weights?"
            )
        return distance
