"""Flags and recipes: a command line from a configuration class, checked by field.

A configuration is a pydantic model: each field has its type, its default, its limits
and a sentence for --help in one place. Every field is a flag of the same name, and a
key of the YAML file that --config takes; a flag overrides the file.
"""

import argparse
import importlib
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)

Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(gt=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveAmount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# vLLM refuses a temperature over 2, and raises one below 0.01 to that.
Temperature = Annotated[float, Field(ge=0.01, le=2)]
Probability = Annotated[float, Field(gt=0, le=1)]


class Refused(Exception):
    """What the user gave cannot run, for the reason that it says in one sentence."""


class OneRankFailed(Exception):
    """What only one rank found out: the others still wait for it, and end with it."""


class Flags(BaseModel):
    """The base of a configuration: the text below a field says what it is."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class OneSentence(argparse.ArgumentParser):
    """A parser that refuses in one sentence, without a list of all flags before it."""

    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message} (--help lists the flags)")


Kind = TypeVar("Kind", bound=Flags)


def parse_flags(kind: type[Kind], arguments: list[str] | None = None) -> Kind:
    """The configuration that a command line asks for (sys.argv by default).

    Raises Refused on an unknown flag or key, or a value that its field does not take.
    """
    parser = OneSentence(description=kind.__doc__, allow_abbrev=False)
    parser.add_argument(
        "--config", metavar="YAML", help="a file with values of these fields"
    )
    for name, field in kind.model_fields.items():
        how_many: dict[str, str] = {}
        if get_origin(field.annotation) in (list, dict):
            how_many = {"nargs": "+"}
        if field.annotation is bool:
            # --resume alone means --resume true.
            how_many = {"nargs": "?", "const": "true"}
        about = f"{field.description} (default: {field.default})"
        parser.add_argument(
            f"--{name}",
            default=argparse.SUPPRESS,
            metavar="VALUE",
            help=about.replace("%", "%%"),
            **how_many,
        )
    values = vars(parser.parse_args(arguments))
    recipe = values.pop("config")
    if recipe is not None:
        values = read_recipe(Path(recipe)) | values
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise Refused(first_complaint(error)) from error


def read_recipe(path: Path) -> dict[str, Any]:
    """The fields that a YAML file sets. Raises Refused where it is no such file."""
    try:
        recipe = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise Refused(f"--config {path} is no YAML file of fields: {reason}") from error
    if not isinstance(recipe, dict):
        raise Refused(f"--config {path} is no YAML file of fields: it holds {recipe!r}")
    return recipe


def first_complaint(error: ValidationError) -> str:
    """pydantic's first complaint as a sentence that names the field and its value."""
    complaint = error.errors()[0]
    name = ".".join(str(part) for part in complaint["loc"])
    if complaint["type"] == "extra_forbidden":
        return f"there is no field {name!r} (--help lists them)"
    reason = complaint["msg"].removeprefix("Value error, ")
    if not name:
        return reason
    return f"{name} is {complaint['input']!r}: {reason[0].lower()}{reason[1:]}"


def name_value_pairs(given: Any) -> Any:
    """["eps=0.4"] or "eps=0.4" as {"eps": "0.4"}; a dictionary is taken as it is."""
    if isinstance(given, dict):
        return given
    pairs = {}
    for argument in given if isinstance(given, list) else [given]:
        name, equals, value = str(argument).partition("=")
        if not equals:
            raise ValueError("give name=value, such as eps=0.4")
        pairs[name] = value
    return pairs


# A number where it can be one: a flag and a recipe then say the same in config.json.
NumberOrText = Annotated[float | str, Field(union_mode="left_to_right")]
NamedValues = Annotated[dict[str, NumberOrText], BeforeValidator(name_value_pairs)]


def find_objective(
    objectives: Mapping[str, Any], name: str, given: dict[str, float | str]
) -> Any:
    """The loss.Objective of this name, its hyper-parameters set to what is given.

    The name is one of `objectives`, or module:name for one that stands somewhere else.
    Raises Refused where there is none, or where it does not take such a
    hyper-parameter.
    """
    objective = objectives.get(name)
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            objective = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            # importlib has the last two for a relative name and for an empty one.
            raise Refused(f"objective {name!r} cannot be imported: {error}") from error
        if not hasattr(objective, "hyper_parameters"):
            raise Refused(f"objective {name!r} is a {type(objective)}, no Objective")
    if objective is None:
        known = ", ".join(objectives)
        raise Refused(
            f"objective is {name!r}: give {known}, or module:name for another"
        )
    values = dict(objective.hyper_parameters)
    for parameter, given_value in given.items():
        try:
            # pydantic reads "false" as False, and does not cut 1.5 to 1.
            value = TypeAdapter(type(values[parameter])).validate_python(given_value)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{value} is not a finite number")
        except (KeyError, ValueError) as error:
            takes = ", ".join(f"{k}={v}" for k, v in objective.hyper_parameters.items())
            raise Refused(
                f"objective_args has {parameter}={given_value}: "
                f"{name} takes {takes or 'nothing'}"
            ) from error
        values[parameter] = value
    return replace(objective, hyper_parameters=values)
