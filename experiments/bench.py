"""Seconds of a step, by phase; with SmolLM2 beside TRL's GRPOTrainer, in one run on one machine.

    python experiments/bench.py                                      # the embedded default
    python experiments/bench.py --smollm2 models/SmolLM2-135M-Instruct    # needs: trl==1.16.0

Prints medians over the steps after the second (the first ones compile), and the fastest step, which
neighbors on a shared host disturb least, and writes them to experiments/results/bench.json. Seconds
depend on the machine, ratios hardly. The folder of --smollm2 is made by experiments/smollm2.py.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PHASES = ("rollout", "reward", "update", "sync")
PROMPTS, GROUP, TOKENS = (
    8,
    4,
    32,
)  # of a step with SmolLM2: 32 responses of at most 32 tokens


def ours(steps: int, *flags: str, ranks: int = 1) -> dict[str, float]:
    """Median seconds of each phase of train.py with these flags, on all cores."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={ranks}", "train.py"]
        command += [
            f"--steps={steps}",
            f"--out_dir={out}/run",
            "--eval_every=0",
            *flags,
        ]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        rows = [json.loads(line) for line in open(f"{out}/run/metrics.jsonl")][3:]
    median = {p: statistics.median(row[f"{p}_seconds"] for row in rows) for p in PHASES}
    lengths = statistics.mean(row["response_tokens"] for row in rows)
    totals = [sum(row[f"{p}_seconds"] for p in PHASES) for row in rows]
    total = statistics.median(totals)
    median |= {"step": total, "fastest step": min(totals)}
    return median | {"sync_share": median["sync"] / total, "tokens": lengths}


def sums_task(folder: Path) -> None:
    """64 sums to ask SmolLM2, the same problems to train on and to hold out: only speed counts."""
    rng = random.Random(0)
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(64)]
    rows = [{"prompt": f"What is {a}+{b}?", "answer": str(a + b)} for a, b in pairs]
    for split in "train", "heldout":
        (folder / f"{split}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    (folder / "task.json").write_text('{"verifier": "exact", "instruction": null}')


def trl(model: str, task: str, steps: int) -> None:
    """Print the median seconds of a step of GRPOTrainer; transformers generates, on CPU."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    stamps = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs) -> None:
            stamps.append(time.perf_counter())

    prompts = [json.loads(line)["prompt"] for line in open(f"{task}/train.jsonl")]
    chats = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    config = GRPOConfig(
        output_dir=f"{task}/trl",
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        max_steps=steps,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=model,
        args=config,
        train_dataset=Dataset.from_list(chats),
        reward_funcs=lambda completions, **_: [
            float(i % 2) for i in range(len(completions))
        ],
        callbacks=[Clock()],
    )
    trainer.train()
    print(
        statistics.median(b - a for a, b in zip(stamps[1:], stamps[2:], strict=False))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--smollm2", metavar="FOLDER", help="also time this model beside TRL"
    )
    parser.add_argument("--trl_child", metavar="TASK", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_child:  # in a process of its own, as train.py is
        return trl(args.smollm2, args.trl_child, steps=5)
    cores = len(os.sched_getaffinity(0))
    results = {
        "cores": cores,
        "tiny": ours(30),
        "tiny, a rank a core": ours(30, ranks=cores),
    }
    if args.smollm2:
        with tempfile.TemporaryDirectory() as task:
            sums_task(Path(task))
            flags = [f"--model={Path(args.smollm2).resolve()}", f"--task={task}"]
            flags += [f"--prompts_per_step={PROMPTS}", f"--group_size={GROUP}"]
            flags += [f"--max_response_tokens={TOKENS}", "--eval_problems=8"]
            child = [
                sys.executable,
                __file__,
                f"--smollm2={args.smollm2}",
                f"--trl_child={task}",
            ]
            seconds = float(subprocess.check_output(child, text=True).split()[-1])
            results["trl float32"] = {"step": seconds}  # in bfloat16 it was slower here
            for dtype in "bfloat16", "float32":
                found = ours(6, *flags, f"--dtype={dtype}")
                results[f"smollm2 {dtype}"] = found
                results[f"trl / smollm2 {dtype}"] = seconds / found["step"]
    path = ROOT / "experiments/results/bench.json"
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
