"""Test that the tests of the losses reject every loss of wrong_losses.py."""

import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, load_module
from launch import run_command
from test_objectives import by_name
from wrong_losses import WRONG_LOSSES


def cases(test: Callable) -> list[dict[str, Any]]:
    """Return every choice of arguments with which pytest would call the test."""
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


def run_test(name: str, file: Path) -> None:
    """Run all cases of "module.test_..." on another loss.py or tools/objectives.py."""
    module = load_module(file)
    if name.startswith("test_loss."):
        under_test = {"loss": module}
    else:
        under_test = {"objectives": by_name(module)}
    test = pkgutil.resolve_name(name)
    for case in cases(test):
        test(**under_test, **case)


@pytest.mark.parametrize("title", WRONG_LOSSES)
def test_a_wrong_loss_fails_the_tests_named_for_it(title, tmp_path):
    mistake = WRONG_LOSSES[title]
    right, wrong = ROOT / mistake.where, tmp_path / "wrong.py"
    wrong.write_text(mistake.made_in(right.read_text()))
    for test in mistake.tests:
        run_test(test, right)
        # autograd raises RuntimeError if there is no gradient at all.
        with pytest.raises((AssertionError, RuntimeError)):
            run_test(test, wrong)


@pytest.mark.slow
def test_a_file_with_the_five_functions_is_a_complete_submission(tmp_path):
    file = tmp_path / "submission.py"
    functions = "group_advantage, ratio_sums, effective_sample_size, kl_divergence, p3o"
    file.write_text(f"from loss import {functions}")
    pytest_on_test_loss = [sys.executable, "-m", "pytest", "-q", "tests/test_loss.py"]
    done = run_command([*pytest_on_test_loss, "--loss", file])
    assert done.returncode == 0, done.stdout


def test_a_mistake_whose_text_is_not_in_the_code_any_more_is_an_error():
    mistake = WRONG_LOSSES["there is no cap"]
    with pytest.raises(LookupError, match="loss.py has 'rho.clamp.*' 0 times"):
        mistake.made_in("no such text")
