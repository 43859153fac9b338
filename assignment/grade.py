"""Grades a submission of the assignment, or many of them.

    python assignment/grade.py STUDENT_DIR
    python assignment/grade.py STUDENT_DIR --only 2.3
    python assignment/grade.py --solution
    python assignment/grade.py --all FOLDER --out runs/grades

What is printed of one submission ends with "points: X of Y"; of many, each has a line.
With --out that folder has NUMBER-NAME.txt for each submission, the same as is printed
of one, and grades.csv. Both are written as soon as a submission is graded.

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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOLUTION = HERE / "solution"
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from assignment.items import ITEMS, Draw, Item, what_is_wrong  # noqa: E402

PARTS = {
    "1": "e_B and its identities",
    "2": "the objective, its KL and its gradient",
    "3": "the trainer's batch",
    "4": "an experiment",
}
# The item that runs no code.
FORM = Item(
    "4.2", 3, "the form of results.json", "results.json", "", lambda draw: iter(())
)
ALL_ITEMS = [*ITEMS, FORM]
CPU_SECONDS = 3  # of an item; the slowest takes less than one
# An item that has not ended after so long was not let compute, or waits for something.
WALL_SECONDS = 60
LONGEST_FILE = 2**20  # bytes of a student's file
MOST_FILES = 50  # of a submission
MOST_PRINTED = 2000  # bytes of what an item prints
# What a student's process knows of this one's environment.
ENVIRONMENT = ["PATH", "HOME", "TMPDIR", "LANG", "LD_LIBRARY_PATH", "SYSTEMROOT"]
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}


class Result(NamedTuple):
    """An item of a submission, graded."""

    name: str
    title: str
    points: int
    most: int
    sentence: str  # the first thing that is wrong; empty if nothing is
    graded: bool = True  # False where the machine failed, and not the code
    printed: str = ""  # by the code


class Runner:
    """The process that runs students' code (runner.py)."""

    def __init__(self, trusted: bool, become_nobody: bool = False) -> None:
        self.trusted = trusted
        self.become_nobody = become_nobody
        self.start()

    def start(self) -> None:
        known = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        runner = str(HERE / "runner.py")
        # -I leaves out the packages in a user's home, which foreign code cannot read.
        words = [runner, "--trust"] if self.trusted else ["-I", runner]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=known | NO_GPU | ONE_THREAD,
        )

    def ask(
        self, folder: Path, item: Item, calls: list[list[Any]]
    ) -> tuple[str, float, bytes, bytes]:
        """How the code ended, its seconds of computing, its answers, what it printed.

        The runner hands on neither of the last two: a later student's code could find
        them in its memory.
        """
        with tempfile.TemporaryDirectory() as private:
            answers, printed = Path(private, "answers"), Path(private, "printed")
            job = {
                "folder": str(folder),
                "module": Path(item.file).stem,
                "function": item.function,
                "calls": calls,
                "answers": str(answers),
                "printed": str(printed),
                "become_nobody": self.become_nobody,
                "cpu_seconds": CPU_SECONDS,
                "wall_seconds": WALL_SECONDS,
            }
            try:
                pickle.dump(job, self.process.stdin)
                self.process.stdin.flush()
                how, cpu_seconds = pickle.load(self.process.stdout)
            except (EOFError, BrokenPipeError):
                how, cpu_seconds = "gone", 0.0
                self.process.wait()
                self.start()
            written = [
                path.read_bytes() if path.is_file() else b""
                for path in (answers, printed)
            ]
            return how, cpu_seconds, *written


@contextmanager
def start_runner(trusted: bool, become_nobody: bool = False) -> Iterator[Runner]:
    runner = Runner(trusted, become_nobody)
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


def not_graded(item: Item, why: object) -> Result:
    """What an item gets where the code may be right."""
    sentence = legible(f"{why}")
    return Result(item.name, item.title, 0, item.points, sentence, graded=False)


