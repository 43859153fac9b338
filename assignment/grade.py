"""Grades a submission of the assignment, or many of them.

    python assignment/grade.py STUDENT_DIR
    python assignment/grade.py --solution
    python assignment/grade.py --all FOLDER --out runs/grades

What is printed of one submission ends with "points: X of Y"; of many, each has a line.
With --out that folder has NAME.txt for each submission, the same as is printed of one,
and grades.csv.

A student's code runs in processes of their own (runner.py, sandbox.py), and its answers
are compared here (items.py), so that code that reads the grader learns nothing. What a
process computes is limited, not how long the machine takes: points do not depend on
what else the machine has to do.
"""

import argparse
import csv
import json
import os
import pickle
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOLUTION = HERE / "solution"
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from assignment import sandbox  # noqa: E402
from assignment.items import ITEMS, Draw, Item, what_is_wrong  # noqa: E402
from assignment.results import wrong_results  # noqa: E402

PARTS = {
    "1": "e_B and its identities",
    "2": "the objective, its KL and its gradient",
    "3": "the trainer's batch",
    "4": "an experiment",
}
CPU_SECONDS = 3  # of an item; the slowest takes less than one
# An item that has not ended after so long was not let compute, or waits for something.
WALL_SECONDS = 60
LONGEST_FILE = 2**20  # bytes of a student's file


class Result(NamedTuple):
    """An item of a submission, graded."""

    name: str
    title: str
    points: int
    most: int
    sentence: str  # the first thing that is wrong; empty if nothing is
    cpu_seconds: float = 0.0
    graded: bool = True  # False where the machine failed, and not the code


