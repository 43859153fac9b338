"""Test the points that the assignment's grader gives, and what code cannot do to it.

The reference gets all points and the starter none. Each known mistake loses the items
that it should and no others. Hostile code gets no points, and cannot change the grader
or its files.
"""

import csv
import json
import math
import mmap
import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from conftest import ROOT
from launch import run_command

from assignment import grade, results, sandbox
from assignment.grade import SOLUTION, Runner
from assignment.gradescope import run as gradescope
from assignment.items import ITEMS, Draw
from assignment.mistakes import MISTAKES, functions_of, source_of
from assignment.starter.toy import Part, Policy, random_ranks, run_ranks
from assignment.variant import make_variant
from loss import effective_sample_size, kl_divergence, p3o, ratio_sums

STARTER = ROOT / "assignment/starter"
SEED = 20260512
# The items that run a student's code.
ITEM = {item.name: item for item in ITEMS if item.file != "results.json"}

pytestmark = pytest.mark.skipif(
    sandbox.landlock_version() < 1,
    reason="without Landlock (Linux 5.13) the grader does not run other people's code",
)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    """Start a process that runs code enclosed; the instructor's token is not for it."""
    os.environ["GITHUB_TOKEN"] = "the instructor's"
    with Runner(trusted=False) as runner:
        yield runner


def lost_by_file(runner: Runner, folder: Path, file: str) -> dict[str, str]:
    """Return the items of one file that give a submission no points, and why."""
    items = [item for item in ITEMS if item.file == file]
    results = [grade.grade_item(runner, item, folder, SEED) for item in items]
    return {result.name: result.sentence for result in results if not result.points}


# The reference, the starter and the handout


@pytest.mark.parametrize("trusted", [False, True])
def test_the_reference_gets_all_points(trusted):
    with Runner(trusted) as runner:
        results = list(grade.grade_each(runner, SOLUTION, SEED))
    assert grade.lost_items(results) == []
    assert grade.total(results) == "85 of 85"


def test_the_starter_and_an_empty_folder_get_none(runner, tmp_path):
    for folder in (STARTER, tmp_path):
        assert grade.total(list(grade.grade_each(runner, folder, SEED))) == "0 of 85"


def test_the_starter_has_the_signatures_of_the_reference():
    for item in ITEM.values():
        signature = re.compile(rf"def {item.function}\(.*? -> ", re.DOTALL)
        reference, starter = source_of(item.file), (STARTER / item.file).read_text()
        assert signature.search(reference)[0] == signature.search(starter)[0]


def test_the_handout_has_the_points_of_each_item():
    rows = (ROOT / "assignment/README.md").read_text().splitlines()
    for item in ITEMS:
        (row,) = [row for row in rows if row.startswith(f"| {item.name} |")]
        assert row.split("|")[-2].strip() == str(item.points)


def test_the_update_of_the_reference_has_the_gradient_of_12():
    weight = torch.randn(3, 5, dtype=torch.float64)
    ranks = random_ranks([[2, 3], [4, 1]], weight)
    # (12) over the tokens of all micro-batches of all ranks at once
    policy, parts = Policy(weight), sum(ranks, [])
    whole = Part(*map(torch.cat, zip(*parts, strict=True)))
    logp, top_logp = policy(whole)
    sums = ratio_sums(logp - whole.logp_behavior, whole.mask)
    e_b = effective_sample_size(sums).item()
    kl = kl_divergence(top_logp, whole.top_logp_behavior)
    loss = p3o(logp, whole.logp_behavior, whole.advantage, kl, e_b)
    loss[whole.mask].mean().backward()
    update = functions_of("batch.py")["update"]
    found_e_b, gradient, _ = run_ranks(update, weight, ranks)
    assert found_e_b == pytest.approx([e_b, e_b], rel=1e-12)
    torch.testing.assert_close(gradient, policy.weight.grad, rtol=0, atol=1e-12)


HALF, UNEVEN = torch.tensor([1 / 2, 1 / 2]), torch.tensor([1 / 4, 3 / 4])
LOG3 = math.log(3)


