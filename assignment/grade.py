"""Grades a submission of the assignment, or many of them.

    python assignment/grade.py STUDENT_DIR
    python assignment/grade.py --solution
    python assignment/grade.py --all FOLDER --out runs/grades

The last line says "points: X of Y". With --out DIR, grade.json, junit.xml and
results.json (the one that Gradescope's autograders read) stand in DIR, or, of several
submissions, in a folder of DIR each, with a table of all in table.md.

A student's code runs in processes of their own (runner.py, sandbox.py), and its answers
are compared here (items.py), so that code that reads the grader learns nothing.
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
from xml.etree import ElementTree

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from assignment import sandbox  # noqa: E402
from assignment.items import (  # noqa: E402
    ITEMS,
    PARTS,
    Answer,
    Draw,
    Item,
    Wrong,
    check_results,
)

CPU_SECONDS = 10  # of an item; the slowest takes less than one
WALL_SECONDS = 40  # of an item
SUBMISSION_SECONDS = 150  # of all items
MEMORY_BYTES = 3 * 2**30
FILE_BYTES = 4 * 2**20  # of what a process prints, and of its answers
LONGEST_FILE = 2**20  # bytes of a student's file
SHOWN = 500  # characters of what the student's code printed
# Files that are the grader's, whatever a student hands in under their name.
GIVEN = ("toy.py",)


class Result(NamedTuple):
    """An item of a submission, graded."""

    item: Item
    points: int
    sentence: str  # the first thing that is wrong; empty if nothing is
    printed: str = ""
    seconds: float = 0.0


class Runner:
    """The process that runs students' code (runner.py)."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-I", HERE / "runner.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd="/",
        )

    def ask(
        self, folder: Path, module: str, calls: list[dict[str, Any]]
    ) -> tuple[str, list[dict[str, Any]] | None, str]:
        """How the process ended, the answers to the calls if it gave them, its prints.

        An answer is what the student's process wrote, and may be anything.
        """
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
                "wall_seconds": WALL_SECONDS,
                "memory_bytes": MEMORY_BYTES,
                "file_bytes": FILE_BYTES,
            }
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            ended = self.process.stdout.readline().strip()
            if not ended:
                raise RuntimeError("grade.py: the process that runs the code has ended")
            shown = ""
            if printed.exists():
                shown = printed.read_bytes()[:SHOWN].decode(errors="replace")
            return ended, read_answers(output, len(calls)), shown

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
    if answers[0].get("while") == "importing":
        return [answers[0]] * count
    return answers if len(answers) == count else None


@contextmanager
def start_runner(trusted: bool) -> Iterator[Runner]:
    runner = Runner(trusted)
    try:
        yield runner
    finally:
        runner.close()


WHY_NO_ANSWER = {
    "waited": f"it was not done after {WALL_SECONDS} s and was stopped",
    "SIGKILL": f"it took {CPU_SECONDS} s of computing and was stopped",
    "SIGXCPU": f"it took {CPU_SECONDS} s of computing and was stopped",
    "SIGSEGV": "it crashed",
    "SIGABRT": "it crashed",
    "ended": "its process ended without an answer",
    "left": "its process ended without an answer",
}


def grade_item(runner: Runner, item: Item, folder: Path, seed: int) -> Result:
    """One item of the submission in this scratch folder."""
    begin = time.monotonic()
    if item.file == "results.json":
        try:
            check_results(folder / item.file)
        except Wrong as wrong:
            return Result(item, 0, str(wrong))
        return Result(item, item.points, "")
    if not (folder / item.file).is_file():
        return Result(item, 0, f"there is no {item.file}")
    questions = item.questions(Draw(seed))
    calls = [
        asked | {"function": question.function}
        for question in questions
        for asked in question.calls
    ]
    module = Path(item.file).stem
    ended, answers, printed = runner.ask(folder, module, calls)
    if ended == "waited":
        # A machine that stands still for a while must not cost a student points.
        ended, answers, printed = runner.ask(folder, module, calls)
    seconds = round(time.monotonic() - begin, 3)
    if answers is None:
        why = WHY_NO_ANSWER.get(ended, f"its process ended with {ended}")
        return Result(item, 0, f"no answer from {item.file}: {why}", printed, seconds)
    place = 0
    for question in questions:
        of_question = answers[place : place + len(question.calls)]
        place += len(question.calls)
        sentence = first_wrong(question.check, question.function, of_question)
        if sentence:
            return Result(item, 0, sentence, printed, seconds)
    return Result(item, item.points, "", printed, seconds)


def first_wrong(check: Any, function: str, answers: list[dict[str, Any]]) -> str:
    """What is wrong with the answers to a question; empty if nothing is."""
    try:
        check(*[Answer(function, answer) for answer in answers])
    except Wrong as wrong:
        return legible(str(wrong))
    except Exception as error:
        # What came back may have any form; it is the student's mistake, not ours.
        return legible(f"{function} returned something that cannot be read: {error}")
    return ""


def legible(text: str) -> str:
    """One line that any file can hold."""
    return "".join(c if c.isprintable() else " " for c in text)[:SHOWN]


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


