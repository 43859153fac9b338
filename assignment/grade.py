"""Grades one submission of the assignment, or many of them.

    python assignment/grade.py STUDENT_DIR
    python assignment/grade.py STUDENT_DIR --only 2.3
    python assignment/grade.py --solution
    python assignment/grade.py --all FOLDER --out runs/grades

The report on one submission ends with "points: X of Y". With --out OUT, it is also
written to OUT/NAME.txt. With --all, one line is printed for each submission, and OUT
gets grades.csv and each report as NUMBER-NAME.txt, as soon as a submission is graded.

A student's code runs in processes of its own (runner.py, sandbox.py), and its answers
are compared here (items.py), so the memory of those processes, and the files that they
can read, hold no expected value. The limit is on CPU time, not on elapsed time, so
points do not depend on how busy the machine is. In messages, text in double quotes
comes from the student's code.
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
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
SOLUTION = HERE / "solution"
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

from assignment.items import (  # noqa: E402
    ITEMS,
    Draw,
    Item,
    as_tensor,
    legible,
    quoted,
    what_is_wrong,
)
from assignment.starter.toy import run_ranks  # noqa: E402

PARTS = {
    "1": "e_B and its identities",
    "2": "the objective, its KL and its gradient",
    "3": "the trainer's batch",
    "4": "an experiment",
}
CPU_SECONDS = 3  # for each process of an item; the slowest needs less than one
# An item that has not ended after this time did not get enough CPU time.
WALL_SECONDS = 60
IDLE_SECONDS = 5  # after which a process that sleeps is stopped
LONGEST_FILE = 2**20  # bytes of a student's file
MOST_FILES = 50  # of a submission
ENDED_RUNNER = "and ended the process that runs it"
MOST_PRINTED = 2000  # bytes that are shown of what an item prints
# The variables of this environment that a student's process gets.
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
    graded: bool = True  # False if the machine failed and not the code
    printed: str = ""  # what the code printed


class Outcome(NamedTuple):
    """What a student's process left behind."""

    answers: list[dict[str, Any]]  # may hold anything; empty if it left none
    ending: str  # of the process, as in runner.py
    cpu_seconds: float
    printed: str


class Runner:
    """The process that runs students' code (runner.py)."""

    def __init__(self, trusted: bool, become_nobody: bool = False) -> None:
        self.trusted = trusted
        self.become_nobody = become_nobody
        self.start()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def start(self) -> None:
        known = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
        runner = str(HERE / "runner.py")
        # -I ignores packages in the user's home, which students' code cannot read.
        words = [runner, "--trust"] if self.trusted else ["-I", runner]
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=known | NO_GPU | ONE_THREAD,
        )

    def ask(self, folder: Path, item: Item, calls: list[list[Any]]) -> Outcome:
        """Make these calls to an item's function in one process.

        Answers and printed text come in files. If they passed through the runner, the
        next student's code could find them in the runner's memory.
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
                "idle_seconds": IDLE_SECONDS,
            }
            try:
                pickle.dump(job, self.process.stdin)
                self.process.stdin.flush()
                ending, cpu_seconds = pickle.load(self.process.stdout)
            except (EOFError, BrokenPipeError):
                ending, cpu_seconds = ENDED_RUNNER, 0.0
                self.process.wait()
                self.start()
            written, text = [
                path.read_bytes() if path.is_file() else b""
                for path in (answers, printed)
            ]
            text = text[:MOST_PRINTED].decode(errors="replace")
            return Outcome(read_answers(written), ending, cpu_seconds, text)

    def ask_ranks(self, folder: Path, item: Item, calls: list[list[Any]]) -> Outcome:
        """Make these calls to run_ranks, with each rank in a process of its own.

        No rank can see the others' micro-batches. The reference's loss.py is in the
        folder. So that a student cannot read it, no text that comes from untrusted code
        is shown.
        """
        outcome = Outcome([], "", 0.0, "")
        answers: list[dict[str, Any]] = []

        def run(_: None, *arguments: Any) -> list[Any]:
            nonlocal outcome
            outcome = self.ask(folder, item, [list(arguments)])
            if not self.trusted:
                shown = [without_text(each) for each in outcome.answers]
                outcome = outcome._replace(answers=shown, printed="")
            (answer,) = outcome.answers
            return [as_tensor(each) for each in answer["value"]]

        try:
            for call in calls:
                answers.append({"value": run_ranks(None, *call, run), "gradients": []})
        except Exception as error:  # The answers may have any form.
            if not outcome.answers:
                return outcome
            answers.append(outcome.answers[0] | {"wrong": f"{error}"})
        return outcome._replace(answers=answers)


def without_text(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer in which an error has no text that the code could choose."""
    if "error" not in answer:
        return answer
    line = f"{answer.get('line')}".rpartition(" ")[2]
    return {
        "error": "an error",
        "message": "--trust shows which",
        "line": f"line {line[:4]}" if line.isdecimal() else "",
    }


