"""Evaluation: pass@k against every possible draw, and its intervals in closed form.

And evaluation on a real engine, as a function and as a script that is killed and goes
on.
"""

import contextlib
import io
import itertools
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ROOT, TORCHRUN
from launch import ENVIRONMENT

import eval
from eval import EvalConfig, estimate, evaluate, load_benchmarks, pass_at_k
from reward import score
from support.checks import lock_folder
from support.flags import Refused, parse_flags
from support.results import (
    append,
    begin_or_resume,
    default_folder,
    settings_of,
    write_report,
)
from train import Config, load_data

# pass@k


@pytest.mark.parametrize(
    "n, c, k", [(5, 2, 1), (5, 2, 3), (6, 1, 6), (4, 0, 2), (4, 4, 1), (8, 3, 4)]
)
def test_pass_at_k_is_the_share_of_the_draws_of_k_samples_with_a_right_one(n, c, k):
    samples = [True] * c + [False] * (n - c)
    draws = list(itertools.combinations(samples, k))
    with_a_right_one = sum(any(draw) for draw in draws)
    assert pass_at_k(n, c, k) == pytest.approx(with_a_right_one / len(draws), abs=1e-12)


def test_pass_at_k_draws_without_replacement():
    assert pass_at_k(8, 2, 1) == 2 / 8
    # Four wrong ones in a row: C(6, 4) / C(8, 4) = 15/70. (1 - 2/8)^4 = 0.316 would be
    # with replacement, and biased.
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - 15 / 70)


