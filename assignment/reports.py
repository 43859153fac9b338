"""What the grader prints and writes: of one submission, and of many in a table."""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from assignment.items import PARTS, Item

LONGEST_SENTENCE = 500  # characters


class Result(NamedTuple):
    """An item of a submission, graded."""

    item: Item
    points: int
    sentence: str  # the first thing that is wrong; empty if nothing is
    printed: str = ""
    cpu_seconds: float = 0.0
    graded: bool = True  # False where the machine failed, and not the code


class Graded(NamedTuple):
    """A submission, graded."""

    results: list[Result]
    seconds: float

    @property
    def cpu_seconds(self) -> float:
        return sum(result.cpu_seconds for result in self.results)


def legible(text: str) -> str:
    """One line that any file can hold."""
    return "".join(c if c.isprintable() else " " for c in text)[:LONGEST_SENTENCE]


def total(results: list[Result]) -> tuple[int, int]:
    """The points, and the most that there are."""
    points = sum(result.points for result in results)
    return points, sum(result.item.points for result in results)


def of_part(results: list[Result], part: int) -> list[Result]:
    return [result for result in results if result.item.part == part]


def not_graded(results: list[Result]) -> list[str]:
    """The items for which the machine failed."""
    return [result.item.name for result in results if not result.graded]


def lost(results: list[Result]) -> list[str]:
    """The items for which the code got no points."""
    return [r.item.name for r in results if r.graded and r.points < r.item.points]


def report(results: list[Result], seed: int) -> str:
    """What is printed of one submission."""
    lines = []
    said: dict[str, str] = {}  # each sentence, and the item that had it first
    for part, title in PARTS.items():
        points, most = total(of_part(results, part))
        lines.append(f"\nPart {part}: {title} ({points} of {most})")
        for result in of_part(results, part):
            lines += lines_of(result, said)
    lines.append(f"\n--seed {seed} repeats these inputs")
    if not_graded(results):
        names = ", ".join(not_graded(results))
        lines.append(f"not graded, which is not your code's fault: {names}. Try again")
    points, most = total(results)
    lines.append(f"points: {points} of {most}")
    return "\n".join(lines)


def lines_of(result: Result, said: dict[str, str]) -> Iterator[str]:
    """An item in the report. What was said before is not said again."""
    item, sentence = result.item, result.sentence
    got = f"{result.points} of {item.points}" if result.graded else "not graded"
    line = f"  {item.name:>5}  {got:>6}  {item.title}"
    if sentence in said:
        yield f"{line} (as in {said[sentence]})"
        return
    yield line
    if sentence:
        said[sentence] = item.name
        yield f"                 {sentence}"


def write_reports(results: list[Result], out: Path, name: str, seed: int) -> None:
    """grade.json, junit.xml and Gradescope's results.json in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "grade.json", summary(results, name, seed))
    write_json(out / "results.json", gradescope(results))
    suite = ElementTree.ElementTree(junit(results, name))
    suite.write(out / "junit.xml", "utf-8", True)


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def summary(results: list[Result], name: str, seed: int) -> dict[str, Any]:
    points, most = total(results)
    return {
        "submission": name,
        "points": points,
        "of": most,
        "not graded": not_graded(results),
        "seed": seed,
        "items": [
            {
                "item": result.item.name,
                "title": result.item.title,
                "points": result.points,
                "of": result.item.points,
                "graded": result.graded,
                "wrong": result.sentence,
                "printed": result.printed,
                "cpu_seconds": round(result.cpu_seconds, 3),
            }
            for result in results
        ],
    }


def gradescope(results: list[Result]) -> dict[str, Any]:
    return {
        "score": total(results)[0],
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


def junit(results: list[Result], name: str) -> ElementTree.Element:
    suite = ElementTree.Element(
        "testsuite",
        name=legible(name),
        tests=str(len(results)),
        failures=str(len(lost(results))),
        errors=str(len(not_graded(results))),
    )
    for result in results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"part{result.item.part}",
            name=f"{result.item.name} {result.item.title}",
            time=str(round(result.cpu_seconds, 3)),
        )
        if result.sentence:
            kind = "failure" if result.graded else "error"
            ElementTree.SubElement(case, kind, message=result.sentence)
    return suite


# Of many submissions


def table(graded: dict[str, Graded], seed: int, seconds: float) -> str:
    """The submissions by points of each part, and the items that most lost."""
    parts = " | ".join(f"part {part}" for part in PARTS)
    columns = f"| submission | {parts} | points | items lost | not graded | CPU s |"
    rows = [f"{columns} first thing to look at |"]
    rows.append("|---" * (len(PARTS) + 6) + "|")
    for name, (results, _) in graded.items():
        cells = [name]
        cells += ["{} of {}".format(*total(of_part(results, part))) for part in PARTS]
        cells.append("{} of {}".format(*total(results)))
        names = lost(results)
        cells.append("all" if len(names) == len(results) else ", ".join(names))
        cells.append(", ".join(not_graded(results)))
        cells.append(f"{graded[name].cpu_seconds:.1f}")
        cells.append(first_sentence(results))
        rows.append("| " + " | ".join(cell(text) for text in cells) + " |")
    return "\n".join([*rows, "", *summary_lines(graded, seed, seconds)])


def cell(text: str) -> str:
    return legible(text).replace("|", "\\|")


def first_sentence(results: list[Result]) -> str:
    for result in results:
        if result.sentence:
            return f"{result.item.name}: {result.sentence}"
    return ""


def summary_lines(
    graded: dict[str, Graded], seed: int, seconds: float
) -> Iterator[str]:
    """The mean, the items by the number of submissions that lost them, seed, time."""
    points = [total(one.results)[0] for one in graded.values()]
    most = max(total(one.results)[1] for one in graded.values())
    mean = sum(points) / len(points)
    many = f"{len(points)} submission{'s' if len(points) > 1 else ''}"
    yield f"{many}, mean {mean:.1f} of {most} points, seed {seed}."
    counts = Counter(name for one in graded.values() for name in lost(one.results))
    names = [f"{name} ({count})" for name, count in counts.most_common()]
    yield f"Items lost, and by how many: {', '.join(names) or 'none'}."
    cpu_seconds = sum(one.cpu_seconds for one in graded.values())
    computed = f"students' code computed for {cpu_seconds:.0f} s"
    yield f"Graded in {seconds:.0f} s, of which {computed}."


def write_csv(path: Path, graded: dict[str, Graded], seed: int) -> None:
    """A line a submission, with the points of each item; empty where not graded."""
    names = [result.item.name for result in next(iter(graded.values())).results]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        parts = [f"part {part}" for part in PARTS]
        heads = ["submission", "points", "of", *parts, *names]
        writer.writerow([*heads, "cpu_seconds", "seconds", "seed", "first sentence"])
        for name, one in graded.items():
            row = [name, *total(one.results)]
            row += [total(of_part(one.results, part))[0] for part in PARTS]
            row += [r.points if r.graded else "" for r in one.results]
            row += [f"{one.cpu_seconds:.2f}", f"{one.seconds:.2f}", seed]
            writer.writerow([*row, first_sentence(one.results)])