def read_answers(written: bytes) -> list[dict[str, Any]]:
    """Return the answers that a student's process wrote; [] if they are malformed."""
    try:
        answers = json.loads(written)
    except (ValueError, RecursionError):
        return []
    is_list = isinstance(answers, list)
    return answers if is_list and all(isinstance(a, dict) for a in answers) else []


def not_graded(item: Item, why: object) -> Result:
    """Return the result of an item whose code may be right."""
    sentence = legible(f"{why}")
    return Result(item.name, item.title, 0, item.points, sentence, graded=False)


def grade_item(runner: Runner, item: Item, folder: Path, seed: int) -> Result:
    """Grade one item of the submission in this scratch folder."""
    lost = Result(item.name, item.title, 0, item.points, "")
    if not (folder / item.file).is_file():
        return lost._replace(sentence=f"there is no {item.file} that can be graded")
    if item.file == "results.json":
        # Imported here because the other items work without pydantic.
        from assignment.results import wrong_results

        return judged(lost, wrong_results(folder / item.file))
    cases = list(item.draw(Draw(seed)))
    ask = runner.ask_ranks if item.function == "update" else runner.ask
    outcome = ask(folder, item, [arguments for _, arguments in cases])
    lost = lost._replace(printed=outcome.printed)
    if outcome.answers:
        return judged(lost, what_is_wrong(item, cases, outcome.answers))
    ending = outcome.ending
    machine = {
        "late": f"did not get {CPU_SECONDS} s of CPU time: grade it again",
        "SIGKILL": "was killed because the machine lacks memory: grade it again",
        ENDED_RUNNER: "ended the process that runs it: grade it again",
    }
    if outcome.cpu_seconds >= CPU_SECONDS and not runner.trusted:
        sentence = f"took more than {CPU_SECONDS} s of CPU time"
    elif ending in machine and not runner.trusted:
        return not_graded(item, f"{item.file} {machine[ending]}")
    elif ending.startswith("could not be enclosed"):
        return not_graded(item, f"{item.file} {ending}")
    elif ending == "idle":
        sentence = f"slept for {IDLE_SECONDS} s and was stopped"
    else:
        sentence = f"ended without an answer{ending and f' ({ending})'}"
    return judged(lost, f"{item.file} {sentence}")


def judged(lost: Result, sentence: str) -> Result:
    """Give all points of an item if nothing is said against it, and otherwise none."""
    points = 0 if sentence else lost.most
    return lost._replace(points=points, sentence=legible(sentence))


def folders_in(folder: Path) -> list[Path]:
    """Return the folders, and links to folders, in a folder.

    Those that an operating system creates, such as __MACOSX, are left out.
    """
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_dir() and not path.name.startswith((".", "__"))
    ]


def innermost(source: Path) -> Path:
    """Return the folder that has the files; an archive may have added outer folders."""
    if source.is_symlink():
        raise ValueError(f"{source.name} is a link")
    inside = folders_in(source)
    if len(inside) == 1 and not wanted_files(source):
        return innermost(inside[0])
    return source


def wanted_files(source: Path) -> list[Path]:
    """Return the Python files and results.json; no link, pipe or overlong file."""
    return [
        path
        for path in sorted(source.iterdir())
        if (path.suffix == ".py" or path.name == "results.json")
        and path.is_file()
        and not path.is_symlink()
        and path.stat().st_size <= LONGEST_FILE
    ][:MOST_FILES]


def copy_submission(source: Path, scratch: Path) -> None:
    """Copy the files of a submission, and toy.py, which is given.

    The reference, solution/, uses the repository's loss.py.
    """
    if source == SOLUTION:
        shutil.copyfile(ROOT / "loss.py", scratch / "loss.py")
    for path in wanted_files(innermost(source)):
        shutil.copyfile(path, scratch / path.name)
    shutil.copyfile(HERE / "starter" / "toy.py", scratch / "toy.py")


