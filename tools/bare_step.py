"""Trains with transformers' generate and REINFORCE: what a minimal script costs.

    python tools/bare_step.py JOB

JOB and the lines that this script prints are those of tools/trl_step.py. The script has
what no such script can do without (samples, log-probabilities, a gradient and an
optimizer step) and nothing else, so tools/bench.py compares train.py with it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.tasks import encode_prompt


def main(job: dict[str, Any]) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-9, fused=True)
    end = tokenizer.eos_token_id
    autocast = torch.autocast(
        device, torch.bfloat16, enabled=job["dtype"] == "bfloat16"
    )
    for step in range(job["steps"]):
        start = time.perf_counter()
        first = step * job["prompts_per_step"]
        prompts = [
            torch.tensor(encode_prompt(tokenizer, text))
            for text in job["prompts"][first : first + job["prompts_per_step"]]
        ]
        prompt = pad_sequence(
            prompts, batch_first=True, padding_value=-1, padding_side="left"
        ).to(device)  # [P, L]
        with torch.no_grad(), autocast:
            tokens = model.generate(
                prompt.clamp(min=0),
                attention_mask=prompt >= 0,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                num_return_sequences=job["group_size"],
                max_new_tokens=job["max_tokens"],
                pad_token_id=end,
            )  # [N, L + T]
        rollout_seconds = time.perf_counter() - start

        response = tokens[:, prompt.shape[1] :]  # [N, T]
        is_end = response == end
        mask = is_end.cumsum(dim=1) - is_end.int() == 0  # up to the first end
        seen = torch.cat(
            [(prompt >= 0).repeat_interleave(job["group_size"], 0), mask], 1
        )
        with autocast:
            logits = model(
                tokens, attention_mask=seen, logits_to_keep=response.shape[1] + 1
            ).logits[:, :-1]  # [N, T, V]
        logp = logits.float().log_softmax(-1).gather(2, response[..., None])[..., 0]
        reward = (
            torch.arange(len(tokens), device=device) % 2
        )  # made up: 0, 1, 0, 1, ...
        advantage = (reward - 0.5)[:, None]  # the group's mean is 1/2
        (-(advantage * logp)[mask].mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        length = mask.sum().item() / len(tokens)
        line = f"tokens {length} rollout {rollout_seconds} sync 0.0"
        print(f"step {step + 1} {line}", flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
