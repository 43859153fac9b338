"""python tests/lives.py FILE CORE: short runs of train.py in turn, some of which get killed.

FILE is a JSON list of [flags, blow, copy]. blow is null or [signal, phase, step]: what the run
sends to itself, in the middle of this phase of this step (the number of its line of metrics). copy
is null or the folder to which out_dir is copied afterwards. Prints a JSON list of [what the run
printed, its exit code or minus the signal that ended it].

Every run is a process of its own, forked where train.py and vllm are imported, which takes longer
than a short run, and nothing else has happened: there is no engine and no process group yet.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import train  # isort: skip  (first: it sets what torch reads when it is imported)
import torch
import vllm
from torch.distributed.checkpoint import FileSystemWriter

import rollout

vllm.LLM, vllm.SamplingParams  # noqa: B018  (imported when they are looked at)

PHASES = {  # what is called once, or first, in the middle of each
    "rollout": (rollout.Engine, "sample"),
    "update": (torch.nn.utils, "clip_grad_norm_"),  # the gradient is there, the step is not
    "save": (FileSystemWriter, "write_data"),  # the data are there, their index is not
}


def arm(number: int, phase: str, step: int) -> None:
    """Have this process send itself a signal in the phase of the step."""
    now = None
    problems_of_step = train.problems_of_step
    owner, name = PHASES[phase]
    original = getattr(owner, name)

    def clock(cfg, drawn, count):  # the first thing in a step
        nonlocal now
        now = drawn - cfg.lag + 1
        return problems_of_step(cfg, drawn, count)

    def struck(*arguments, **keywords):
        nonlocal now
        result = original(*arguments, **keywords)
        if now == step:
            now = None
            os.kill(os.getpid(), number)
        return result

    train.problems_of_step = clock
    setattr(owner, name, struck)


def live(flags: list[str], blow: list | None, printed: str) -> int:
    """One run to its end; its exit code, or minus the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            file = os.open(printed, os.O_WRONLY)
            os.dup2(file, 1), os.dup2(file, 2)
            sys.argv = ["train.py", *flags]
            if blow:
                arm(*blow)
            train.main()
            code = 0
        except train.Refused as error:
            print(error)
            code = 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 2
        sys.stdout.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    # One thread each: threads that wait for each other take minutes where cores are scarce.
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(sys.argv[2])]})
    done = []
    for flags, blow, copy in json.loads(Path(sys.argv[1]).read_text()):
        blow = blow and [getattr(signal, blow[0]), *blow[1:]]
        with tempfile.NamedTemporaryFile() as printed:
            code = live(flags, blow, printed.name)
            done.append([Path(printed.name).read_text(), code])
        if copy:
            out = next(f for f in flags if f.startswith("--out_dir=")).partition("=")[2]
            shutil.copytree(out, copy, symlinks=True)
    print(json.dumps(done))
