"""The tests of the losses reject every loss of wrong_losses.py, and the option --loss
of test_loss.py checks the file that it is given.
"""

import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import FUNCTIONS, LOSS, ROOT, load_module, pytest_configure
from launch import run_script
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
    file.write_text(f"from loss import {', '.join(FUNCTIONS)}")
    pytest_on_test_loss = [sys.executable, "-m", "pytest", "-q", "tests/test_loss.py"]
    done = run_script([*pytest_on_test_loss, "--loss", file])
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "right, wrong, complaint",
    [
        ("group_advantage(reward:", "group_advantage(r:", r"group_advantage\(r"),
        ("def kl_divergence(", "def divergence(", "kl_divergence is missing"),
        ("import torch\n", "import no_such_module\n", "cannot be imported"),
        (None, None, "there is no such file"),
    ],
)
def test_a_file_that_lacks_the_interface_of_a_loss_is_refused(
    tmp_path, right, wrong, complaint
):
    file = tmp_path / "other.py"
    if right:
        file.write_text(LOSS.read_text().replace(right, wrong))
    # This is what pytest calls first if it is given --loss FILE.
    with pytest.raises(pytest.UsageError, match=complaint):
        pytest_configure(SimpleNamespace(getoption={"--loss": str(file)}.get))


def test_a_mistake_whose_text_is_not_in_the_code_any_more_is_an_error():
    mistake = WRONG_LOSSES["there is no cap"]
    with pytest.raises(LookupError, match="loss.py has 'rho.clamp.*' 0 times"):
        mistake.made_in("no such text")
