"""The layout of the repository: what a reader may rely on before opening a file."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPTS = ("loss", "reward", "rollout", "policy", "train", "eval")


def tracked_python() -> list[Path]:
    """The Python files of the repository."""
    command = ["git", "ls-files", "*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        return [p.relative_to(ROOT) for p in ROOT.glob("[a-z]*/**/*.py")] + [
            p.relative_to(ROOT) for p in ROOT.glob("*.py")
        ]
    return [Path(line) for line in listed.stdout.split()]


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def test_the_top_level_has_the_scripts_of_the_method_and_no_other_python():
    assert sorted(p.stem for p in ROOT.glob("*.py")) == sorted(SCRIPTS)


def test_the_scripts_and_support_never_import_experiments():
    for path in tracked_python():
        if path.parts[0] == "support" or len(path.parts) == 1:
            tops = {name.split(".")[0] for name in imports_of(path)}
            assert "experiments" not in tops, path


def test_support_knows_the_scripts_by_what_it_is_handed():
    for path in tracked_python():
        if path.parts[0] == "support":
            assert not imports_of(path) & set(SCRIPTS), path


def test_no_module_of_the_top_level_or_support_imports_itself_through_others():
    modules = {}
    for path in tracked_python():
        if path.parts[0] == "support" or len(path.parts) == 1:
            name = ".".join(path.with_suffix("").parts)
            modules[name.removesuffix(".__init__")] = imports_of(path)

    def reachable(name: str, seen: set[str]) -> set[str]:
        for imported in modules.get(name, set()) & modules.keys():
            if imported not in seen:
                seen |= {imported} | reachable(imported, seen | {imported})
        return seen

    for name in modules:
        assert name not in reachable(name, set()), name


@pytest.mark.parametrize("script", ["loss", "reward"])
def test_a_script_shows_its_own_work(script):
    done = subprocess.run(
        [sys.executable, f"{script}.py"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4


def test_no_line_of_python_is_wider_than_88_columns():
    for path in tracked_python():
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            assert len(line) <= 88, f"{path}:{number}"


def test_equations_are_called_by_the_papers_numbers():
    # (3) advantage, (4) PPO's clip, (7) ratio, (8) KL to a reference, (11), (12), (13)
    paper = {"3", "4", "7", "8", "11", "12", "13"}
    for script in SCRIPTS:
        text = (ROOT / f"{script}.py").read_text()
        found = set(re.findall(r"(?:^|[\s#,;])\((\d{1,2})\)", text))
        assert found <= paper, script
