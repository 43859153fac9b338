"""Short runs of train.py in turn, some of which are killed.

    python tests/lives.py FILE CORE

FILE is a JSON list of lives: {"flags": [...], "blow": null or [signal, phase, step],
"copy_to": null or a folder}. The blow is what the run sends to itself, in the middle of
this phase of this step. Afterwards its out_dir is copied to the folder. Prints a JSON
list of {"printed": what the run printed, "code": its exit code, or minus the signal
that ended it}.

Every run is a process of its own. It is forked where train.py and vllm are imported,
which takes longer than a short run, and nothing else has happened: there is no engine
and no process group yet.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import train  # isort: skip  (first: it sets what torch reads when it is imported)
import torch
import vllm
from torch.distributed.checkpoint import FileSystemWriter

import rollout
from support.ranks import run_script

vllm.LLM, vllm.SamplingParams  # noqa: B018  (imported when they are looked at)

# What is called once, or first, in the middle of each phase: its owner, its name.
PHASES = {
    "rollout": (rollout.Engine, "sample"),
    # The gradient is there, and the optimizer's step is not.
    "update": (torch.nn.utils, "clip_grad_norm_"),
    # The engine has the new weights, and its log line has not been written.
    "sync": (rollout.Engine, "load_weights"),
    # The checkpoint's data are there, and their index is not.
    "save": (FileSystemWriter, "write_data"),
}


def arm(number: int, phase: str, step: int) -> None:
    """Have this process send itself the signal `number` in this phase of this step."""
    step_now = None
    problem_numbers = train.problem_numbers
    owner, name = PHASES[phase]
    original = getattr(owner, name)

    def clock(cfg: train.Config, sampled_for: int, problem_count: int) -> list[int]:
        # The first thing that happens in a step. In the first one it happens for the
        # steps 1, ..., 1 + lag, and the last of them sets the clock right.
        nonlocal step_now
        step_now = sampled_for - cfg.lag
        return problem_numbers(cfg, sampled_for, problem_count)

    def struck(*arguments: Any, **keywords: Any) -> Any:
        nonlocal step_now
        result = original(*arguments, **keywords)
        if step_now == step:
            step_now = None
            os.kill(os.getpid(), number)
        return result

    train.problem_numbers = clock
    setattr(owner, name, struck)


def begin_life(
    flags: list[str],
    blow: list | None,
    output: Path,
    environment: dict[str, str] | None = None,
) -> int:
    """Fork a run of train.py that prints into `output`; returns its process id."""
    child = os.fork()
    if child != 0:
        return child
    try:
        os.environ.update(environment or {})
        file = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.argv = ["train.py", *flags]
        if blow is not None:
            name, phase, step = blow
            arm(getattr(signal, name), phase, step)
        code = run_script(train.main)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 2
    sys.stdout.flush()
    os._exit(code)


def live(flags: list[str], blow: list | None, output: Path) -> int:
    """One run to its end; its exit code, or minus the signal that ended it."""
    child = begin_life(flags, blow, output)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def out_dir_of(flags: list[str]) -> str:
    """The value of --out_dir=."""
    [flag] = [flag for flag in flags if flag.startswith("--out_dir=")]
    return flag.removeprefix("--out_dir=")


def main(file: Path, core: int) -> None:
    # One thread each: threads that wait for each other take minutes where cores are
    # scarce.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})
    ends = []
    for life in json.loads(file.read_text()):
        with tempfile.NamedTemporaryFile() as output:
            code = live(life["flags"], life["blow"], Path(output.name))
            ends.append({"printed": Path(output.name).read_text(), "code": code})
        if life["copy_to"] is not None:
            shutil.copytree(out_dir_of(life["flags"]), life["copy_to"], symlinks=True)
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
