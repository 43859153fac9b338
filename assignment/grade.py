"""Grades a submission of the assignment, or many of them.

    python assignment/grade.py STUDENT_DIR
    python assignment/grade.py --solution
    python assignment/grade.py --all FOLDER --out runs/grades

The last line says "points: X of Y". With --out DIR, grade.json, junit.xml and
results.json (the one that Gradescope's autograders read) stand in DIR, or, of several
submissions, in a folder of DIR each, with all of them in table.md and table.csv.

A student's code runs in processes of their own (runner.py, sandbox.py), and its answers
are compared here (items.py), so that code that reads the grader learns nothing. What a
process computes is limited, not how long the machine takes: points do not depend on
what else the machine has to do.
"""

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

try:
    import scipy  # noqa: F401
    import torch  # noqa: F401
except ImportError as error:
    sys.exit(
        f"grade.py: {error}, in {sys.executable}. Run it with .venv/bin/python, which "
        "the repository's README.md installs"
    )

from assignment import sandbox  # noqa: E402
from assignment.items import (  # noqa: E402
    ITEMS,
    Answer,
    Draw,
    Item,
    Question,
    Wrong,
    check_results,
    what_was_raised,
)
from assignment.reports import (  # noqa: E402
    Graded,
    Result,
    legible,
    report,
    table,
    total,
    write_csv,
    write_reports,
)

CPU_SECONDS = 5  # of an item; the slowest takes less than one
SLEEP_SECONDS = 5  # of an item, in which its process neither computes nor wants to
# An item that has not ended after so long, though it did not sleep, was not let compute
# by the machine. That is not the student's fault.
WALL_SECONDS = 300
MEMORY_BYTES = 3 * 2**30
FILE_BYTES = 4 * 2**20  # of what a process prints, and of its answers
CRASHES = ("SIGSEGV", "SIGABRT")  # signals that end a process
LONGEST_FILE = 2**20  # bytes of a student's file
SHOWN = 500  # characters of what the student's code printed
# Files that are the grader's, whatever a student hands in under their name.
GIVEN = ("toy.py",)
FILES = list(dict.fromkeys(item.file for item in ITEMS))  # of a submission


class Ended(NamedTuple):
    """How a student's process ended, and what it left."""

    how: str
    cpu_seconds: float
    answers: list[dict[str, Any]] | None  # what it wrote, and may be anything
    printed: str

    def is_the_machines_fault(self) -> bool:
        """Whether it was not let compute, or killed though it computed little."""
        killed = self.how == "SIGKILL" and self.cpu_seconds < CPU_SECONDS / 2
        return self.how == "waited" or killed

    def crashed(self) -> bool:
        return self.how in CRASHES


