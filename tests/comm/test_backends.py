"""How backends are made for a team."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from interlace.comm.backends import MARGIN_S, connect


def test_ranks_that_nccl_keeps_waiting_in_the_store_wait_no_longer_than_runs_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It connects in the first run, and there the store's own time-out would hold."""
    made: list[tuple[Any, timedelta]] = []

    def nccl(store: Any, me: int, size: int, timeout: timedelta) -> object:
        made.append((store, timeout))
        return object()

    monkeypatch.setattr(c10d, "ProcessGroupNCCL", nccl, raising=False)
    usual = timedelta(seconds=77)
    whole: Any = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=usual)
    part: Any = dist.PrefixStore("team", whole)
    connect("nccl", part, 0, 2, 3.0, "team tp")
    ((store, limit),) = made
    assert limit == timedelta(seconds=3 + MARGIN_S)
    assert (store.timeout, part.timeout, whole.timeout) == (timedelta(seconds=3), usual, usual)
    part.set("id", "x")
    assert store.get("id") == b"x"

    class Uncloned:
        def clone(self) -> Any:
            raise RuntimeError("not implemented")

    other: Any = Uncloned()
    connect("nccl", other, 0, 2, 3.0, "team tp")
    assert made[1][0] is other


@pytest.mark.parametrize("interfaces", ["", "lo", "lo,lo", "lo,"])
def test_gloo_takes_the_interfaces_that_torch_takes(
    monkeypatch: pytest.MonkeyPatch, interfaces: str
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    limit = timedelta(seconds=3 + MARGIN_S)
    theirs: Any = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=limit).options
    known: Any = connect("gloo", dist.HashStore(), 0, 1, 3.0, "team tp", label=("tp", (0,)))
    ours = known.options
    assert len(ours._devices) == len(theirs._devices)
    assert (ours._threads, ours._timeout) == (theirs._threads, theirs._timeout)
    assert (ours.group_name, ours.global_ranks_in_group) == ("tp", [0])
