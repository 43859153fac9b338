"""Reads a script's flags and YAML files, and reports its errors in one sentence.

A configuration is a class of fields, each with its type, limits, default and a sentence
for --help. pydantic-settings makes every field a flag of the same name. YAML files
given with --config may set the same fields; a later file overrides an earlier one, and
a flag overrides them all.
"""

import argparse
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

# torch reads this when it is imported: its C++ code must print no warnings.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


class Refused(Exception):
    """The user's input cannot be used; the message says why, in one sentence."""


class Stopped(Exception):
    """The run cannot continue; the message says why, in one sentence."""


class Flags(BaseSettings):
    """The base of a configuration. The text below a field describes it in --help."""

    model_config = SettingsConfigDict(
        extra="forbid",
        case_sensitive=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        cli_implicit_flags=True,  # --resume and --no-resume
        env_prefix="=",  # No variable has such a name, so none sets a field.
    )

    @classmethod
    def from_flags(cls, arguments: list[str] | None = None) -> Self:
        """Return the configuration that a command line asks for (default: sys.argv).

        Raises Refused if a flag or key is unknown, if a field does not accept its
        value, or if fields contradict each other.
        """
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config", action="append", default=[])
        given, flags = parser.parse_known_args(arguments)
        recipe = {}
        for path in given.config:
            recipe |= read_recipe(path)
        try:
            return cls(_cli_parse_args=flags, _cli_exit_on_error=False, **recipe)
        except ValidationError as error:
            complaint = error.errors()[0]
            name = ".".join(map(str, complaint["loc"]))
            raise Refused(
                f"{name} is {complaint['input']!r}: {complaint['msg']}"
            ) from None
        except SettingsError as error:
            raise Refused(f"{error} (--help lists the flags)") from None

    @classmethod
    def refuse_wrong_flags(cls) -> None:
        """Exit with a message if the command line is wrong or asks for --help.

        Scripts whose imports take seconds call this before those imports.
        """
        try:
            cls.from_flags()
        except Refused as error:
            sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def read_recipe(path: str) -> dict[str, Any]:
    """Return the fields that a YAML file or a run's config.json sets.

    Raises Refused if the file cannot be read.
    """
    try:
        text = Path(path).read_text()
        fields = yaml.safe_load(text)
        if not isinstance(fields, dict):
            raise ValueError("write `name: value`, one per line")
        if len(yaml.compose(text).value) > len(fields):
            raise ValueError("a name occurs twice")
    except Exception as error:  # yaml raises many types.
        raise Refused(
            f"--config {path} is not a YAML file of fields: {one_line(error)}"
        ) from None
    # A config.json (recognized by "ranks") also has fields about the run that wrote it.
    # They are left out.
    own = ("commits", "ranks", "out_dir", "resume") if "ranks" in fields else ()
    return {str(name): value for name, value in fields.items() if name not in own}


def one_line(error: BaseException) -> str:
    """Return the beginning of an error's message, on one line.

    It ends at the first period after more than 22 characters: a shorter sentence says
    too little, and later sentences may give advice on the options of other programs. If
    the message is a single word, as in KeyError('x'), the type of the error is added.
    """
    text = " ".join(str(error).split())
    reason, *_ = re.split(r"(?<=.{22}\S)\. ", text)
    return reason if " " in reason else repr(error)


def run_script(main: Callable[[], None]) -> None:
    """Run a script's main, and print the reason if it fails.

    The reason for an expected failure is one sentence. After main, the process ends at
    once and skips the interpreter's clean-up, in which an engine would wait for the
    other ranks. If this rank has failed, that would be a deadlock: the other ranks wait
    for this one, and torchrun ends them only after this process has ended. CUDA's
    memory pools may also abort the process in the clean-up.
    """
    sys.stdout.reconfigure(line_buffering=True)  # even if it is a file
    script = Path(sys.argv[0]).name
    status = 1
    try:
        main()
        status = 0
    except (Refused, Stopped, FloatingPointError, OSError) as error:
        print(f"{script}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(
            f"{script}: interrupted; a run of train.py that has a checkpoint continues "
            "if its command is repeated with --resume --out_dir FOLDER (its first line "
            "on stdout names FOLDER)",
            file=sys.stderr,
        )
        status = 130
    except Exception:
        traceback.print_exc()
    os._exit(status)
