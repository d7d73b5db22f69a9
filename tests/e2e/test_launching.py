"""A job on two hosts: `torchrun` on each, what `interlace doctor` says there, and who listens."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tests.runtime.programs import inputs_of, prepared
from tests.support.hosts import Hosts, HostsPool, made_or_skipped

import interlace
from interlace.comm import team_of
from interlace.launch import joined

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "hosts.md").read_text()
ENVIRON = {**os.environ, "PYTHONPATH": f"{Path(interlace.__file__).parents[1]}:{ROOT}"}
pytestmark = pytest.mark.timeout(110)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    yield from made_or_skipped()


@pytest.mark.slow
def test_two_hosts_on_one_machine_as_told(hosts: Hosts) -> None:
    """What docs/how-to/hosts.md has to try out, in namespaces of its own."""
    (script,) = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    place = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c")
    done = subprocess.run(
        [*place, 'mount -t tmpfs tmpfs /run && exec bash -e -c "$0"', script],
        env={**ENVIRON, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^gloo.s address +ok +listens on 10.77.0.2", done.stdout, re.MULTILINE)


def listening() -> list[str]:
    """Where anybody listens for TCP on this host."""
    found: list[str] = []
    for file in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{file}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A":
                words = bytes.fromhex(local.partition(":")[0])
                count = len(words) // 4
                address = struct.pack(f">{count}I", *struct.unpack(f"<{count}I", words))
                found.append(str(ip_address(address)))
    return found


def run_and_list(seed: int) -> list[str]:
    """Runs of a team over hosts and, beside them, a team of each host's ranks."""
    me, world = dist.get_rank(), dist.get_world_size()
    for place in range(2):
        group: Any = dist.new_group([*range(place, world, 2)])
        if me % 2 == place:
            team_of(group, "inside").setup(20)
    for kind in ("shift", "pipeline"):
        executor = prepared(kind, timeout_s=20.0)
        executor.run(inputs_of(executor.program, me, seed))
        executor.reset()
        executor.run(inputs_of(executor.program, me, seed))
    dist.barrier()
    return listening()


def test_ranks_listen_on_the_chosen_interface_alone(hosts: Hosts, seed: int) -> None:
    pool = HostsPool(hosts)
    try:
        on_a, on_b, *_ = pool(4).run(run_and_list, seed)
    finally:
        pool.close()
    assert set(on_b) == {hosts.address(1)}
    everywhere = [each for each in on_a if ip_address(each).is_unspecified]
    assert len(everywhere) == 1, "torch's store listens so, and nothing else"
    assert {*on_a} - {*everywhere} == {hosts.address(0)}


@pytest.mark.slow
def test_a_store_of_ones_own_listens_on_its_address_alone(hosts: Hosts) -> None:
    """The script of docs/how-to/hosts.md for launchers other than torchrun."""
    (script,) = re.findall(r"^```python\n(import os\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    script += "from tests.e2e.test_launching import listening\n"
    script += "dist.barrier(); print(*listening()); dist.barrier(); dist.destroy_process_group()\n"
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.address(0), "MASTER_PORT": "29500"}
    ranks = [
        subprocess.Popen(
            hosts.command(rank, sys.executable, "-c", script),
            env={**ENVIRON, **given, "GLOO_SOCKET_IFNAME": "eth0", "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    on_a, on_b = (rank.communicate(timeout=40)[0].split() for rank in ranks)
    assert on_a == [hosts.address(0)] * 2, "the store, and gloo"
    assert on_b == [hosts.address(1)]


def list_in_job(settings: object, tell: object) -> dict[str, Any]:
    with joined("cpu", timedelta(seconds=30), 60):
        dist.barrier()
        return {"listening": listening()}


@pytest.mark.slow
def test_ranks_that_interlace_starts_listen_on_loopback_alone(hosts: Hosts) -> None:
    code = (
        "import json; from tests.e2e.test_launching import list_in_job\n"
        "from interlace.launch import launch\n"
        "if __name__ == '__main__':\n"
        "    print(json.dumps(launch(list_in_job, {}, 2, lambda event: None, 60, 'a test')))\n"
    )
    done = subprocess.run(
        hosts.command(1, sys.executable, "-c", code),
        env=ENVIRON,
        capture_output=True,
        text=True,
        timeout=80,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["listening"]
    assert len(found) == 3, "the store, and gloo of two ranks"
    assert {*found} == {"127.0.0.1"}
