"""The layout of the repository: what a reader may rely on before opening a file."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

SCRIPTS = ("loss", "reward", "rollout", "policy", "train", "eval")
BELOW = [*ROOT.glob("support/*.py"), *ROOT.glob("answers/*.py")]
CORE = [*ROOT.glob("*.py"), *BELOW]


def module_of(path: Path) -> str:
    """The name by which it is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    """The modules that a file imports, wherever the import stands."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def test_the_top_level_has_the_scripts_of_the_method_and_no_other_python():
    assert sorted(path.stem for path in ROOT.glob("*.py")) == sorted(SCRIPTS)


@pytest.mark.parametrize("path", CORE, ids=module_of)
def test_imports_never_point_up(path):
    # The rooms import the scripts, and the scripts import support/ and answers/.
    above = {"tools", "study", "tests", "assignment"}
    if path in BELOW:
        above |= set(SCRIPTS)
    assert not above & {name.split(".")[0] for name in imports_of(path)}


def test_no_module_imports_itself_through_others():
    imported = {module_of(path): imports_of(path) for path in CORE}
    while imported:
        # A module that imports none of the others can be in no circle.
        leaves = [name for name, names in imported.items() if not names & set(imported)]
        assert leaves, f"a circle among {sorted(imported)}"
        for name in leaves:
            del imported[name]


def test_equations_are_called_by_the_papers_numbers():
    # (3) advantage, (4) PPO's clip, (7) ratio, (8) KL to a reference, (11), (12), (13)
    paper = {"3", "4", "7", "8", "11", "12", "13"}
    for script in SCRIPTS:
        text = (ROOT / f"{script}.py").read_text()
        found = set(re.findall(r"(?:^|[\s#,;])\((\d{1,2})\)", text))
        assert found <= paper, script


def test_an_environment_of_another_machine_is_refused_not_used(tmp_path):
    # Set up where nvidia-smi saw a GPU, and used where there is none.
    (tmp_path / "installed").write_text("requirements.txt\n")
    flags = [f"VENV={tmp_path}", "REQUIREMENTS=requirements-cpu.txt"]
    done = subprocess.run(
        ["make", "--dry-run", "train", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert f"{tmp_path} was made from requirements.txt" in done.stderr
    assert "torchrun" not in done.stdout
