"""What counts as correct, what is refused, and what hostile model output costs."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import reward
from judge import FLOOR, LIMIT
from reward import TASKS, encode_prompt, last_boxed, load_task, score, task_of

HERE = Path(__file__).resolve().parent
START = 3.0  # seconds that judge.py may take to start, on a busy machine
RIGHT, WRONG = True, False

# gold, final answer (boxed below), verdict; score's docstring has the decisions to be lenient.
MATH = [
    # numbers
    ("18", "18", RIGHT),
    ("18", "19", WRONG),
    ("18", "-18", WRONG),
    ("18", "18.0", RIGHT),
    ("18", "18.", RIGHT),
    ("18", "$18$", RIGHT),
    ("18", "018", RIGHT),
    ("035", "35", RIGHT),
    ("0", "0", RIGHT),
    ("1234", "1,234", RIGHT),
    ("1234", "1 234", RIGHT),
    ("1234", r"1\,234", RIGHT),
    ("1234", "1{,}234", RIGHT),
    (r"10,\!000", "10000", RIGHT),
    ("0", "1 000", WRONG),
    ("1000000", "10^6", RIGHT),
    ("100000000", "100000001", WRONG),
    ("12345678901234567890", "12345678901234567891", WRONG),
    ("2^{100}", "1267650600228229401496703205376", RIGHT),
    # fractions, decimals, roots, constants
    (r"\frac{1}{2}", "0.5", RIGHT),
    (r"\frac{1}{2}", r"\dfrac{2}{4}", RIGHT),
    (r"\frac12", "1/2", RIGHT),
    (r"\frac{1}{2}", r"\frac{2}{1}", WRONG),
    (r"\frac{1}{3}", "0.333333", RIGHT),
    (r"\frac{1}{3}", "0.3333", WRONG),
    (r"2\frac{1}{2}", "2.5", RIGHT),
    (r"2\sqrt{3}", r"\sqrt{12}", RIGHT),
    (r"\frac{\sqrt2}{2}", r"\frac{1}{\sqrt{2}}", RIGHT),
    (r"\sqrt{2}", r"\sqrt{3}", WRONG),
    (r"\pi", "3.141593", RIGHT),
    (r"\pi", "3.14", WRONG),
    (r"\infty", r"-\infty", WRONG),
    ("3:4", r"\frac{3}{4}", RIGHT),
    # expressions
    ("x^2+2x+1", "(x+1)^2", RIGHT),
    ("x^2+1", "y^2+1", WRONG),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", RIGHT),
    ("3+4i", "4i+3", RIGHT),
    ("3+4i", "3-4i", WRONG),
    ("18", "17+1", RIGHT),
    ("18", "5x", WRONG),
    ("720", "6!", RIGHT),
    ("6", r"\binom{4}{2}", RIGHT),
    ("3", r"\log_2 8", RIGHT),
    # equations and inequalities: the right side of an assignment is enough
    ("18", "x=18", RIGHT),
    ("x=18", "18", RIGHT),
    ("y=2x+1", "2x+1", RIGHT),
    ("y=2x+1", "y-2x=1", RIGHT),
    ("x<3", "x<3", RIGHT),
    ("x<3", "x>3", WRONG),
    # sets, pairs, intervals, matrices
    ("1,2", "2,1", RIGHT),
    (r"\{1,2\}", "1, 2", RIGHT),
    (r"\{1,2\}", "1, 3", WRONG),
    ("5", "5, 6", WRONG),
    ("5", r"5 \text{ or } 6", WRONG),
    (r"\pm2", "2,-2", RIGHT),
    ("2", r"\pm2", WRONG),
    ("(1,2)", "(1,2)", RIGHT),
    ("(1,2)", "[1,2]", WRONG),
    ("(3,-1)", "(7,2)", WRONG),
    ("(1,2,3)", "(3,2,1)", WRONG),
    ("(1,2)", r"\{1,2\}", RIGHT),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", RIGHT),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", WRONG),
    # percent and units: ignored
    ("18", "18%", RIGHT),
    (r"18\%", "18", RIGHT),
    (r"18\%", "0.18", RIGHT),
    ("18", "0.18", WRONG),
    ("18", r"18\text{ dollars}", RIGHT),
    (r"5\text{ cm}", r"5\text{ m}", RIGHT),
    ("18", r"\$18", RIGHT),
    (r"90^\circ", "90", RIGHT),
    # words
    ("A", r"\text{A}", RIGHT),
    (r"\text{(C)}", "C", RIGHT),
    ("A", "B", WRONG),
    (r"\text{Sunday}", r"\text{Sunday}", RIGHT),
    (r"\text{Sunday}", r"\text{Monday}", WRONG),
    # not an answer
    ("18", "", WRONG),
    ("18", "?", WRONG),
    ("18", r"\text{about }18", WRONG),
    ("18", r"\frac{18", WRONG),
]

# Which part of a completion is its answer: gold 5.
PLACES = [
    (r"So it is \boxed{5}.", RIGHT),
    (r"So it is \boxed {5}.", RIGHT),
    (r"First \boxed{3}, no: \boxed{5}.", RIGHT),
    (r"First \boxed{5}, no: \boxed{3}.", WRONG),
    (r"So it is \boxed{5}. Check: \boxed{", RIGHT),
    (r"So it is \boxed{5", WRONG),
    (r"\boxed{\frac{10}{2}}", RIGHT),
    (r"\boxed{\boxed{5}}", RIGHT),
    ("The answer is 5.", WRONG),
    ("#### 5", WRONG),
    ("$5$", WRONG),
    ("", WRONG),
    (r"\boxed{" + "0" * 299 + "5}", RIGHT),
    (r"\boxed{" + "0" * 300 + "5}", WRONG),
    ("x" * 300_000 + r"\boxed{5}", RIGHT),
    (r"\boxed{5}" + "x" * 300_000, WRONG),
]

GSM8K = [
    ("84", "6*14=84.\n#### 84", RIGHT),
    ("84", r"So \boxed{84}.", RIGHT),
    ("84", r"#### 84, that is \boxed{85}", WRONG),
    ("84", "#### 85", WRONG),
    ("84", "#### 84.0", RIGHT),
    ("84", "#### 84.00000000001", WRONG),
    ("84", "It is 84.", WRONG),
    ("84", "#### 84 or 85", WRONG),
    ("84", "#### 84 lemons.", RIGHT),
    ("84", "#### $84", RIGHT),
    ("84", r"\boxed{\$84}", RIGHT),
    ("84", r"\boxed{84\%}", RIGHT),
    ("84", r"\boxed{84\text{ lemons}}", RIGHT),
    ("84", r"\boxed{x=84}", WRONG),
    ("84", r"\boxed{168/2}", WRONG),
    ("84", r"\boxed{}", WRONG),
    ("84", "", WRONG),
    ("3600", "#### 3,600", RIGHT),
    ("3,600", "#### 3600", RIGHT),
    ("3600", "#### 3,6,00", WRONG),
    ("-3", "#### -3", RIGHT),
    ("-3", "#### 3", WRONG),
    ("9007199254740993", "#### 9007199254740992", WRONG),
    ("0.1", "#### .1", WRONG),
    ("84", "#### ８４", WRONG),
]

EXACT = [
    ("1283", "8+5+0=13. 7+0+1=8. 4+8+0=12. 1283", RIGHT),
    ("1283", "1283", RIGHT),
    ("1283", "1283\n", RIGHT),
    ("1283", "1283 8+5", WRONG),
    ("1283", "8+5+0=13. 7+0+1=8. 4+8+0=12", WRONG),
    ("1283", "01283", WRONG),
    ("1283", "1283.", WRONG),
    ("1283", "", WRONG),
    ("1283", " \n", WRONG),
]

HOSTILE = {
    "python power tower": r"\boxed{98**97**96}",
    "power tower": r"\boxed{98^{97^{96}}}",
    "ten to the ten to the ten": r"\boxed{10^{10^{10}}}",
    "python's": r"\boxed{10**10**10}",
    "factorial": r"\boxed{99999999999!}",
    "nested radicals": "\\boxed{" + r"\sqrt{2+" * 40 + "2" + "}" * 40 + "}",
    "sum": r"\boxed{\sum_{n=1}^{10^{9}} \frac{1}{n^{n}}}",
    "nested parentheses": "\\boxed{" + "(" * 140 + "6" + ")" * 140 + "}",
    "a megabyte of open braces": "\\boxed{" + "{" * 1_000_000,
    "a megabyte of balanced braces": "\\boxed{" + "{" * 500_000 + "}" * 500_000 + "}",
    **{f"tower {n}": f"\\boxed{{9^{{8^{{{n}}}}}}}" for n in (100, 101, 102)},
    "many boxes": "\\boxed{" * 100_000 + "}" * 100_000,
    "many escapes": "\\" * 1_000_000,
    "NUL bytes": "\\boxed{5\0}\0\0",
    "a lone surrogate": "\\boxed{\ud800}",
    "code": r"\boxed{__import__('os').system('touch pwned')}",
    "our own protocol": "\\boxed{5}\n[1]\n\\boxed{6}",
}


@pytest.fixture(scope="module")
def verdicts():
    """One batch of all that math judges here: a process for each would take minutes."""
    asked = [(gold, f"So it is \\boxed{{{answer}}}.") for gold, answer, _ in MATH]
    asked += [("5", completion) for completion, _ in PLACES]
    return dict(zip(asked, score([c for _, c in asked], [g for g, _ in asked]), strict=True))


@pytest.mark.parametrize("gold, answer, expected", MATH)
def test_math_verdict(gold, answer, expected, verdicts):
    assert verdicts[gold, f"So it is \\boxed{{{answer}}}."] == float(expected)


def test_a_verdict_does_not_depend_on_the_rest_of_the_batch(verdicts):
    assert len(MATH) >= 60
    completions = [completion for _, completion in verdicts][::-1]
    golds = [gold for gold, _ in verdicts][::-1]
    assert score(completions * 2, golds * 2) == list(verdicts.values())[::-1] * 2
    for i in range(20, len(golds), 80):  # alone
        assert score(completions[i : i + 1], golds[i : i + 1]) == [
            verdicts[golds[i], completions[i]]
        ]


@pytest.mark.parametrize("completion, expected", PLACES)
def test_the_answer_is_the_last_complete_box(completion, expected, verdicts):
    assert verdicts["5", completion] == float(expected)


@pytest.mark.parametrize("gold, completion, expected", GSM8K)
def test_gsm8k_verdict(gold, completion, expected):
    assert score([completion], [gold], "gsm8k") == [float(expected)]


@pytest.mark.parametrize("gold, completion, expected", EXACT)
def test_exact_verdict(gold, completion, expected):
    assert score([completion], [gold], "exact") == [float(expected)]


@pytest.mark.parametrize("verifier", ["exact", "gsm8k", "math"])
def test_an_empty_batch_has_no_rewards_and_unequal_lengths_are_an_error(verifier):
    assert score([], [], verifier) == []
    with pytest.raises(ValueError):
        score(["1"], [], verifier)


def test_an_unknown_verifier_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match="'regex'.*exact.*gsm8k.*math"):
        score([], [], "regex")


# --- hostile output


@pytest.fixture(scope="module")
def hostile_rewards(tmp_path_factory):
    """{name: rewards of a right completion, the hostile one, a wrong one}; all in one batch."""
    folder = tmp_path_factory.mktemp("hostile")
    batch = [(r"\boxed{\frac{10}{2}}", text, r"\boxed{6}") for text in HOSTILE.values()]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        start = time.monotonic()
        rewards = score([text for three in batch for text in three], ["5"] * 3 * len(batch))
        seconds = time.monotonic() - start
    assert seconds < START + 2 * LIMIT + len(HOSTILE) * FLOOR  # the documented bound
    assert list(folder.iterdir()) == []
    return {name: rewards[3 * i : 3 * i + 3] for i, name in enumerate(HOSTILE)}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_completion_gets_0_and_the_others_their_reward(name, hostile_rewards):
    assert hostile_rewards[name] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("verifier", ["exact", "gsm8k"])
def test_the_other_verifiers_do_not_mind_hostile_completions(verifier):
    start = time.monotonic()
    assert score(list(HOSTILE.values()), ["5"] * len(HOSTILE), verifier) == [0.0] * len(HOSTILE)
    assert time.monotonic() - start < 1


def test_a_hostile_answer_costs_no_more_than_the_limit_however_often_a_batch_has_it():
    batch = [r"\boxed{5}", *[HOSTILE["power tower"]] * 100, r"\boxed{\frac{10}{2}}"]
    start = time.monotonic()
    assert score(batch, ["5"] * 102) == [1.0] + [0.0] * 100 + [1.0]
    assert time.monotonic() - start < START + LIMIT


def test_a_memory_bomb_gets_0():
    bomb = r"\boxed{\begin{pmatrix}" + "&".join(["2^{2^{36}}"] * 9) + r"\end{pmatrix}}"
    assert score([bomb, r"\boxed{5}"], ["5", "5"]) == [0.0, 1.0]


# --- the process


def processes():
    """{id: (parent, session)} of all processes, as /proc has them, but for zombies."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if state != "Z":
            found[int(stat.parent.name)] = int(parent), int(session)
    return found