class Runner:
    """The process that runs students' code (runner.py)."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted
        libraries = ("OMP", "MKL", "OPENBLAS")
        environment = os.environ | {f"{name}_NUM_THREADS": "1" for name in libraries}
        self.process = subprocess.Popen(
            [sys.executable, "-I", HERE / "runner.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd="/",
        )

    def ask(self, folder: Path, module: str, calls: list[dict[str, Any]]) -> Ended:
        """What became of these calls of a module of the submission."""
        with tempfile.TemporaryDirectory() as scratch:
            output, printed = Path(scratch, "answers.json"), Path(scratch, "printed")
            job = {
                "folder": str(folder),
                "module": module,
                "calls": calls,
                "output": str(output),
                "printed": str(printed),
                "trusted": self.trusted,
                "cpu_seconds": CPU_SECONDS,
                "sleep_seconds": SLEEP_SECONDS,
                "wall_seconds": WALL_SECONDS,
                "memory_bytes": MEMORY_BYTES,
                "file_bytes": FILE_BYTES,
            }
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
            if not line:
                raise RuntimeError("grade.py: the process that runs the code has ended")
            ended = json.loads(line)
            shown = ""
            if printed.exists():
                shown = printed.read_bytes()[:SHOWN].decode(errors="replace")
            answers = read_answers(output, len(calls))
            return Ended(ended["ended"], ended["cpu_seconds"], answers, shown)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def read_answers(path: Path, count: int) -> list[dict[str, Any]] | None:
    """The answers to `count` calls; None where there are no such."""
    try:
        answers = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(answers, list) or not answers:
        return None
    if not all(isinstance(answer, dict) for answer in answers):
        return None
    # One that stands for all of them says what it came from.
    return answers if len(answers) == count or "while" in answers[0] else None


@contextmanager
def start_runner(trusted: bool) -> Iterator[Runner]:
    runner = Runner(trusted)
    try:
        yield runner
    finally:
        runner.close()


def why_no_answer(how: str) -> str:
    """The end of a process that has not answered, in a sentence."""
    reasons = {
        "slept": f"it waited for {SLEEP_SECONDS} s without computing",
        "SIGKILL": f"it took more than {CPU_SECONDS} s of computing",
        "SIGXCPU": f"it took more than {CPU_SECONDS} s of computing",
        **dict.fromkeys(CRASHES, "it crashed"),
        "ended": "its process ended without an answer",
        "left": "its process ended without an answer",
    }
    return reasons.get(how, f"its process ended with {how}")


def grade_item(runner: Runner, item: Item, folder: Path, seed: int) -> Result:
    """One item of the submission in this scratch folder."""
    if item.file == "results.json":
        return grade_results(item, folder)
    if not (folder / item.file).is_file():
        return Result(item, 0, f"there is no {item.file} that can be taken")
    questions = item.questions(Draw(seed))
    calls = [
        asked | {"function": question.function}
        for question in questions
        for asked in question.calls
    ]
    module = Path(item.file).stem
    ended = runner.ask(folder, module, calls)
    # A crash may be chance: torch crashed once in code that has run many hundred times,
    # with ranks as threads of a forked process.
    if ended.is_the_machines_fault() or ended.crashed():
        ended = runner.ask(folder, module, calls)
    if ended.is_the_machines_fault():
        sentence = "this machine has let the code compute too little, twice: try again"
        return Result(item, 0, sentence, ended.printed, ended.cpu_seconds, False)
    sentence = what_is_wrong(item, questions, ended)
    points = 0 if sentence else item.points
    return Result(item, points, sentence, ended.printed, ended.cpu_seconds)


def grade_results(item: Item, folder: Path) -> Result:
    """The item that runs no code."""
    try:
        check_results(folder / item.file)
    except Wrong as wrong:
        return Result(item, 0, str(wrong))
    return Result(item, item.points, "")


def what_is_wrong(item: Item, questions: list[Question], ended: Ended) -> str:
    """The first wrong answer to the questions of an item; empty if none is."""
    if ended.answers is None:
        return f"no answer from {item.file}: {why_no_answer(ended.how)}"
    answers = iter(ended.answers)
    if "while" in ended.answers[0]:
        return why_no_more(item, ended.answers[0])
    for question in questions:
        of_question = [next(answers) for _ in question.calls]
        sentence = first_wrong(question, of_question)
        if sentence:
            return sentence
    return ""


def why_no_more(item: Item, answer: dict[str, Any]) -> str:
    """What kept a process from answering: an import, or an endless function."""
    doing = answer["while"]
    if answer.get("error") == "OutOfTime":
        where = f" ({answer['where']})" if answer.get("where") else ""
        subject = f"the import of {item.file}" if doing == "importing" else doing
        sentence = f"{subject} took more than {CPU_SECONDS} s of computing{where}"
        return legible(f"{sentence} and was stopped")
    return legible(f"{item.file} cannot be imported: {what_was_raised(answer)}")


def first_wrong(question: Question, answers: list[dict[str, Any]]) -> str:
    """What is wrong with the answers to a question; empty if nothing is."""
    function = question.function
    try:
        question.check(*[Answer(function, answer) for answer in answers])
    except Wrong as wrong:
        return legible(str(wrong))
    except Exception as error:
        # What came back may have any form; it is the student's mistake, not ours.
        return legible(f"{function} returned something that cannot be read: {error}")
    return ""


def copy_submission(source: Path, scratch: Path) -> None:
    """The Python files and results.json of a submission, and the files that are given.

    A link, a pipe or a file that is too long stays behind.
    """
    for path in sorted(source.iterdir()):
        wanted = path.suffix == ".py" or path.name == "results.json"
        if wanted and path.is_file() and not path.is_symlink():
            if path.stat().st_size <= LONGEST_FILE:
                shutil.copyfile(path, scratch / path.name)
    for name in GIVEN:
        shutil.copyfile(HERE / "starter" / name, scratch / name)


def copy_solution(scratch: Path) -> None:
    """The reference: loss.py is the repository's, the rest stands in solution/."""
    copy_submission(HERE / "solution", scratch)
    shutil.copyfile(ROOT / "loss.py", scratch / "loss.py")


def grade(runner: Runner, source: Path | None, seed: int) -> Graded:
    """All items of a submission; of the reference where source is None."""
    begin = time.monotonic()
    if source is not None and (sentence := nothing_to_grade(source)):
        return Graded([Result(item, 0, sentence) for item in ITEMS], 0.0)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        if source is None:
            copy_solution(scratch)
        else:
            copy_submission(source, scratch)
        results = [
            grade_item(runner, item, scratch, seed + number)
            for number, item in enumerate(ITEMS)
        ]
    return Graded(results, time.monotonic() - begin)


