"""The tests of the losses, tested: they reject the losses of wrong_losses.py, which
have one mistake each. And what `pytest tests/test_loss.py --loss FILE` takes.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import test_loss
import test_objectives
from conftest import LOSS, pytest_configure
from loss_on_ranks import OTHER_OBJECTIVES
from wrong_losses import FUNCTIONS, WRONG, WRONG_OBJECTIVES


def cases(test: Callable) -> list[dict[str, Any]]:
    """Every choice of arguments with which pytest would call a parametrized test."""
    choices: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", []):
        names = mark.args[0].split(", ")
        rows = [row if len(names) > 1 else [row] for row in mark.args[1]]
        choices = [
            choice | dict(zip(names, row, strict=True))
            for choice in choices
            for row in rows
        ]
    return choices


def assert_rejected(test: Callable, **fixtures: Any) -> None:
    """The test fails in one of its cases or another."""
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        for case in cases(test):
            test(**fixtures, **case)


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_loss_fails_the_tests_named_for_it(mistake: str) -> None:
    module, tests = WRONG[mistake]
    for name in tests:
        assert_rejected(getattr(test_loss, name), loss=module)


@pytest.mark.parametrize("mistake", WRONG_OBJECTIVES)
def test_a_wrong_objective_fails_the_tests_named_for_it(mistake: str) -> None:
    name, wrong, tests = WRONG_OBJECTIVES[mistake]
    for test in tests:
        assert_rejected(
            getattr(test_objectives, test), objectives=OTHER_OBJECTIVES | {name: wrong}
        )


def test_a_file_with_the_four_functions_is_a_complete_submission(
    tmp_path: Path,
) -> None:
    # It is also the loss of which the wrong ones are made, and that has no mistake.
    file = tmp_path / "submission.py"
    lines = ["from wrong_losses import RIGHT"]
    lines += [f"{function} = RIGHT.{function}" for function in FUNCTIONS]
    file.write_text("\n".join(lines))
    command = [sys.executable, "-m", "pytest", "-q", test_loss.__file__]
    ended = subprocess.run(
        [*command, "--loss", str(file)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout


def configure(path: Path) -> None:
    """What pytest does first when it is given --loss PATH."""
    pytest_configure(SimpleNamespace(getoption={"--loss": str(path)}.get))


def test_a_file_with_another_interface_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "renamed.py"
    source = LOSS.read_text()
    file.write_text(source.replace("group_advantage(reward:", "group_advantage(r:"))
    with pytest.raises(pytest.UsageError, match=r"group_advantage\(r:"):
        configure(file)


def test_a_file_without_one_of_the_functions_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "incomplete.py"
    source = LOSS.read_text()
    file.write_text(source.replace("def kl_divergence(", "def divergence("))
    with pytest.raises(pytest.UsageError, match="kl_divergence is missing"):
        configure(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pytest.UsageError, match="there is no such file"):
        configure(tmp_path / "missing.py")


def test_a_file_that_fails_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "failing.py"
    file.write_text("import no_such_module")
    with pytest.raises(pytest.UsageError, match="cannot be imported"):
        configure(file)
