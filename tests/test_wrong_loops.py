"""Test that the tests of the loop reject every loop of wrong_loops.py.

Each of these has one wrong line. Most tests are slow, because they make runs.
"""

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

# These are fixtures of the tests that are called here.
from test_checkpoints import log, trained  # noqa: F401
from test_loop import few, record, sums, tiny  # noqa: F401
from test_resume import finished  # noqa: F401
from test_sync import embedded  # noqa: F401
from test_tasks import load  # noqa: F401
from test_train import stale, trainee  # noqa: F401
from test_wrong_losses import cases
from wrong_loops import MISTAKES, code_with, make

from support.command import Refused, Stopped

# A test may reject a loop, and so may the run itself. autograd raises RuntimeError if
# there is no gradient, and Python raises ValueError if a list is too short.
REJECTIONS = (
    AssertionError,
    pytest.fail.Exception,
    Refused,
    Stopped,
    FloatingPointError,
    RuntimeError,
    ValueError,
)

# A mistake and a test that has to fail on it.
PAIRS = [(title, test) for title, what in MISTAKES.items() for test in what.tests]


def fixtures_of(test: Callable, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the arguments of a test that are not in its cases."""
    parametrized = {key for case in cases(test) for key in case}
    return {
        key: request.getfixturevalue(key)
        for key in inspect.signature(test).parameters
        if key not in parametrized
    }


def call(test: Callable, fixtures: dict[str, Any]) -> None:
    """Run all cases of a test, each with a folder of its own."""
    for number, case in enumerate(cases(test)):
        if "tmp_path" in fixtures:
            case["tmp_path"] = fixtures["tmp_path"] / str(number)
            case["tmp_path"].mkdir()
        test(**fixtures | case)


@pytest.mark.slow
@pytest.mark.parametrize("title, name", PAIRS)
def test_a_wrong_loop_fails_the_tests_named_for_it(title, name, request, monkeypatch):
    test = pkgutil.resolve_name(name)
    # The fixtures are built first, so that the mistake affects only the test.
    fixtures = fixtures_of(test, request)
    make(MISTAKES[title], monkeypatch)
    with pytest.raises(REJECTIONS):
        call(test, fixtures)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for _, name in PAIRS}))
def test_the_same_tests_pass_without_a_mistake(name, request):
    test = pkgutil.resolve_name(name)
    marks = [mark.name for mark in getattr(test, "pytestmark", [])]
    assert "slow" not in marks  # These tests are part of make test.
    call(test, fixtures_of(test, request))


def test_each_mistake_replaces_one_text_of_the_code_and_names_tests_that_exist():
    for mistake in MISTAKES.values():
        code_with(mistake)  # raises LookupError
        assert all(map(pkgutil.resolve_name, mistake.tests))