def grade_item(runner: Runner, item: Item, folder: Path, seed: int) -> Result:
    """One item of the submission in this scratch folder."""
    lost = Result(item.name, item.title, 0, item.points, "")
    if not (folder / item.file).is_file():
        return lost._replace(sentence=f"there is no {item.file} that can be taken")
    if item is FORM:
        # Not at the top of the file: the other items do without pydantic.
        from assignment.results import wrong_results

        return judged(lost, wrong_results(folder / item.file))
    cases = list(item.draw(Draw(seed)))
    calls = [arguments for _, arguments in cases]
    how, cpu_seconds, written, printed = runner.ask(folder, item, calls)
    text = printed[:MOST_PRINTED].decode(errors="replace")
    lost = lost._replace(printed=text)
    answers = read_answers(written)
    if answers:
        return judged(lost, what_is_wrong(item, cases, answers))
    of_machine = {
        "late": f"neither ended nor computed for {CPU_SECONDS} s: grade it again",
        "SIGKILL": "was ended by the machine, which lacks memory: grade it again",
        "not enclosed": f"could not be enclosed: {text}",
        "gone": "ended the process that runs it, and was not enclosed",
    }
    if cpu_seconds >= CPU_SECONDS and not runner.trusted:
        sentence = f"took more than {CPU_SECONDS} s of computing"
    elif how in of_machine:
        return not_graded(item, f"{item.file} {of_machine[how]}")
    else:
        sentence = f"ended without an answer {how}".strip()
    return judged(lost, f"{item.file} {sentence}")


def judged(lost: Result, sentence: str) -> Result:
    """All points of an item where there is nothing to say, and else none."""
    points = 0 if sentence else lost.most
    return lost._replace(points=points, sentence=legible(sentence))


def legible(text: str) -> str:
    """One line that any terminal can show."""
    return "".join(c if c.isprintable() else " " for c in text)[:500]