def nothing_to_grade(folder: Path) -> str:
    """Where a folder has no file of a submission: a sentence that says where one is."""
    if any((folder / name).exists() for name in FILES):
        return ""
    sentence = f"{folder.name} has no {', no '.join(FILES)}"
    for pattern in ("*/", "*/*/"):
        for name in FILES:
            for path in sorted(folder.glob(pattern + name)):
                nested = path.parent.relative_to(folder.parent)
                return legible(f"{sentence}: do you mean {nested}?")
    return legible(sentence)


def submissions(args: argparse.Namespace) -> dict[str, Path | None]:
    """Names and folders of what is to be graded. Exits where there is nothing."""
    if args.solution:
        return {"the reference solution": None}
    folders = list(args.folder)
    if args.all:
        folders += folders_in(args.all)
    if not folders:
        sys.exit("grade.py: give a folder, several, --all FOLDER, or --solution")
    named: dict[str, Path | None] = {}
    for folder in folders:
        check_folder(folder)
        name = folder.resolve().name
        if name in named:
            name = str(folder).strip("/").replace("/", "-")
        named[name] = folder
    return named


def folders_in(folder: Path) -> list[Path]:
    """The submissions of --all. What is no folder is named, and left out."""
    check_folder(folder)
    entries = [path for path in sorted(folder.iterdir()) if path.name[0] != "."]
    found = [path for path in entries if path.is_dir()]
    others = [path.name for path in entries if not path.is_dir()]
    if others:
        print(f"left out, as these are no folders: {legible(', '.join(others))}")
    if not found:
        sys.exit(f"grade.py: {folder} has no folders in it, one for each submission")
    return found


def check_folder(folder: Path) -> None:
    if folder.is_file():
        sys.exit(f"grade.py: {folder} is a file; give the folder that it is in")
    if not folder.is_dir():
        sys.exit(f"grade.py: there is no folder {folder}")


def check_out(reports: list[Path], submitted: list[Path | None]) -> None:
    """Exits where a folder of reports, which has a results.json, is a submission's."""
    taken = {folder.resolve() for folder in submitted if folder is not None}
    for folder in reports:
        if folder.resolve() in taken:
            sys.exit(
                f"grade.py: the reports in {folder} would replace a submission's "
                "results.json: give --out another folder"
            )


def check_machine(trusted: bool) -> None:
    """Exits where students' code could not be kept from this machine."""
    if trusted:
        return
    if not sandbox.is_available():
        sys.exit(
            "grade.py: this machine cannot enclose foreign code (it takes Linux 5.13 "
            "or later on x86-64, with Landlock). --trust grades your own code without."
        )
    for system in ("/usr", "/lib", sys.prefix, sys.base_prefix):
        if ROOT.is_relative_to(Path(system).resolve()):
            sys.exit(
                f"grade.py: students' code may read {system}, and this repository is "
                "in it, solution included: move it somewhere else"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="*", type=Path, help="of a submission")
    parser.add_argument("--all", type=Path, help="a folder of submissions")
    parser.add_argument(
        "--solution", action="store_true", help="grade the reference solution"
    )
    parser.add_argument("--out", type=Path, help="a folder for the reports")
    parser.add_argument("--seed", type=int, help="of the inputs; by default a secret")
    parser.add_argument(
        "--trust", action="store_true", help="your own code, without an enclosure"
    )
    args = parser.parse_args()
    check_machine(args.trust)
    named = submissions(args)
    are_many = args.all is not None or len(named) > 1
    if args.out:
        reports = [args.out / name for name in named] if are_many else [args.out]
        check_out(reports, list(named.values()))
    seed = secrets.randbits(40) if args.seed is None else args.seed
    with start_runner(args.trust) as runner:
        if are_many:
            grade_many(runner, named, seed, args.out)
        else:
            grade_one(runner, *named.popitem(), seed, args.out)


def grade_one(
    runner: Runner, name: str, folder: Path | None, seed: int, out: Path | None
) -> None:
    """Grade a submission and print its report. Exits where it has no file."""
    results = grade(runner, folder, seed).results
    if out:
        write_reports(results, out, name, seed)
    if folder is not None and (sentence := nothing_to_grade(folder)):
        sys.exit(f"grade.py: {sentence}")
    print(report(results, seed))


def grade_many(
    runner: Runner, named: dict[str, Path | None], seed: int, out: Path | None
) -> None:
    """Grade submissions, print a line for each as it is done, and then the table."""
    begin = time.monotonic()
    graded = {}
    for name, folder in named.items():
        graded[name] = grade(runner, folder, seed)
        if out:
            write_reports(graded[name].results, out / name, name, seed)
        points, most = total(graded[name].results)
        print(f"{legible(name)}: points: {points} of {most}", flush=True)
    text = table(graded, seed, time.monotonic() - begin)
    print("\n" + text)
    if out:
        (out / "table.md").write_text(text + "\n")
        write_csv(out / "table.csv", graded, seed)


if __name__ == "__main__":
    main()
