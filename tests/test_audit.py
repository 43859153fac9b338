"""docs/audit.md: the files, tests and functions that it names exist, and the flags of
its commands; its counts and its arithmetic are right."""

import ast
import math
import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_readme import commands_in, names_in
from wrong_loops import MISTAKES

from experiments.ablations import clamped_k3_loss
from loss import KL_ESTIMATORS, effective_sample_size
from support.flags import parse_flags
from train import Config

AUDIT = (ROOT / "docs/audit.md").read_text()
COMMANDS = commands_in(AUDIT)
TESTS = [word for words in COMMANDS for word in words if "::" in word]


def test_the_items_and_the_deviations_are_numbered_without_a_gap() -> None:
    items = re.findall(r"^\*\*([A-E]\d)\. ", AUDIT, re.MULTILINE)
    for letter in "ABCDE":
        of_letter = [item for item in items if item[0] == letter]
        assert of_letter == [f"{letter}{n + 1}" for n in range(len(of_letter))]
        assert len(of_letter) >= 3
    deviations = re.findall(r"^\*\*(\d+)\. ", AUDIT, re.MULTILINE)
    assert deviations == [str(n + 1) for n in range(len(deviations))]
    assert len(deviations) == 12


@pytest.mark.parametrize("test", TESTS)
def test_a_test_that_the_audit_names_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert name in functions


def test_a_function_that_the_audit_names_is_in_the_file_beside_it() -> None:
    # "`Policy.forward` in `policy.py`", also with "and" or "of" between.
    named = re.findall(
        r"`([\w.]+)`(?: and `([\w.]+)`)?[^`]{0,12} (?:in|of)\s+`([\w/]+\.py)`", AUDIT
    )
    assert len(named) >= 12
    for first, second, file in named:
        defined = set(names_in(ROOT / file))
        for name in filter(None, (first, second)):
            assert name in defined or name == "torch.minimum", (name, file)


def test_the_commands_of_the_audit_are_of_four_kinds() -> None:
    for words in COMMANDS:
        if words[0] == "python" and words[1:3] == ["-m", "pytest"]:
            files = [word.partition("::")[0] for word in words if ".py" in word]
            assert files
            assert all((ROOT / file).exists() for file in files)
        elif words[:2] == ["python", "train.py"]:
            parse_flags(Config, words[2:])
        elif words[0] == "python":
            assert (ROOT / words[1]).exists()
        elif words[0] not in ("grep", "(3)", "(7)", "(11)", "(12)", "+"):
            raise AssertionError(f"what is {shlex.join(words)}?")


def test_the_lines_of_code_that_the_audit_quotes_are_there() -> None:
    source = (ROOT / "loss.py").read_text()
    for quoted in (
        "loss = policy_loss + (1 - ess) * kl",
        "torch.minimum(ratio, ess)",
    ):
        assert f"`{quoted}`" in AUDIT
        assert quoted in source
    engine = (ROOT / "rollout.py").read_text()
    assert '`logprobs_mode="processed_logprobs"`' in AUDIT
    assert 'logprobs_mode="processed_logprobs"' in engine


def test_the_ablations_and_recipes_that_the_audit_names_are_there() -> None:
    ablations = set(names_in(ROOT / "experiments/ablations.py"))
    assert {"k3", "clamped_k3"} <= ablations
    for path in re.findall(r"`([\w/-]+\.(?:py|yaml))`", AUDIT):
        assert Path(ROOT / path).exists(), path


def test_the_audit_counts_the_wrong_versions_of_the_loop() -> None:
    text = AUDIT.replace("\n", " ")
    count, files = re.search(
        r"(\d+) versions of (.+?) and the checkpoint", text
    ).groups()
    assert int(count) == len(MISTAKES)
    modules = {mistake.function.__module__ for mistake in MISTAKES.values()}
    changed = {f"{module.replace('.', '/')}.py" for module in modules}
    named = set(re.findall(r"`([\w/]+\.py)`", files))
    assert changed == named | {"support/checkpoints.py"}


# The arithmetic of the deviations


def test_deviation_1_at_8_responses_is_a_factor_of_1_07() -> None:
    assert round(math.sqrt(8 / 7), 2) == 1.07


def weight_of_k3(log_ratio: float) -> float:
    """The derivative of k3 with respect to log pi_theta."""
    x = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
    KL_ESTIMATORS["k3"](x).backward()
    return float(x.grad)


def weight_of_clamped_k3(log_ratio: float) -> float:
    """The same for the authors' estimate: the gradient of (12) at A = 0 and e_B = 0."""
    logp = torch.tensor([[log_ratio]], dtype=torch.float64, requires_grad=True)
    nothing = torch.zeros(1, dtype=torch.float64)
    one_token = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = clamped_k3_loss(
        logp, torch.zeros_like(logp), nothing, one_token, ess=nothing[0], token_count=1
    )
    loss.backward()
    return float(logp.grad)


def test_deviation_4_has_the_weights_of_k3() -> None:
    assert round(weight_of_k3(math.log(1e-4))) == -9999
    # The clamp begins at 10 nats.
    assert round(weight_of_k3(-9.9)) == round(weight_of_clamped_k3(-9.9)) == -19929
    assert weight_of_clamped_k3(-10.1) == 1
    # rho log rho is least at rho = 1/e.
    assert min(r / 1000 * math.log(r / 1000) for r in range(1, 1000)) >= -1 / math.e


def test_deviation_5_has_the_e_b_of_four_micro_batches() -> None:
    # The fourth has one ratio of s among n, and 0 elsewhere: mean 1 for s = n, and
    # e_B = 1/n. 12.5 tokens would give 0.08; 25 tokens with two such ratios do.
    stale = torch.full((25,), 1e-9, dtype=torch.float64)
    stale[:2] = 12.5
    ratio = torch.cat([torch.ones(75, dtype=torch.float64), stale])[None]
    everything = torch.ones_like(ratio).bool()
    own = effective_sample_size(stale[None].log(), everything[:, :25])
    of_all = effective_sample_size(ratio.log(), everything)
    assert round(float(own), 2) == 0.08
    assert round((3 + float(own)) / 4, 2) == 0.77
    assert round(float(of_all), 2) == 0.26