@pytest.mark.parametrize("n, c, k", [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_what_cannot_be(n, c, k):
    with pytest.raises(ValueError, match="pass_at_k needs"):
        pass_at_k(n, c, k)


# Intervals


def test_the_interval_of_a_share_is_that_of_the_binomial_distribution():
    # 300 of 1000 problems right: standard error sqrt(0.3 * 0.7 / 1000) = 0.01449.
    summary = estimate({"task": [1] * 300 + [0] * 700}, n=1)["pass@k"]["task"]["1"]
    assert summary["value"] == pytest.approx(0.3, abs=1e-12)
    # Quantiles of 10,000 resamples have a standard error of 0.027 standard errors,
    # 0.0004.
    low, high = 0.3 - 1.96 * 0.01449, 0.3 + 1.96 * 0.01449
    assert summary["interval"] == pytest.approx([low, high], abs=0.0015)


def test_problems_are_resampled_with_all_their_samples():
    # Half of 400 problems are always right, half never. The 8 samples of a problem say
    # the same: the standard error is sqrt(0.25 / 400) = 0.025, and not that of 3200
    # samples, 0.0088.
    summary = estimate({"task": [8] * 200 + [0] * 200}, n=8)["pass@k"]["task"]
    for k in "1", "8":
        interval = [0.5 - 0.049, 0.5 + 0.049]
        assert summary[k]["interval"] == pytest.approx(interval, abs=0.003)


def test_to_draw_other_problems_changes_nothing_where_each_is_like_the_others():
    summary = estimate({"task": [3] * 50}, n=8)["pass@k"]["task"]
    # Not at k = 6 to 8: of 6 samples one is right, as only 5 are wrong.
    for k in range(1, 6):
        value = pass_at_k(8, 3, k)
        assert summary[str(k)]["value"] == pytest.approx(value, abs=1e-12)
        assert summary[str(k)]["interval"] == pytest.approx([value] * 2, abs=1e-12)


def test_none_of_30_problems_right_has_the_exact_binomial_interval():
    # The bootstrap would say [0, 0]. With a share p, none of 30 is right with
    # probability (1 - p)^30, which is 2.5% at p = 1 - 0.025^(1/30) = 0.1157.
    summary = estimate({"task": [0] * 30}, n=8)["pass@k"]["task"]
    for k in "1", "8":
        assert summary[k]["value"] == 0
        assert summary[k]["interval"] == pytest.approx([0, 0.1157], abs=1e-4)


def test_all_of_30_problems_right_have_the_exact_binomial_interval():
    # 1 - 0.1157 = 0.8843.
    summary = estimate({"task": [4] * 30}, n=4)["pass@k"]["task"]
    for k in "1", "4":
        assert summary[k]["value"] == 1
        assert summary[k]["interval"] == pytest.approx([0.8843, 1], abs=1e-4)


@pytest.mark.parametrize("problems", range(30, 60))
def test_so_have_problems_that_are_all_solved_by_some_of_n_samples(problems):
    # pass@4 of each is 1. Shares such as 1/3 add up to 1 but for rounding.
    counts = [1 + problem % 4 for problem in range(problems)]
    summary = estimate({"task": counts}, n=4)["pass@k"]["task"]["4"]
    assert summary["value"] == 1
    low = 0.025 ** (1 / problems)
    assert summary["interval"] == pytest.approx([low, 1], abs=1e-9)


def test_the_average_weighs_benchmarks_alike_and_adds_up_their_variances():
    counts = {"large": [1] * 300 + [0] * 700, "small": [1] * 50 + [0] * 50}
    average = estimate(counts, n=1)["average"]["1"]
    # By problems it would be 350 / 1100 = 0.318.
    assert average["value"] == pytest.approx((0.3 + 0.5) / 2)
    # sqrt(0.01449^2 + 0.05^2) / 2 = 0.02603, where 0.05 = sqrt(0.25 / 100).
    low, high = 0.4 - 1.96 * 0.02603, 0.4 + 1.96 * 0.02603
    assert average["interval"] == pytest.approx([low, high], abs=0.003)


def test_the_average_of_benchmarks_all_right_has_the_interval_of_the_smallest():
    counts = {"large": [1] * 1000, "small": [1] * 30}
    average = estimate(counts, n=1)["average"]["1"]
    assert average["value"] == 1
    assert average["interval"] == pytest.approx([0.8843, 1], abs=1e-4)


def test_the_bootstrap_gives_the_same_interval_every_time():
    counts = {"task": [0, 1, 2, 4, 4, 1, 0]}
    assert estimate(counts, n=4) == estimate(counts, n=4)


# On the engine


def evaluate_tiny(engine, heldout, first: int, last: int, **options: Any) -> list[int]:
    """Right samples of the held-out problems from `first` up to `last`."""
    return evaluate(
        engine,
        heldout.problems[first:last],
        heldout.prompts[first:last],
        "exact",
        first=first,
        max_tokens=64,
        **options,
    )


def test_evaluate_counts_the_right_samples_of_each_problem(engine, policy, heldout):
    correct = evaluate_tiny(engine, heldout, 0, 64, samples=4)
    assert len(correct) == 64
    assert set(correct) <= set(range(5))
    # The embedded policy solves 0.44: standard error at most sqrt(0.25 / 64) = 0.06.
    assert sum(correct) / 256 == pytest.approx(0.44, abs=3 * 0.06)


def test_the_noise_of_an_evaluation_is_a_function_of_the_seed_and_the_problem(
    engine, policy, heldout
):
    correct = evaluate_tiny(engine, heldout, 0, 32, samples=4)
    assert evaluate_tiny(engine, heldout, 0, 16, samples=4) == correct[:16]
    assert evaluate_tiny(engine, heldout, 0, 16, samples=4, seed=1) != correct[:16]


def test_the_samples_of_a_problem_do_not_depend_on_the_chunk_that_it_comes_in(
    engine, policy, heldout
):
    whole = evaluate_tiny(engine, heldout, 0, 12, samples=4)
    chunks = []
    for first, last in (0, 7), (7, 8), (8, 12):
        chunks += evaluate_tiny(engine, heldout, first, last, samples=4)
    assert chunks == whole


def test_greedy_samples_are_scored_as_they_read(engine, policy, heldout):
    prompts = heldout.prompts[:64]
    answers = [problem["answer"] for problem in heldout.problems[:64]]
    greedy = engine.sample(prompts, 1, [0] * 64, temperature=0, max_tokens=64)
    right = [
        text.split()[-1] == answer
        for text, answer in zip(greedy.text, answers, strict=True)
    ]
    assert 0 < sum(right) < 64
    assert score(greedy.text, answers, "exact") == right
    # One sample of each problem: 1 or 0 are right.
    assert evaluate_tiny(engine, heldout, 0, 64, temperature=0) == right


# As a script


# python eval.py, which dies of kill -9 when its third chunk is sampled and not written.
KILLED = """
import os, runpy, signal
from support import results

append = results.append

def append_until_killed(path, task, first, correct):
    if first == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    append(path, task, first, correct)

results.append = append_until_killed
runpy.run_path("eval.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def evaluations(run_here, tmp_path_factory) -> SimpleNamespace:
    """Two benchmarks, of 40 problems and of the first 9 of these and a dropped one,
    evaluated twice.

    Undisturbed on one rank, this process: `whole`, its folder, and `printed`. And
    killed on one rank and resumed on two: `killed`, its folder; `left`, what the kill
    left of problems.jsonl; `printed_resumed`.
    """
    folder = tmp_path_factory.mktemp("evaluation")
    sums = folder / "sums"
    sums.mkdir()
    lines = (ROOT / "tiny/heldout.jsonl").read_text().splitlines()[:9]
    too_long = {"prompt": "1" * 70 + "+1", "answer": "1" * 69 + "2"}
    lines.append(json.dumps(too_long))
    (sums / "heldout.jsonl").write_text("\n".join(lines))
    shutil.copy(ROOT / "tiny/task.json", sums)
    flags = ["--task", "tiny", str(sums), "--samples=4", "--limit=40", "--drop_long"]
    # 16 responses are 4 problems.
    flags += ["--chunk_responses=16"]

    killed_flags = [*flags, f"--out_dir={folder / 'killed'}"]
    killed = subprocess.Popen(
        [sys.executable, "-c", KILLED, *killed_flags],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with contextlib.redirect_stdout(io.StringIO()) as printed:  # meanwhile
        run_here(eval, *flags, f"--out_dir={folder / 'whole'}")
    _, errors = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, errors
    left = (folder / "killed/problems.jsonl").read_text()
    resumed = subprocess.run(
        [*TORCHRUN, "--standalone", "--nproc-per-node=2", "eval.py", *killed_flags],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert resumed.returncode == 0, resumed.stderr
    return SimpleNamespace(
        flags=flags,
        sums=str(sums),
        whole=folder / "whole",
        printed=printed.getvalue(),
        killed=folder / "killed",
        left=left,
        printed_resumed=resumed.stdout,
    )


def test_a_killed_evaluation_goes_on_from_its_last_chunk_on_any_number_of_ranks(
    evaluations,
):
    # The settings, then two chunks of four problems.
    assert len(evaluations.left.splitlines()) == 1 + 2 * 4
    assert "tiny: 8 of" in evaluations.printed
    assert "tiny: 8 of" not in evaluations.printed_resumed
    resumed = (evaluations.killed / "problems.jsonl").read_text()
    assert resumed.startswith(evaluations.left)
    for name in "problems.jsonl", "results.json", "results.md":
        text = (evaluations.killed / name).read_text()
        assert text == (evaluations.whole / name).read_text(), name


def test_results_json_has_settings_counts_and_every_k_with_its_interval(evaluations):
    result = json.loads((evaluations.whole / "results.json").read_text())
    expected = {
        "model": "tiny",
        "split": "heldout",
        "samples": 4,
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 0,
    }
    assert expected.items() <= result["settings"].items()
    tasks = ["tiny", evaluations.sums]
    benchmarks = result["settings"]["benchmarks"]
    assert list(benchmarks) == tasks
    sizes = [(about["problems"], about["dropped"]) for about in benchmarks.values()]
    assert sizes == [(40, 0), (9, 1)]
    assert [len(result["correct"][task]) for task in tasks] == [40, 9]
    for k in 1, 2, 3, 4:
        means = []
        for task in tasks:
            counts = result["correct"][task]
            mean = sum(pass_at_k(4, c, k) for c in counts) / len(counts)
            means.append(mean)
            summary = result["pass@k"][task][str(k)]
            assert summary["value"] == pytest.approx(mean)
            low, high = summary["interval"]
            assert 0 <= low < high <= 1
            assert low <= summary["value"] <= high
        average = result["average"][str(k)]["value"]
        assert average == pytest.approx(sum(means) / 2)
    # The embedded policy solves 0.44: standard error 0.5 / sqrt(160) = 0.04 or more.
    assert result["pass@k"]["tiny"]["1"]["value"] == pytest.approx(0.44, abs=0.2)


def test_benchmarks_do_not_share_their_noise(evaluations):
    result = json.loads((evaluations.whole / "results.json").read_text())
    # The same 9 problems, with 4 samples of each.
    assert result["correct"][evaluations.sums] != result["correct"]["tiny"][:9]


def test_the_table_is_printed_and_written_with_its_settings(evaluations):
    text = (evaluations.whole / "results.md").read_text()
    assert text in evaluations.printed
    result = json.loads((evaluations.whole / "results.json").read_text())

    def cells(estimates: dict[str, Any]) -> str:
        texts = []
        for k in "124":
            low, high = estimates[k]["interval"]
            texts.append(f"{estimates[k]['value']:.3f} [{low:.3f}, {high:.3f}]")
        return " | ".join(texts)

    for line in (
        "| benchmark | problems | pass@1 [95%] | pass@2 [95%] | pass@4 [95%] |",
        f"| tiny | 40 | {cells(result['pass@k']['tiny'])} |",
        f"| mean of benchmarks |  | {cells(result['average'])} |",
        "- temperature: 1.0",
        "- samples: 4 of each problem",
        f"- dropped prompts: 0 of tiny, 1 of {evaluations.sums}",
    ):
        assert line in text.splitlines()


def test_a_finished_evaluation_is_reported_again_without_an_engine(
    evaluations, run_here
):
    table = evaluations.whole / "results.md"
    before = table.read_text()
    table.unlink()
    # An engine would want an exabyte.
    flags = [*evaluations.flags, "--kv_cache_gb=1e9"]
    run_here(eval, *flags, f"--out_dir={evaluations.whole}")
    assert table.read_text() == before


# The folder of results


def settings(**fields: Any) -> dict[str, Any]:
    """The settings of an evaluation on four problems, with these fields."""
    cfg = EvalConfig(limit=4, **fields)
    model, benchmarks = load_benchmarks(cfg)
    return settings_of(cfg.model_dump(), model, benchmarks)


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", 0.7),
        ("top_p", 0.9),
        ("samples", 2),
        ("seed", 1),
        ("split", "train"),
        ("max_response_tokens", 32),
        ("dtype", "bfloat16"),
    ],
)
def test_results_of_other_settings_are_refused_and_left_as_they_are(
    field, value, tmp_path
):
    path = tmp_path / "problems.jsonl"
    begin_or_resume(path, settings())
    append(path, "tiny", 0, [3, 8])
    before = path.read_bytes()
    other = settings(**{field: value})
    assert default_folder(other) != default_folder(settings())
    with pytest.raises(Refused, match=rf"has other settings \(.*{field}"):
        begin_or_resume(path, other)
    assert path.read_bytes() == before


def test_what_only_makes_it_faster_is_no_other_setting(tmp_path):
    path = tmp_path / "problems.jsonl"
    begin_or_resume(path, settings())
    append(path, "tiny", 0, [3, 8])
    faster = settings(chunk_responses=1, kv_cache_gb=1.0, verbose=True)
    assert default_folder(faster) == default_folder(settings())
    assert begin_or_resume(path, faster) == {"tiny": [3, 8]}


def test_other_weights_and_other_problems_under_the_same_name_are_other_settings(
    tmp_path,
):
    model = tmp_path / "model"
    shutil.copytree(ROOT / "tiny", model)
    problems = model / "heldout.jsonl"
    fields = {"model": str(model), "task": [str(problems)]}
    before = settings(**fields)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    after = settings(**fields)
    assert after["weights"] != before["weights"]
    assert after["benchmarks"] == before["benchmarks"]
    problems.write_text("\n".join(problems.read_text().splitlines()[1:]))
    assert settings(**fields)["benchmarks"] != before["benchmarks"]


def test_a_file_whose_settings_could_not_be_written_is_not_begun(tmp_path, monkeypatch):
    path = tmp_path / "problems.jsonl"

    def disk_is_full(self, *arguments):
        self.touch()
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", disk_is_full)
        with pytest.raises(OSError, match="no space"):
            begin_or_resume(path, settings())
    assert not path.exists()
    assert begin_or_resume(path, settings()) == {"tiny": []}


def test_a_line_torn_by_a_kill_is_sampled_again(tmp_path):
    path = tmp_path / "problems.jsonl"
    begin_or_resume(path, settings())
    append(path, "tiny", 0, [3, 8])
    with path.open("a") as file:
        file.write('{"task": "tiny", "probl')
    assert begin_or_resume(path, settings()) == {"tiny": [3, 8]}
    append(path, "tiny", 2, [1, 0])
    assert begin_or_resume(path, settings()) == {"tiny": [3, 8, 1, 0]}


@pytest.mark.parametrize(
    "text",
    ["", "notes", "[1, 2]\n", "SETTINGS\nnotes\n", "SETTINGS\nROW\nROW\n"],
    ids=["empty", "notes", "list", "notes below", "two wrote at once"],
)
def test_a_file_that_holds_no_results_is_refused_and_left_as_it_is(text, tmp_path):
    path = tmp_path / "problems.jsonl"
    row = json.dumps({"task": "tiny", "problem": 0, "correct": 3})
    text = text.replace("SETTINGS", json.dumps(settings())).replace("ROW", row)
    path.write_text(text)
    with pytest.raises(Refused, match="does not hold results by problem"):
        begin_or_resume(path, settings())
    assert path.read_text() == text


def test_the_table_has_powers_of_two_and_n(tmp_path):
    counts = {"tiny": [0, 3, 6, 1]}
    result = estimate(counts, n=6)
    text = write_report(tmp_path, settings(samples=6), result, counts)
    ks = [1, 2, 4, 6]
    head = " | ".join(["benchmark", "problems", *(f"pass@{k} [95%]" for k in ks)])
    assert text.splitlines()[0] == f"| {head} |"
    assert "mean of" not in text  # there is one benchmark
    stored = json.loads((tmp_path / "results.json").read_text())
    assert list(stored["pass@k"]["tiny"]) == ["1", "2", "3", "4", "5", "6"]


# What the user can get wrong


def test_over_long_prompts_are_refused_or_dropped_and_counted(capsys):
    # "478+805" is 9 tokens with <bos> and ':'; four digits make 11. The context is 128.
    with pytest.raises(Refused, match="of 4096 train prompts of tiny have over 9"):
        load_data(Config(max_response_tokens=119))
    heldout = load_data(Config(max_prompt_tokens=9)).heldout
    assert {len(prompt) for prompt in heldout.prompts} == {9}
    assert heldout.dropped == 512 - len(heldout.problems) > 0
    printed = capsys.readouterr().out
    assert f"dropped: {heldout.dropped} of 512 heldout prompts of tiny" in printed


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ("--task tiny sums", "unknown task 'sums'"),
        ("--task tiny tiny", "a task is given twice"),
        ("--model=missing", "no model at 'missing'"),
        ("--samples=-1", "samples is '-1'"),
        ("--samples=many", "samples is 'many': input should be a valid integer"),
        ("--temperature=-1", "temperature is '-1'"),
        ("--temperature=2.5", "temperature is '2.5'"),
        ("--temperature=0.001", "give 0 (greedy), or at least the 0.01"),
        ("--temperature=nan", "temperature is 'nan'"),
        ("--temperature=0 --samples=4", "greedy samples are all the same"),
        ("--top_p=0", "top_p is '0'"),
        ("--temperature=0 --top_p=0.5", "which greedy decoding does not look at"),
        ("--top_p=1.5", "top_p is '1.5'"),
        ("--split=test", "split is 'test': input should be 'train' or 'heldout'"),
        ("--limit=-3", "limit is '-3'"),
        ("--chunk_responses=0", "chunk_responses is '0'"),
        ("--kv_cache=1", "unrecognized arguments: --kv_cache"),
        ("--rollout_tp=2", "rollout_tp is 2: it has to divide the 1 ranks of a node"),
        # "478+805" is 9 tokens with <bos> and ':'; four digits make 11. The context
        # is 128.
        ("--max_response_tokens=119", "heldout prompts of tiny have over 9 tokens"),
        (
            "--max_response_tokens=130 --drop_long",
            "over -2 tokens, so none is left: raise max_prompt_tokens (train.py)",
        ),
    ],
)
def test_bad_input_is_one_sentence_before_the_engine_is_built(
    arguments, sentence, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    command = ["eval.py", f"--out_dir={out}", *arguments.split()]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(eval, "init_distributed", lambda: pytest.fail("too late"))
    with pytest.raises(Refused) as refused:
        eval.main()
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not out.exists()


def test_an_evaluation_has_the_settings_that_it_was_given(group, tmp_path, monkeypatch):
    engines, calls = [], []

    def build(*given, **options):
        engines.append((given, options))
        return SimpleNamespace(close=lambda: None)

    def recorded(engine, problems, prompts, verifier, **options):
        calls.append(options)
        return [0] * len(problems)

    monkeypatch.setattr(eval, "init_distributed", lambda: group)
    monkeypatch.setattr(eval, "Engine", build)
    monkeypatch.setattr(eval, "evaluate", recorded)
    flags = "--limit=3 --samples=2 --temperature=0.7 --top_p=0.9 --seed=5"
    flags += " --max_response_tokens=40 --dtype=bfloat16 --kv_cache_gb=0.5"
    flags += " --max_num_seqs=7 --chunk_responses=4 --verbose=true"
    out = f"--out_dir={tmp_path / 'out'}"
    monkeypatch.setattr(sys, "argv", ["eval.py", out, *flags.split()])
    eval.main()
    [(_, options)] = engines
    assert options == {
        "tp": 1,
        "dtype": "bfloat16",
        "kv_cache_gb": 0.5,
        "max_num_seqs": 7,
        "verbose": True,
    }
    sampling = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 40}
    # Two problems of two samples are a chunk of four, and then there is one left.
    assert calls == [
        {"samples": 2, "seed": 5, "first": 0, **sampling},
        {"samples": 2, "seed": 5, "first": 2, **sampling},
    ]


def test_a_second_evaluation_into_the_same_out_dir_is_refused_while_the_first_is_there(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["eval.py", f"--out_dir={tmp_path}"])
    monkeypatch.setattr(eval, "init_distributed", lambda: pytest.fail("too late"))
    with lock_folder(tmp_path):
        with pytest.raises(Refused, match="is being written to by another process"):
            eval.main()
    # It has written nothing there.
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


@pytest.mark.parametrize("temperature, samples", [("0", 1), ("1.0", 8)])
def test_the_number_of_samples_is_8_or_1_if_they_would_all_be_the_same(
    temperature, samples, tmp_path
):
    recipe = tmp_path / "eval.yaml"
    recipe.write_text("task: tiny\nlimit: 4\n")
    flags = [f"--config={recipe}", f"--temperature={temperature}"]
    cfg = parse_flags(EvalConfig, flags)
    load_benchmarks(cfg)
    assert (cfg.samples, cfg.task, cfg.limit) == (samples, ["tiny"], 4)
    assert cfg.dtype in ("float32", "bfloat16")


def test_a_run_is_evaluated_by_its_model(tmp_path):
    shutil.copytree(ROOT / "tiny", tmp_path / "run/model")
    model, _ = load_benchmarks(EvalConfig(model=str(tmp_path / "run"), limit=4))
    assert Path(model) == tmp_path / "run/model"


def test_a_run_that_has_left_no_model_yet_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(Config().model_dump()))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    sentence = "is a run that has left no model: finish it with --resume, or train"
    with pytest.raises(Refused, match=sentence):
        load_benchmarks(EvalConfig(model=str(tmp_path)))
