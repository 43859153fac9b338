"""Trains with transformers' generate and REINFORCE, for tools/bench.py.

    python tools/bare_step.py JOB

JOB and the printed lines are as tools/trl_step.py describes them, but without a sync.
The script does only what every such script must do: it samples, computes
log-probabilities and a gradient, and makes an optimizer step.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(job: dict[str, Any]) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_default_device(device)
    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.to(device).parameters(), lr=1e-9, fused=True)
    is_bfloat16 = job["dtype"] == "bfloat16"
    chats = [[{"role": "user", "content": prompt}] for prompt in job["prompts"]]
    for step in range(job["steps"]):
        start = time.perf_counter()
        prompts = tokenizer.apply_chat_template(
            chats[step * job["prompts_per_step"] :][: job["prompts_per_step"]],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        ).to(device)  # [P, L] each
        with torch.autocast(device, torch.bfloat16, enabled=is_bfloat16):
            tokens = model.generate(
                **prompts,
                do_sample=True,
                top_k=0,
                num_return_sequences=job["group_size"],
                max_new_tokens=job["max_tokens"],
            )  # [N, L + T]
            seconds = time.perf_counter() - start
            response = tokens[:, prompts["input_ids"].shape[1] :]  # [N, T]
            is_end = (response == tokenizer.eos_token_id).long()
            mask = is_end.cumsum(dim=1) == is_end  # up to the first end of sequence
            seen = prompts["attention_mask"].repeat_interleave(job["group_size"], dim=0)
            logits = model(
                tokens,
                attention_mask=torch.cat([seen, mask], dim=1),
                logits_to_keep=response.shape[1] + 1,
            ).logits[:, :-1]  # [N, T, V]
        logp = logits.float().log_softmax(-1).gather(2, response[..., None])[..., 0]
        reward = torch.arange(len(tokens)) % 2  # made up: 0, 1, 0, 1, ...
        advantage = reward[:, None] - 0.5  # the mean of a group is 1/2
        (-(advantage * logp)[mask].mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        length = mask.sum().item() / len(tokens)
        row = {"response_tokens": length, "rollout_seconds": seconds}
        print("step", json.dumps(row), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
