"""The mismatch meter, run as `python rollout.py`: how far off-policy is an engine for a model?

vLLM samples as set, the trainer's forward pass scores the same tokens in float32 at temperature 1,
and the two are compared: no training, no reward. Use it for any framework that samples with vLLM.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
import transformers

from config import Config, Refused, check_config, load_model_files
from loss import KL_ESTIMATORS, effective_sample_size
from policy import Policy
from reward import encode_prompt
from rollout import QUANTIZATIONS, Engine, Rollouts, init_distributed


def measure(log_ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """What a batch's log rho [N, T] says of the mismatch; KL(pi_theta || pi_b) in nats a token."""
    tokens = log_ratio[mask].double()  # [M]
    quantiles = torch.quantile(
        tokens[: 2**24].exp(), torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99]).double()
    )  # of as many as torch.quantile takes
    return {
        "e_B": effective_sample_size(log_ratio, mask).item(),
        "mean |log rho|": tokens.abs().mean().item(),
        "max |log rho|": tokens.abs().max().item(),
        "KL": KL_ESTIMATORS["is"](tokens).mean().item(),
        **{f"rho q{q}": v for q, v in zip((1, 10, 50, 90, 99), quantiles.tolist(), strict=True)},
    }


def most_off(rollouts: Rollouts, log_ratio: torch.Tensor) -> list[tuple[float, int, int]]:
    """(mean |log rho|, count, token id) of the tokens sampled 10 times or more, the worst first."""
    off: dict[int, list[float]] = defaultdict(list)
    row, t = rollouts.mask.nonzero(as_tuple=True)
    token = rollouts.tokens[row, rollouts.prompt_length[row] + t]
    for i, value in zip(token.tolist(), log_ratio[rollouts.mask].abs().tolist(), strict=True):
        off[i].append(value)
    often = [(sum(v) / len(v), len(v), i) for i, v in off.items() if len(v) >= 10]
    return sorted(often, reverse=True)


def main() -> None:
    """Sample with the engine as set, score with the trainer's forward pass, compare."""
    tiny = Path(__file__).resolve().parents[1] / "tiny"
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(tiny), help="a model folder or hub name")
    parser.add_argument("--prompts", default=str(tiny / "heldout.jsonl"), help="field 'prompt'")
    parser.add_argument("--rollout_quantization", default="none", choices=QUANTIZATIONS)
    parser.add_argument("--rollout_dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--top_k", type=int, default=0)
    parser.add_argument("--responses", type=int, default=256)
    parser.add_argument("--max_response_tokens", type=int, default=64)
    args, start = parser.parse_args(), time.time()
    sampling = dict(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k)
    if min(args.responses, args.max_response_tokens) < 1:
        parser.error("responses and max_response_tokens have to be positive")
    try:
        check_config(Config(**sampling))
        problems = [json.loads(line)["prompt"] for line in open(args.prompts)][: args.responses]
        tokenizer, context = load_model_files(args.model)
    except (json.JSONDecodeError, KeyError, TypeError):
        parser.error(f"{args.prompts}: each line has to be a JSON object with a field 'prompt'")
    except (Refused, ValueError, OSError) as error:  # each names the flag, the model or the file
        parser.error(str(error))
    prompts = [encode_prompt(tokenizer, problem) for problem in problems]
    longest = max(map(len, prompts), default=context) + args.max_response_tokens
    if longest > context:
        parser.error(f"{args.prompts}: needs 1 prompt or more, and of at most {context} tokens")
    each = -(-args.responses // len(prompts))  # responses to a prompt, rounded up

    init_distributed()
    options = dict(quantization=args.rollout_quantization, dtype=args.rollout_dtype)
    engine = Engine(args.model, longest, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    engine.load_weights(model.state_dict().items(), version="0")
    seeds = [each * i for i in range(len(prompts))]
    rollouts = engine.sample(prompts, each, seeds, max_tokens=args.max_response_tokens, **sampling)
    log_ratio = torch.zeros_like(rollouts.logp_behavior)
    policy = Policy(model)
    with torch.no_grad():
        for rows in torch.arange(len(rollouts.text)).split(16):
            batch = rollouts.rows(rows.tolist())
            log_ratio[rows, : batch.mask.shape[1]] = policy(batch) - batch.logp_behavior
    size = f"{len(rollouts.text)} responses, {int(rollouts.mask.sum())} tokens"
    print(f"{size}, {time.time() - start:.0f} s")
    entropy = -rollouts.logp_behavior[rollouts.mask].mean().item()  # as these samples estimate it
    for name, value in ({"entropy of pi_b": entropy} | measure(log_ratio, rollouts.mask)).items():
        print(f"{name:16}{value:10.5f}")
    print("most off (10 samples or more)")
    for off, count, token in most_off(rollouts, log_ratio)[:5]:
        print(f"  {tokenizer.decode([token])!r:14}{off:10.5f}  mean |log rho| of {count}")
    engine.close()
