"""pass@k against every possible draw, its intervals against closed forms; evaluation on a real
engine, as a function and as a script that is killed and goes on."""

import contextlib
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TORCHRUN

import eval
from config import (
    EvalConfig,
    Refused,
    load_evaluation,
    load_model_files,
    load_prompts,
    parse_config,
)
from eval import estimate, evaluate, pass_at_k
from results import append, begin_or_resume, default_folder, settings_of, write_report
from reward import score

ROOT = Path(__file__).parents[1]
# Processes share the cores: threads that spin while they wait would starve the others.
ENVIRONMENT = os.environ | {"OMP_WAIT_POLICY": "passive"}


@pytest.mark.parametrize(
    "n, c, k", [(5, 2, 1), (5, 2, 3), (6, 1, 6), (4, 0, 2), (4, 4, 1), (8, 3, 4)]
)
def test_pass_at_k_is_the_share_of_the_draws_of_k_samples_with_a_right_one(n, c, k):
    draws = list(itertools.combinations([1] * c + [0] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_1_is_the_share_of_right_samples_and_is_not_1_minus_the_power_of_the_others():
    assert pass_at_k(8, 2, 1) == 2 / 8
    # (1 - 2/8)^4 = 0.316 would be biased: without replacement it is C(6, 4) / C(8, 4) = 15/70.
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - 15 / 70)


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(n, c, k)


# Intervals


def test_the_interval_of_a_share_is_that_of_the_binomial_distribution():
    # 300 of 1000 problems right: standard error sqrt(0.3 * 0.7 / 1000) = 0.01449.
    found = estimate({"task": [1] * 300 + [0] * 700}, 1)["pass@k"]["task"]["1"]
    assert found["value"] == pytest.approx(0.3, abs=1e-12)
    # Quantiles of 10,000 resamples have a standard error of 0.027 standard errors = 0.0004.
    low, high = 0.3 - 1.96 * 0.01449, 0.3 + 1.96 * 0.01449
    assert found["interval"] == pytest.approx([low, high], abs=0.0015)


def test_problems_are_resampled_with_all_their_samples():
    # Half of 400 problems always right, half never. The 8 samples of a problem say the same: the
    # standard error is sqrt(0.25 / 400) = 0.025, and not that of 3200 samples, 0.0088.
    found = estimate({"task": [8] * 200 + [0] * 200}, 8)["pass@k"]["task"]
    for k in "1", "8":
        assert found[k]["interval"] == pytest.approx([0.5 - 0.049, 0.5 + 0.049], abs=0.003)
    # Where every problem is like every other, to draw other problems changes nothing.
    found = estimate({"task": [3] * 50}, 8)["pass@k"]["task"]
    for k in 1, 2, 3, 4, 5, 6, 7, 8:
        assert found[str(k)]["value"] == pytest.approx(pass_at_k(8, 3, k), abs=1e-12)
        assert found[str(k)]["interval"] == pytest.approx([pass_at_k(8, 3, k)] * 2, abs=1e-12)


def test_the_average_weighs_benchmarks_alike_and_adds_up_their_variances():
    found = estimate({"large": [1] * 300 + [0] * 700, "small": [1] * 50 + [0] * 50}, 1)
    average = found["average"]["1"]
    assert average["value"] == pytest.approx((0.3 + 0.5) / 2)  # by problems: 350 / 1100 = 0.318
    # sqrt(0.01449^2 + 0.05^2) / 2 = 0.02603, where 0.05 = sqrt(0.25 / 100)
    low, high = 0.4 - 1.96 * 0.02603, 0.4 + 1.96 * 0.02603
    assert average["interval"] == pytest.approx([low, high], abs=0.003)


def test_the_bootstrap_gives_the_same_interval_every_time():
    counts = {"task": [0, 1, 2, 4, 4, 1, 0]}
    assert estimate(counts, 4) == estimate(counts, 4)


# On the engine


def test_evaluate_counts_the_right_samples_of_each_problem(engine, policy):
    problems, prompts, *_ = load_prompts("tiny", "heldout", load_model_files("tiny")[0], room=64)
    correct = evaluate(engine, problems[:64], prompts[:64], "exact", samples=4, max_tokens=64)
    assert len(correct) == 64 and set(correct) <= set(range(5))
    # The embedded policy solves about half: standard error sqrt(0.25 / 64) = 0.06 at most.
    assert 0.3 < sum(correct) / 256 < 0.8
    # The noise is a function of the seed and the problem.
    few = problems[:16], prompts[:16], "exact", 4
    assert evaluate(engine, *few, max_tokens=64) == correct[:16]
    assert evaluate(engine, *few, seed=1, max_tokens=64) != correct[:16]


def test_the_samples_of_a_problem_do_not_depend_on_the_chunk_that_it_comes_in(engine, policy):
    problems, prompts, *_ = load_prompts("tiny", "heldout", load_model_files("tiny")[0], room=64)

    def counts(first, last):
        chunk = problems[first:last], prompts[first:last]
        return evaluate(engine, *chunk, "exact", samples=4, first=first, max_tokens=64)

    assert counts(0, 12) == counts(0, 7) + counts(7, 8) + counts(8, 12)


def test_greedy_samples_are_scored_as_they_read(engine, policy):
    problems, prompts, *_ = load_prompts("tiny", "heldout", load_model_files("tiny")[0], room=64)
    texts = engine.sample(prompts[:32], 1, [0] * 32, temperature=0, max_tokens=64).text
    right = [text.split()[-1] == p["answer"] for text, p in zip(texts, problems, strict=False)]
    assert score(texts, [p["answer"] for p in problems[:32]], "exact") == right
    counts = evaluate(engine, problems[:32], prompts[:32], "exact", temperature=0, max_tokens=64)
    assert counts == right  # one sample of each problem: 1 or 0 right


# As a script


# python eval.py, which dies of kill -9 when its third chunk is sampled and not yet written.
KILLED = """
import os, results, runpy, signal

def append(path, task, first, correct, append=results.append):
    if first == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    append(path, task, first, correct)

results.append = append
runpy.run_path("eval.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def done(run_here, tmp_path_factory):
    """Two benchmarks of 40 and of 9 problems and a dropped one, evaluated undisturbed on one rank,
    this process (folder "whole"), and killed on one rank and resumed on two (folder "killed")."""
    folder = tmp_path_factory.mktemp("evaluation")
    lines = (ROOT / "tiny/heldout.jsonl").read_text().splitlines()[100:109]
    lines.append(json.dumps({"prompt": "1" * 70 + "+1", "answer": "1" * 69 + "2"}))
    (folder / "sums").mkdir()
    (folder / "sums/heldout.jsonl").write_text("\n".join(lines))
    shutil.copy(ROOT / "tiny/task.json", folder / "sums")
    flags = f"--task tiny {folder}/sums --samples=4 --limit=40 --drop_long --chunk_responses=16"
    flags = flags.split()

    out_dir = f"--out_dir={folder / 'killed'}"
    options = dict(cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    killed = subprocess.Popen([sys.executable, "-c", KILLED, *flags, out_dir], **options, text=True)
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # meanwhile
        run_here(eval, *flags, f"--out_dir={folder / 'whole'}")
    _, errors = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, errors
    left = (folder / "killed/problems.jsonl").read_text()
    two_ranks = [*TORCHRUN, "--standalone", "--nproc-per-node=2", ROOT / "eval.py"]
    resumed = subprocess.run([*two_ranks, *flags, out_dir], **options, text=True)
    assert resumed.returncode == 0, resumed.stderr
    return folder, left, printed.getvalue(), resumed.stdout


def test_a_killed_evaluation_goes_on_from_its_last_chunk_on_any_number_of_ranks(done):
    folder, left, printed, resumed = done
    assert len(left.splitlines()) == 1 + 8  # settings, then two chunks of 16 / 4 problems
    assert "tiny: 8 of" in printed and "tiny: 8 of" not in resumed
    assert (folder / "killed/problems.jsonl").read_text().startswith(left)
    for name in "problems.jsonl", "results.json", "results.md":
        assert (folder / "killed" / name).read_text() == (folder / "whole" / name).read_text()


def test_results_json_has_settings_counts_and_every_k_with_its_interval(done):
    folder, _, _, _ = done
    result = json.loads((folder / "whole/results.json").read_text())
    expected = dict(model="tiny", split="heldout", samples=4, temperature=1.0, top_p=1.0, seed=0)
    assert expected.items() <= result["settings"].items()
    sums = f"{folder}/sums"
    about = result["settings"]["benchmarks"]
    assert [(b["problems"], b["dropped"]) for b in about.values()] == [(40, 0), (9, 1)]
    assert [len(counts) for counts in result["correct"].values()] == [40, 9]
    for k in 1, 2, 3, 4:
        means = []
        for task in "tiny", sums:
            found, counts = result["pass@k"][task][str(k)], result["correct"][task]
            means.append(sum(pass_at_k(4, c, k) for c in counts) / len(counts))
            assert found["value"] == pytest.approx(means[-1])
            assert found["interval"][0] < found["value"] <= found["interval"][1] <= 1
        assert result["average"][str(k)]["value"] == pytest.approx(sum(means) / 2)
    # The embedded policy solves about half: standard error 0.5 / sqrt(160) = 0.04 or some more.
    assert 0.3 < result["pass@k"]["tiny"]["1"]["value"] < 0.8


def test_the_table_is_printed_and_written_with_its_settings(done):
    folder, _, printed, _ = done
    text = (folder / "whole/results.md").read_text()
    assert text in printed
    result = json.loads((folder / "whole/results.json").read_text())
    cell = "{value:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
    tiny, average = (
        " | ".join(cell.format(**found[k]) for k in "124")
        for found in (result["pass@k"]["tiny"], result["average"])
    )
    for line in (
        "| benchmark | problems | pass@1 [95%] | pass@2 [95%] | pass@4 [95%] |",
        f"| tiny | 40 | {tiny} |",
        f"| mean of benchmarks |  | {average} |",
        "- temperature: 1.0",
        "- samples: 4 of each problem",
        f"- dropped prompts: 0 of tiny, 1 of {folder}/sums",
    ):
        assert line in text.splitlines()


def test_a_finished_evaluation_is_reported_again_without_an_engine(done, run_here):
    folder, _, _, _ = done
    before = (folder / "whole/results.md").read_text()
    (folder / "whole/results.md").unlink()
    flags = f"--task tiny {folder}/sums --samples=4 --limit=40 --drop_long --kv_cache_gb=1e9"
    # An engine would want an exabyte.
    run_here(eval, *flags.split(), f"--out_dir={folder}/whole")
    assert (folder / "whole/results.md").read_text() == before


# The folder of results


def settings(**changed):
    cfg = EvalConfig(limit=4, **changed)
    return settings_of(cfg, *load_evaluation(cfg))


@pytest.mark.parametrize(
    "changed",
    [{"temperature": 0.7}, {"top_p": 0.9}, {"samples": 2}, {"seed": 1}, {"split": "train"}]
    + [{"max_response_tokens": 32}, {"dtype": "bfloat16"}],
)
def test_results_of_other_settings_are_refused_and_left_as_they_are(changed, tmp_path):
    path = tmp_path / "problems.jsonl"
    begin_or_resume(path, settings())
    append(path, "tiny", 0, [3, 8])
    before = path.read_bytes()
    assert default_folder(settings()) != default_folder(settings(**changed))
    with pytest.raises(Refused, match=rf"has other settings \(.*{next(iter(changed))}"):
        begin_or_resume(path, settings(**changed))
    assert path.read_bytes() == before
    faster = settings(chunk_responses=1, kv_cache_gb=1.0, verbose=True)
    assert begin_or_resume(path, faster) == {"tiny": [3, 8]}


def test_other_weights_and_other_problems_under_the_same_name_are_other_settings(tmp_path):
    shutil.copytree(ROOT / "tiny", tmp_path / "model")
    cfg = dict(model=str(tmp_path / "model"), task=[str(tmp_path / "model/heldout.jsonl")])
    before = settings(**cfg)
    weights = tmp_path / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    other = settings(**cfg)
    assert other["weights"] != before["weights"] and other["benchmarks"] == before["benchmarks"]
    problems = tmp_path / "model/heldout.jsonl"
    problems.write_text("\n".join(problems.read_text().splitlines()[1:]))
    assert settings(**cfg)["benchmarks"] != before["benchmarks"]


def test_a_line_torn_by_a_kill_is_sampled_again(tmp_path):
    path = tmp_path / "problems.jsonl"
    begin_or_resume(path, settings())
    append(path, "tiny", 0, [3, 8])
    with path.open("a") as file:
        file.write('{"task": "tiny", "probl')
    assert begin_or_resume(path, settings()) == {"tiny": [3, 8]}
    append(path, "tiny", 2, [1, 0])
    assert begin_or_resume(path, settings()) == {"tiny": [3, 8, 1, 0]}


@pytest.mark.parametrize("text", ["", "notes", "[1, 2]\n", "HEAD\nnotes\n", "HEAD\nROW\nROW\n"])
def test_a_file_that_holds_no_results_is_refused_and_left_as_it_is(text, tmp_path):
    path = tmp_path / "problems.jsonl"
    row = json.dumps({"task": "tiny", "problem": 0, "correct": 3})  # twice: two wrote at once
    text = text.replace("HEAD", json.dumps(settings())).replace("ROW", row)
    path.write_text(text)
    with pytest.raises(Refused, match="does not hold results by problem"):
        begin_or_resume(path, settings())
    assert path.read_text() == text


def test_the_table_has_powers_of_two_and_n(tmp_path):
    counts = {"tiny": [0, 3, 6, 1]}
    text = write_report(tmp_path, settings(samples=6), estimate(counts, 6), counts)
    head = "| benchmark | problems | pass@1 [95%] | pass@2 [95%] | pass@4 [95%] | pass@6 [95%] |"
    assert text.splitlines()[0] == head and "mean of" not in text
    assert list(json.loads((tmp_path / "results.json").read_text())["pass@k"]["tiny"]) == [
        *"123456"
    ]


# What the user can get wrong


def test_over_long_prompts_are_refused_or_dropped_and_counted(capsys):
    tokenizer, _ = load_model_files("tiny")
    # "478+805" is 9 tokens with <bos> and ':'; four digits make 11.
    with pytest.raises(ValueError, match="of 512 heldout prompts of tiny have over 9 tokens"):
        load_prompts("tiny", "heldout", tokenizer, room=9)
    problems, prompts, *_ = load_prompts("tiny", "heldout", tokenizer, room=9, drop=True)
    assert {len(prompt) for prompt in prompts} == {9}
    assert f"dropped: {512 - len(problems)} of 512" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--task tiny sums", "unknown task 'sums'"),
        ("--task tiny tiny", "a task is given twice"),
        ("--model=missing", "no model at 'missing'"),
        ("--samples=0", "samples is 0"),
        ("--samples=-1", "samples is -1"),
        ("--samples=many", "invalid int value: 'many'"),
        ("--temperature=-1", "temperature is -1.0"),
        ("--temperature=2.5", "temperature of 0 (greedy) or 0.01 to 2"),
        ("--temperature=0.001", "temperature of 0 (greedy) or 0.01 to 2"),
        ("--temperature=nan", "temperature of 0 (greedy) or 0.01 to 2"),
        ("--temperature=0 --samples=4", "greedy samples are all the same"),
        ("--top_p=0", "top_p is 0.0"),
        ("--top_p=1.5", "top_p of at most 1"),
        ("--split=test", "invalid choice: 'test'"),
        ("--limit=-3", "limit is -3"),
        ("--chunk_responses=0", "chunk_responses is 0"),
        ("--kv_cache=1", "unrecognized arguments: --kv_cache"),
        # "478+805" is 9 tokens with <bos> and ':'; four digits make 11. The context is 128.
        ("--max_response_tokens=119", "heldout prompts of tiny have over 9 tokens"),
        (
            "--max_response_tokens=130 --drop_long",
            "512 of 512 heldout prompts of tiny have over -2",
        ),
    ],
)
def test_bad_input_is_one_sentence_before_the_engine_is_built(
    arguments, sentence, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["eval.py", f"--out_dir={out}", *arguments.split()])
    monkeypatch.setattr(eval, "init_distributed", lambda: pytest.fail("too late"))
    with pytest.raises(Refused) as refused:
        eval.main()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value) and not out.exists()


def test_what_the_user_leaves_open_is_decided_by_the_other_settings(tmp_path):
    recipe = tmp_path / "eval.yaml"
    recipe.write_text("task: tiny\nlimit: 4\n")
    for temperature, samples in ("0", 1), ("1.0", 8):  # greedy samples would all be the same
        cfg = parse_config([f"--config={recipe}", f"--temperature={temperature}"], EvalConfig)
        load_evaluation(cfg)
        assert (cfg.samples, cfg.task, cfg.limit) == (samples, ["tiny"], 4)
        assert cfg.dtype in ("float32", "bfloat16")
