"""The assignment's grader: what each submission gets, and what it cannot do.

The reference gets all points and the starter none. Each wrong loss of wrong_losses.py
and each wrong loop of wrong_batches.py loses the items that it should and no others.
Hostile code gets no points, and leaves the grader and its files as they were.
"""

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import wrong_batches
import wrong_losses
from conftest import ROOT

from assignment import grade, sandbox
from assignment.items import ITEMS, MISMATCHES, Draw, Wrong, check_results

ASSIGNMENT = ROOT / "assignment"
STARTER = ASSIGNMENT / "starter"
SEED = 20260512
ITEM = {item.name: item for item in ITEMS}

pytestmark = pytest.mark.skipif(
    not sandbox.is_available(), reason="this kernel cannot enclose foreign code"
)


@pytest.fixture(scope="module")
def runner() -> Iterator[grade.Runner]:
    with grade.start_runner(trusted=False) as runner:
        yield runner


def points_by_item(runner: grade.Runner, folder: Path | None) -> dict[str, int]:
    results = grade.grade(runner, folder, SEED)
    return {result.item.name: result.points for result in results}


def lost_of_file(runner: grade.Runner, folder: Path, file: str) -> set[str]:
    """The items of one file in which a submission gets no points."""
    lost = set()
    for item in ITEMS:
        if item.file == file:
            result = grade.grade_item(runner, item, folder, SEED)
            if result.points == 0:
                lost.add(item.name)
    return lost


# The reference, the starter


def test_the_reference_gets_all_points(runner: grade.Runner) -> None:
    right = {item.name: item.points for item in ITEMS}
    assert points_by_item(runner, None) == right


def test_the_starter_gets_none(runner: grade.Runner) -> None:
    assert set(points_by_item(runner, STARTER).values()) == {0}


def test_an_empty_folder_gets_none(runner: grade.Runner, tmp_path: Path) -> None:
    assert set(points_by_item(runner, tmp_path).values()) == {0}


@pytest.mark.parametrize("file", ["loss.py", "derivations.py", "batch.py"])
def test_the_starter_has_the_functions_of_the_reference(file: str) -> None:
    reference = (
        ROOT / "loss.py" if file == "loss.py" else ASSIGNMENT / "solution" / file
    )
    asked = set()
    for item in ITEMS:
        if item.file == file:
            asked |= {question.function for question in item.questions(Draw(SEED))}
    for name in asked:
        signatures = [
            signature_in(path.read_text(), name) for path in (STARTER / file, reference)
        ]
        assert signatures[0] == signatures[1], name


def signature_in(source: str, function: str) -> str:
    """The parameters of a function as its file writes them."""
    begin = source.index(f"def {function}(")
    return source[begin : source.index(" -> ", begin)]


def test_the_points_of_the_items_add_up_to_those_of_the_handout() -> None:
    text = (ASSIGNMENT / "README.md").read_text()
    for item in ITEMS:
        assert f"| {item.name} | " in text, item.name
        row = next(
            line for line in text.splitlines() if line.startswith(f"| {item.name} |")
        )
        assert row.split("|")[-2].strip() == str(item.points), row
    assert f"{sum(item.points for item in ITEMS)} points" in text


# The matrix of mistakes

# What is wrong (wrong_losses.py) -> the items that it loses
LOST: dict[str, set[str]] = {
    "population standard deviation": {"1.6"},
    "e_B over padding": {"1.2"},
    "e_B in float32": {"1.4"},
    "e_B of a NaN is 1": {"1.5"},
    "KL(pi_b || pi_theta)": {"2.1", "2.2", "2.3"},
    "the rest left out of the KL": {"2.1", "2.2"},
    "pi_theta detached in the KL": {"2.2"},
    "the rest without gradient": {"2.2"},
    "the rest without floor": {"2.3"},
    "cap 1/e_B": {"2.4"},
    "cap 1": {"2.4"},
    "no stop-gradient on the capped ratio": {"2.4"},
    "gradient through e_B": {"1.5", "2.10"},
    "e_B of the micro-batch": {"2.9"},
    # The KL never counts, so its estimate does not either.
    "e_B = 1": {"2.4", "2.5", "2.6"},
    "mean of means": {"2.7", "2.9"},
    "mean over padding": {"2.7"},
    "mean of the micro-batch": {"2.9"},
    "zero loss": {"2.4", "2.5", "2.6", "2.7", "2.8", "2.9", "2.10", "2.11"},
    "sign of the KL": {"2.5", "2.6"},
    "e_B instead of 1 - e_B on the KL": {"2.5", "2.6"},
    "estimated KL clamped at 10 nats": {"2.6"},
    "k3 by default": {"2.6"},
    # An infinite one is not refused.
    "the given KL ignored": {"2.5", "2.11"},
    "the given KL without gradient": {"2.5"},
    "advantage not detached": {"2.10"},
    # A mean over tokens of what only the last one has is another mean.
    "advantage on the last token only": {"2.7", "2.8"},
    # All that has rho or e_B in it.
    "ratio inverted": {"2.4", "2.5", "2.6", "2.9", "2.10"},
}


