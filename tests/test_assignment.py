"""The assignment's grader: what each submission gets, and what it cannot do.

The reference gets all points and the starter none. Each wrong loss of wrong_losses.py
and each wrong loop of wrong_batches.py loses the items that it should and no others.
Hostile code gets no points, and leaves the grader and its files as they were.
"""

import csv
import inspect
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import wrong_batches
import wrong_losses
from conftest import ROOT
from torch import Tensor
from wrong_losses import P3O, only_tokens

from assignment import grade, reports, sandbox
from assignment.items import ITEMS, Draw, Wrong, check_results
from assignment.starter import toy
from loss import Loss

ASSIGNMENT = ROOT / "assignment"
STARTER = ASSIGNMENT / "starter"
SEED = 20260512
ITEM = {item.name: item for item in ITEMS}

# The grader runs foreign code. Without Landlock (Linux 5.13, x86-64) it refuses to.
NEEDS_SANDBOX = "this kernel has no Landlock, without which foreign code is not run"
pytestmark = pytest.mark.skipif(not sandbox.is_available(), reason=NEEDS_SANDBOX)


@pytest.fixture(scope="module")
def runner() -> Iterator[grade.Runner]:
    with grade.start_runner(trusted=False) as runner:
        yield runner


def points_by_item(runner: grade.Runner, folder: Path | None) -> dict[str, int]:
    results = grade.grade(runner, folder, SEED).results
    return {result.item.name: result.points for result in results}


def lost_of_file(runner: grade.Runner, folder: Path, file: str) -> dict[str, str]:
    """The items of one file in which a submission gets no points, and why."""
    results = [
        grade.grade_item(runner, item, folder, SEED)
        for item in ITEMS
        if item.file == file
    ]
    return {r.item.name: r.sentence for r in results if r.points == 0}


# The reference, the starter


def test_the_reference_gets_all_points(runner: grade.Runner) -> None:
    right = {item.name: item.points for item in ITEMS}
    assert points_by_item(runner, None) == right


def test_the_starter_gets_none(runner: grade.Runner) -> None:
    assert set(points_by_item(runner, STARTER).values()) == {0}


def test_an_empty_folder_gets_none(runner: grade.Runner, tmp_path: Path) -> None:
    assert set(points_by_item(runner, tmp_path).values()) == {0}


@pytest.mark.parametrize("file", ["loss.py", "derivations.py", "batch.py"])
def test_the_starter_has_the_functions_of_the_reference(file: str) -> None:
    reference = (
        ROOT / "loss.py" if file == "loss.py" else ASSIGNMENT / "solution" / file
    )
    asked = set()
    for item in ITEMS:
        if item.file == file:
            asked |= {question.function for question in item.questions(Draw(SEED))}
    for name in asked:
        signatures = [
            signature_in(path.read_text(), name) for path in (STARTER / file, reference)
        ]
        assert signatures[0] == signatures[1], name


def signature_in(source: str, function: str) -> str:
    """The parameters of a function as its file writes them."""
    begin = source.index(f"def {function}(")
    return source[begin : source.index(" -> ", begin)]


def test_the_points_of_the_items_add_up_to_those_of_the_handout() -> None:
    text = (ASSIGNMENT / "README.md").read_text()
    for item in ITEMS:
        assert f"| {item.name} | " in text, item.name
        row = next(
            line for line in text.splitlines() if line.startswith(f"| {item.name} |")
        )
        assert row.split("|")[-2].strip() == str(item.points), row
    assert f"{sum(item.points for item in ITEMS)} points" in text


# The matrix of mistakes

# What only the assignment's grader looks at, and test_loss.py need not.


class PaddingInGradient(P3O):
    """Padding is cut off after the arithmetic: NaN there goes into the gradient."""

    def p3o_loss(self, *tensors: Tensor, **keywords: Any) -> Loss:
        logp, _, _, mask = tensors
        loss, stats = super().p3o_loss(*tensors, **keywords)
        nothing = 0 * torch.where(mask, logp.exp(), 0.0).sum()
        return loss + nothing, stats


class DividedByPadding(P3O):
    """The largest ratio, by which all are divided, may be one of the padding."""

    def effective_sample_size(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        super().effective_sample_size(log_ratio, mask)  # for its errors
        log_ratio = log_ratio.detach()
        largest = torch.where(log_ratio.isfinite(), log_ratio, -torch.inf).max()
        ratio = (log_ratio[mask] - largest).exp()
        ess = ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum())
        return ess.double()


