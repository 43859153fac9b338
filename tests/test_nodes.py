"""Test runs on two hosts: network namespaces that a virtual cable connects.

As on Debian and Ubuntu, each host's /etc/hosts says that its own name is 127.0.1.1.
`pytest -s` shows what the runs print.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import TWO_STEPS
from launch import assert_same_metrics, read_metrics, start_node
from test_checkpoints import names
from test_resume import assert_same_run

from support.checkpoints import checkpoints
from support.command import Refused
from support.machine import init_distributed

HOSTS = [f"p3o-{os.getpid()}-{node}" for node in range(2)]


def ip(words: str) -> str:
    """Return what this command of iproute2 prints."""
    return subprocess.check_output(["ip", *words.split()], text=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Yield a prefix for each of the two hosts: the rest of a command runs there."""
    try:
        ip(f"netns add {HOSTS[0]}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"two hosts require root and iproute2: {error}")
    ip(f"netns add {HOSTS[1]}")
    ip(f"link add eth0 netns {HOSTS[0]} type veth peer name eth0 netns {HOSTS[1]}")
    commands = []
    for number, host in enumerate(HOSTS, 1):
        ip(f"-n {host} addr add 10.77.0.{number}/24 dev eth0")
        ip(f"-n {host} link set lo up")
        ip(f"-n {host} link set eth0 up")
        file = tmp_path / host
        file.write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
        script = f'mount --bind {file} /etc/hosts; hostname {host}; exec "$@"'
        variable = "GLOO_SOCKET_IFNAME=eth0"
        inside = f"ip netns exec {host} env {variable} unshare --mount --uts sh -ec"
        commands.append([*inside.split(), script, host])
    yield commands
    for host in HOSTS:
        kill(host)
        ip(f"netns delete {host}")


def kill(host: str) -> None:
    """Send kill -9 to all processes of a host, including torchrun."""
    for process in ip(f"netns pids {host}").split():
        os.kill(int(process), signal.SIGKILL)


def start(hosts: list[list[str]], *flags: str) -> list[subprocess.Popen]:
    """Start train.py on both hosts, each with two ranks that share an engine."""
    flags = (*TWO_STEPS, "--steps=4", "--save_every=2", "--rollout_tp=2", *flags)
    return [
        start_node(node, 2, 2, "10.77.0.1:29500", "train.py", *flags, inside=host)
        for node, host in enumerate(hosts)
    ]


@pytest.mark.slow
def test_two_hosts_do_what_one_rank_does_and_resume_bit_for_bit_after_one_is_killed(
    hosts, train_here, tmp_path
):
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert [node.wait(300) for node in start(hosts, f"--out_dir={alone}")] == [0, 0]
    assert_same_metrics(read_metrics(alone), train_here(*TWO_STEPS, "--steps=4"))

    first, second = start(hosts, f"--out_dir={killed}")
    while not checkpoints(killed):
        assert first.poll() is None
        time.sleep(0.05)
    kill(HOSTS[1])  # in step 3 or 4
    killed_at = time.monotonic()
    assert (first.wait(300), second.wait()) == (1, -signal.SIGKILL)
    print(f"The other host ended {time.monotonic() - killed_at:.0f} s after the kill.")
    assert names(killed) == ["step-000002"]
    resumed = start(hosts, f"--out_dir={killed}", "--resume")
    assert [node.wait(300) for node in resumed] == [0, 0]
    assert_same_run(killed, alone)


def test_several_nodes_have_to_be_told_their_network_interface(monkeypatch):
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    sentence = "^there are several nodes: on each of them, set GLOO_SOCKET_IFNAME, and "
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    with pytest.raises(Refused, match=sentence):
        init_distributed()
