"""Checks the form of results.json of part 4, and that its numbers fit its values."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from assignment.items import quoted
from assignment.solution.experiment import paired_interval
from loss import LOSSES

# The grader needs nothing else of the trainer.
from support.command import Refused
from support.config import NEUTRAL_FIELDS, Config

Sentence = Annotated[str, Field(min_length=40)]
Accuracy = Annotated[float, Field(ge=0, le=1)]
# The file is parsed outside the enclosure, so a limit on its size bounds the work.
LONGEST_FILE = 20_000  # bytes
# An arm is off-policy if one of these differs from its default. Fewer minibatches than
# the default do not count, because they make it less off-policy.
MISMATCH_FIELDS = {
    "temperature",
    "top_p",
    "top_k",
    "rollout_quantization",
    "lag",
    "passes",
    "minibatches",
}


class Arm(BaseModel):
    """One of the two settings, with its results."""

    flags: Annotated[list[str], Field(max_length=50)]
    seeds: Annotated[list[int], Field(min_length=5)]
    values: list[Accuracy]


class Comparison(BaseModel):
    """The first arm minus the second."""

    difference: float
    low: float
    high: float


class Results(BaseModel):
    """The content of results.json; starter/results.json shows the fields."""

    question: Sentence
    prediction: Sentence
    arms: Annotated[dict[str, Arm], Field(min_length=2, max_length=2)]
    comparison: Comparison
    conclusion: Sentence


def wrong_results(path: Path) -> str:
    """Return the first thing wrong with results.json; "" if nothing is."""
    if path.stat().st_size > LONGEST_FILE:
        return f"results.json has more than {LONGEST_FILE} bytes"
    try:
        results = Results.model_validate_json(path.read_bytes())
    except ValidationError as error:
        complaint = error.errors()[0]
        field = " ".join(str(each) for each in complaint["loc"]) or "as a whole"
        return f"results.json, {quoted(field)}: {complaint['msg']}"
    first, second = results.arms.values()
    for name, arm in results.arms.items():
        if len(set(arm.seeds)) < len(arm.seeds):
            return f"arm {quoted(name)} has a seed twice"
        if len(arm.values) != len(arm.seeds):
            return f"arm {quoted(name)} does not have one value for each seed"
    if first.seeds != second.seeds:
        return "the arms do not have the same seeds, so they cannot be paired"
    right = paired_interval(first.values, second.values)
    for (name, found), expected in zip(results.comparison, right, strict=True):
        if not abs(found - expected) <= 1e-4:
            return f"{name} is {found}; from the values it is {expected:.4f}"
    return wrong_flags([first.flags, second.flags])


def wrong_flags(flags_of_arms: list[list[str]]) -> str:
    """Return what is wrong with the settings of the two arms; "" if nothing is.

    Only their form is checked: nothing that a student names is imported or opened.
    """
    settings = []
    for flags in flags_of_arms:
        if any(
            flag.startswith(("--config", "--seed", "-h", "--help")) for flag in flags
        ):
            return "leave --seed, --config and --help out of the flags"
        try:
            cfg = Config.from_flags(flags)
        except (Refused, SystemExit, RecursionError) as error:
            return f"train.py refuses the flags: {quoted(error)}"
        name = cfg.objective
        if name not in LOSSES and not re.fullmatch(r"[\w.]+:\w+", name):
            known = f"{', '.join(LOSSES)} or module:name"
            return f"the objective {quoted(name)} is not one of {known}"
        # Fields that may differ when a run is resumed do not affect its results.
        settings.append(cfg.model_dump(exclude=NEUTRAL_FIELDS | {"seed"}))
    if settings[0] == settings[1]:
        return "the arms have the same settings: nothing is compared"
    default = Config().model_dump(include=MISMATCH_FIELDS)
    for each in settings:
        each["minibatches"] = max(each["minibatches"], default["minibatches"])
    if all(default.items() <= each.items() for each in settings):
        return f"no arm has a mismatch: set one of {', '.join(sorted(MISMATCH_FIELDS))}"
    return ""