@pytest.mark.parametrize(
    "name, arguments, right",
    [
        # rho = 0 and 2: (2/2)^2 / (4/2)
        ("ess_of_variation", [1.0], 1 / 2),
        # rho = 1, 1, 1, 4: (7/4)^2 / (19/4)
        ("ess_with_one_outlier", [4, 4.0], 49 / 76),
        # 1 / (1/4 / (1/4) + 1/4 / (3/4))
        ("ess_of_policies", [HALF, UNEVEN], 3 / 4),
        # rho = 3 is capped at e_B = 1/4, and the KL has the weight 3/4.
        ("token_weight", [3.0, 1.0, 1 / 4], 1 / 4 - 3 / 4 * 3 * LOG3),
        # log 2 and log 2/3 minus their mean are 1/2 log 3 and -1/2 log 3.
        ("kl_gradient", [HALF.log(), UNEVEN.log()], [LOG3 / 4, -LOG3 / 4]),
        # (1 - e_B)(1 - 1/T): test_divergence.py shows the identity.
        ("entropy_bonus", [2.0, 1 / 2], 1 / 4),
    ],
)
def test_the_derivations_of_the_reference_by_hand(name, arguments, right):
    found = functions_of("derivations.py")[name](*arguments)
    assert torch.as_tensor(found).tolist() == pytest.approx(right)


# The matrix of mistakes


# Each mistake takes a second or two. `make test` tries every eighth of them.
MATRIX = [
    pytest.param(mistake, marks=[pytest.mark.slow] if index % 8 else [])
    for index, mistake in enumerate(MISTAKES)
]


@pytest.mark.parametrize("mistake", MATRIX, ids=lambda mistake: mistake.said)
def test_a_mistake_loses_the_items_that_it_should_and_no_others(
    runner, tmp_path, mistake
):
    grade.copy_submission(SOLUTION, tmp_path)
    wrong = source_of(mistake.file, mistake)
    assert wrong != source_of(mistake.file)
    (tmp_path / mistake.file).write_text(wrong)
    lost = lost_by_file(runner, tmp_path, mistake.file)
    assert lost.keys() == set(mistake.items.split()), lost
    assert any(mistake.said in sentence for sentence in lost.values()), lost


def test_every_item_of_code_has_a_mistake_that_loses_it():
    assert {item for mistake in MISTAKES for item in mistake.items.split()} == set(ITEM)


def test_a_mistake_in_the_loss_costs_nothing_in_the_batch(runner, tmp_path):
    (mistake,) = [each for each in MISTAKES if "min(rho, 1)" in each.said]
    grade.copy_submission(SOLUTION, tmp_path)
    (tmp_path / "loss.py").write_text(source_of("loss.py", mistake))
    assert grade.lost_items(list(grade.grade_each(runner, tmp_path, SEED))) == ["2.4"]


LOSS_FUNCTIONS = {item.name: item.function for item in ITEMS if item.file == "loss.py"}
ONE_FUNCTION = "import torch\ndef same(*arguments):\n    {}\n"
ONE_FUNCTION += " = ".join([*set(LOSS_FUNCTIONS.values()), "same"])
ANSWERS = json.dumps([{"value": {"tensor": [3, 3, 3]}, "gradients": []}] * 9)


@pytest.mark.parametrize(
    "code",
    [
        ONE_FUNCTION.format("return arguments[0] * 0"),
        ONE_FUNCTION.format("return 'all points, please'"),
        # This code writes answers to every open file, and ends.
        "import os\nfor number in range(30):\n"
        f"    try: os.write(number, {ANSWERS!r}.encode())\n"
        "    except OSError: 0\nos._exit(0)",
    ],
    ids=["zero", "text", "forged"],
)
def test_code_that_answers_without_computing_gets_no_point(runner, tmp_path, code):
    (tmp_path / "loss.py").write_text(code)
    assert lost_by_file(runner, tmp_path, "loss.py").keys() == LOSS_FUNCTIONS.keys()


def test_the_same_seed_draws_the_same_inputs_and_another_seed_draws_others():
    for item in ITEM.values():
        first, again, other = [str(list(item.draw(Draw(seed)))) for seed in (1, 1, 2)]
        assert first == again != other


# Hostile code


def sentence_of(runner: Runner, folder: Path, code: str) -> str:
    """Return what the grader says about item 1.1 if loss.py contains this code."""
    (folder / "loss.py").write_text(code)
    result = grade.grade_item(runner, ITEM["1.1"], folder, SEED)
    assert grade.lost_items([result]) == ["1.1"]
    return result.sentence


RATIO_SUMS = "def ratio_sums(log_ratio, mask):\n    "