def grade_each(
    runner: Runner, source: Path, seed: int, items: Iterable[Item] = ITEMS
) -> Iterator[Result]:
    """Yield the result of each item of a submission as soon as it is graded.

    An error of the grader makes the item "not graded" and does not affect any other.
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
                # The mistakes in the student's loss.py have already cost points.
                shutil.copyfile(ROOT / "loss.py", scratch / "loss.py")
            try:
                result = grade_item(runner, item, scratch, seed)
            except Exception as error:
                result = not_graded(item, f"the grader raised {quoted(repr(error))}")
            yield result


def total(results: list[Result]) -> str:
    points = sum(result.points for result in results)
    return f"{points} of {sum(result.most for result in results)}"


def lost_items(results: list[Result]) -> list[str]:
    """Return the items for which the code got no points."""
    return [r.name for r in results if r.graded and r.points < r.most]


def report(results: list[Result], seed: int) -> str:
    """Return the report on one submission, which says each sentence only once."""
    lines = []
    said: dict[str, str] = {"": ""}  # each sentence, and the item that had it first
    for part, title in PARTS.items():
        part_results = [result for result in results if result.name[0] == part]
        if part_results:
            lines.append(f"\nPart {part}: {title} ({total(part_results)})")
        for result in part_results:
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


def summary_line(name: str, results: list[Result]) -> str:
    """Return the line of a submission among many."""
    lost = ", ".join(lost_items(results)) or "nothing"
    line = f"{name}: {total(results)} points, lost {lost}"
    again = [result for result in results if not result.graded]
    if not again:
        return line
    names = ", ".join(result.name for result in again)
    return f"{line}; not graded: {names} ({again[0].sentence})"


def csv_row(name: str, results: list[Result]) -> list[Any]:
    """Return a row of grades.csv, in which an item that was not graded is empty."""
    points = [result.points if result.graded else "" for result in results]
    sentences = [result.sentence for result in results if result.sentence]
    # A spreadsheet would evaluate text that begins like a formula.
    name, sentence = [
        f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
        for text in (name, "".join(sentences[:1]))
    ]
    return [name, sum(result.points for result in results), *points, sentence]


def grade_all(
    runner: Runner, folders: list[Path], items: list[Item], seed: int, out: Path | None
) -> None:
    """Grade many submissions; print and write the results as soon as one is graded."""
    lost: Counter[str] = Counter()
    names = [item.name for item in items]
    rows = [["submission", "points", *names, "first sentence"]]
    for number, folder in enumerate(folders, 1):
        name = legible(folder.name)
        results = list(grade_each(runner, folder, seed, items))
        lost.update(lost_items(results))
        print(summary_line(name, results), flush=True)
        if out:
            # Two names may differ only in characters that a file name cannot hold.
            write_report(out, f"{number:02}-{name[:50]}", results, seed)
            rows.append(csv_row(name, results))
            with (out / "grades.csv").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
    counts = ", ".join(f"{item} ({count})" for item, count in lost.most_common())
    print(f"{len(folders)} submissions, --seed {seed}; failures by item: {counts}")


def write_report(out: Path, name: str, results: list[Result], seed: int) -> None:
    text = report(results, seed) + "\n"
    (out / f"{name}.txt").write_text(text, encoding="utf-8")


def has_to_become_nobody(private: Iterable[Path]) -> bool:
    """Return whether this user is root, so that students' code must run as another.

    `private` are folders that the code must not read. Exits with the reason if the code
    cannot be enclosed on this machine.
    """
    reason = "the enclosure for other people's code needs Linux"
    if sys.platform == "linux":
        from assignment import sandbox

        reason = sandbox.refusal(private)
    if reason:
        sys.exit(f"grade.py: {reason}. --trust grades your own code without enclosure.")
    return os.geteuid() == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, help="one submission's folder")
    parser.add_argument("--all", type=Path, help="a folder of submissions")
    parser.add_argument("--solution", action="store_true", help="grade the reference")
    parser.add_argument("--only", default="", help="an item such as 2.3, or a part: 2")
    parser.add_argument("--out", type=Path, help="a folder for the reports")
    parser.add_argument("--seed", type=int, help="seed of the inputs (default: secret)")
    parser.add_argument(
        "--trust", action="store_true", help="run your own code without enclosure"
    )
    args = parser.parse_args()
    # A student's name may have letters that this terminal cannot show.
    sys.stdout.reconfigure(errors="replace")
    folder = SOLUTION if args.solution else args.all or args.folder
    if folder is None or not folder.is_dir():
        sys.exit(f"grade.py: give a folder, --all FOLDER or --solution (got {folder})")
    named = args.only
    items = [item for item in ITEMS if named in ("", item.name, item.name[0])]
    if not items:
        sys.exit(f"grade.py: there is no item {named}; give one such as 2.3, or a part")
    folders = [folder.resolve()]
    if args.all:
        folders = folders_in(folder)
        if not folders:
            sys.exit(f"grade.py: {folder} has no folders: make one for each submission")
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    seed = secrets.randbits(40) if args.seed is None else args.seed
    private = [ROOT, folder, *([args.out] if args.out else [])]
    become_nobody = not args.trust and has_to_become_nobody(private)
    with Runner(args.trust, become_nobody) as runner:
        if args.all:
            grade_all(runner, folders, items, seed, args.out)
            return
        results = list(grade_each(runner, folders[0], seed, items))
    print(report(results, seed))
    if args.out:
        write_report(args.out, folders[0].name, results, seed)


if __name__ == "__main__":
    main()
