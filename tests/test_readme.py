"""What README.md names exists, and the files that it asks to be read are as short as promised."""

import ast
import re
from pathlib import Path

import pytest

from config import parse_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BUDGETS = {"loss.py": 250, "reward.py": 160, "rollout.py": 200, "train.py": 350, "eval.py": 150}


def names_in(path):
    """Functions, methods (Class.method), classes and constants that a file defines."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign):
            yield node.targets[0].id
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
            for inner in getattr(node, "body", []):
                if isinstance(node, ast.ClassDef) and isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}"


def test_every_file_that_the_readme_names_is_there():
    named = re.findall(r"`([\w/.-]+\.(?:py|txt|yaml))`|\]\(([\w/.-]+)\)", README)
    paths = [path for pair in named for path in pair if path and not path.startswith("http")]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_function_of_the_equation_table_is_in_the_file_beside_it():
    rows = [line for line in README.splitlines() if re.match(r"\| \(\d\) \|", line)]
    assert len(rows) == 5
    pairs = [pair for row in rows for pair in re.findall(r"`(\w+\.py)`, `([\w.]+)`", row)]
    assert len(pairs) >= 6
    for file, name in pairs:
        assert name in set(names_in(ROOT / file)), (file, name)


def test_every_flag_of_a_command_in_the_readme_is_a_field():
    commands = re.findall(r"^    torchrun (?:--nproc-per-node \d )?train\.py (.*)$", README, re.M)
    assert commands
    for flags in commands:
        parse_config(flags.split("#")[0].split())


@pytest.mark.parametrize("file, lines", BUDGETS.items())
def test_the_five_scripts_are_within_their_budget(file, lines):
    assert len((ROOT / file).read_text().splitlines()) <= lines


def test_imports_point_one_way():
    # train -> eval -> {rollout, reward}, train -> {rollout, reward, loss}; the three know no other.
    ours = {path.stem for path in ROOT.glob("*.py")}
    for name in "loss", "reward", "rollout":
        body = ast.parse((ROOT / f"{name}.py").read_text()).body
        imported = {n.module for n in body if isinstance(n, ast.ImportFrom)}
        imported |= {alias.name for n in body if isinstance(n, ast.Import) for alias in n.names}
        assert not imported & ours
