"""One batch as a page: each token colored by its weight in the gradient.

    python experiments/tokens.py --temperature 1.4      # a batch sampled from tiny/
    python experiments/tokens.py runs/NAME              # the batch that this run's
                                                        # model would learn from next
    python experiments/tokens.py runs/NAME --sampled_by tiny    # a very stale one

It writes a single HTML file (--page), which any browser shows without a network. An
objective is chosen at the top of the page. A token that it makes likelier is blue, one
that it makes rarer is orange. The pointer shows ratio, cap, KL and advantage.

All flags of train.py that decide over a batch are taken, from RUN/config.json where a
RUN is given; flags on the command line override them. A lag of the run is not repeated:
a run keeps its last weights only. --sampled_by names older ones. One rank only.
"""

import html
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
# torch reads it when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
from transformers import PreTrainedTokenizerBase

import train
from experiments.token_weights import (
    COMPARED,
    ScoredBatch,
    sample_and_score,
    token_weights,
)
from loss import effective_sample_size
from policy import build_policy
from rollout import Engine, init_distributed
from support.flags import PositiveCount, Refused, parse_flags

TEMPLATE = Path(__file__).resolve().with_name("tokens_template.html")


class Config(train.Config):
    """A batch to look at: the flags of train.py, and three more."""

    prompts_per_step: PositiveCount = 8
    """prompts of the batch"""
    top_logprobs: PositiveCount = 20
    """K: the KL is over the K likeliest tokens of pi_b"""
    step: PositiveCount = 1
    """the batch of which step; with a RUN, the one after its last"""
    sampled_by: str = ""
    """a model folder that samples in place of --model"""
    show: PositiveCount = 64
    """responses on the page; e_B is that of all responses of the step"""
    page: str = "runs/tokens.html"
    """the file to write; with a RUN, RUN/tokens.html"""


def flags_of_run(run: str) -> list[str]:
    """The flags by which a finished run's next batch is sampled from its model.

    Raises Refused where the folder has no config.json or no model.
    """
    folder = Path(run)
    if not (folder / "config.json").exists() or not (folder / "model").is_dir():
        raise Refused(f"{run} is no finished run: it needs config.json and model/")
    config = json.loads((folder / "config.json").read_text())
    flags = [
        f"--model={folder / 'model'}",
        f"--step={config['steps'] + 1}",
        f"--page={folder / 'tokens.html'}",
    ]
    decide = (
        "task prompts_per_step group_size temperature top_p top_k top_logprobs "
        "rollout_quantization rollout_dtype policy_temperature scale_advantage "
        "max_prompt_tokens max_response_tokens seed"
    )
    return flags + [f"--{name}={config[name]}" for name in decide.split()]


def page_data(
    batch: ScoredBatch,
    tokenizer: PreTrainedTokenizerBase,
    group_size: int,
    show: int,
) -> dict[str, Any]:
    """What the page shows, as JSON can hold it: the first `show` responses.

    Weights are those in the whole batch, one a token and objective, in the order of
    COMPARED.
    """
    rollouts = batch.rollouts
    weights = [
        token_weights(
            objective,
            batch.log_ratio,
            rollouts.logp_behavior,
            rollouts.advantage,
            rollouts.mask,
        )
        for objective in COMPARED.values()
    ]  # [N, T] each
    responses = []
    for row in range(min(show, len(rollouts.text))):
        prompt_length = int(rollouts.prompt_length[row])
        tokens = []
        for t in range(int(rollouts.mask[row].sum())):
            tokens.append(
                {
                    "text": tokenizer.decode(rollouts.tokens[row, prompt_length + t]),
                    "ratio": batch.log_ratio[row, t].exp().item(),
                    "kl": batch.kl[row, t].item(),
                    "weights": [weight[row, t].item() for weight in weights],
                }
            )
        responses.append(
            {
                "prompt": tokenizer.decode(rollouts.tokens[row, :prompt_length]),
                "reward": rollouts.reward[row].item(),
                "advantage": rollouts.advantage[row].item(),
                "tokens": tokens,
            }
        )
    return {
        "objectives": list(COMPARED),
        "ess": effective_sample_size(batch.log_ratio, rollouts.mask).item(),
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


def describe(cfg: Config) -> str:
    """The title of the page: where its batch is from."""
    parts = [f"{cfg.model}, step {cfg.step}"]
    if cfg.sampled_by:
        parts.append(f"sampled by {cfg.sampled_by}")
    parts.append(f"T = {cfg.temperature:g}")
    for name in ("top_p", "top_k", "rollout_quantization"):
        if getattr(cfg, name) != train.Config.model_fields[name].default:
            parts.append(f"{name} = {getattr(cfg, name)}")
    return ", ".join(parts)


def main() -> None:
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-"):
        arguments = flags_of_run(arguments[0]) + arguments[1:]
    cfg = parse_flags(Config, arguments)
    data = train.load_data(cfg)
    mesh = init_distributed()
    engine = Engine(
        cfg.sampled_by or cfg.model,
        data.longest,
        quantization=cfg.rollout_quantization,
        dtype=cfg.rollout_dtype,
        top_logprobs=cfg.top_logprobs,
        kv_cache_gb=cfg.kv_cache_gb,
        max_num_seqs=cfg.max_num_seqs,
        verbose=cfg.verbose,
    )
    policy = build_policy(
        cfg.model, mesh, dtype=cfg.dtype, temperature=cfg.policy_temperature
    )
    batch = sample_and_score(engine, policy, cfg, cfg.step, data.train)
    shown = page_data(batch, data.tokenizer, cfg.group_size, cfg.show)
    path = Path(cfg.page)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(shown, describe(cfg)))
    print(
        f"{path}: {len(shown['responses'])} of {shown['response_count']} responses, "
        f"e_B {shown['ess']:.4f}, {shown['token_count']} tokens"
    )
    engine.close()


if __name__ == "__main__":
    try:
        main()
    except (Refused, FloatingPointError) as error:
        sys.exit(f"tokens.py: {error}")
