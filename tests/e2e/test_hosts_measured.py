"""What `interlace calibrate` measures on several hosts: the links inside and between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from tests.support.hosts import Hosts, HostsPool, NoHosts

from interlace.cost import Machine, default_machine
from interlace.ir.ops import KINDS
from interlace_bench import links
from interlace_bench.calibration.work import calibrate_work
from interlace_bench.ranks import here
from interlace_bench.settings import CalibrationSettings, InterconnectSettings

pytestmark = pytest.mark.timeout(110)


@pytest.fixture
def pool() -> Iterator[HostsPool]:
    """Ranks 0 and 1 are on the first host, 2 and 3 on the second."""
    try:
        with Hosts() as hosts:
            made = HostsPool(hosts, in_a_row=2)
            yield made
            made.close()
    except NoHosts as why:
        pytest.skip(str(why))


def measured(
    folder: str, most: int, kinds: tuple[str, ...]
) -> tuple[tuple[tuple[int, ...], ...], str]:
    """The ranks by host, and the file that this rank's host calibrates by."""
    ranks = here(torch.device("cpu"))
    path = f"{folder}/{ranks.me}.json"
    sizes = InterconnectSettings(most=str(most))
    settings = CalibrationSettings(links=sizes, file=path, dtypes=("f32",))
    with mock.patch.object(links, "KINDS", kinds):
        report = calibrate_work(settings, ranks, lambda event: None)
    return ranks.hosts, path if report else ""


@pytest.mark.parametrize(
    ("world", "most", "kinds"),
    [
        (3, 1 << 10, ("all_gather",)),
        pytest.param(4, 1 << 16, (*KINDS,), marks=pytest.mark.slow),
    ],
    ids=["2-and-1", "2-and-2"],
)
def test_links_inside_and_between(
    pool: HostsPool, world: int, most: int, kinds: tuple[str, ...], tmp_path: Path
) -> None:
    found = pool(world).run(measured, str(tmp_path), most, kinds, timeout_s=100)
    assert found[0][0] == ((0, 1), (2, 3)[: world - 2])
    path, other = tmp_path / "0.json", tmp_path / "2.json"
    assert [file for _, file in found] == [str(path), "", str(other), ""][:world]
    assert path.read_text() == other.read_text()
    machine, base = Machine.load(path), default_machine("cpu")
    inside, between = machine.link("gloo"), machine.link("gloo", between=True)
    assert {"send", "all_gather@2"} <= {*dict(inside.curves)}
    assert {"send", *kinds} - {"barrier", "gather", "scatter"} == {*dict(between.curves)}
    assert machine.link("peer") != base.link("peer")
    assert between.shared