def test_every_wrong_loss_has_its_row() -> None:
    assert set(LOST) == set(wrong_losses.MISTAKES)


def source_of(
    module: ModuleType, base: type, mistake: type, functions: list[str]
) -> str:
    """A file of the base class, the mistake and the functions that both make."""
    lines = ["from __future__ import annotations", "import torch"]
    if module is wrong_batches:
        lines.append("from toy import log_probabilities, toy_loss")
    else:
        lines += ["LARGEST_LOG_RATIO = 82.0", "SMALLEST_REST = 1e-6"]
        lines += [
            inspect.getsource(helper)
            for helper in (wrong_losses.refuse_rows, wrong_losses.only_tokens)
        ]
    lines.append(inspect.getsource(base))
    if mistake is not base:
        lines.append(inspect.getsource(mistake))
    lines.append(f"version = {mistake.__name__}()")
    lines += [f"{name} = version.{name}" for name in functions]
    return "\n".join(lines)


def write_loss(folder: Path, mistake: type) -> None:
    functions = list(wrong_losses.FUNCTIONS)
    source = source_of(wrong_losses, wrong_losses.P3O, mistake, functions)
    (folder / "loss.py").write_text(source)


def write_loop(folder: Path, mistake: type) -> None:
    functions = ["batch_quantities", "gradient_of_rank"]
    source = source_of(wrong_batches, wrong_batches.Loop, mistake, functions)
    (folder / "batch.py").write_text(source)
    (folder / "toy.py").write_text((STARTER / "toy.py").read_text())


def test_the_classes_without_a_mistake_lose_nothing(
    runner: grade.Runner, tmp_path: Path
) -> None:
    write_loss(tmp_path, wrong_losses.P3O)
    write_loop(tmp_path, wrong_batches.Loop)
    assert lost_of_file(runner, tmp_path, "loss.py") == set()
    assert lost_of_file(runner, tmp_path, "batch.py") == set()


@pytest.mark.parametrize("mistake", LOST)
def test_a_wrong_loss_loses_the_items_that_it_should_and_no_others(
    runner: grade.Runner, tmp_path: Path, mistake: str
) -> None:
    write_loss(tmp_path, wrong_losses.MISTAKES[mistake][0])
    assert lost_of_file(runner, tmp_path, "loss.py") == LOST[mistake]


@pytest.mark.parametrize("mistake", wrong_batches.MISTAKES)
def test_a_wrong_loop_loses_the_items_that_it_should_and_no_others(
    runner: grade.Runner, tmp_path: Path, mistake: str
) -> None:
    version, lost = wrong_batches.MISTAKES[mistake]
    write_loop(tmp_path, version)
    assert lost_of_file(runner, tmp_path, "batch.py") == lost


# Code that does not try gets nothing

IMPORT_ALL = "import torch\n"
CONSTANTS = {
    "e_B is always 1": """
def effective_sample_size(log_ratio, mask):
    return torch.ones((), dtype=torch.float64)
""",
    "everything is 0 and depends on nothing": """
def effective_sample_size(log_ratio, mask):
    return torch.zeros((), dtype=torch.float64)
def group_advantage(reward, scale=True):
    return torch.zeros_like(reward)
def kl_divergence(logp, logp_behavior):
    return 0 * logp.sum(dim=-1)
def p3o_loss(logp, *others, **keywords):
    return 0 * logp.sum(), {}
""",
    "everything refuses everything": """
def refuse(*arguments, **keywords):
    raise FloatingPointError("response 0 1 2 3 4 5 6 cannot be used")
effective_sample_size = group_advantage = kl_divergence = p3o_loss = refuse
""",
    "every result is NaN": """
def effective_sample_size(log_ratio, mask):
    return torch.tensor(float("nan"))
def group_advantage(reward, scale=True):
    return reward * float("nan")
def kl_divergence(logp, logp_behavior):
    return logp.sum(dim=-1) * float("nan")
def p3o_loss(logp, *others, **keywords):
    return logp.sum() * float("nan"), {}
""",
    "every result is a text": """
def anything(*arguments, **keywords):
    return "all points, please"
effective_sample_size = group_advantage = kl_divergence = p3o_loss = anything
""",
}


