"""The tests of the loop, tested: they reject the loops of wrong_loops.py, which have
one line wrong each. Slow: many are runs of their own.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

# Fixtures of the tests that are called here.
from test_checkpoints import log, trained  # noqa: F401
from test_loop import few, record, sums, tiny  # noqa: F401
from test_resume import finished  # noqa: F401
from test_sync import embedded, long_engine, long_tiny  # noqa: F401
from test_tasks import load  # noqa: F401
from test_train import stale, trainee  # noqa: F401
from test_wrong_losses import cases
from wrong_loops import MISTAKES

from support.command import Refused, Stopped

# What a run says of a wrong loop by itself counts as well as what a test says of it.
# RuntimeError is what autograd has to say where there is no gradient, and ValueError
# what Python has to say of a list that is too short.
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
PAIRS = [(mistake, test) for mistake, what in MISTAKES.items() for test in what.tests]


def named_test(name: str) -> Callable:
    """The test function that "module.test_..." names."""
    module, _, function = name.partition(".")
    return getattr(importlib.import_module(module), function)


def fixtures_of(test: Callable, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The arguments of a test that are not in its cases."""
    parametrized = {key for case in cases(test) for key in case}
    return {
        key: request.getfixturevalue(key)
        for key in inspect.signature(test).parameters
        if key not in parametrized
    }


def call(test: Callable, fixtures: dict[str, Any]) -> None:
    """The test in all of its cases, each with a folder of its own."""
    for number, case in enumerate(cases(test)):
        if "tmp_path" in fixtures:
            case["tmp_path"] = fixtures["tmp_path"] / str(number)
            case["tmp_path"].mkdir()
        test(**fixtures | case)


@pytest.mark.slow
@pytest.mark.parametrize("mistake, name", PAIRS)
def test_a_wrong_loop_fails_the_tests_named_for_it(mistake, name, request, monkeypatch):
    test = named_test(name)
    # Before the mistake is made: it is to be the test's business alone.
    fixtures = fixtures_of(test, request)
    MISTAKES[mistake].make(monkeypatch)
    with pytest.raises(REJECTIONS):
        call(test, fixtures)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for _, name in PAIRS}))
def test_called_in_the_same_way_they_pass_where_there_is_no_mistake(name, request):
    test = named_test(name)
    marks = [mark.name for mark in getattr(test, "pytestmark", [])]
    assert "slow" not in marks  # They are part of make test.
    call(test, fixtures_of(test, request))


def test_each_mistake_is_made_in_one_line_of_the_code():
    for mistake in MISTAKES.values():
        mistake.code()  # or a LookupError


def test_a_mistake_whose_line_is_not_there_any_more_is_an_error():
    mistake = MISTAKES["no gradient clipping"]._replace(right="clip_gradient")
    with pytest.raises(LookupError, match="apply_gradient has 'clip_gradient' 0 times"):
        mistake.code()
