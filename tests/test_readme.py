"""What the documents name exists, and the front page is a page."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

from eval import EvalConfig
from support.flags import parse_flags
from train import Config

README = ROOT / "README.md"
DOCUMENTS = [README, *sorted(ROOT.glob("docs/*.md"))]
DOCUMENTS += [
    ROOT / f"{folder}/README.md" for folder in ("tiny", "experiments", "recipes")
]


def names_in(path: Path) -> Iterator[str]:
    """Functions, classes, methods (Class.method) and constants that a file defines."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            yield node.targets[0].id
        if isinstance(node, ast.AnnAssign):
            yield node.target.id
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}"


def commands_in(text: str) -> list[list[str]]:
    """The words of the commands that a document shows, as indented lines."""
    lines = re.findall(r"^    (\S.*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_that_a_document_names_is_there(document):
    text = document.read_text()
    in_code = re.findall(r"`([\w-]+(?:/[\w.-]+)*\.(?:py|txt|yaml|md))`", text)
    missing = [path for path in in_code if not (ROOT / path).exists()]
    missing = [path for path in missing if not (document.parent / path).exists()]
    links = re.findall(r"\]\(([\w./-]+)\)", text)
    missing += [path for path in links if not (document.parent / path).exists()]
    assert missing == []
    if document == README:
        assert len(in_code) + len(links) >= 15


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_flag_of_a_command_in_a_document_is_a_field(document):
    for words in commands_in(document.read_text()):
        for script, kind in (("train.py", Config), ("eval.py", EvalConfig)):
            if script in words:
                flags = words[words.index(script) + 1 :]
                given = [word for word in flags if not word.endswith((".yaml", "..."))]
                given = [word for word in given if word != "--config"]
                parse_flags(kind, given)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_script_of_a_command_in_a_document_is_there(document):
    for words in commands_in(document.read_text()):
        if words[:1] in (["python"], ["torchrun"]):
            scripts = [word for word in words if word.endswith(".py")]
            assert all((ROOT / script).exists() for script in scripts), words


def test_every_function_of_the_equation_table_is_in_the_file_beside_it():
    text = README.read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \(\d+\) \|", line)]
    assert [row.split("|")[1].strip() for row in rows] == ["(3)", "(7)", "(11)", "(12)"]
    named = 0
    for row in rows:
        for file, names in re.findall(r"`(\w+\.py)`, ((?:`[\w.]+`(?: and )?)+)", row):
            for name in re.findall(r"`([\w.]+)`", names):
                assert name in set(names_in(ROOT / file)), (file, name)
                named += 1
    assert named >= 6


def test_the_front_page_has_at_most_150_lines_of_at_most_120_columns():
    lines = README.read_text().splitlines()
    assert len(lines) <= 150
    too_wide = [line for line in lines if len(line) > 120 and not line.startswith("|")]
    assert too_wide == []