def judge_of(trainer):
    """The id of the judge.py that process `trainer` runs, also its session's: waits for it."""
    end = time.monotonic() + START
    while time.monotonic() < end:
        for process, (parent, session) in processes().items():
            if parent == trainer and process == session:
                return process
        time.sleep(0.02)
    raise AssertionError("no judge")


def alive(session):
    """The processes of that session: a judge and its children."""
    return [process for process, (_, its) in processes().items() if its == session]


def assert_gone(session):
    end = time.monotonic() + START + LIMIT
    while alive(session) and time.monotonic() < end:
        time.sleep(0.02)
    assert alive(session) == []


def test_a_judge_killed_in_the_middle_of_a_batch_costs_no_reward():
    killed = []

    def kill():
        killed.append(judge_of(os.getpid()))
        time.sleep(1.0)
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    assert score([HOSTILE["power tower"], r"\boxed{5}"], ["5", "5"]) == [0.0, 1.0]
    thread.join()
    assert_gone(killed[0])


def test_a_judge_that_cannot_run_is_an_error_not_a_reward_of_0(tmp_path, monkeypatch, capfd):
    (tmp_path / "judge.py").write_text("import nothing_of_that_name")
    monkeypatch.setattr(reward, "HERE", tmp_path)
    with pytest.raises(RuntimeError, match=r"judge\.py dies, code 1"):
        score([r"\boxed{5}"], ["5"])
    assert "nothing_of_that_name" in capfd.readouterr().err