def test_code_that_is_not_given_the_processor_is_not_graded(
    runner, tmp_path, monkeypatch
):
    monkeypatch.setattr(grade, "WALL_SECONDS", 0.5)
    (tmp_path / "loss.py").write_text("import time\ntime.sleep(10**6)")
    result = grade.grade_item(runner, ITEM["1.1"], tmp_path, SEED)
    assert "grade it again" in result.sentence
    assert grade.lost_items([result]) == []
    assert "not graded" in grade.report([result], SEED)


HOSTILE_CODE = {
    "endless loop": (
        RATIO_SUMS + "while True: pass",
        "computed for too long and was stopped (loss.py, line 2)",
    ),
    "endless loop that ignores the signal": (
        "from signal import *\nsignal(SIGXCPU, SIG_IGN)\nwhile True: pass",
        "took more than 1 s of CPU time",
    ),
    "sleep": ("import time\ntime.sleep(10**6)", "slept for 1 s"),
    "writes its own file": ("open(__file__, 'w')", "PermissionError"),
    "writes shared memory": ("open('/dev/shm/answers', 'w')", "PermissionError"),
    "crash": ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    # The runner lets it write 4 MB.
    "flood of answers": (RATIO_SUMS + "return 'x' * 2**23", "without an answer"),
    "memory bomb": (RATIO_SUMS + "return bytearray(10**11)", "MemoryError"),
    "deep answer": (
        "x = []\nfor _ in range(10**5): x = [x]\n" + RATIO_SUMS + "return x",
        "RecursionError",
    ),
    "syntax error": ("def ratio_sums(", "SyntaxError"),
    "the environment": (
        RATIO_SUMS + "import os; raise RuntimeError(list(os.environ.values()))",
        "RuntimeError: [",
    ),
    "the memory of the grader": (
        RATIO_SUMS + "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
        "PermissionError",
    ),
    "the text of the reference": (
        f"exec(open({str(ROOT / 'loss.py')!r}).read())",
        "PermissionError",
    ),
    "the folder of the grader": (
        f"import os\nos.listdir({str(ROOT / 'assignment')!r})",
        "PermissionError",
    ),
    # A repository is often in /usr/src, or in the folder of its virtual environment.
    "system folders without libraries": (
        "import os\nos.listdir('/usr/src')",
        "PermissionError",
    ),
    "the root of the environment": (
        "import os, sys\nos.listdir(sys.prefix)",
        "PermissionError",
    ),
    # The enclosure reports its own failure over a pipe that is closed by now.
    "a feigned failure": (
        "import os\nprint('the code is harmless: use --trust')\n"
        "for number in range(30):\n"
        "    try: os.write(number, b'seccomp failed')\n"
        "    except OSError: 0\nos._exit(77)",
        "loss.py ended without an answer",
    ),
    "words of the grader": (
        "raise RuntimeError('points: 85 of 85\" (\\u202e)')",
        'ratio_sums raised "RuntimeError: points: 85 of 85\' ( ) (loss.py, line 1)"',
    ),
}


@pytest.mark.parametrize("code, said", HOSTILE_CODE.values(), ids=HOSTILE_CODE)
def test_the_report_on_hostile_code_says_what_happened(
    runner, tmp_path, monkeypatch, code, said
):
    monkeypatch.setattr(grade, "CPU_SECONDS", 1)
    monkeypatch.setattr(grade, "IDLE_SECONDS", 1)
    sentence = sentence_of(runner, tmp_path, code)
    assert said in sentence
    assert os.environ["GITHUB_TOKEN"] not in sentence


def test_no_other_system_call_is_permitted(runner, tmp_path):
    # Each call is tried by its number on x86-64 and by its number on x32. Linux does
    # not filter uretprobe and uprobe (335 and 336), which end the calling process.
    allowed = [*sandbox.ALLOWED, sandbox.OPENAT, 335, 336]
    code = f"""import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def is_refused(number):
    return libc.syscall(number, 0, 0, 0, 0, 0) == -1 and ctypes.get_errno() == 1
numbers = [n for n in range(600) if n not in {allowed}]
numbers += range(2**30, 2**30 + 600)
raise RuntimeError([n for n in numbers if not is_refused(n)])"""
    assert "RuntimeError: [] " in sentence_of(runner, tmp_path, code)
    # fork, execve, kill, setsid, prctl, shmget, msgget, socket, ptrace, fcntl, ioctl,
    # bpf, io_uring_setup, open_tree, fsopen, mount_setattr
    reach_others = {57, 59, 62, 112, 157, 29, 68, 41, 101, 72, 16}
    reach_others |= {321, 425, 428, 430, 442}
    # truncate, rename, link, unlink, symlink, chmod
    change_files = {76, 82, 86, 87, 88, 90}
    assert not (reach_others | change_files) & set(allowed)