class EssInFloat32(P3O):
    def effective_sample_size(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return super().effective_sample_size(log_ratio, mask).to(log_ratio.dtype)


class EssIsNoTensor(P3O):
    def effective_sample_size(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        return super().effective_sample_size(log_ratio, mask).item()


class NoStats(P3O):
    def p3o_loss(self, *tensors: Tensor, **keywords: Any) -> Loss:
        return super().p3o_loss(*tensors, **keywords)[0], {}


class LossAlone(P3O):
    def p3o_loss(self, *tensors: Tensor, **keywords: Any) -> Loss:
        return super().p3o_loss(*tensors, **keywords)[0]


class StatsWithGradient(P3O):
    def p3o_loss(self, *tensors: Tensor, **keywords: Any) -> Loss:
        loss, stats = super().p3o_loss(*tensors, **keywords)
        return loss, stats | {"loss": loss}


class PaddingIsCapped(P3O):
    def p3o_loss(self, *tensors: Tensor, **keywords: Any) -> Loss:
        logp, logp_behavior, _, mask = tensors
        loss, stats = super().p3o_loss(*tensors, **keywords)
        log_ratio = only_tokens(logp, mask) - only_tokens(logp_behavior, mask)
        ess = self.e_b(keywords.get("ess"), log_ratio, mask)
        divisor = keywords.get("token_count") or mask.numel()
        capped = (log_ratio.exp() > ess).double().sum().detach() / divisor
        return loss, stats | {"capped": capped}


class KlOfItsOwnTokens(P3O):
    """The sum of the KL is divided by the tokens given, not by token_count."""

    def p3o_loss(self, *tensors: Tensor, **keywords: Any) -> Loss:
        tokens = max(1, int(tensors[3].sum()))
        self.factor = (keywords.get("token_count") or tokens) / tokens
        return super().p3o_loss(*tensors, **keywords)

    def total(self, policy_loss: Tensor, kl: Tensor, ess: Tensor) -> Tensor:
        return super().total(policy_loss, self.factor * kl, ess)


class KlByItsOwnEss(P3O):
    """The KL is weighed by e_B of the tokens given, and the cap is the ess given."""

    def p3o_loss(self, *tensors: Tensor, **keywords: Any) -> Loss:
        self.mask = tensors[3]
        return super().p3o_loss(*tensors, **keywords)

    def kl(self, kl: Tensor | None, log_ratio: Tensor, kl_estimator: str) -> Tensor:
        ratio = log_ratio.detach().exp()[self.mask]
        self.own_ess = ratio.mean() ** 2 / (ratio**2).mean()
        return super().kl(kl, log_ratio, kl_estimator)

    def total(self, policy_loss: Tensor, kl: Tensor, ess: Tensor) -> Tensor:
        return super().total(policy_loss, kl, self.own_ess)


class StatsOfItsOwnTokens(P3O):
    def p3o_loss(self, *tensors: Tensor, **keywords: Any) -> Loss:
        loss, stats = super().p3o_loss(*tensors, **keywords)
        tokens = max(1, int(tensors[3].sum()))
        factor = (keywords.get("token_count") or tokens) / tokens
        return loss, {name: factor * value for name, value in stats.items()}


class FarIsNoError(P3O):
    def log_ratio(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        return super().log_ratio(logp, logp_behavior).clamp(-82, 82)


class GradientToBehavior(P3O):
    def kl_divergence(self, logp: Tensor, logp_behavior: Tensor) -> Tensor:
        nothing = (logp_behavior - logp_behavior.detach()).sum(dim=-1)
        return super().kl_divergence(logp, logp_behavior) + nothing


class NothingAddedToDeviation(P3O):
    def deviation(self, reward: Tensor) -> Tensor:
        return reward.std(dim=-1, keepdim=True) - 1e-6


class EqualRewardsByMean(P3O):
    """The mean of equal rewards differs from them by rounding."""

    def group_advantage(self, reward: Tensor, scale: bool = True) -> Tensor:
        super().group_advantage(reward, scale)  # for its errors
        advantage = reward - reward.mean(dim=-1, keepdim=True)
        return advantage / (self.deviation(reward) + 1e-6) if scale else advantage


MISTAKES: dict[str, type[P3O]] = {
    **{mistake: version for mistake, (version, _) in wrong_losses.MISTAKES.items()},
    "padding in the gradient": PaddingInGradient,
    "the largest ratio may be padding": DividedByPadding,
    "e_B is a float32 tensor": EssInFloat32,
    "e_B is no tensor": EssIsNoTensor,
    "an empty dictionary": NoStats,
    "no dictionary": LossAlone,
    "a dictionary with a gradient": StatsWithGradient,
    "padding counts as capped": PaddingIsCapped,
    "the KL divided by its own tokens": KlOfItsOwnTokens,
    "the KL by its own e_B": KlByItsOwnEss,
    "the dictionary divided by its own tokens": StatsOfItsOwnTokens,
    "a ratio of -800 nats is no error": FarIsNoError,
    "a gradient to pi_b": GradientToBehavior,
    "nothing added to the deviation": NothingAddedToDeviation,
    "equal rewards less their mean": EqualRewardsByMean,
}

# What is wrong -> the items that it loses
LOST: dict[str, set[str]] = {
    "population standard deviation": {"1.6"},
    "e_B over padding": {"1.2", "1.4"},
    # Equal ratios that are not divided by the largest give nearly 1.
    "e_B in float32": {"1.3", "1.4"},
    "e_B of a NaN is 1": {"1.5"},
    "KL(pi_b || pi_theta)": {"2.1", "2.2", "2.3"},
    "the rest left out of the KL": {"2.1", "2.2"},
    "pi_theta detached in the KL": {"2.2"},
    "the rest without gradient": {"2.2"},
    "the rest without floor": {"2.3"},
    "cap 1/e_B": {"2.4"},
    "cap 1": {"2.4"},
    "no stop-gradient on the capped ratio": {"2.4"},
    "gradient through e_B": {"1.5", "2.10"},
    "e_B of the micro-batch": {"2.9"},
    # The KL never counts, so its estimate does not either.
    "e_B = 1": {"2.4", "2.5", "2.6"},
    "mean of means": {"2.7", "2.9"},
    # The statistics of the dictionary, which are right here, no longer add up to it.
    "mean over padding": {"2.5", "2.7"},
    "mean of the micro-batch": {"2.9"},
    "zero loss": {"2.4", "2.5", "2.6", "2.7", "2.8", "2.9", "2.10", "2.11"},
    "sign of the KL": {"2.5", "2.6"},
    "e_B instead of 1 - e_B on the KL": {"2.5", "2.6", "2.9"},
    "estimated KL clamped at 10 nats": {"2.6"},
    "k3 by default": {"2.6"},
    # An infinite one is not refused.
    "the given KL ignored": {"2.5", "2.11"},
    "the given KL without gradient": {"2.5"},
    "advantage not detached": {"2.10"},
    # A mean over tokens of what only the last one has is another mean.
    "advantage on the last token only": {"2.7", "2.8"},
    # All that has rho or e_B in it.
    "ratio inverted": {"2.4", "2.5", "2.6", "2.9", "2.10"},
    "padding in the gradient": {"2.7"},
    "the largest ratio may be padding": {"1.4"},
    "e_B is a float32 tensor": {"1.5"},
    "e_B is no tensor": {"1.5"},
    "an empty dictionary": {"2.5"},
    "no dictionary": {"2.5"},
    "a dictionary with a gradient": {"2.5"},
    "padding counts as capped": {"2.5"},
    "the KL divided by its own tokens": {"2.9"},
    "the KL by its own e_B": {"2.9"},
    "the dictionary divided by its own tokens": {"2.9"},
    "a ratio of -800 nats is no error": {"2.11"},
    "a gradient to pi_b": {"2.2"},
    "nothing added to the deviation": {"1.6"},
    "equal rewards less their mean": {"1.6"},
}

# What is wrong -> what the grader says of it, in one of the items
SAID: dict[str, str] = {
    "population standard deviation": "with the population's deviation",
    "e_B over padding": "padding counts as tokens of ratio 1",
    "e_B in float32": "your e_B is nan",
    "e_B of a NaN is 1": "gave no error; expected FloatingPointError",
    "KL(pi_b || pi_theta)": "That is KL(pi_b || pi_theta), the other direction",
    "the rest left out of the KL": "the bucket is missing",
    "pi_theta detached in the KL": "logp is detached",
    "the rest without gradient": "no gradient goes through the rest",
    "the rest without floor": "your KL is not finite",
    "cap 1/e_B": "That is min(rho, 1/e_B)",
    "cap 1": "That is min(rho, 1)",
    "no stop-gradient on the capped ratio": "the capped ratio is not detached",
    "gradient through e_B": "e_B requires a gradient; expected a constant (detach)",
    "e_B of the micro-batch": "ess is not looked at",
    "mean of means": "the mean of the responses' means",
    "mean over padding": "padding included",
    "mean of the micro-batch": "token_count is not looked at",
    "zero loss": "what is left without the KL",
    "sign of the KL": "it pushes away",
    "e_B instead of 1 - e_B on the KL": "e_B in place of 1 - e_B",
    "estimated KL clamped at 10 nats": "log rho clamped at 10 nats",
    "k3 by default": "with the estimate 'k3'",
    "the given KL ignored": "the KL that is given is not looked at",
    "ratio inverted": "the ratio is inverted",
    "padding in the gradient": "the gradient to logp there is nan",
    "the largest ratio may be padding": "which must not be what you divide by",
    "e_B is a float32 tensor": "is a float32 tensor; expected a float64 tensor",
    "e_B is no tensor": "is a float; expected a float64 tensor",
    "an empty dictionary": "has no 'loss'",
    "no dictionary": "does not return the loss and a dictionary",
    "a dictionary with a gradient": "carries a gradient",
    "padding counts as capped": "a share of all entries, padding included",
    "the KL divided by its own tokens": "the KL is not divided by token_count",
    "the KL by its own e_B": "not weighed by the ess that is given",
    "the dictionary divided by its own tokens": "it is not divided by token_count",
    "a ratio of -800 nats is no error": "of which k3 is not finite",
    "a gradient to pi_b": "there is a gradient to logp_behavior",
    "nothing added to the deviation": "without the 1e-6",
    "equal rewards less their mean": "expected exactly 0",
}


def test_every_wrong_loss_has_its_row() -> None:
    assert set(LOST) == set(MISTAKES)


def source_of(
    module: ModuleType, base: type, mistake: type, functions: list[str]
) -> str:
    """A file of the base class, the mistake and the functions that both make."""
    lines = ["from __future__ import annotations", "import torch"]
    if module is wrong_batches:
        lines.append("from toy import log_probabilities, toy_loss")
    else:
        lines += ["LARGEST_LOG_RATIO = 82.0", "SMALLEST_REST = 1e-6"]
        lines += [
            inspect.getsource(helper)
            for helper in (wrong_losses.refuse_rows, wrong_losses.only_tokens)
        ]
    lines.append(inspect.getsource(base))
    if mistake is not base:
        lines.append(inspect.getsource(mistake))
    lines.append(f"version = {mistake.__name__}()")
    lines += [f"{name} = version.{name}" for name in functions]
    return "\n".join(lines)


def write_loss(folder: Path, mistake: type) -> None:
    functions = list(wrong_losses.FUNCTIONS)
    source = source_of(wrong_losses, wrong_losses.P3O, mistake, functions)
    (folder / "loss.py").write_text(source)


def write_loop(folder: Path, mistake: type) -> None:
    functions = ["batch_quantities", "gradient_of_rank"]
    source = source_of(wrong_batches, wrong_batches.Loop, mistake, functions)
    (folder / "batch.py").write_text(source)
    (folder / "toy.py").write_text((STARTER / "toy.py").read_text())


def test_the_classes_without_a_mistake_lose_nothing(
    runner: grade.Runner, tmp_path: Path
) -> None:
    write_loss(tmp_path, wrong_losses.P3O)
    write_loop(tmp_path, wrong_batches.Loop)
    assert lost_of_file(runner, tmp_path, "loss.py") == {}
    assert lost_of_file(runner, tmp_path, "batch.py") == {}


# Each of these is told by the check that tells another of the rows.
LIKE_ANOTHER = {"e_B is no tensor", "no dictionary", "a dictionary with a gradient"}
ROWS = [
    pytest.param(row, marks=pytest.mark.slow) if row in LIKE_ANOTHER else row
    for row in LOST
]


@pytest.mark.parametrize("mistake", ROWS)
def test_a_wrong_loss_loses_the_items_that_it_should_and_no_others(
    runner: grade.Runner, tmp_path: Path, mistake: str
) -> None:
    write_loss(tmp_path, MISTAKES[mistake])
    lost = lost_of_file(runner, tmp_path, "loss.py")
    assert lost.keys() == LOST[mistake], lost
    assert any(SAID.get(mistake, "") in sentence for sentence in lost.values()), lost


@pytest.mark.parametrize("mistake", wrong_batches.MISTAKES)
def test_a_wrong_loop_loses_the_items_that_it_should_and_no_others(
    runner: grade.Runner, tmp_path: Path, mistake: str
) -> None:
    version, items = wrong_batches.MISTAKES[mistake]
    said = wrong_batches.SAID.get(mistake, "")
    write_loop(tmp_path, version)
    lost = lost_of_file(runner, tmp_path, "batch.py")
    assert lost.keys() == items, lost
    assert any(said in sentence for sentence in lost.values()), lost


# Code that does not try gets nothing

IMPORT_ALL = "import torch\n"
CONSTANTS = {
    "e_B is always 1": """
def effective_sample_size(log_ratio, mask):
    return torch.ones((), dtype=torch.float64)
""",
    "everything is 0 and depends on nothing": """
def effective_sample_size(log_ratio, mask):
    return torch.zeros((), dtype=torch.float64)
def group_advantage(reward, scale=True):
    return torch.zeros_like(reward)
def kl_divergence(logp, logp_behavior):
    return 0 * logp.sum(dim=-1)
def p3o_loss(logp, *others, **keywords):
    return 0 * logp.sum(), {}
""",
    "everything refuses everything": """
def refuse(*arguments, **keywords):
    raise FloatingPointError("response 0 1 2 3 4 5 6 cannot be used")
effective_sample_size = group_advantage = kl_divergence = p3o_loss = refuse
""",
    "every result is NaN": """
def effective_sample_size(log_ratio, mask):
    return torch.tensor(float("nan"))
def group_advantage(reward, scale=True):
    return reward * float("nan")
def kl_divergence(logp, logp_behavior):
    return logp.sum(dim=-1) * float("nan")
def p3o_loss(logp, *others, **keywords):
    return logp.sum() * float("nan"), {}
""",
    "every result is a text": """
def anything(*arguments, **keywords):
    return "all points, please"
effective_sample_size = group_advantage = kl_divergence = p3o_loss = anything
""",
}


@pytest.mark.parametrize("code", CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_gets_no_point(
    runner: grade.Runner, tmp_path: Path, code: str
) -> None:
    (tmp_path / "loss.py").write_text(IMPORT_ALL + code)
    all_items = {item.name for item in ITEMS if item.file == "loss.py"}
    assert lost_of_file(runner, tmp_path, "loss.py").keys() == all_items


# Hostile code


def sentence_of(
    runner: grade.Runner, folder: Path, code: str, name: str = "1.1"
) -> str:
    """What the grader says of an item, if the file of the item has this code."""
    (folder / ITEM[name].file).write_text(code)
    result = grade.grade_item(runner, ITEM[name], folder, SEED)
    assert result.points == 0
    return result.sentence


E_B = "def effective_sample_size(log_ratio, mask):\n"


ENDLESS = {
    "import of loss.py": "while True: pass",
    "effective_sample_size": E_B + "    while True: pass",
}


@pytest.mark.parametrize(
    "what",
    [
        "effective_sample_size",
        pytest.param("import of loss.py", marks=pytest.mark.slow),
    ],
)
def test_an_endless_loop_is_stopped_and_its_line_is_said(
    runner: grade.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(grade, "CPU_SECONDS", 1)
    line = ENDLESS[what].count("\n") + 1
    said = sentence_of(runner, tmp_path, ENDLESS[what])
    where = f"(loss.py, line {line}) and was stopped"
    assert f"{what} took more than 1 s of computing {where}" in said


@pytest.mark.slow
def test_an_endless_loop_that_catches_everything_is_stopped(
    runner: grade.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grade, "CPU_SECONDS", 1)
    code = (
        "while True:\n    try:\n        while True: pass\n    except BaseException: 0"
    )
    assert "more than 1 s of computing" in sentence_of(runner, tmp_path, code)


def test_an_endless_sleep_is_stopped(
    runner: grade.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grade, "SLEEP_SECONDS", 0.5)
    said = sentence_of(runner, tmp_path, "import time\ntime.sleep(10**6)")
    assert "it waited for 0.5 s without computing" in said


def endless(function: str, source: str) -> str:
    """The source with a first line in this function that never ends."""
    begin = source.index(f"def {function}(")
    body = source.index("\n    ", source.index(":\n", begin))
    return f"{source[:body]}\n    while True: pass{source[body:]}"


def test_an_endless_loop_costs_the_items_of_its_function_and_no_others(
    runner: grade.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grade, "CPU_SECONDS", 1)
    grade.copy_solution(tmp_path)
    path = tmp_path / "derivations.py"
    path.write_text(endless("token_weight", path.read_text()))
    assert lost_of_file(runner, tmp_path, "derivations.py").keys() == {"2.12"}


@pytest.mark.slow
def test_an_endless_e_b_costs_the_items_that_call_it(
    runner: grade.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grade, "CPU_SECONDS", 1)
    grade.copy_solution(tmp_path)
    path = tmp_path / "loss.py"
    path.write_text(endless("effective_sample_size", path.read_text()))
    results = grade.grade(runner, tmp_path, SEED).results
    # p3o_loss computes it where none is given, which is in six of its items.
    lost = {"1.1", "1.2", "1.3", "1.4", "1.5"}
    lost |= {"2.4", "2.5", "2.7", "2.8", "2.10", "2.11"}
    assert set(reports.lost(results)) == lost


def test_what_the_machine_failed_is_repeated_once_and_then_not_graded(
    runner: grade.Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    ask = runner.ask
    monkeypatch.setattr(runner, "ask", lambda *job: asked.append(1) or ask(*job))
    # As if this was very long and the code had not been let compute.
    monkeypatch.setattr(grade, "WALL_SECONDS", 0)
    (tmp_path / "loss.py").write_text("while True: pass")
    result = grade.grade_item(runner, ITEM["1.1"], tmp_path, SEED)
    assert len(asked) == 2
    assert not result.graded
    assert reports.lost([result]) == []
    assert "not graded, which is not your code's fault: 1.1" in reports.report(
        [result], SEED
    )


def test_only_what_computed_little_was_failed_by_the_machine() -> None:
    for how, cpu_seconds, machine in (
        ("waited", 0.1, True),
        ("SIGKILL", 0.1, True),
        ("SIGKILL", grade.CPU_SECONDS + 2, False),
        ("slept", 0.1, False),
        ("ended", 0.1, False),
    ):
        ended = grade.Ended(how, cpu_seconds, None, "")
        assert ended.is_the_machines_fault() == machine


def test_a_rank_that_is_late_is_waited_for() -> None:
    def add(rank: int, group: toy.Group) -> float:
        time.sleep(0.2 * rank)
        return float(group.all_reduce_sum(rank, torch.tensor(1.0 + rank)))

    assert toy.run_on_ranks(add, [[], [], []]) == [6.0, 6.0, 6.0]


@pytest.mark.parametrize("end", ["return", "raise"])
def test_a_rank_that_waits_for_one_that_is_done_is_told(end: str) -> None:
    def add(rank: int, group: toy.Group) -> float:
        if rank == 1 and end == "raise":
            raise ZeroDivisionError
        return None if rank == 1 else group.all_reduce_sum(rank, torch.tensor(1.0))

    first, second = toy.run_on_ranks(add, [[], []])
    assert isinstance(first, toy.MissingRank)
    assert "rank 0 waits in its collective number 1, but rank 1 was done" in str(first)
    assert isinstance(second, ZeroDivisionError if end == "raise" else type(None))


def test_different_collectives_on_two_ranks_are_an_error() -> None:
    def reduce(rank: int, group: toy.Group) -> Tensor:
        one = torch.tensor(1.0)
        if rank == 0:
            return group.all_reduce_sum(rank, one)
        return group.all_reduce_max(rank, one)

    results = toy.run_on_ranks(reduce, [[], []])
    assert any("calls all_reduce" in str(result) for result in results)


HOSTILE = {
    "crash": ("import ctypes\nctypes.string_at(0)", "crashed"),
    "abort": ("import os\nos.abort()", "crashed"),
    "sys.exit": ("import sys\nsys.exit(0)", "SystemExit"),
    "os._exit": ("import os\nos._exit(0)", "without an answer"),
    "flood of output": (
        E_B + "    while True: print('flood' * 9999)",
        "it printed more than 4 MB",
    ),
    "flood of answers": (E_B + "    return list(range(10**6))", "without an answer"),
    "memory bomb": (E_B + "    return bytearray(10**11)", "MemoryError"),
    "memory bomb of torch": (
        E_B + "    return __import__('torch').ones(10**11)",
        "RuntimeError",
    ),
    "deep recursion": (
        E_B + "    return effective_sample_size(1, 2)",
        "RecursionError",
    ),
    "deep answer": (
        E_B + "    x = []\n    for _ in range(10**5): x = [x]\n    return x",
        "RecursionError",
    ),
    "syntax error": ("def effective_sample_size(", "SyntaxError"),
    "fork": (E_B + "    __import__('os').fork()", "PermissionError"),
    "another program": (
        E_B + "    __import__('subprocess').run(['true'])",
        "PermissionError",
    ),
    "a signal to the grader": (
        E_B + "    import os\n    os.kill(os.getppid(), 9)",
        "PermissionError",
    ),
    "a socket": (E_B + "    __import__('socket').socket()", "PermissionError"),
    "the memory of the grader": (
        E_B + "    import os\n    open(f'/proc/{os.getppid()}/mem', 'rb')",
        "PermissionError",
    ),
}


@pytest.mark.parametrize("code, said", HOSTILE.values(), ids=HOSTILE)
def test_hostile_code_is_told_what_happened(
    runner: grade.Runner, tmp_path: Path, code: str, said: str
) -> None:
    assert said in sentence_of(runner, tmp_path, code)


@pytest.mark.parametrize(
    "attempt",
    [
        "os.remove(target)",
        "os.rename(target, target + '.gone')",
        "open(target, 'w')",
        "os.truncate(target, 0)",
        "os.chmod(target, 0)",
        "os.symlink(target, target + '.link')",
        "shutil.rmtree(os.path.dirname(target))",
    ],
)
def test_no_file_can_be_changed(
    runner: grade.Runner, tmp_path: Path, attempt: str
) -> None:
    submission, elsewhere = tmp_path / "submission", tmp_path / "elsewhere"
    submission.mkdir()
    elsewhere.mkdir()
    target = elsewhere / "expectations.json"
    for target in (elsewhere / "file", submission / "loss.py"):
        target.write_text("as it was")
        code = f"import os, shutil\ntarget = {str(target)!r}\n{E_B}    {attempt}"
        said = sentence_of(runner, submission, code)
        assert "PermissionError" in said
        assert target.read_text() in ("as it was", code)
        assert target.stat().st_mode & 0o777 != 0
        assert len(list(target.parent.iterdir())) == 1


READS = {
    "an import of the reference": f"""
import importlib.util
spec = importlib.util.spec_from_file_location("it", {str(ROOT / "loss.py")!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
effective_sample_size = module.effective_sample_size
""",
    "an import of the solution": f"""
import sys
sys.path.insert(0, {str(ASSIGNMENT / "solution")!r})
from batch import batch_quantities as effective_sample_size
""",
    "an import of the grader": """
from assignment.items import effective_sample_size
""",
    "an import through the grader's own modules": """
import sys
modules = [m for m in sys.modules.values() if "assignment" in str(vars(m))]
effective_sample_size = modules[0].effective_sample_size
""",
    "the text of the reference": f"""
exec(open({str(ROOT / "loss.py")!r}).read())
""",
    "the text of the reference, mapped by torch": f"""
import torch
size = {(ROOT / "loss.py").stat().st_size}
text = torch.from_file({str(ROOT / "loss.py")!r}, size=size, dtype=torch.uint8)
exec(bytes(text.tolist()).decode())
""",
    "the text of the reference, by another program": f"""
import subprocess
exec(subprocess.run(["cat", {str(ROOT / "loss.py")!r}], capture_output=True).stdout)
""",
    "the folder of the grader": f"""
import os
os.listdir({str(ASSIGNMENT)!r})
""",
}


@pytest.mark.parametrize("code", READS.values(), ids=READS)
def test_neither_reference_nor_grader_can_be_read(
    runner: grade.Runner, tmp_path: Path, code: str
) -> None:
    said = sentence_of(runner, tmp_path, code)
    denied = ("PermissionError", "NotFoundError", "AttributeError", "RuntimeError")
    assert any(error in said for error in denied), said


def test_answers_that_code_writes_itself_get_no_point(
    runner: grade.Runner, tmp_path: Path
) -> None:
    forged = json.dumps([{"value": 1.0, "gradients": []}] * 4)
    code = f"""
import os
for number in range(3, 30):
    try:
        os.write(number, {forged!r}.encode())
    except OSError:
        pass
os._exit(0)
"""
    assert sentence_of(runner, tmp_path, code)


def test_the_inputs_of_two_runs_differ_and_those_of_a_seed_do_not() -> None:
    for item in ITEMS:
        if item.file != "results.json":
            calls = [
                json.dumps([question.calls for question in item.questions(Draw(seed))])
                for seed in (1, 1, 2)
            ]
            assert calls[0] == calls[1]
            assert calls[0] != calls[2]


def test_links_pipes_and_long_files_stay_behind(tmp_path: Path) -> None:
    source, scratch = tmp_path / "source", tmp_path / "scratch"
    source.mkdir()
    scratch.mkdir()
    (source / "loss.py").symlink_to(ROOT / "loss.py")
    os.mkfifo(source / "batch.py")
    (source / "derivations.py").write_text("#" * (grade.LONGEST_FILE + 1))
    (source / "experiment.py").write_text("kept = True")
    grade.copy_submission(source, scratch)
    assert sorted(path.name for path in scratch.iterdir()) == [
        "experiment.py",
        "toy.py",
    ]


def test_after_all_that_the_reference_still_gets_all_points(
    runner: grade.Runner,
) -> None:
    # The same process has run every hostile submission above.
    assert sum(points_by_item(runner, None).values()) == sum(i.points for i in ITEMS)


# What the grader says and writes


def test_the_first_wrong_fact_is_a_sentence_with_numbers(
    runner: grade.Runner, tmp_path: Path
) -> None:
    write_loss(tmp_path, wrong_losses.CapOne)
    said = grade.grade_item(runner, ITEM["2.4"], tmp_path, SEED).sentence
    number = r"[\d.]+"
    expected = rf"at rho = {number}, e_B = {number} your weight is 1; expected {number}"
    assert re.match(rf"{expected}\. That is min\(rho, 1\)\. ", said), said


def test_an_error_comes_with_the_line_of_the_students_code(
    runner: grade.Runner, tmp_path: Path
) -> None:
    code = "import torch\n" + E_B + "    return torch.ones(2) @ torch.ones(3)"
    assert "(loss.py, line 3)" in sentence_of(runner, tmp_path, code)


HINTED = {
    "a relative import": ("from .toy import Group", "write `from toy import ...`"),
    "another package": ("import pandas_or_so", "there are torch, numpy, scipy"),
    "a file": ("open('data.txt', 'w')", "the grader lets code open no other files"),
}


@pytest.mark.parametrize("code, hint", HINTED.values(), ids=HINTED)
def test_what_the_grader_does_not_let_is_explained(
    runner: grade.Runner, tmp_path: Path, code: str, hint: str
) -> None:
    said = sentence_of(runner, tmp_path, code)
    assert said.startswith("loss.py cannot be imported: ")
    assert "(loss.py, line 1)" in said
    assert hint in said


def test_one_cause_is_said_once(runner: grade.Runner, tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text("def effective_sample_size(")
    results = [
        grade.grade_item(runner, ITEM[name], tmp_path, SEED)
        for name in ("1.1", "1.2", "2.1")
    ]
    text = reports.report(results, SEED)
    assert text.count("SyntaxError") == 1
    assert text.count("(as in 1.1)") == 2


def run_grader(*arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, ASSIGNMENT / "grade.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_one_submission_ends_with_its_points_and_has_three_reports(
    tmp_path: Path,
) -> None:
    done = run_grader(STARTER, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    *_, seed, last = done.stdout.splitlines()
    assert last == f"points: 0 of {sum(i.points for i in ITEMS)}"
    summary = json.loads((tmp_path / "grade.json").read_text())
    assert summary["points"] == 0
    assert seed == f"--seed {summary['seed']} repeats these inputs"
    assert len(summary["items"]) == len(ITEMS)
    gradescope = json.loads((tmp_path / "results.json").read_text())
    assert gradescope["score"] == 0
    assert [t["max_score"] for t in gradescope["tests"]] == [i.points for i in ITEMS]
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert suite.get("tests") == suite.get("failures") == str(len(ITEMS))


def run_here(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
    runner: grade.Runner,
    *arguments: str | Path,
) -> str:
    """What the command prints, without the seconds in which it would start."""
    words = ["grade.py", *map(str, arguments), "--seed", str(SEED)]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(grade, "start_runner", lambda trusted: nullcontext(runner))
    grade.main()
    return capsys.readouterr().out


def test_several_submissions_end_with_a_table(
    runner: grade.Runner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, out = tmp_path / "all", tmp_path / "out"
    for student in ("ada", "emmy|n"):
        (folder / student).mkdir(parents=True)
    (folder / "late.zip").write_text("")
    (folder / "emmy|n" / "experiment.py").write_text(
        (ASSIGNMENT / "solution/experiment.py").read_text()
    )
    graded = run_here(monkeypatch, capsys, runner, "--all", folder, "--out", out)
    assert "left out, as these are no folders: late.zip" in graded
    rows = [line for line in graded.splitlines() if line.startswith("| ")]
    rows = [row.replace("\\|", "!").split(" | ") for row in rows]
    assert [row[0] for row in rows] == ["| submission", "| ada", "| emmy!n"]
    assert [row[5] for row in rows[1:]] == ["0 of 85", "2 of 85"]
    assert rows[1][6] == "all"
    assert "4.1" not in rows[2][6].split(", ")
    assert f"2 submissions, mean 1.0 of 85 points, seed {SEED}." in graded
    assert "1.1 (2), " in graded
    assert (out / "emmy|n/grade.json").exists()
    assert (out / "table.md").read_text().strip() in graded
    with (out / "table.csv").open() as file:
        ada, emmy = csv.DictReader(file)
    assert (emmy["submission"], emmy["points"], emmy["part 4"]) == ("emmy|n", "2", "2")
    assert (emmy["4.1"], ada["4.1"]) == ("2", "0")


def test_one_folder_of_all_makes_a_table_too(
    runner: grade.Runner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "ada").mkdir()
    graded = run_here(monkeypatch, capsys, runner, "--all", tmp_path)
    assert f"1 submission, mean 0.0 of 85 points, seed {SEED}." in graded


def test_a_folder_without_folders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no folders in it"):
        grade.folders_in(tmp_path)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loss.py").write_text("")
    with pytest.raises(SystemExit, match="is a file; give the folder"):
        grade.check_folder(tmp_path / "loss.py")


def test_a_folder_around_the_submission_is_seen(
    runner: grade.Runner, tmp_path: Path
) -> None:
    (tmp_path / "ada/my_solution").mkdir(parents=True)
    (tmp_path / "ada/my_solution/loss.py").write_text("")
    results = grade.grade(runner, tmp_path / "ada", SEED).results
    assert len({result.sentence for result in results}) == 1
    assert results[0].sentence.endswith("do you mean ada/my_solution?")
    with pytest.raises(SystemExit, match="do you mean ada/my_solution"):
        grade.grade_one(runner, "ada", tmp_path / "ada", SEED, None)


def test_a_python_without_torch_is_told_in_a_sentence() -> None:
    command = [sys.executable, "-S", ASSIGNMENT / "grade.py", STARTER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert ".venv/bin/python" in done.stderr


def test_a_missing_folder_is_refused_in_a_sentence(tmp_path: Path) -> None:
    nobody = tmp_path / "nobody"
    with pytest.raises(SystemExit, match=f"grade.py: there is no folder {nobody}"):
        grade.check_folder(nobody)


def test_reports_into_the_folder_of_a_submission_are_refused(tmp_path: Path) -> None:
    # Both have a results.json: Gradescope's, and that of part 4.
    ada, ben = tmp_path / "ada", tmp_path / "ben"
    ada.mkdir()
    grade.check_out([tmp_path, tmp_path / "reports"], [ada, None])
    for out in ada, tmp_path / "ben/../ada":
        with pytest.raises(SystemExit, match="would replace a submission's"):
            grade.check_out([ben, out], [ada])


def test_a_message_that_xml_cannot_hold_is_made_legible(
    runner: grade.Runner, tmp_path: Path
) -> None:
    code = E_B + "    raise ValueError('\\x00\\x1b[31m\\n<&>')"
    (tmp_path / "loss.py").write_text(code)
    results = [grade.grade_item(runner, ITEM["1.1"], tmp_path, SEED)]
    reports.write_reports(results, tmp_path / "out", "\x00", SEED)
    suite = ElementTree.parse(tmp_path / "out/junit.xml").getroot()
    assert "<&>" in suite.find("testcase/failure").get("message")


# results.json of part 4


def solution_results() -> dict:
    return json.loads((ASSIGNMENT / "solution/results.json").read_text())


def complaint(tmp_path: Path, results: object) -> str:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    with pytest.raises(Wrong) as caught:
        check_results(path)
    return str(caught.value)


def test_numbers_that_do_not_follow_from_the_values_are_named(tmp_path: Path) -> None:
    results = solution_results()
    results["comparison"]["high"] += 0.01
    assert "high in results.json is" in complaint(tmp_path, results)


def test_fewer_than_five_seeds_are_refused(tmp_path: Path) -> None:
    results = solution_results()
    for arm in results["arms"].values():
        arm["seeds"], arm["values"] = arm["seeds"][:4], arm["values"][:4]
    assert "fewer than 5 seeds" in complaint(tmp_path, results)


def test_arms_of_different_seeds_cannot_be_paired(tmp_path: Path) -> None:
    results = solution_results()
    list(results["arms"].values())[0]["seeds"] = [5, 6, 7, 8, 9]
    assert "same seeds" in complaint(tmp_path, results)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        # More on-policy than the default, which has two minibatches.
        ["--minibatches=1"],
        # The policy's own temperature.
        ["--temperature=1.4", "--policy_temperature=1.4"],
    ],
)
def test_an_experiment_without_a_mismatch_is_refused(
    flags: list[str], tmp_path: Path
) -> None:
    results = solution_results()
    for objective, arm in zip(("p3o", "grpo"), results["arms"].values(), strict=True):
        arm["flags"] = [*flags, f"--objective={objective}"]
    assert "no arm has a mismatch" in complaint(tmp_path, results)


@pytest.mark.parametrize(
    "flag",
    [
        "--temperature=1.2",
        "--top_p=0.9",
        "--top_k=5",
        "--rollout_quantization=fp8_per_channel",
        "--lag=1",
        "--minibatches=4",
        "--passes=2",
    ],
)
def test_a_mismatch_in_one_arm_is_enough(flag: str, tmp_path: Path) -> None:
    results = solution_results()
    first, second = results["arms"].values()
    first["flags"], second["flags"] = ["--minibatches=1"], ["--minibatches=1", flag]
    (tmp_path / "results.json").write_text(json.dumps(results))
    check_results(tmp_path / "results.json")


def test_two_arms_of_one_setting_are_refused_however_it_is_written(
    tmp_path: Path,
) -> None:
    results = solution_results()
    first, second = results["arms"].values()
    first["flags"] = ["--lag=4", "--out_dir=runs/a"]
    second["flags"] = ["--lag", "4", "--out_dir=runs/b", "--save_every=2"]
    assert "the arms have the same settings" in complaint(tmp_path, results)


@pytest.mark.parametrize(
    "flag, said",
    [
        ("--seed=3", "leave --seed out of the flags"),
        ("--objective=ppo", "train.py has no objective 'ppo'"),
    ],
)
def test_a_seed_among_the_flags_and_an_unknown_objective_are_refused(
    flag: str, said: str, tmp_path: Path
) -> None:
    results = solution_results()
    list(results["arms"].values())[0]["flags"].append(flag)
    assert said in complaint(tmp_path, results)


def test_runs_without_a_spread_have_an_interval_without_width(tmp_path: Path) -> None:
    # One arm that always collapses, and one that always learns.
    results = solution_results()
    first, second = results["arms"].values()
    first["values"], second["values"] = [0.0] * 5, [1.0] * 5
    results["comparison"] = {"difference": -1.0, "low": -1.0, "high": -1.0}
    (tmp_path / "results.json").write_text(json.dumps(results))
    check_results(tmp_path / "results.json")


def test_runs_that_all_had_the_same_seed_are_refused(tmp_path: Path) -> None:
    results = solution_results()
    first, second = results["arms"].values()
    first["values"], second["values"] = [0.9375] * 5, [0.9023] * 5
    assert "was each run given a --seed of its own?" in complaint(tmp_path, results)


def test_flags_that_train_py_does_not_have_are_refused(tmp_path: Path) -> None:
    results = solution_results()
    list(results["arms"].values())[0]["flags"].append("--temprature=1.2")
    assert "train.py refuses the flags" in complaint(tmp_path, results)


@pytest.mark.parametrize("results", [None, [], 3, {"arms": 3}, "text"])
def test_results_of_another_form_are_refused(tmp_path: Path, results: object) -> None:
    assert complaint(tmp_path, results)
