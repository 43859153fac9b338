"""train.py with a mismatch that changes from step to step: the case for a measured e_B.

    python experiments/changing.py --out_dir runs/changing

The rollouts of the steps are, in turn, fresh; of the weights of STALE steps ago; hot;
and of an fp8 engine. So no constant cap and no constant weight of the KL can be right
for all of them. One rank only. The flags are train.py's; it takes temperature, lag and
fp8 itself.
"""

import sys
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import train
from rollout import Engine, Rollouts

STALE = 16  # steps
HOT = 1.4
TURNS = ("fresh", "stale", "hot", "fp8")


def turn_of(step: int) -> str:
    return TURNS[(step - 1) % len(TURNS)]


class ChangingEngine(Engine):
    """An engine with an fp8 one beside it, and a memory of its last weights."""

    def __init__(self, model: str, max_model_len: int, **options) -> None:
        super().__init__(model, max_model_len, **options)
        options["can_sleep"] = False
        self.fp8 = Engine(
            model, max_model_len, **options | {"quantization": "fp8_per_channel"}
        )
        self.stale = Engine(model, max_model_len, **options)
        self.history: deque = deque(maxlen=STALE + 1)

    def load_weights(self, weights, version: str) -> None:
        weights = [(name, weight.clone()) for name, weight in weights]
        super().load_weights(weights, version)
        self.fp8.load_weights(weights, version)
        self.history.append((weights, version))

    def sample_step(
        self, cfg: train.Config, step: int, prompts: list[list[int]]
    ) -> Rollouts:
        turn = turn_of(step)
        engine = self
        if turn == "hot":
            cfg = cfg.model_copy(update={"temperature": HOT})
        if turn == "fp8":
            engine = self.fp8
        if turn == "stale":
            engine = self.stale
            engine.load_weights(*self.history[0])  # as old as it has, at first
        return sample_step(engine, cfg, step, prompts)


def sampled_by(cfg: train.Config, step: int) -> int:
    """The weights that the batch of a step has to be from."""
    if turn_of(step) == "stale":
        return max(0, step - 1 - STALE)
    return step - 1


sample_step = train.sample_step

if __name__ == "__main__":
    train.Engine = ChangingEngine
    train.sample_step = lambda engine, *arguments: engine.sample_step(*arguments)
    train.weights_that_sample = sampled_by
    train.check_on_policy = lambda *arguments: None  # it is not meant to be
    train.main()
