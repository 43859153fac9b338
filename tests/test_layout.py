"""Test the layout of the repository, on which readers rely before they open a file."""

import ast
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from conftest import ROOT
from launch import run_command

SCRIPTS = {"loss", "reward", "rollout", "policy", "train", "eval"}
# A file imports only from its own level and those before it. (study/ may name
# objectives of tools/ by strings, as --objective does.)
LEVELS = ({"answer_checking"}, {"support"}, SCRIPTS, {"study"}, {"tools"})
FILES = [*ROOT.glob("*.py")]
for folder in "answer_checking", "support", "study", "tools":
    FILES += ROOT.glob(f"{folder}/*.py")


def module_of(path: Path) -> str:
    """Return the name by which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    """Return the modules that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{a.name}" for a in node.names)}
    return names


def test_the_only_python_files_at_the_top_level_are_the_scripts_of_the_method():
    assert {path.stem for path in ROOT.glob("*.py")} == SCRIPTS


def level_of(module: str) -> int:
    """Return the number of a module's level; -1 for one from outside the project."""
    room = module.split(".")[0]
    return next((i for i, level in enumerate(LEVELS) if room in level), -1)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_never_point_up(path):
    imported = imports_of(path)
    assert not {"tests", "assignment"} & {name.split(".")[0] for name in imported}
    assert max(map(level_of, imported), default=-1) <= level_of(module_of(path))


def test_no_module_imports_itself_through_other_modules():
    imported = {module_of(path): imports_of(path) for path in FILES}
    TopologicalSorter(imported).prepare()  # raises CycleError, which names the circle


def test_code_numbers_equations_as_the_paper_does():
    # (3) advantage, (4) PPO's clip, (7) ratio, (8) KL to a reference, (11), (12), (13)
    paper = {"3", "4", "7", "8", "11", "12", "13"}
    for script in SCRIPTS:
        text = (ROOT / f"{script}.py").read_text()
        assert set(re.findall(r"(?:^|[\s#,;])\((\d{1,2})\)", text)) <= paper, script


def test_an_environment_that_was_made_for_another_machine_is_refused(tmp_path):
    # It was made on a machine with a GPU, and this one needs requirements-cpu.txt.
    (tmp_path / "installed").write_text("requirements.txt\n")
    command = f"make --dry-run train VENV={tmp_path} REQUIREMENTS=requirements-cpu.txt"
    done = run_command(command.split())
    assert done.returncode != 0
    assert f"{tmp_path} was made from requirements.txt" in done.stdout
    assert "train.py" not in done.stdout
