"""The tests of the losses, tested: they reject the losses of wrong_losses.py, which
have one mistake each. And what `pytest tests/test_loss.py --loss FILE` takes.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import test_loss
import test_objectives
from conftest import FUNCTIONS, LOSS, ROOT, load_module, pytest_configure
from wrong_losses import WRONG_LOSSES, WRONG_OBJECTIVES, Mistake

OBJECTIVES = ROOT / "tools/objectives.py"


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


def call(test: Callable, **fixtures: Any) -> None:
    for case in cases(test):
        test(**fixtures, **case)


def module_with(mistake: Mistake, file: Path, folder: Path) -> ModuleType:
    """The module of `file` with the mistake, written to `folder`."""
    wrong = folder / file.name
    wrong.write_text(mistake.made_in(file))
    return load_module(wrong)


@pytest.mark.parametrize("name", WRONG_LOSSES)
def test_a_wrong_loss_fails_the_tests_named_for_it(name, tmp_path):
    mistake = WRONG_LOSSES[name]
    module = module_with(mistake, LOSS, tmp_path)
    for test in mistake.tests:
        # RuntimeError is what autograd has to say where there is no gradient at all.
        with pytest.raises((AssertionError, RuntimeError)):
            call(getattr(test_loss, test), loss=module)


@pytest.mark.parametrize("name", WRONG_OBJECTIVES)
def test_a_wrong_objective_fails_the_tests_named_for_it(name, tmp_path):
    mistake = WRONG_OBJECTIVES[name]
    objectives = test_objectives.by_name(module_with(mistake, OBJECTIVES, tmp_path))
    for test in mistake.tests:
        with pytest.raises(AssertionError):
            call(getattr(test_objectives, test), objectives=objectives)


def test_called_in_the_same_way_the_tests_pass_without_a_mistake():
    for test in {test for mistake in WRONG_LOSSES.values() for test in mistake.tests}:
        call(getattr(test_loss, test), loss=load_module(LOSS))


@pytest.mark.slow
def test_a_file_with_the_five_functions_is_a_complete_submission(tmp_path):
    file = tmp_path / "submission.py"
    file.write_text(f"from loss import {', '.join(FUNCTIONS)}")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", test_loss.__file__, "--loss", file],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout


def configure(path: Path) -> None:
    """What pytest does first when it is given --loss PATH."""
    pytest_configure(SimpleNamespace(getoption={"--loss": str(path)}.get))


@pytest.mark.parametrize(
    "right, wrong, complaint",
    [
        ("group_advantage(reward:", "group_advantage(r:", r"group_advantage\(r"),
        ("def kl_divergence(", "def divergence(", "kl_divergence is missing"),
        ("import torch\n", "import no_such_module\n", "cannot be imported"),
    ],
)
def test_a_file_with_another_interface_is_refused(tmp_path, right, wrong, complaint):
    file = tmp_path / "other.py"
    file.write_text(Mistake(right, wrong, tests=[]).made_in(LOSS))
    with pytest.raises(pytest.UsageError, match=complaint):
        configure(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(pytest.UsageError, match="there is no such file"):
        configure(tmp_path / "missing.py")


def test_a_mistake_whose_text_is_not_there_any_more_is_an_error():
    with pytest.raises(LookupError, match="loss.py has 'no such text' 0 times"):
        Mistake("no such text", "", tests=[]).made_in(LOSS)