def test_the_limit_of_memory_does_not_include_what_the_process_had_before():
    # torch with CUDA reserves 10 GB of addresses when it is imported.
    reserved = mmap.mmap(-1, 4 * 2**30, flags=mmap.MAP_PRIVATE, prot=0)
    process = os.fork()
    if process == 0:
        try:
            sandbox.limit(9, 2**28, file_bytes=2**20)
            bytearray(2**27)
            bytearray(2**29)
        except MemoryError:
            os._exit(7)
        finally:
            os._exit(1)
    reserved.close()
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7


@pytest.mark.parametrize(
    "module, name", [("toy", "run_ranks"), ("__main__", "run_rank")]
)
def test_a_batch_that_replaces_what_runs_it_gets_no_point(
    runner, tmp_path, module, name
):
    grade.copy_submission(SOLUTION, tmp_path)
    right = source_of("batch.py").replace("def update(", "def right(")
    cheat = f"""import {module} as module
original = getattr(module, {name!r}, None)
def update(*_): raise ValueError
module.{name} = lambda update, *rest: original(right, *rest)
"""
    (tmp_path / "batch.py").write_text(right + cheat)
    lost = lost_by_file(runner, tmp_path, "batch.py")
    assert lost.keys() == {"3.1", "3.2", "3.3", "3.4", "3.5"}


def test_a_batch_can_neither_see_another_rank_nor_show_the_reference(runner, tmp_path):
    grade.copy_submission(SOLUTION, tmp_path)
    leak = """import inspect, loss, gc
source = inspect.getsource(loss.p3o)
print(source)
class Leak(Exception): pass
def update(policy, parts, *_):
    known = [x for x in gc.get_objects() if type(x).__name__ == "Part"]
    if len(known) > len(parts): raise KeyError
    raise Leak(source)
"""
    (tmp_path / "batch.py").write_text(leak)
    result = grade.grade_item(runner, ITEM["3.2"], tmp_path, SEED)
    assert (result.points, result.printed) == (0, "")
    assert result.sentence == 'update raised "an error: --trust shows which (line 8)"'


def test_code_may_switch_off_the_gradient_of_an_input(runner, tmp_path):
    text = source_of("loss.py").replace(
        "logp_behavior.detach().double()",
        "logp_behavior.requires_grad_(False).double()",
    )
    (tmp_path / "loss.py").write_text(text)
    assert lost_by_file(runner, tmp_path, "loss.py") == {}


def test_links_pipes_and_long_files_are_not_copied(tmp_path):
    source, scratch = tmp_path / "source", tmp_path / "scratch"
    source.mkdir()
    scratch.mkdir()
    (source / "loss.py").symlink_to(ROOT / "loss.py")
    os.mkfifo(source / "batch.py")
    (source / "derivations.py").write_text("#" * (grade.LONGEST_FILE + 1))
    (source / "experiment.py").write_text("kept = True")
    grade.copy_submission(source, scratch)
    kept = sorted(path.name for path in scratch.iterdir())
    assert kept == ["experiment.py", "toy.py"]


def child_of(process: int) -> int:
    """Wait until a process has a child, and return the child's number."""
    children = Path(f"/proc/{process}/task/{process}/children")
    while not children.read_text():
        time.sleep(0.1)
    return int(children.read_text().split()[0])


def test_no_process_outlives_a_grader_that_is_killed(tmp_path):
    (tmp_path / "loss.py").write_text("import time\ntime.sleep(10**6)")
    grader = os.fork()
    if grader == 0:
        try:
            with Runner(trusted=False) as runner:
                list(grade.grade_each(runner, tmp_path, SEED))
        finally:
            os._exit(1)
    try:
        runner = child_of(grader)
        handles = [os.pidfd_open(each) for each in (runner, child_of(runner))]
    finally:
        os.kill(grader, signal.SIGKILL)
        os.waitpid(grader, 0)
    for handle in handles:
        # A handle is readable as soon as its process has ended.
        assert select.select([handle], [], [], 5)[0]
        os.close(handle)