def folders_in(folder: Path) -> list[Path]:
    """The folders in it, and links to such, but none that a system has put there."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_dir() and not path.name.startswith((".", "__"))
    ]


def innermost(source: Path) -> Path:
    """The folder that has the files: an archive may have it in another one."""
    if source.is_symlink():
        raise ValueError(f"{source.name} is a link")
    inside = folders_in(source)
    if len(inside) == 1 and not wanted_files(source):
        return innermost(inside[0])
    return source


def wanted_files(source: Path) -> list[Path]:
    """The Python files and results.json; no link, no pipe, and nothing too long."""
    return [
        path
        for path in sorted(source.iterdir())
        if (path.suffix == ".py" or path.name == "results.json")
        and path.is_file()
        and not path.is_symlink()
        and path.stat().st_size <= LONGEST_FILE
    ][:MOST_FILES]


def copy_submission(source: Path, scratch: Path) -> None:
    """The files of a submission, and the file that is given.

    The reference, solution/, has the repository's loss.py.
    """
    if source == SOLUTION:
        shutil.copyfile(ROOT / "loss.py", scratch / "loss.py")
    for path in wanted_files(innermost(source)):
        shutil.copyfile(path, scratch / path.name)
    shutil.copyfile(HERE / "starter" / "toy.py", scratch / "toy.py")


def grade_each(
    runner: Runner, source: Path, seed: int, items: Iterable[Item] = ALL_ITEMS
) -> Iterator[Result]:
    """The items of the submission in this folder, each as soon as it is graded.

    Whatever is raised here is "not graded", and costs nobody else anything.
    """
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder).resolve()
        try:
            if runner.become_nobody:
                scratch.chmod(0o755)
            copy_submission(source, scratch)
        except Exception as error:
            why = f"the folder cannot be read: {error}"
            yield from [not_graded(item, why) for item in items]
            return
        for item in items:
            if item.file == "batch.py":
                # A mistake in the student's loss.py has cost its points by now.
                shutil.copyfile(ROOT / "loss.py", scratch / "loss.py")
            try:
                number = ALL_ITEMS.index(item)
                result = grade_item(runner, item, scratch, seed + number)
            except Exception as error:
                result = not_graded(item, f"the grader raised {error!r}")
            yield result


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
        if of_part:
            lines.append(f"\nPart {part}: {title} ({total(of_part)})")
        for result in of_part:
            got = f"{result.points} of {result.most}" if result.graded else "not graded"
            first = said.setdefault(result.sentence, result.name)
            again = f" (as in {first})" if first not in ("", result.name) else ""
            lines.append(f"  {result.name}  {got:>6}  {result.title}{again}")
            if first == result.name:
                lines.append(f"               {result.sentence}")
            if said.setdefault(result.printed, result.name) == result.name:
                for line in result.printed.splitlines():
                    lines.append(f"       printed | {legible(line)}")
    lines.append(f"\n--seed {seed} repeats these inputs")
    lines.append(f"points: {total(results)}")
    return "\n".join(lines)


def line_of(name: str, results: list[Result]) -> str:
    """A submission among many."""
    lost = ", ".join(lost_items(results)) or "nothing"
    line = f"{name}: {total(results)} points, lost {lost}"
    again = [result for result in results if not result.graded]
    if not again:
        return line
    names = ", ".join(result.name for result in again)
    return f"{line}; not graded: {names} ({again[0].sentence})"


def row_of(name: str, results: list[Result]) -> list[Any]:
    """A line of grades.csv, in which an item that was not graded is empty."""
    points = [result.points if result.graded else "" for result in results]
    sentences = [result.sentence for result in results if result.sentence]
    # A spreadsheet would compute what begins like a formula.
    name, sentence = [
        f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
        for text in (name, "".join(sentences[:1]))
    ]
    return [name, sum(result.points for result in results), *points, sentence]


def grade_all(
    runner: Runner, folders: list[Path], items: list[Item], seed: int, out: Path | None
) -> None:
    """Many submissions. What is known of each is printed and written at once."""
    lost: Counter[str] = Counter()
    if out:
        head = ["submission", "points", *[item.name for item in items]]
        write_row(out, "w", [*head, "first sentence"])
    for number, folder in enumerate(folders, 1):
        name = legible(folder.name)
        results = list(grade_each(runner, folder, seed, items))
        lost.update(lost_items(results))
        print(line_of(name, results), flush=True)
        if out:
            # Numbered, as names may differ in what a file's name cannot hold.
            write_report(out, f"{number:02}-{name[:50]}", results, seed)
            write_row(out, "a", row_of(name, results))
    counts = ", ".join(f"{item} ({count})" for item, count in lost.most_common())
    print(f"{len(folders)} submissions, --seed {seed}; lost by how many: {counts}")


def write_report(out: Path, name: str, results: list[Result], seed: int) -> None:
    text = report(results, seed) + "\n"
    (out / f"{name}.txt").write_text(text, encoding="utf-8")


def write_row(out: Path, mode: str, row: list[Any]) -> None:
    with (out / "grades.csv").open(mode, newline="", encoding="utf-8") as file:
        csv.writer(file).writerow(row)


def has_to_become_nobody() -> bool:
    """Whether foreign code has to run as another user than this one, which is root.

    Ends, with the reason, where foreign code cannot run at all.
    """
    reason = "foreign code is enclosed on Linux alone"
    if sys.platform == "linux":
        from assignment import sandbox

        reason = sandbox.why_not()
    if reason:
        sys.exit(f"grade.py: {reason}. --trust grades your own code without enclosing.")
    return os.geteuid() == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="of a submission")
    parser.add_argument("--all", type=Path, help="a folder of submissions")
    parser.add_argument("--solution", action="store_true", help="grade the reference")
    parser.add_argument("--only", default="", help="an item, as 2.3, or a part, as 2")
    parser.add_argument("--out", type=Path, help="a folder for the reports")
    parser.add_argument("--seed", type=int, help="of the inputs; by default a secret")
    parser.add_argument(
        "--trust", action="store_true", help="your own code, without an enclosure"
    )
    args = parser.parse_args()
    # A student's name may have letters that this terminal lacks.
    sys.stdout.reconfigure(errors="replace")
    folder = SOLUTION if args.solution else args.all or args.folder
    if folder is None or not folder.is_dir():
        sys.exit(f"grade.py: give a folder, --all FOLDER or --solution, not {folder}")
    named = args.only
    items = [item for item in ALL_ITEMS if named in ("", item.name, item.name[0])]
    if not items:
        sys.exit(f"grade.py: there is no item {named}; give one of the handout, as 2.3")
    folders = [folder.resolve()]
    if args.all:
        folders = folders_in(folder)
        if not folders:
            sys.exit(f"grade.py: {folder} has no folders, one for each submission")
    seed = secrets.randbits(40) if args.seed is None else args.seed
    become_nobody = not args.trust and has_to_become_nobody()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    with start_runner(args.trust, become_nobody) as runner:
        if args.all:
            grade_all(runner, folders, items, seed, args.out)
            return
        results = list(grade_each(runner, folders[0], seed, items))
    print(report(results, seed))
    if args.out:
        write_report(args.out, folders[0].name, results, seed)


if __name__ == "__main__":
    main()
