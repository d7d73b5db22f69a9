"""Hosts to test with: namespaces that have a host name, a /dev/shm, processes and a network apart.

    with Hosts() as hosts:                  # NoHosts, where this user may not make namespaces
        pool = HostsPool(hosts)             # ranks 0 and 2 on the first host, 1 and 3 on the other
        pool(4).run(function)
        hosts.cut_off(1)                    # the second host's link goes down, without a word
        hosts.slow_down(200)                # each host sends at most 200 Mbit/s

Hosts are joined by a bridge in a network namespace of its own, so nothing changes outside.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.support.pool import Pool, preload, work

SPACES = ("uts", "net", "mnt", "pid")
PR_SET_PDEATHSIG = 1


class NoHosts(Exception):
    """Why there can be none: this user may not make namespaces, or the kernel lacks something."""


class Hosts:
    def __init__(self, count: int = 2) -> None:
        self.names = [f"interlace-{letter}" for letter in "abcd"[:count]]
        self._stack = ExitStack()
        self._switch = 0
        self.pids: list[int] = []
        """A process in the namespaces of each host."""

    def __enter__(self) -> Hosts:
        try:
            self._switch = self._hold(["--net"], "true")
            self._ip(self._switch, "link add br0 type bridge")
            self._ip(self._switch, "link set br0 up")
            for number, name in enumerate(self.names):
                spaces = [
                    "--uts",
                    "--net",
                    "--mount",
                    "--pid",
                    "--fork",
                    "--kill-child",
                    "--mount-proc",
                ]
                parent = self._hold(spaces, f"hostname {name} && mount -t tmpfs tmpfs /dev/shm")
                (pid,) = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
                self.pids.append(int(pid))
                self._ip(self._switch, f"link add v{number} type veth peer name eth0 netns {pid}")
                self._ip(self._switch, f"link set v{number} master br0 up")
                for what in (f"addr add {self.address(number)}/24 dev eth0", "link set eth0 up"):
                    self._ip(int(pid), what)
                self._ip(int(pid), "link set lo up")
        except (OSError, subprocess.SubprocessError, NoHosts) as error:
            self._stack.close()
            raise NoHosts(f"no namespaces to be hosts: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @staticmethod
    def address(host: int) -> str:
        return f"10.77.0.{host + 1}"

    def command(self, host: int, *words: str) -> list[str]:
        """A command that runs the words on the host, from its root folder."""
        spaces = ("--uts", "--net", "--mount", "--pid")
        return ["nsenter", "--target", str(self.pids[host]), *spaces, "--", *words]

    def cut_off(self, host: int) -> None:
        """The host's link goes down: nothing comes from it any more, and nothing says so."""
        self._ip(self._switch, f"link set v{host} down")

    def join(self, host: int) -> None:
        """Its link is up again."""
        self._ip(self._switch, f"link set v{host} up")

    def kill(self, host: int) -> None:
        """All its processes end at once."""
        subprocess.run(self.command(host, "sh", "-c", "kill -9 -1"), timeout=10)

    def slow_down(self, mbit: int) -> None:
        """Limits each host's sends to this rate, by the kernel's traffic control."""
        for pid in self.pids:
            rule = f"tbf rate {mbit}mbit burst 256kb latency 1s"
            self._do(pid, ["tc", *f"qdisc replace dev eth0 root {rule}".split()])

    def _hold(self, spaces: list[str], first: str) -> int:
        """A process in new namespaces that stays until the end; its id, or that of `--fork`."""
        script = f"{first} && echo ready && exec sleep 100000"
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        held: Any = subprocess.Popen(["unshare", *spaces, "sh", "-c", script], **pipes)
        self._stack.callback(lambda: (held.kill(), held.communicate()))
        if held.stdout.readline() != "ready\n":
            raise NoHosts(held.stderr.read().strip())
        return held.pid

    def _ip(self, pid: int, what: str) -> None:
        self._do(pid, ["ip", *what.split()])

    def _do(self, pid: int, words: list[str]) -> None:
        command = ["nsenter", "-t", str(pid), "-n", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        if done.returncode:
            raise NoHosts(f"{' '.join(words)}: {done.stderr.strip()}")


def made_or_skipped(count: int = 2) -> Iterator[Hosts]:
    """The body of a fixture: hosts, or the tests are skipped with the reason."""
    try:
        with Hosts(count) as made:
            yield made
    except NoHosts as why:
        pytest.skip(str(why))


class HostsPool(Pool):
    """Ranks that take turns on hosts, so many in a row on each; the store is on the first."""

    def __init__(self, hosts: Hosts, in_a_row: int = 1) -> None:
        self._hosts, self._in_a_row = hosts, in_a_row
        super().__init__(environ={"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": hosts.address(0)})

    def _store_of(self) -> Any:
        """The store, made by a thread that is on the first host's network."""
        from torch.distributed import TCPStore

        made: list[Any] = []

        def make() -> None:
            _enter(self._hosts.pids[0], ("net",))
            address = self._environ["MASTER_ADDR"]
            made.append(TCPStore(address, 0, is_master=True, wait_for_workers=False))

        preload()
        thread = threading.Thread(target=make)
        thread.start()
        thread.join()
        return made[0]

    def _target(self, rank: int) -> tuple[Any, ...]:
        return work_on, self._hosts.pids[rank // self._in_a_row % len(self._hosts.pids)]


def work_on(pid: int, connection: Connection, port: int, environ: Mapping[str, str]) -> None:
    """A worker's life in the namespaces of a process; it ends as its child there does."""
    sys.path[:] = map(os.path.abspath, sys.path)  # from another folder they are others
    _enter(pid, SPACES)
    if child := os.fork():
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    work(connection, port, environ)


def _enter(pid: int, spaces: tuple[str, ...]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with ExitStack() as opened:  # before /proc becomes another
        files = [opened.enter_context(open(f"/proc/{pid}/ns/{space}")) for space in spaces]
        for file in files:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"{file.name}: {os.strerror(ctypes.get_errno())}")