# What the grader prints and writes


@pytest.fixture
def this_runner(runner, monkeypatch):
    """Replace the class Runner, so that no second process is started."""
    monkeypatch.setattr(grade, "has_to_become_nobody", lambda private: False)
    monkeypatch.setattr(grade, "Runner", lambda *_: nullcontext(runner))


@pytest.fixture
def command(this_runner, monkeypatch):
    """Return a function that runs grade.py with the given arguments."""

    def run(*words: object) -> None:
        monkeypatch.setattr(sys, "argv", ["grade.py", *map(str, words)])
        grade.main()

    return run


def test_many_submissions_are_graded_in_one_command(
    tmp_path, command, capsys, monkeypatch
):
    folder, out = tmp_path / "all", tmp_path / "out"
    long = "l" * 253
    for student in ("=1+1", "Ada", "ada", "emmy/my_solution", long, ".git", "__MACOSX"):
        (folder / student).mkdir(parents=True)
        shutil.copy(SOLUTION / "experiment.py", folder / student)
    (folder / "link").symlink_to(folder / "emmy")
    # The grader itself fails once.
    outcomes = [ZeroDivisionError, "", "", "", ""]
    monkeypatch.setattr(grade, "what_is_wrong", Mock(side_effect=outcomes))
    command("--all", folder, "--out", out, "--seed", SEED, "--only", "4.1")
    lines = capsys.readouterr().out.splitlines()
    assert "not graded: 4.1 (the grader raised" in lines[0]
    assert lines[3] == "emmy: 2 of 2 points, lost nothing"
    assert lines[4].endswith(
        "not graded: 4.1 (the folder cannot be read: link is a link)"
    )
    assert lines[6].startswith(f"6 submissions, --seed {SEED}; failures by item: ")
    assert (out / "04-emmy.txt").read_text().splitlines()[-1] == "points: 2 of 2"
    with (out / "grades.csv").open() as file:
        rows = [(row["submission"], row["4.1"]) for row in csv.DictReader(file)]
    names = ["'=1+1", "Ada", "ada", "emmy", "link", long]
    assert rows == list(zip(names, ["", "2", "2", "2", "", "2"], strict=True))


def test_the_report_says_the_same_error_and_printed_text_only_once(
    tmp_path, command, capsys
):
    (tmp_path / "loss.py").write_text("print('\\x1b[2Jlog rho')\nraise IndexError")
    command(tmp_path, "--only", "1")
    said = capsys.readouterr().out
    # Part 1 calls ratio_sums in 1.1, 1.2 and 1.4, and two other functions of loss.py.
    assert said.count("printed |  [2Jlog rho") == 1
    assert said.count("IndexError") == 3
    assert said.count("(as in 1.1)") == 2
    assert said.endswith("points: 0 of 25\n")


def test_gradescope_gets_all_items_even_if_the_grader_dies(
    tmp_path, this_runner, monkeypatch
):
    for name in ("experiment.py", "results.json"):
        shutil.copy(SOLUTION / name, tmp_path)
    monkeypatch.setattr(gradescope, "SUBMISSION", tmp_path)
    monkeypatch.setattr(gradescope, "RESULTS", tmp_path / "out.json")
    monkeypatch.setattr(grade, "WALL_SECONDS", 60)

    monkeypatch.setattr(results, "wrong_results", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        gradescope.main()
    tests = json.loads((tmp_path / "out.json").read_text())["tests"]
    assert [test["number"] for test in tests] == [*ITEM, "4.2"]
    assert sum(test["max_score"] for test in tests) == 85
    assert [test["score"] for test in tests[-2:]] == [2, 0]
    assert tests[-1]["output"] == "not graded: not reached"


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed, lost",
    [
        (4, {"1.3", "1.7", "1.8", "1.9"}),  # e_B
        (6, {"2.5", "2.7", "2.9"}),  # the weight of the KL
        (7, {"2.4", "2.7"}),  # the cap
    ],
)
def test_the_public_solution_loses_the_part_that_a_variant_changes(
    tmp_path, seed, lost
):
    variant, public = tmp_path / "variant", tmp_path / "public"
    make_variant(seed, variant)
    public.mkdir()
    grade.copy_submission(SOLUTION, public)
    for folder, expected in ((variant / "assignment/solution", set()), (public, lost)):
        command = [sys.executable, variant / "assignment/grade.py", folder, "--trust"]
        done = run_command(command)
        assert done.returncode == 0
        assert set(re.findall(r"(?m)^  (\S+)  0 of", done.stdout)) == expected


