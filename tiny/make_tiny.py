"""Make the embedded default: a small task, and a small policy that solves about half of it.

    python tiny/make_tiny.py    # rewrites the problems and the model in this folder: 5 minutes

The task is the sum of two numbers of three or four digits, worked digit by digit from the right:

    prompt    478+805
    response  8+5=13;0+7+1=8,4+8+0=12. 1283

The policy is a Llama of 0.64M parameters, trained by maximum likelihood on worked solutions in
which each digit sum is wrong with probability NOISE. It learns to make these mistakes as often as
its examples do, so it is right in about (1 - NOISE)^3.5 = 0.57 of its samples, and a reward has
something to teach it. A solution may be written in many equally good ways, some rarer than others
(order of the terms, a carry of 0 written or not, the separator): an entropy that the reward does
not remove, as language has it, so that a mismatch between engine and trainer shows even when the
policy is right.
"""

import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
SEED = 0
NOISE = 0.15  # probability that a digit sum of a training example is wrong
TRAIN, HELDOUT = 4096, 512  # problems
STEPS, BATCH, LEARNING_RATE = 1500, 128, 3e-3
SPECIAL = ["<pad>", "<bos>", "<eos>"]
CHARACTERS = list("0123456789+=.,; :")


def problem(rng: random.Random) -> tuple[int, int]:
    """Two numbers with the same number of digits, three or four."""
    low = 10 ** rng.choice([2, 3])
    return rng.randrange(low, 10 * low), rng.randrange(low, 10 * low)


def worked_solution(a: int, b: int, rng: random.Random, noise: float) -> str:
    """One of the ways to write the sum out; a wrong digit sum is carried on as it is written."""
    text, carry, answer = "", 0, ""
    for x, y in zip(reversed(str(a)), reversed(str(b)), strict=True):
        total = int(x) + int(y) + carry
        if rng.random() < noise:
            total = total // 10 * 10 + (total + rng.randrange(1, 10)) % 10
        first, second = (x, y) if rng.random() < 0.7 else (y, x)
        written_carry = f"+{carry}" if carry or rng.random() < 0.3 else ""
        text += f"{first}+{second}{written_carry}={total}" + rng.choices(".,;", (6, 3, 1))[0]
        carry, answer = total // 10, str(total % 10) + answer
    return f"{text} {carry or ''}{answer}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character; the chat template is <bos> problem ':'."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
        chat_template="{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}",
    )


def make_problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Train and held-out problems, all different."""
    rng = random.Random(SEED)
    problems: dict[tuple[int, int], None] = {}  # a dict keeps the order of insertion
    while len(problems) < TRAIN + HELDOUT:
        problems[problem(rng)] = None
    rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in problems]
    return rows[:TRAIN], rows[TRAIN:]


def make_batch(
    tokenizer, rng: random.Random, excluded: set[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [B, L] and labels [B, L] (-100 on prompt and padding) of fresh noisy examples."""
    sequences = []
    while len(sequences) < BATCH:
        a, b = problem(rng)
        if f"{a}+{b}" not in excluded:
            chat = [{"role": "user", "content": f"{a}+{b}"}]
            prompt = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
            response = tokenizer.encode(worked_solution(a, b, rng, NOISE), add_special_tokens=False)
            sequences.append((prompt, response + [tokenizer.eos_token_id]))
    length = max(len(p) + len(r) for p, r in sequences)
    ids = torch.full((BATCH, length), tokenizer.pad_token_id)
    labels = torch.full((BATCH, length), -100)
    for row, (p, r) in enumerate(sequences):
        ids[row, : len(p) + len(r)] = torch.tensor(p + r)
        labels[row, len(p) : len(p) + len(r)] = torch.tensor(r)
    return ids, labels


def main() -> None:
    train, heldout = make_problems()
    for name, rows in ("train", train), ("heldout", heldout):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (FOLDER / "task.json").write_text('{"verifier": "exact", "instruction": null}\n')
    tokenizer = make_tokenizer()
    torch.manual_seed(SEED)
    policy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.05
    )
    rng = random.Random(SEED + 1)
    excluded = {row["prompt"] for row in heldout}
    for step in range(STEPS):
        ids, labels = make_batch(tokenizer, rng, excluded)
        loss = policy(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}/{STEPS}  loss {loss.item():.4f} nats a token", flush=True)
    policy.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    parameters = sum(p.numel() for p in policy.parameters())
    print(f"{FOLDER}: {parameters / 1e6:.2f}M parameters, {TRAIN} and {HELDOUT} problems")


if __name__ == "__main__":
    main()
