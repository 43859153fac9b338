"""What stands between a command line and main(): flags, recipes, errors in a sentence.

A configuration is a class of fields, each with its type, limits, default and a sentence
for --help. pydantic-settings makes every field a flag of the same name. A YAML file,
given by --config, may set the same fields: a later one overrides an earlier one, and a
flag all of them.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

Count = Annotated[int, Field(ge=0)]
PositiveCount = Annotated[int, Field(gt=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PositiveAmount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# vLLM refuses a temperature over 2, and raises one below 0.01 to that.
Temperature = Annotated[float, Field(ge=0.01, le=2)]
Probability = Annotated[float, Field(gt=0, le=1)]
Dtype = Literal["auto", "float32", "bfloat16"]
Folder = Annotated[str, AfterValidator(os.path.expanduser)]  # ~ is the home folder
# A number where it can be one.
Number = Annotated[float, Field(allow_inf_nan=False)]
NumberOrText = Annotated[Number | str, Field(union_mode="left_to_right")]


class Refused(Exception):
    """What the user gave cannot be used, for the reason that it says in a sentence."""


class Stopped(Exception):
    """A run cannot go on, for the reason that it says in one sentence."""


class Flags(BaseSettings):
    """The base of a configuration: the text below a field says what it is."""

    model_config = SettingsConfigDict(
        extra="forbid",
        case_sensitive=True,
        use_attribute_docstrings=True,
        cli_implicit_flags=True,  # --resume and --no-resume
    )

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: Any, **others: Any
    ) -> tuple[Any, ...]:
        """Flags and the recipe, and no variables of the environment."""
        return (init_settings,)


Kind = TypeVar("Kind", bound=Flags)


def parse_flags(kind: type[Kind], arguments: list[str] | None = None) -> Kind:
    """The configuration that a command line asks for (sys.argv by default).

    Raises Refused on an unknown flag or key, or a value that its field does not take.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    given, flags = parser.parse_known_args(arguments)
    recipe = {}
    for path in given.config:
        recipe |= read_recipe(path)
    try:
        return kind(_cli_parse_args=flags, _cli_exit_on_error=False, **recipe)
    except ValidationError as error:
        complaint = error.errors()[0]
        name = ".".join(str(part) for part in complaint["loc"])
        of_field = f"{name} is {complaint['input']!r}: " if name else ""
        reason = complaint["msg"].removeprefix("Value error, ")
        raise Refused(f"{of_field}{reason}") from None
    except SettingsError as error:
        raise Refused(f"{error} (--help lists the flags)") from None


def read_recipe(path: str) -> dict[str, Any]:
    """The fields that a YAML file sets, or a run's config.json. Else raises Refused."""
    try:
        text = Path(path).read_text()
        fields = yaml.safe_load(text)
        if not isinstance(fields, dict):
            raise ValueError("write `name: value`, one a line")
        if len(yaml.compose(text).value) > len(fields):
            raise ValueError("a name is there twice")
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise Refused(
            f"--config {path} is no YAML file of fields: {one_line(error)}"
        ) from None
    if "ranks" in fields:
        # A run's config.json is repeated, in a folder of its own.
        for name in ("environment", "commits", "ranks", "out_dir"):
            fields.pop(name, None)
    return {str(name): value for name, value in fields.items()}


def one_line(error: Exception) -> str:
    """An error's message without its line breaks, and its kind where it is a word."""
    text = " ".join(str(error).split())
    return text if " " in text else repr(error)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main. What ends it early is said, in one sentence if it can be.

    The process then leaves at once. An engine that ended with the interpreter would
    wait for the other ranks, which wait for this one after an error: torchrun ends
    them. CUDA's memory pools may also abort at the interpreter's end.
    """
    rank = os.environ.get("RANK", "0")
    script = Path(sys.argv[0]).name + (f", rank {rank}" if rank != "0" else "")
    status = 0
    try:
        main()
    except (Refused, Stopped, FloatingPointError, OSError) as error:
        print(f"{script}: {error}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print(f"{script}: interrupted", file=sys.stderr)
        status = 130
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