def rows(table: str) -> list[list[str]]:
    """Return the cells of each row of a table."""
    return [
        [cell.strip() for cell in row.split("|")] for row in table.split("\n")[1:-1]
    ]


# The columns are the grader's user, the kernel's version of Landlock, the folders that
# all users can open, the repository, and why the grader refuses, if it does.
MACHINES = """
user |  1 |               | home/repository    |
user | -1 |               | home/repository    | no Landlock
user |  1 |               | usr/lib/repository | the code could read
root |  7 |               | home/repository    | start the grader as another user
root |  7 | usr/lib       | home/repository    |
root | -1 | usr/lib, home | home/repository    | close the folder
root | -1 | usr/lib       | home/repository    |
"""


@pytest.mark.parametrize("user, landlock, folders, private, said", rows(MACHINES))
def test_the_grader_refuses_to_run_if_it_cannot_enclose_code(
    user, landlock, folders, private, said, tmp_path, monkeypatch
):
    (tmp_path / "usr/lib").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: 0 if user == "root" else 1000)
    monkeypatch.setattr(sandbox, "LIBRARIES", [tmp_path / "usr/lib"])
    monkeypatch.setattr(sandbox, "landlock_version", lambda: int(landlock))
    is_open = tuple(str(tmp_path / each) for each in folders.split(", ") if each)
    monkeypatch.setattr(
        sandbox, "is_open_to_others", lambda path: str(path).startswith(is_open)
    )
    reason = sandbox.refusal([tmp_path / private])
    assert said in reason
    assert bool(said) == bool(reason)


# The results.json of part 4


def wrong_in(folder: Path, *changes: dict[str, Any]) -> str:
    """Return what is wrong if these fields of the two arms are changed."""
    found = json.loads((SOLUTION / "results.json").read_text())
    for arm, change in zip(found["arms"].values(), changes, strict=False):
        arm.update(change)
    path = folder / "results.json"
    path.write_text(json.dumps(found))
    return results.wrong_results(path)


# The columns are a field of the first arm, its value, and what is wrong with it.
FIELDS = """
seeds  | [0, 1, 2, 3]              | at least 5 items
seeds  | [0, 1, 2, 3, 3]           | has a seed twice
seeds  | [5, 6, 7, 8, 9]           | do not have the same seeds
values | [0.5]                     | does not have one value for each seed
values | [0.5, 0.5, 0.5, 0.5, 2]   | less than or equal to 1
values | [0.5, 0.5, 0.5, 0.5, 0.5] | from the values it is
"""


@pytest.mark.parametrize("name, value, said", rows(FIELDS))
def test_results_that_do_not_fit_together_are_refused(name, value, said, tmp_path):
    assert said in wrong_in(tmp_path, {name: json.loads(value)})


def test_overlong_results_are_refused_before_their_flags_are_parsed(tmp_path):
    assert "at most 50 items" in wrong_in(tmp_path, {"flags": ["--lag=4"] * 51})
    assert "more than 20000 bytes" in wrong_in(tmp_path, {"flags": ["," * 20_000]})


# The columns are the flags of the two arms, and what is wrong with them. Nothing is
# wrong if the arms differ and at least one of them has a mismatch.
FLAGS = """
--seed=3                    | --lag=4          | leave --seed, --config and
--config=/etc/passwd        | --lag=4          | leave --seed, --config and
--temprature=1.2            | --lag=4          | train.py refuses the flags
--objective=antigravity     | --lag=4          | "antigravity" is not one of p3o
--lag=4 --out_dir=runs/a    | --lag 4          | have the same settings
--minibatches=1             | --objective=grpo | no arm has a mismatch
--minibatches=4             | --objective=grpo |
--top_p=0.9                 | --objective=p3o  |
--objective=antigravity:fly | --lag=4          |
--verifier=antigravity:fly  | --lag=4          |
"""


@pytest.mark.parametrize("first, second, said", rows(FLAGS))
def test_flags_are_checked_without_importing_what_they_name(
    first, second, said, tmp_path
):
    found = wrong_in(tmp_path, *[{"flags": arm.split()} for arm in (first, second)])
    assert said in found
    assert bool(said) == bool(found)
    assert "antigravity" not in sys.modules