class Runner:
    """The process that runs students' code (runner.py)."""

    def __init__(self, trusted: bool) -> None:
        self.trusted = trusted
        libraries = ("OMP", "MKL", "OPENBLAS")
        one_thread = {f"{name}_NUM_THREADS": "1" for name in libraries}
        self.process = subprocess.Popen(
            [sys.executable, "-I", HERE / "runner.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | one_thread,
            cwd="/",
        )

    def ask(
        self, folder: Path, item: Item, calls: list[list[Any]]
    ) -> tuple[str, float, bytes]:
        """How the code ended, its seconds of computing, and the answers it wrote."""
        job = {
            "folder": str(folder),
            "module": Path(item.file).stem,
            "function": item.function,
            "calls": calls,
            "trusted": self.trusted,
            "cpu_seconds": CPU_SECONDS,
            "wall_seconds": WALL_SECONDS,
        }
        pickle.dump(job, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)


@contextmanager
def start_runner(trusted: bool) -> Iterator[Runner]:
    runner = Runner(trusted)
    try:
        yield runner
    finally:
        runner.process.communicate()


def read_answers(written: bytes) -> list[dict[str, Any]]:
    """The answers of a student's process, which may be anything; none if unreadable."""
    try:
        answers = json.loads(written)
    except (ValueError, RecursionError):
        return []
    is_list = isinstance(answers, list)
    return answers if is_list and all(isinstance(a, dict) for a in answers) else []


def grade_item(runner: Runner, item: Item, folder: Path, seed: int) -> Result:
    """One item of the submission in this scratch folder."""
    lost = Result(item.name, item.title, 0, item.points, "")
    if not (folder / item.file).is_file():
        return lost._replace(sentence=f"there is no {item.file} that can be taken")
    cases = item.draw(Draw(seed))
    calls = [arguments for _, arguments in cases]
    how, cpu_seconds, written = runner.ask(folder, item, calls)
    lost = lost._replace(cpu_seconds=cpu_seconds)
    answers = read_answers(written)
    if answers:
        sentence = legible(what_is_wrong(item, cases, answers))
        return lost._replace(points=0 if sentence else item.points, sentence=sentence)
    if cpu_seconds >= CPU_SECONDS:
        sentence = f"took more than {CPU_SECONDS} s of computing"
    elif how in ("late", "SIGKILL"):
        sentence = f"neither ended nor computed for {CPU_SECONDS} s: grade it again"
        return lost._replace(sentence=f"{item.file} {sentence}", graded=False)
    else:
        sentence = f"ended without an answer {how}".strip()
    return lost._replace(sentence=f"{item.file} {sentence}")


def legible(text: str) -> str:
    """One line that any terminal can show."""
    return "".join(c if c.isprintable() else " " for c in text)[:500]


def grade_results(folder: Path) -> Result:
    """The item that runs no code."""
    path = folder / "results.json"
    sentence = "there is no results.json that can be taken"
    if path.is_file():
        sentence = legible(wrong_results(path))
    points = 0 if sentence else 3
    return Result("4.2", "the form of results.json", points, 3, sentence)


def copy_submission(source: Path, scratch: Path) -> None:
    """The Python files and results.json of a submission, and the file that is given.

    A link, a pipe or a file that is too long stays behind. The reference, solution/,
    has the repository's loss.py.
    """
    for path in sorted(source.iterdir()):
        wanted = path.suffix == ".py" or path.name == "results.json"
        if wanted and path.is_file() and not path.is_symlink():
            if path.stat().st_size <= LONGEST_FILE:
                shutil.copyfile(path, scratch / path.name)
    if source == SOLUTION:
        shutil.copyfile(ROOT / "loss.py", scratch / "loss.py")
    shutil.copyfile(HERE / "starter" / "toy.py", scratch / "toy.py")


def grade(runner: Runner, source: Path, seed: int) -> list[Result]:
    """All items of the submission in this folder."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        copy_submission(source, scratch)
        results = []
        for number, item in enumerate(ITEMS):
            if item.file == "batch.py":
                # A mistake in the student's loss.py has cost its points by now.
                shutil.copyfile(ROOT / "loss.py", scratch / "loss.py")
            results.append(grade_item(runner, item, scratch, seed + number))
        return [*results, grade_results(scratch)]


def total(results: list[Result]) -> str:
    points = sum(result.points for result in results)
    return f"{points} of {sum(result.most for result in results)}"


def lost_items(results: list[Result]) -> list[str]:
    """The items for which the code got no points."""
    return [r.name for r in results if r.graded and r.points < r.most]


def report(results: list[Result], seed: int) -> str:
    """What is printed of one submission. What was said before is not said again."""
    lines = []
    said: dict[str, str] = {"": ""}  # each sentence, and the item that had it first
    for part, title in PARTS.items():
        of_part = [result for result in results if result.name[0] == part]
        lines.append(f"\nPart {part}: {title} ({total(of_part)})")
        for result in of_part:
            got = f"{result.points} of {result.most}" if result.graded else "not graded"
            first = said.setdefault(result.sentence, result.name)
            again = f" (as in {first})" if first not in ("", result.name) else ""
            lines.append(f"  {result.name}  {got:>6}  {result.title}{again}")
            if first == result.name:
                lines.append(f"               {result.sentence}")
    lines.append(f"\n--seed {seed} repeats these inputs")
    lines.append(f"points: {total(results)}")
    return "\n".join(lines)


def line_of(name: str, results: list[Result]) -> str:
    """A submission among many."""
    lost = ", ".join(lost_items(results)) or "nothing"
    again = ", ".join(result.name for result in results if not result.graded)
    line = f"{name}: {total(results)} points, lost {lost}"
    return f"{line}; not graded: {again}" if again else line


def write_reports(graded: dict[str, list[Result]], seed: int, out: Path) -> None:
    """NAME.txt for each submission, and grades.csv with a line for each.

    An item that was not graded is empty in grades.csv.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "grades.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        items = [result.name for result in next(iter(graded.values()))]
        writer.writerow(["submission", "points", *items, "first sentence"])
        for name, results in graded.items():
            (out / f"{name}.txt").write_text(report(results, seed) + "\n")
            points = [result.points if result.graded else "" for result in results]
            sentences = [result.sentence for result in results if result.sentence]
            all_points = sum(result.points for result in results)
            writer.writerow([name, all_points, *points, *sentences[:1]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="of a submission")
    parser.add_argument("--all", type=Path, help="a folder of submissions")
    parser.add_argument("--solution", action="store_true", help="grade the reference")
    parser.add_argument("--out", type=Path, help="a folder for the reports")
    parser.add_argument("--seed", type=int, help="of the inputs; by default a secret")
    parser.add_argument(
        "--trust", action="store_true", help="your own code, without an enclosure"
    )
    args = parser.parse_args()
    folder = SOLUTION if args.solution else args.all or args.folder
    if folder is None or not folder.is_dir():
        sys.exit(f"grade.py: give a folder, --all FOLDER or --solution, not {folder}")
    if not args.trust and not sandbox.is_available():
        sys.exit(
            "grade.py: this machine cannot enclose foreign code (it takes Linux 5.13 "
            "or later on x86-64, with Landlock). --trust grades your own code without."
        )
    seed = secrets.randbits(40) if args.seed is None else args.seed
    folders = [folder]
    if args.all:
        folders = [path for path in sorted(folder.iterdir()) if path.is_dir()]
        if not folders:
            sys.exit(f"grade.py: {folder} has no folders, one for each submission")
    graded = {}
    with start_runner(args.trust) as runner:
        for folder in folders:
            name = legible(folder.resolve().name)
            graded[name] = grade(runner, folder, seed)
            said = (
                line_of(name, graded[name]) if args.all else report(graded[name], seed)
            )
            print(said, flush=True)
    if args.all:
        lost = Counter(item for each in graded.values() for item in lost_items(each))
        counts = ", ".join(f"{item} ({count})" for item, count in lost.most_common())
        print(f"{len(graded)} submissions, --seed {seed}; lost by how many: {counts}")
    if args.out:
        write_reports(graded, seed, args.out)


if __name__ == "__main__":
    main()
