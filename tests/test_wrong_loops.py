"""The tests of the loop, tested: they reject the loops of wrong_loops.py, which have
one line wrong each.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

# Fixtures of the tests that are called here.
from test_loop import instructed_task, moved, stale_batch, update_of  # noqa: F401
from test_lost_weights import distance_after_a_sync, long_tiny  # noqa: F401
from test_wrong_losses import cases
from wrong_loops import MISTAKES

from support.flags import Refused

# What a run says of a wrong loop by itself counts as well as what a test says of it.
REJECTIONS = (AssertionError, pytest.fail.Exception, Refused, FloatingPointError)

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


@pytest.mark.parametrize("mistake, name", PAIRS)
def test_a_wrong_loop_fails_the_tests_named_for_it(mistake, name, request, monkeypatch):
    test = named_test(name)
    # Before the mistake is made: it is to be the test's business alone.
    fixtures = fixtures_of(test, request)
    MISTAKES[mistake].make(monkeypatch)
    with pytest.raises(REJECTIONS):
        for case in cases(test):
            test(**fixtures, **case)


@pytest.mark.parametrize("name", sorted({name for _, name in PAIRS}))
def test_called_in_the_same_way_they_pass_where_there_is_no_mistake(name, request):
    test = named_test(name)
    fixtures = fixtures_of(test, request)
    for case in cases(test):
        test(**fixtures, **case)


@pytest.mark.parametrize("name", sorted({name for _, name in PAIRS}))
def test_the_tests_that_reject_them_are_part_of_make_test(name):
    marks = [mark.name for mark in getattr(named_test(name), "pytestmark", [])]
    assert "slow" not in marks
    assert "skip" not in marks


def test_a_mistake_whose_line_is_not_there_any_more_is_an_error():
    mistake = MISTAKES["a warm-up that never ends"]._replace(right="warm_up / 2")
    with pytest.raises(LookupError, match="build_optimizer has 'warm_up / 2' 0 times"):
        mistake.code()
