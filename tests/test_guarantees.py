"""docs/guarantees.md: every test that it names exists, and takes as long as it says."""

import ast
import json
import re
from pathlib import Path

import pytest
from conftest import ROOT
from test_readme import commands_in

from support.judge import LIMIT
from support.probe import FACTOR, NATS, PROBE_EVERY

GUARANTEES = (ROOT / "docs/guarantees.md").read_text()
COMMANDS = commands_in(GUARANTEES)
# As one line: a sentence may break anywhere.
SENTENCES = " ".join(GUARANTEES.split())
NAMED = [word for words in COMMANDS for word in words if "::" in word]
# The table of faults names tests of one file.
IN_TABLE = re.findall(r"^\|.*\| `(test_\w+)` \|$", GUARANTEES, re.MULTILINE)


def functions_of(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / file).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


def is_slow(test: str) -> bool:
    """Whether the test "file::name" is left out of `make test`."""
    file, _, name = test.partition("::")
    decorators = functions_of(file)[name].decorator_list
    return "pytest.mark.slow" in [ast.unparse(decorator) for decorator in decorators]


@pytest.mark.parametrize("test", NAMED)
def test_a_test_that_a_guarantee_names_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    assert name in functions_of(file)


def test_every_fault_has_its_test() -> None:
    tests = functions_of("tests/test_faults.py")
    assert len(IN_TABLE) == 13
    assert [name for name in IN_TABLE if name not in tests] == []


def test_a_guarantee_whose_test_is_slow_says_so() -> None:
    for paragraph in GUARANTEES.split("\n\n**"):
        words = [word for words in commands_in(paragraph) for word in words]
        has_slow_test = any(is_slow(word) for word in words if "::" in word)
        says_so = re.search(r"\([^)]*slow\.\)", paragraph, re.IGNORECASE)
        assert has_slow_test == (says_so is not None), paragraph


def test_the_soak_found_what_is_said_of_it() -> None:
    results = ROOT / "experiments/results/soak/soak.json"
    found = json.loads(results.read_text())
    assert found["steps"] == 2000
    assert len(found["killed_at"]) == 20
    assert found["first_difference_of_metrics"] is None
    assert found["same_model"]
    assert max(found["disk_mb_at_most"].values()) < 23
    assert f"{found['log_bytes_per_step'] / 1000:.1f} kB a step" in SENTENCES
    by_100_steps = found["resident_mb_of_100_steps"]
    settled = round(max(by_100_steps))
    assert f"within 700 steps, at {settled:,} MB" in SENTENCES
    # But for the first 700 steps, and the last 100.
    assert all(abs(mean - settled) < 5 for mean in by_100_steps[7:-1])
    whole, half = found["resident_slope"], found["resident_slope_of_second_half"]
    change, low, high = (half[name] for name in ("mb_per_1000_steps", "low", "high"))
    assert f"{change:.1f} MB per 1,000 steps" in SENTENCES
    assert f"(95% interval {low:.1f} to {high:.1f})" in SENTENCES
    change, low, high = (whole[name] for name in ("mb_per_1000_steps", "low", "high"))
    assert f"that is {change:+.0f} ({low:.0f} to {high:.0f})" in SENTENCES


def test_the_commands_are_tests_and_the_soak() -> None:
    for words in COMMANDS:
        assert words[0] == "python"
        if words[1:3] != ["-m", "pytest"]:
            assert words[1] == "experiments/soak.py"
            continue
        tests = [word for word in words[3:] if word != "-rs"]
        files = [word.partition("::")[0] for word in tests]
        assert files
        assert [file for file in files if not Path(ROOT, file).exists()] == []


def test_the_numbers_of_the_page_are_those_of_the_code() -> None:
    assert f"k times {LIMIT:.0f} s of CPU time" in SENTENCES
    assert f"a probe every {PROBE_EVERY} steps" in SENTENCES
    assert f"on fixed texts by {FACTOR} times what they did at the start" in SENTENCES
    assert f"({NATS} nats a token at most)" in SENTENCES
    assert f"used for up to {PROBE_EVERY - 1} steps" in SENTENCES
