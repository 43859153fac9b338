"""Start scripts of this repository on several ranks, as their users do."""

import json
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, TORCHRUN

# Scripts in tests/ need it to import train.py and the other modules.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def run_command(command: list[str | Path]) -> subprocess.CompletedProcess:
    """Run a command in the folder of the repository until it ends."""
    return subprocess.run(
        command,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )


def torchrun(ranks: int, script: str, *arguments: str, fails: bool = False) -> str:
    """Run a script under torchrun on one node until it ends; return what it printed.

    Asserts that it succeeds, or that it does not if `fails` is true.
    """
    nproc = f"--nproc-per-node={ranks}"
    done = run_command([*TORCHRUN, "--standalone", nproc, ROOT / script, *arguments])
    assert (done.returncode != 0) == fails, done.stdout
    return done.stdout


def start_node(
    node: int,
    nodes: int,
    ranks: int,
    master: str,
    script: str,
    *arguments: str,
    inside: Sequence[str] = (),
) -> subprocess.Popen:
    """Start torchrun on one node as in recipes/README.md; `master` is address:port.

    `inside` is the start of a command that runs the rest of it on another host.
    """
    address, port = master.split(":")
    flags = f"--nnodes={nodes} --nproc-per-node={ranks} --node-rank={node} "
    flags += f"--master-addr={address} --master-port={port}"
    command = [*inside, *TORCHRUN, *flags.split(), ROOT / script, *arguments]
    environment = {"GLOO_SOCKET_IFNAME": "lo", **ENVIRONMENT}
    return subprocess.Popen(command, cwd=ROOT, env=environment)


def torchrun_on_nodes(nodes: int, ranks_of_node: int, *script: str) -> None:
    """Run a script under one torchrun per node, all on the loopback address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{free.getsockname()[1]}"
    launchers = [
        start_node(node, nodes, ranks_of_node, master, *script) for node in range(nodes)
    ]
    assert [launcher.wait(timeout=300) for launcher in launchers] == [0] * nodes


def read_metrics(out_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl, which start with step 0."""
    return [json.loads(line) for line in open(out_dir / "metrics.jsonl")]


def assert_same_metrics(
    rows: list[dict[str, Any]], expected_rows: list[dict[str, Any]]
) -> None:
    """Assert that the metrics of two runs agree up to rounding."""
    for name in "heldout_pass@1", "heldout_greedy":
        assert rows[0][name] == expected_rows[0][name]
    for row, expected in zip(rows[1:], expected_rows[1:], strict=True):
        # If a rank had the responses to other prompts, their reward would be 0.
        exact = "reward", "response_tokens", "groups_with_signal", "truncated"
        # The weights of the second update depend on the first.
        for name in *exact, "ess", "ess_min", "mismatch_kl", "grad_norm", "entropy":
            rel = 1e-6 if name in exact else 1e-3
            assert row[name] == pytest.approx(expected[name], rel=rel), name
        # Every shard of an engine has its new weights, because log pi_b agrees with the
        # trainer.
        assert row["logprob_abs_diff"] < 1e-6