def grade(runner: Runner, source: Path | None, seed: int) -> list[Result]:
    """All items of a submission; of the reference where source is None."""
    begin = time.monotonic()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        if source is None:
            copy_solution(scratch)
        else:
            copy_submission(source, scratch)
        for number, item in enumerate(ITEMS):
            if time.monotonic() - begin > SUBMISSION_SECONDS:
                sentence = f"the {SUBMISSION_SECONDS} s of a submission were spent"
                results.append(Result(item, 0, sentence))
                continue
            results.append(grade_item(runner, item, scratch, seed + number))
    return results


def total(results: list[Result]) -> tuple[int, int]:
    """The points, and the most that there are."""
    points = sum(result.points for result in results)
    return points, sum(result.item.points for result in results)


def report(results: list[Result]) -> str:
    """What is printed of a submission."""
    lines = []
    for part, title in PARTS.items():
        of_part = [result for result in results if result.item.part == part]
        points, most = total(of_part)
        lines.append(f"\nPart {part}: {title} ({points} of {most})")
        for result in of_part:
            item = result.item
            got = f"{result.points} of {item.points}"
            lines.append(f"  {item.name:>5}  {got:>6}  {item.title}")
            if result.sentence:
                lines.append(f"                 {result.sentence}")
    points, most = total(results)
    lines.append(f"\npoints: {points} of {most}")
    return "\n".join(lines)


def write_reports(results: list[Result], out: Path, name: str, seed: int) -> None:
    """grade.json, junit.xml and Gradescope's results.json in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    points, most = total(results)
    summary = {
        "submission": name,
        "points": points,
        "of": most,
        "seed": seed,
        "items": [
            {
                "item": result.item.name,
                "title": result.item.title,
                "points": result.points,
                "of": result.item.points,
                "wrong": result.sentence,
                "printed": result.printed,
                "seconds": result.seconds,
            }
            for result in results
        ],
    }
    write_json(out / "grade.json", summary)
    gradescope = {
        "score": points,
        "tests": [
            {
                "number": result.item.name,
                "name": result.item.title,
                "score": result.points,
                "max_score": result.item.points,
                "status": "failed" if result.sentence else "passed",
                "output": result.sentence,
                "visibility": "visible",
            }
            for result in results
        ],
    }
    write_json(out / "results.json", gradescope)
    failures = sum(bool(result.sentence) for result in results)
    suite = ElementTree.Element(
        "testsuite", name=legible(name), tests=str(len(results)), failures=str(failures)
    )
    for result in results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"part{result.item.part}",
            name=f"{result.item.name} {result.item.title}",
            time=str(result.seconds),
        )
        if result.sentence:
            ElementTree.SubElement(case, "failure", message=result.sentence)
    ElementTree.ElementTree(suite).write(out / "junit.xml", "utf-8", True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def table(graded: dict[str, list[Result]]) -> str:
    """The submissions by points of each part, as Markdown."""
    parts = " | ".join(f"part {part}" for part in PARTS)
    rows = [f"| submission | {parts} | points | first thing to look at |"]
    rows.append("|---" * (len(PARTS) + 3) + "|")
    for name, results in graded.items():
        cells = [legible(name).replace("|", " ")]
        for part in PARTS:
            of_part = [result for result in results if result.item.part == part]
            cells.append("{} of {}".format(*total(of_part)))
        cells.append("{} of {}".format(*total(results)))
        wrong = [result for result in results if result.sentence]
        first = ""
        if wrong:
            first = f"{wrong[0].item.name}: {wrong[0].sentence}".replace("|", "\\|")
        rows.append("| " + " | ".join([*cells, first]) + " |")
    return "\n".join(rows)


def submissions(args: argparse.Namespace) -> dict[str, Path | None]:
    """Names and folders of what is to be graded. Exits where there is nothing."""
    if args.solution:
        return {"the reference solution": None}
    folders = list(args.folder)
    if args.all:
        if not args.all.is_dir():
            sys.exit(f"grade.py: there is no folder {args.all}")
        folders += sorted(path for path in args.all.iterdir() if path.is_dir())
    if not folders:
        sys.exit("grade.py: give a folder, several, --all FOLDER, or --solution")
    named: dict[str, Path | None] = {}
    for folder in folders:
        if not folder.is_dir():
            sys.exit(f"grade.py: there is no folder {folder}")
        name = folder.resolve().name
        if name in named:
            name = str(folder).strip("/").replace("/", "-")
        named[name] = folder
    return named


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
    seed = secrets.randbits(40) if args.seed is None else args.seed
    graded = {}
    with start_runner(args.trust) as runner:
        for name, folder in named.items():
            graded[name] = grade(runner, folder, seed)
            if args.out:
                out = args.out if len(named) == 1 else args.out / name
                write_reports(graded[name], out, name, seed)
            if len(named) == 1:
                print(report(graded[name]))
            else:
                points, most = total(graded[name])
                print(f"{name}: points: {points} of {most}", flush=True)
    if len(named) > 1:
        print("\n" + table(graded))
        if args.out:
            (args.out / "table.md").write_text(table(graded) + "\n")


if __name__ == "__main__":
    main()