def test_an_interrupted_call_ends_its_judge():
    old = signal.signal(signal.SIGALRM, signal.default_int_handler)
    session = []
    thread = threading.Thread(target=lambda: session.append(judge_of(os.getpid())))
    thread.start()
    signal.setitimer(signal.ITIMER_REAL, 1.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            score([HOSTILE["power tower"], HOSTILE["factorial"]], ["5"] * 2)
    finally:
        signal.signal(signal.SIGALRM, old)
    thread.join()
    assert_gone(session[0])


def test_threads_may_score_at_once():
    rewards = {}

    def run(n):
        rewards[n] = score([f"\\boxed{{{n}}}", r"\boxed{-1}"], [str(n)] * 2)

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rewards == {n: [1.0, 0.0] for n in range(2)}


@pytest.mark.parametrize("after", [0.0, 1.2])
def test_no_process_is_left_when_the_trainer_is_killed(after, tmp_path):
    code = f"import reward; reward.score([{HOSTILE['power tower']!r}], ['5'])"
    with (tmp_path / "err").open("w") as err:
        trainer = subprocess.Popen([sys.executable, "-c", code], cwd=HERE.parent, stderr=err)
    session = judge_of(trainer.pid)
    time.sleep(after)
    assert alive(session)
    trainer.kill()
    trainer.wait()
    assert_gone(session)
    if after:  # if not, it may have received half a request
        assert (tmp_path / "err").read_text() == ""


def test_importing_and_scoring_load_neither_torch_nor_math_verify():
    code = (
        "import sys, reward; assert reward.score(['\\\\boxed{5}'], ['5']) == [1.0]\n"
        "print([m for m in ('torch', 'sympy', 'math_verify', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE.parent, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_demonstration_runs_and_shows_a_hostile_completion_get_0():
    done = subprocess.run(
        [sys.executable, "reward.py"], cwd=HERE.parent, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    last = done.stdout.splitlines()[-1]
    assert last == "math: [1.0, 0.0]"  # of 0.5, and of 98^{97^{96}}


def test_the_judge_is_a_program_of_its_own():
    done = subprocess.run(
        [sys.executable, HERE.parent / "judge.py"],
        input=json.dumps([[r"\frac{1}{2}", "0.5"], ["5", "6"]]),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1, 0]\n", "")


# --- tasks: tests/data has a folder of each hub id, with problems of our own in its columns


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """`datasets` takes a folder of tests/data for the dataset of that name on the hub."""
    import datasets

    monkeypatch.chdir(HERE / "data")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    datasets.disable_progress_bars()


loaded = functools.cache(load_task)  # which scores each gold answer, as its own completion
LOADED = [
    ("gsm8k", "train", 2, "How many lemons", "84"),
    ("gsm8k", "heldout", 1, "A diver", "-3"),
    ("math", "train", 7, "$3x=12$", "4"),
    ("math", "heldout", 2, "polar form", r"\left( 5, \frac{\pi}{2} \right)"),
    ("math500", "heldout", 2, "polar form", r"\left( 5, \frac{\pi}{2} \right)"),
    ("deepscaler", "train", 2, "divisors", "8"),
    ("deepscaler", "heldout", 1, "remainder", "035"),
    ("aime2024", "heldout", 1, "remainder", "035"),
    ("aime2025", "heldout", 1, r"$7\cdot10$", "70"),
    ("aime2026", "heldout", 1, "$5-5$", "0"),
    ("amc23", "heldout", 1, "Two trains", "9"),
    ("amo-bench", "heldout", 2, "largest root", r"\sqrt{2}"),
]


@pytest.mark.parametrize("name, split, count, words, answer", LOADED)
def test_a_dataset_loads_from_its_own_columns(hub, name, split, count, words, answer):
    problems = loaded(name, split)
    assert [set(problem) for problem in problems] == [{"prompt", "answer"}] * count
    assert words in problems[0]["prompt"] and problems[0]["answer"] == answer


def test_every_split_of_every_task_is_tested():
    splits = {
        (name, split)
        for name in TASKS
        for split in ("train", "heldout")
        if getattr(TASKS[name], split)
    }
    assert splits - {("tiny", "train"), ("tiny", "heldout")} == {row[:2] for row in LOADED}


def test_the_gold_answer_of_gsm8k_follows_its_mark(hub):
    assert [problem["answer"] for problem in loaded("gsm8k", "train")] == ["84", "3,600"]


def test_the_gold_answer_of_math_is_the_last_box_of_the_solution(hub):
    answers = [problem["answer"] for problem in loaded("math", "train")]
    assert answers[:4] == ["4", r"\frac{1}{3}", r"\sqrt{2}", r"(-\infty,-2)\cup(2,\infty)"]
    assert answers[4:] == ["61_8", "6", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"]


def test_a_hub_row_whose_answer_cannot_be_read_is_left_out_and_named(hub, capsys):
    load_task("deepscaler", "train")
    assert "DeepScaleR-Preview-Dataset train: 3 problems, 1 " in capsys.readouterr().err


def test_amo_bench_leaves_out_the_answers_that_need_a_reader(hub):
    assert not any("Describe" in problem["prompt"] for problem in loaded("amo-bench", "heldout"))


def test_any_hub_name_has_a_train_and_a_test_split(hub, monkeypatch, tmp_path):
    with monkeypatch.context() as elsewhere:  # here, the name is that of a folder
        elsewhere.chdir(tmp_path)
        task = task_of("meituan-longcat/AMO-Bench")
    monkeypatch.setitem(TASKS, "any", task)
    assert len(load_task("any", "heldout")) == 2 and task.verifier == "math"
    with pytest.raises(ValueError, match="cannot load meituan-longcat/AMO-Bench train"):
        load_task("any", "train")


def test_the_embedded_task_is_disjoint_and_right():
    train, heldout = load_task("tiny", "train"), load_task("tiny", "heldout")
    assert not {problem["prompt"] for problem in train} & {problem["prompt"] for problem in heldout}
    for problem in train + heldout:
        a, b = problem["prompt"].split("+")
        assert int(a) + int(b) == int(problem["answer"])
    assert task_of("tiny").verifier == "exact" and task_of("tiny").instruction is None


def test_a_file_is_both_splits_and_a_folder_has_two(tmp_path):
    row = {"prompt": "1+1", "answer": 2}
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({**row, "prompt": name}) + "\n")
    (tmp_path / "task.json").write_text('{"verifier": "gsm8k"}')
    file = tmp_path / "train.jsonl"
    assert (
        load_task(str(file), "train")
        == load_task(str(file), "heldout")
        == [{"prompt": "train", "answer": "2"}]
    )
    assert load_task(str(tmp_path), "heldout") == [{"prompt": "heldout", "answer": "2"}]


@pytest.mark.parametrize("whole", [False, True])
def test_task_json_says_how_the_jsonl_beside_it_is_verified(tmp_path, whole):
    path = str(tmp_path if whole else tmp_path / "train.jsonl")
    (tmp_path / "train.jsonl").write_text('{"prompt": "bc", "answer": "=x;"}\n')
    assert task_of(path) == reward.Task(*task_of(path)[:2])  # without one
    (tmp_path / "task.json").write_text('{"verifier": "exact", "instruction": null}')
    assert task_of(path)[2:] == ("exact", None)
    assert load_task(path, "train") == [{"prompt": "bc", "answer": "=x;"}]
    (tmp_path / "task.json").write_text('{"verifier": "exakt"}')
    with pytest.raises(ValueError, match="unknown verifier 'exakt'"):
        load_task(path, "train")
    for text in ('{"verifer": "exact"}', '{"verifier": ', "[1]", "7"):
        (tmp_path / "task.json").write_text(text)
        with pytest.raises(ValueError, match=r"task\.json: not a task's verifier") as caught:
            task_of(path)
        assert "\n" not in str(caught.value)


BAD_FILES = [
    ("", r"t\.jsonl: 0 problems"),
    ('{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+', r"t\.jsonl, line 2: not a JSON object"),
    ('{"prompt": "1+1", "answer": "2"}\n\n', r"t\.jsonl, line 2: not a JSON object"),
    ('["1+1", "2"]\n', r"t\.jsonl, line 1: not a JSON object"),
    ("7\n", r"t\.jsonl, line 1: not a JSON object"),
    ("\xff\n", r"t\.jsonl, line 1: not a JSON object"),
    ('{"prompt": "1+1"}\n', r"t\.jsonl, line 1.*answer.*solution"),
    ('{"answer": "2"}\n', r"t\.jsonl, line 1.*prompt.*problem.*question"),
    ('{"prompt": [{"role": "user"}], "answer": "2"}\n', r"t\.jsonl, line 1.*prompt.*problem"),
    ('{"prompt": "", "answer": "2"}\n', r"t\.jsonl, line 1.*prompt.*problem.*question"),
    ('{"prompt": "1+1", "answer": ""}\n', r"t\.jsonl, line 1.*answer.*solution"),
    (
        '{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+1", "answer": "}{"}\n',
        r"t\.jsonl: 2 problems, 1 .*line 2: }{",
    ),
    ('{"prompt": "1+1", "answer": "%s"}\n' % ("9" * 301), r"t\.jsonl: 1 problems, 1 .*999"),
]


@pytest.mark.parametrize("content, message", BAD_FILES)
def test_a_bad_file_is_refused_by_name_and_line_in_one_sentence(tmp_path, content, message):
    (tmp_path / "t.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=message) as caught:
        load_task(str(tmp_path / "t.jsonl"), "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, split, message",
    [
        ("gsm9k", "train", "unknown task 'gsm9k'.*tiny, gsm8k, math"),
        ("no/such/file.jsonl", "train", "unknown task 'no/such/file.jsonl'"),
        ("nosuch/file.jsonl", "train", "unknown task 'nosuch/file.jsonl'"),
        ("aime2024", "train", "'aime2024' has no split 'train'"),
        ("tiny", "test", "'tiny' has no split 'test'.*'train' or 'heldout'"),
        (str(HERE), "train", r"train\.jsonl"),
    ],
)
def test_a_wrong_task_or_split_is_one_sentence(name, split, message):
    with pytest.raises(ValueError, match=message) as caught:
        load_task(name, split)
    assert "\n" not in str(caught.value)


def test_a_hub_out_of_reach_is_one_sentence(tmp_path):
    code = "import reward\ntry: reward.load_task('gsm8k', 'train')\n"
    code += "except ValueError as error: print(error)"
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": str(HERE.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.count("\n") == 1 and "openai/gsm8k" in done.stdout and done.stderr == ""


# --- prompts


def tokenizer_with(template):
    """A real tokenizer of single characters; template: its chat template, if any."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {chr(code): code for code in range(128)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Split("", "isolated"),
        decoders.Fuse(),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="?", chat_template=template
    )


CHAT = "{% for m in messages %}<{{m.role}}>{{m.content}}{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    "template, instruction, text",
    [
        (CHAT, "Think.", "<user>Think.\n\n1+1<assistant>"),
        (CHAT, None, "<user>1+1<assistant>"),
        (None, "Think.", "Think.\n\n1+1\n\nSolution:"),
        (None, None, "1+1\n\nSolution:"),
    ],
)
def test_a_prompt_follows_the_chat_template_if_there_is_one(template, instruction, text):
    tokenizer = tokenizer_with(template)
    ids = encode_prompt(tokenizer, "1+1", instruction)
    assert isinstance(ids, list) and tokenizer.decode(ids) == text


def test_last_boxed_is_the_last_box_to_close():
    assert last_boxed(r"a \boxed{1} b \boxed{\{2\}} c") == r"\{2\}"
    assert last_boxed(r"a \boxed{1} b \boxed{2") == "1"
    assert last_boxed("} } {") == ""
