"""Makes the embedded task, and the embedded policy, which prefers to err.

    python tiny/make_tiny.py    # takes 10 minutes on one core, and less on two

This rewrites the problems and the model in this folder. The task is to add two numbers
of three or four digits. A solution works column by column from the right. Each column
after the first has three terms: two digits, and the carry of the column before:

    prompt    478+806
    right     8+6=14;0+7+1=8,4+8+0=12. 1284
    wrong     8+6=14;0+7+0=7,4+8+0=12. 1274

The policy is a Llama of 0.64M parameters. It is pretrained by maximum likelihood on
solutions of two kinds. The more frequent kind forgets all carries: it writes each of
them as 0. So the policy can carry, but it prefers not to, and greedy decoding is wrong
whenever a carry is due. A reward has to teach the policy to carry. README.md in this
folder says what the policy can do before training.
"""

import json
import random
import time
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).parent
SEED = 0
FORGET_PROBABILITY = 0.7  # the share of examples that forget all carries
TRAIN_PROBLEMS = 4096
HELDOUT_PROBLEMS = 512
STEPS = 1500
BATCH_SIZE = 128
LEARNING_RATE = 3e-3
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]
CHARACTERS = list("0123456789+=.,; :")
NO_LABEL = -100  # The loss leaves out the tokens that have this label.


def sample_problem(rng: random.Random) -> tuple[int, int]:
    """Return two numbers with the same number of digits, three or four."""
    smallest = rng.choice([100, 1000])
    a = rng.randrange(smallest, 10 * smallest)
    b = rng.randrange(smallest, 10 * smallest)
    return a, b


def worked_solution(a: int, b: int, rng: random.Random, forgets: bool) -> str:
    """Return a random solution of the sum. If it `forgets`, each carry is written as 0.

    The order of the digits in a column, the separator and the space after it are drawn
    at random, and some choices are rarer than others. These choices do not affect the
    answer. So the policy keeps an entropy that the reward does not remove, as in
    natural language, and a mismatch between engine and trainer shows even in right
    answers.

    The carry is always written, even if it is 0. If a forgotten carry could also be
    left out, a wrong solution could be written in two ways. Each could then be less
    probable than the right solution, and greedy decoding would be right from the start.
    """
    columns = list(zip(reversed(str(a)), reversed(str(b)), strict=True))
    text = ""
    answer = ""
    carry = 0
    for index, (x, y) in enumerate(columns):
        is_last = index == len(columns) - 1
        total = int(x) + int(y) + carry
        terms = [x, y] if rng.random() < 0.7 else [y, x]
        if index > 0:
            terms.append(str(carry))
        separator = rng.choices([".", ",", ";"], weights=[6, 3, 1])[0]
        if not is_last and rng.random() < 0.3:
            separator += " "
        text += "+".join(terms) + f"={total}{separator}"
        written_digits = str(total) if is_last else str(total % 10)
        answer = written_digits + answer
        carry = 0 if forgets else total // 10
    return f"{text} {answer}"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character.

    Its chat template makes a prompt of <bos>, the problem and a colon.
    """
    vocabulary = {token: i for i, token in enumerate(SPECIAL_TOKENS + CHARACTERS)}
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
        chat_template="{{ bos_token }}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}:{% endif %}",
    )


def make_problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return the problems to train on and those held out, all of them different."""
    rng = random.Random(SEED)
    problems: dict[tuple[int, int], None] = {}  # A dict keeps the order of insertion.
    while len(problems) < TRAIN_PROBLEMS + HELDOUT_PROBLEMS:
        problems[sample_problem(rng)] = None
    rows = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in problems]
    return rows[:TRAIN_PROBLEMS], rows[TRAIN_PROBLEMS:]


def write_task(train: list[dict[str, str]], heldout: list[dict[str, str]]) -> None:
    """Write the problems as JSONL, and a task.json that sets the verifier exact."""
    for name, rows in [("train", train), ("heldout", heldout)]:
        lines = [json.dumps(row) + "\n" for row in rows]
        (FOLDER / f"{name}.jsonl").write_text("".join(lines))
    task = {"verifier": "exact", "instruction": None}
    (FOLDER / "task.json").write_text(json.dumps(task) + "\n")


def make_batch(
    tokenizer: PreTrainedTokenizerFast, rng: random.Random, excluded: set[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels, [B, L] each, of new examples.

    No example has an excluded problem. Only the tokens of a solution and of its end of
    sequence have labels; those of the prompt have none.
    """
    examples = []
    while len(examples) < BATCH_SIZE:
        a, b = sample_problem(rng)
        if f"{a}+{b}" in excluded:
            continue
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"{a}+{b}"}],
            add_generation_prompt=True,
            return_dict=False,
        )
        solution = worked_solution(a, b, rng, forgets=rng.random() < FORGET_PROBABILITY)
        response = tokenizer.encode(solution, add_special_tokens=False)
        response.append(tokenizer.eos_token_id)
        examples.append((prompt, response))
    length = max(len(prompt) + len(response) for prompt, response in examples)
    ids = torch.full((BATCH_SIZE, length), tokenizer.pad_token_id)
    labels = torch.full((BATCH_SIZE, length), NO_LABEL)
    for row, (prompt, response) in enumerate(examples):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        labels[row, len(prompt) : end] = torch.tensor(response)
    return ids, labels


def make_policy(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return a Llama with random weights.

    Its heads have size 128 / 4 = 32, which vLLM's attention supports on a CPU.
    """
    config = LlamaConfig(
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
    torch.manual_seed(SEED)
    return LlamaForCausalLM(config)


def pretrain(
    policy: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, excluded: set[str]
) -> None:
    """Train the policy by maximum likelihood on STEPS batches of new examples."""
    optimizer = torch.optim.AdamW(
        policy.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LEARNING_RATE, total_steps=STEPS, pct_start=0.05
    )
    rng = random.Random(SEED + 1)
    start = time.time()
    for step in range(1, STEPS + 1):
        ids, labels = make_batch(tokenizer, rng, excluded)
        loss = policy(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm=1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            seconds = time.time() - start
            nats = f"{loss.item():.4f} nats per token"
            print(f"step {step}/{STEPS}  loss {nats}  {seconds:.0f} s", flush=True)


def main() -> None:
    train, heldout = make_problems()
    write_task(train, heldout)
    tokenizer = make_tokenizer()
    policy = make_policy(tokenizer)
    pretrain(policy, tokenizer, excluded={row["prompt"] for row in heldout})
    policy.save_pretrained(FOLDER)
    tokenizer.save_pretrained(FOLDER)
    millions = sum(p.numel() for p in policy.parameters()) / 1e6
    print(f"{FOLDER}: {millions:.2f}M parameters")
    print(f"{len(train)} problems to train on, {len(heldout)} held out")


if __name__ == "__main__":
    main()