@pytest.mark.parametrize("code", CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_gets_no_point(
    runner: grade.Runner, tmp_path: Path, code: str
) -> None:
    (tmp_path / "loss.py").write_text(IMPORT_ALL + code)
    all_items = {item.name for item in ITEMS if item.file == "loss.py"}
    assert lost_of_file(runner, tmp_path, "loss.py") == all_items


# Hostile code


def sentence_of(
    runner: grade.Runner, folder: Path, code: str, name: str = "1.1"
) -> str:
    """What the grader says of an item, if the file of the item has this code."""
    (folder / ITEM[name].file).write_text(code)
    result = grade.grade_item(runner, ITEM[name], folder, SEED)
    assert result.points == 0
    return result.sentence


E_B = "def effective_sample_size(log_ratio, mask):\n"


@pytest.mark.parametrize("where", ["import", "call"])
def test_an_endless_loop_is_stopped(
    runner: grade.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(grade, "CPU_SECONDS", 1)
    code = "while True: pass" if where == "import" else E_B + "    while True: pass"
    assert "computing and was stopped" in sentence_of(runner, tmp_path, code)


def test_an_endless_sleep_is_stopped(
    runner: grade.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grade, "WALL_SECONDS", 2)
    code = "import time\ntime.sleep(10**6)"
    assert "was stopped" in sentence_of(runner, tmp_path, code)


def test_a_submission_has_so_many_seconds_and_no_more(
    runner: grade.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grade, "SUBMISSION_SECONDS", 0)
    results = grade.grade(runner, STARTER, SEED)
    assert {result.sentence for result in results} == {
        "the 0 s of a submission were spent"
    }


HOSTILE = {
    "crash": ("import ctypes\nctypes.string_at(0)", "crashed"),
    "abort": ("import os\nos.abort()", "crashed"),
    "sys.exit": ("import sys\nsys.exit(0)", "SystemExit"),
    "os._exit": ("import os\nos._exit(0)", "without an answer"),
    "flood of output": (
        E_B + "    while True: print('flood' * 9999)",
        "File too large",
    ),
    "flood of answers": (E_B + "    return list(range(10**6))", "without an answer"),
    "memory bomb": (E_B + "    return bytearray(10**11)", "MemoryError"),
    "memory bomb of torch": (
        E_B + "    return __import__('torch').ones(10**11)",
        "RuntimeError",
    ),
    "deep recursion": (
        E_B + "    return effective_sample_size(1, 2)",
        "RecursionError",
    ),
    "deep answer": (
        E_B + "    x = []\n    for _ in range(10**5): x = [x]\n    return x",
        "RecursionError",
    ),
    "syntax error": ("def effective_sample_size(", "SyntaxError"),
    "fork": (E_B + "    __import__('os').fork()", "PermissionError"),
    "another program": (
        E_B + "    __import__('subprocess').run(['true'])",
        "PermissionError",
    ),
    "a signal to the grader": (
        E_B + "    import os\n    os.kill(os.getppid(), 9)",
        "PermissionError",
    ),
    "a socket": (E_B + "    __import__('socket').socket()", "PermissionError"),
    "the memory of the grader": (
        E_B + "    import os\n    open(f'/proc/{os.getppid()}/mem', 'rb')",
        "PermissionError",
    ),
}


@pytest.mark.parametrize("code, said", HOSTILE.values(), ids=HOSTILE)
def test_hostile_code_is_told_what_happened(
    runner: grade.Runner, tmp_path: Path, code: str, said: str
) -> None:
    assert said in sentence_of(runner, tmp_path, code)


@pytest.mark.parametrize(
    "attempt",
    [
        "os.remove(target)",
        "os.rename(target, target + '.gone')",
        "open(target, 'w')",
        "os.truncate(target, 0)",
        "os.chmod(target, 0)",
        "os.symlink(target, target + '.link')",
        "shutil.rmtree(os.path.dirname(target))",
    ],
)
def test_no_file_can_be_changed(
    runner: grade.Runner, tmp_path: Path, attempt: str
) -> None:
    submission, elsewhere = tmp_path / "submission", tmp_path / "elsewhere"
    submission.mkdir()
    elsewhere.mkdir()
    target = elsewhere / "expectations.json"
    for target in (elsewhere / "file", submission / "loss.py"):
        target.write_text("as it was")
        code = f"import os, shutil\ntarget = {str(target)!r}\n{E_B}    {attempt}"
        said = sentence_of(runner, submission, code)
        assert "PermissionError" in said
        assert target.read_text() in ("as it was", code)
        assert target.stat().st_mode & 0o777 != 0
        assert len(list(target.parent.iterdir())) == 1


READS = {
    "an import of the reference": f"""
import importlib.util
spec = importlib.util.spec_from_file_location("it", {str(ROOT / "loss.py")!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
effective_sample_size = module.effective_sample_size
""",
    "an import of the solution": f"""
import sys
sys.path.insert(0, {str(ASSIGNMENT / "solution")!r})
from batch import batch_quantities as effective_sample_size
""",
    "an import of the grader": """
from assignment.items import effective_sample_size
""",
    "an import through the grader's own modules": """
import sys
modules = [m for m in sys.modules.values() if "assignment" in str(vars(m))]
effective_sample_size = modules[0].effective_sample_size
""",
    "the text of the reference": f"""
exec(open({str(ROOT / "loss.py")!r}).read())
""",
    "the text of the reference, mapped by torch": f"""
import torch
size = {(ROOT / "loss.py").stat().st_size}
text = torch.from_file({str(ROOT / "loss.py")!r}, size=size, dtype=torch.uint8)
exec(bytes(text.tolist()).decode())
""",
    "the text of the reference, by another program": f"""
import subprocess
exec(subprocess.run(["cat", {str(ROOT / "loss.py")!r}], capture_output=True).stdout)
""",
    "the folder of the grader": f"""
import os
os.listdir({str(ASSIGNMENT)!r})
""",
}


@pytest.mark.parametrize("code", READS.values(), ids=READS)
def test_neither_reference_nor_grader_can_be_read(
    runner: grade.Runner, tmp_path: Path, code: str
) -> None:
    said = sentence_of(runner, tmp_path, code)
    denied = ("PermissionError", "NotFoundError", "AttributeError", "RuntimeError")
    assert any(error in said for error in denied), said


def test_answers_that_code_writes_itself_get_no_point(
    runner: grade.Runner, tmp_path: Path
) -> None:
    forged = json.dumps([{"value": 1.0, "gradients": []}] * 4)
    code = f"""
import os
for number in range(3, 30):
    try:
        os.write(number, {forged!r}.encode())
    except OSError:
        pass
os._exit(0)
"""
    assert sentence_of(runner, tmp_path, code)


def test_the_inputs_of_two_runs_differ_and_those_of_a_seed_do_not() -> None:
    for item in ITEMS:
        if item.file != "results.json":
            calls = [
                json.dumps([question.calls for question in item.questions(Draw(seed))])
                for seed in (1, 1, 2)
            ]
            assert calls[0] == calls[1]
            assert calls[0] != calls[2]


def test_links_pipes_and_long_files_stay_behind(tmp_path: Path) -> None:
    source, scratch = tmp_path / "source", tmp_path / "scratch"
    source.mkdir()
    scratch.mkdir()
    (source / "loss.py").symlink_to(ROOT / "loss.py")
    os.mkfifo(source / "batch.py")
    (source / "derivations.py").write_text("#" * (grade.LONGEST_FILE + 1))
    (source / "experiment.py").write_text("kept = True")
    grade.copy_submission(source, scratch)
    assert sorted(path.name for path in scratch.iterdir()) == [
        "experiment.py",
        "toy.py",
    ]


def test_after_all_that_the_reference_still_gets_all_points(
    runner: grade.Runner,
) -> None:
    # The same process has run every hostile submission above.
    assert sum(points_by_item(runner, None).values()) == sum(i.points for i in ITEMS)


# What the grader says and writes


def test_the_first_wrong_fact_is_a_sentence_with_numbers(
    runner: grade.Runner, tmp_path: Path
) -> None:
    write_loss(tmp_path, wrong_losses.CapOne)
    said = grade.grade_item(runner, ITEM["2.4"], tmp_path, SEED).sentence
    number = r"[\d.]+"
    expected = rf"at rho = {number}, e_B = {number} your weight is 1; expected {number}"
    assert re.fullmatch(expected, said), said


def run_grader(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ASSIGNMENT / "grade.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_one_submission_ends_with_its_points_and_has_three_reports(
    tmp_path: Path,
) -> None:
    done = run_grader(STARTER, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()[-1] == f"points: 0 of {sum(i.points for i in ITEMS)}"
    )
    summary = json.loads((tmp_path / "grade.json").read_text())
    assert summary["points"] == 0
    assert len(summary["items"]) == len(ITEMS)
    gradescope = json.loads((tmp_path / "results.json").read_text())
    assert gradescope["score"] == 0
    assert [t["max_score"] for t in gradescope["tests"]] == [i.points for i in ITEMS]
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert suite.get("tests") == suite.get("failures") == str(len(ITEMS))


def test_several_submissions_end_with_a_table(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    for student in ("ada", "emmy"):
        (folder / student).mkdir(parents=True)
    (folder / "emmy" / "experiment.py").write_text(
        (ASSIGNMENT / "solution/experiment.py").read_text()
    )
    done = run_grader("--all", folder, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert [row.split("|")[1].strip() for row in rows] == ["submission", "ada", "emmy"]
    assert [row.split("|")[6].strip() for row in rows[1:]] == ["0 of 85", "2 of 85"]
    assert (tmp_path / "out/emmy/grade.json").exists()
    assert (tmp_path / "out/table.md").read_text().strip() in done.stdout


def test_a_missing_folder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = run_grader(tmp_path / "nobody")
    assert done.returncode == 1
    assert done.stderr.strip() == f"grade.py: there is no folder {tmp_path / 'nobody'}"


def test_a_message_that_xml_cannot_hold_is_made_legible(
    runner: grade.Runner, tmp_path: Path
) -> None:
    code = E_B + "    raise ValueError('\\x00\\x1b[31m\\n<&>')"
    (tmp_path / "loss.py").write_text(code)
    results = [grade.grade_item(runner, ITEM["1.1"], tmp_path, SEED)]
    grade.write_reports(results, tmp_path / "out", "\x00", SEED)
    suite = ElementTree.parse(tmp_path / "out/junit.xml").getroot()
    assert "<&>" in suite.find("testcase/failure").get("message")


# results.json of part 4


def solution_results() -> dict:
    return json.loads((ASSIGNMENT / "solution/results.json").read_text())


def complaint(tmp_path: Path, results: object) -> str:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    with pytest.raises(Wrong) as caught:
        check_results(path)
    return str(caught.value)


def test_numbers_that_do_not_follow_from_the_values_are_named(tmp_path: Path) -> None:
    results = solution_results()
    results["comparison"]["high"] += 0.01
    assert "high in results.json is" in complaint(tmp_path, results)


def test_fewer_than_five_seeds_are_refused(tmp_path: Path) -> None:
    results = solution_results()
    for arm in results["arms"].values():
        arm["seeds"], arm["values"] = arm["seeds"][:4], arm["values"][:4]
    assert "fewer than 5 seeds" in complaint(tmp_path, results)


def test_arms_of_different_seeds_cannot_be_paired(tmp_path: Path) -> None:
    results = solution_results()
    list(results["arms"].values())[0]["seeds"] = [5, 6, 7, 8, 9]
    assert "same seeds" in complaint(tmp_path, results)


def test_an_experiment_without_a_mismatch_is_refused(tmp_path: Path) -> None:
    results = solution_results()
    for arm in results["arms"].values():
        arm["flags"] = [
            flag for flag in arm["flags"] if flag[2:].split("=")[0] not in MISMATCHES
        ]
    assert "no arm has a mismatch" in complaint(tmp_path, results)


def test_flags_that_train_py_does_not_have_are_refused(tmp_path: Path) -> None:
    results = solution_results()
    list(results["arms"].values())[0]["flags"].append("--temprature=1.2")
    assert "train.py refuses the flags" in complaint(tmp_path, results)


@pytest.mark.parametrize("results", [None, [], 3, {"arms": 3}, "text"])
def test_results_of_another_form_are_refused(tmp_path: Path, results: object) -> None:
    assert complaint(tmp_path, results)
