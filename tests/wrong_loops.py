"""The code around the loss with one line wrong, which tests must reject.

MISTAKES has them by what is wrong: the function that has the line, the line as it is,
the wrong one in its place, and the tests that must fail on it. Every one of these runs,
prints plausible numbers and mostly learns something. test_wrong_loops.py sees to it
that each is rejected.

A line that is not found, or is there twice, is an error: a mistake cannot silently stop
being one when the code is changed.
"""

import inspect
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import NamedTuple

import pytest

import eval
import policy
import reward
import rollout
import support.checkpoints
import support.tasks
import train


class Mistake(NamedTuple):
    """One line of a function, and a wrong one in its place."""

    function: Callable
    right: str
    wrong: str
    tests: list[str]  # "test_loop.test_...": a module of tests/ and one of its tests

    def code(self) -> CodeType:
        """What the function would be compiled to with the wrong line."""
        source = textwrap.dedent(inspect.getsource(self.function))
        found = source.count(self.right)
        if found != 1:
            name = self.function.__qualname__
            raise LookupError(f"{name} has {self.right!r} {found} times, not once")
        namespace: dict = {}
        # The functions of the repository have no closures, so the code is all of them.
        exec(source.replace(self.right, self.wrong), {**vars(module)}, namespace)
        return namespace[self.function.__name__].__code__

    def make(self, patch: pytest.MonkeyPatch) -> None:
        """Until `patch` is undone, the function has the wrong line.

        Its code is replaced in place, so that whoever has imported it has the mistake.
        """
        patch.setattr(self.function, "__code__", self.code())
