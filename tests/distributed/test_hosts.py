"""Ranks on two hosts, network namespaces that two virtual interfaces join, and a cut link."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [f"qkv-{os.getpid()}-{rank}" for rank in range(2)]
INTERFACES = [f"qkv{os.getpid() % 10**6}{side}" for side in "ab"]
ADDRESSES = ["10.199.77.1", "10.199.77.2"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of two hosts that reach each other."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need Linux's ip command, and root")
    with ExitStack() as stack:
        for name in NAMES:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        ends = [word for name, of in zip(INTERFACES, NAMES, strict=True) for word in (name, of)]
        ip("link", "add", ends[0], "netns", ends[1], "type", "veth",
           "peer", "name", ends[2], "netns", ends[3])  # fmt: skip
        for name, interface, address in zip(NAMES, INTERFACES, ADDRESSES, strict=True):
            inside = "-netns", name
            ip(*inside, "address", "add", f"{address}/24", "dev", interface)
            for link in ("lo", interface):
                ip(*inside, "link", "set", link, "up")
        yield NAMES


@pytest.mark.slow
def test_a_cut_link_is_seen_on_both_hosts(hosts: list[str]) -> None:
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "tests.distributed.on_a_host",
             str(rank), f"{ADDRESSES[0]}:29517"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "GLOO_SOCKET_IFNAME": interface},
        )
        for rank, (name, interface) in enumerate(zip(hosts, INTERFACES, strict=True))
    ]  # fmt: skip
    try:
        for process in ranks:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate()[1][-2000:]
            assert float(line) < 2e-6
        ip("-netns", hosts[1], "link", "set", INTERFACES[1], "down")
        for process in ranks:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for rank, process in enumerate(ranks):
            said, errors = process.communicate(timeout=120)
            found = re.match(r"([\d.]+) s: (.*)", said)
            assert found is not None, said + errors[-2000:]
            assert f"rank {1 - rank} " in found[2]
            assert float(found[1]) < 60
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
