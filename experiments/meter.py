"""The mismatch meter, run as `python rollout.py`: how far off-policy is an engine for a model?"""

import argparse
import json
from pathlib import Path

import torch
import transformers

from loss import effective_sample_size
from policy import Policy
from reward import encode_prompt
from rollout import QUANTIZATIONS, Engine, init_distributed


def main() -> None:
    """Sample with the engine as set, score with the trainer's forward pass, compare."""
    tiny = Path(__file__).resolve().parents[1] / "tiny"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=str(tiny), help="a model folder or hub name")
    parser.add_argument("--prompts", default=str(tiny / "heldout.jsonl"), help="field 'prompt'")
    parser.add_argument("--rollout_quantization", default="none", choices=QUANTIZATIONS)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    args = parser.parse_args()
    init_distributed()
    engine = Engine(args.model, 128, quantization=args.rollout_quantization)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    engine.load_weights(model.state_dict().items(), version="0")
    problems = [json.loads(line)["prompt"] for line in open(args.prompts)][:256]
    prompts = [encode_prompt(engine.tokenizer, problem) for problem in problems]
    sampling = dict(temperature=args.temperature, top_p=args.top_p, max_tokens=64)
    rollouts = engine.sample(prompts, 1, list(range(len(prompts))), **sampling)
    with torch.no_grad():
        logp = Policy(model)(rollouts)
    log_ratio = logp - rollouts.logp_behavior
    ess = effective_sample_size(log_ratio, rollouts.mask)
    off = log_ratio[rollouts.mask].abs()
    print(f"e_B {ess:.5f}  |log rho| mean {off.mean():.5f}, max {off.max():.3f}")
    engine.close()
