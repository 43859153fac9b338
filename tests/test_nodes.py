"""Test two nodes that are two hosts: network namespaces with a cable between them.

As in Debian and Ubuntu, each host's name is 127.0.1.1 in its own /etc/hosts. With
`pytest -s` you see what the runs print.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import TWO_STEPS
from launch import assert_same_metrics, read_metrics, start_node
from test_checkpoints import names
from test_resume import assert_same_run

from support.checkpoints import checkpoints
from support.command import Refused
from support.machine import choose_interface

HOSTS = [f"p3o-{os.getpid()}-{node}" for node in range(2)]


def ip(words: str) -> str:
    """Return what this command of iproute2 prints."""
    return subprocess.check_output(["ip", *words.split()], text=True)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[list[str]]]:
    """Yield the two hosts, each as the start of a command that runs the rest there."""
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
        inside = f"ip netns exec {host} unshare --mount --uts sh -ec"
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


@pytest.fixture
def no_interface(monkeypatch):
    """Unset the interfaces for a test, and restore the variables afterwards."""
    for name in "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME":
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


ADDRESSES = [
    (entry.address, name)
    for name, entries in psutil.net_if_addrs().items()
    for entry in entries
    if entry.family in (socket.AF_INET, socket.AF_INET6) and "%" not in entry.address
]


@pytest.mark.parametrize("address, interface", ADDRESSES)
def test_gloo_and_nccl_take_the_interface_of_the_first_node(
    address, interface, no_interface
):
    choose_interface(address)
    assert os.environ["GLOO_SOCKET_IFNAME"] == interface
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface}"


def test_a_first_node_that_others_cannot_reach_is_refused_unless_an_interface_is_given(
    no_interface, monkeypatch
):
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(Refused, match="MASTER_ADDR first is 127.0.0.1 on this node"):
        choose_interface("first")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    choose_interface("first")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
