"""Where the demo runs: which device and how many ranks, and what its ranks are given for it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cli.schedules import invoke

from interlace.commands import demo
from interlace.errors import BackendError, TeamError
from interlace.launch import joined, prepare_for_gpus


@pytest.mark.parametrize(
    ("gpus", "device", "ranks", "found"),
    [
        (0, "auto", None, ("cpu", 2)),
        (0, "auto", 4, ("cpu", 4)),
        (1, "auto", None, ("cpu", 2)),
        (2, "auto", None, ("cuda", 2)),
        (3, "auto", None, ("cuda", 2)),
        (8, "auto", None, ("cuda", 4)),
        (8, "auto", 8, ("cuda", 8)),
        (4, "auto", 8, ("cpu", 8)),
        (8, "cpu", None, ("cpu", 2)),
        (1, "cuda", None, ("cuda", 1)),
        (4, "cuda", 2, ("cuda", 2)),
    ],
)
def test_device_and_ranks(
    monkeypatch: pytest.MonkeyPatch, gpus: int, device: Any, ranks: int | None, found: Any
) -> None:
    monkeypatch.setattr(demo, "count_gpus", lambda: gpus)
    assert demo._place(device, ranks) == found


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "count_gpus", lambda: 2)
    with pytest.raises(BackendError, match="torch sees 2 GPUs here, and each of 4 ranks"):
        demo._place("cuda", 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    code, _, error = invoke("demo", "--device", "cuda")
    assert code == 2
    assert error.startswith("error: BackendError: --device cuda: torch sees 0 GPUs here")
    with (
        pytest.raises(BackendError, match="torch sees no GPU here"),
        joined("cuda", timedelta(1), 60),
    ):
        pass


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    code, out, error = invoke("demo", "--out", str(tmp_path / "file" / "demo"))
    assert code == 2
    assert "cannot write in" in error
    assert "Not a directory" in error
    assert out == "", "no step was shown"


def test_a_rank_without_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(TeamError, match="rank 2 of this host has no GPU, there are 2"):
        with joined("cuda", timedelta(1), 60):
            pass


def test_the_plan_of_a_device() -> None:
    small, large = (demo._plan(device, layers=3, steps=5) for device in ("cpu", "cuda"))
    assert (small.model.dtype, large.model.dtype) == ("f32", "bf16")
    assert small.ways(2) == ["eager", "serial", "overlapped"]
    for plan, world in ((small, 4), (large, 2)):
        assert plan.ways(world) == ["eager", "serial", "in_order", "overlapped"]
    assert {small.model.layers, large.model.layers} == {3}
    for world in (1, 2, 4, 8):
        large.model.check(world)


def test_what_nccl_and_cublas_read() -> None:
    one_host = {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}
    environment = {"NCCL_SOCKET_IFNAME": "eth7", **one_host}
    prepare_for_gpus(environment, exact=True)
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert environment["NCCL_SOCKET_IFNAME"] == "eth7", "what is set stays"
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    for several in ({}, {**one_host, "WORLD_SIZE": "8"}):
        prepare_for_gpus(several)
        assert not any("SOCKET" in name or "CUBLAS" in name for name in several)


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_the_group_is_gone_whatever_happens(fails: bool) -> None:
    how = {"store": dist.HashStore(), "rank": 0, "world_size": 1}

    def inside() -> None:
        with joined("cpu", timedelta(seconds=20), 60, **how) as device:
            assert device == torch.device("cpu")
            assert dist.is_initialized()
            if fails:
                raise ValueError("inside")

    if fails:
        with pytest.raises(ValueError, match="inside"):
            inside()
    else:
        inside()
    assert not dist.is_initialized()


def test_the_report_says_what_is_equal() -> None:
    overlapped = {"losses": [5.0, 4.0], "parameters": ["a", "b"]}
    same, apart = {**overlapped}, {**overlapped, "losses": [5.0 + 2**-10, 4.0 - 2**-7]}
    assert demo.equality("in_order", same, overlapped) == (
        "overlapped = in order, bit for bit: losses and last parameters"
    )
    far = "losses 0.0078 apart, 0.00098 in the first"
    assert demo.equality("serial", apart, overlapped) == (
        f"overlapped and serial: {far}: sums are taken in another order"
    )
    assert demo.equality("in_order", apart, overlapped) == (
        f"overlapped and in order: {far}, WHICH MUST NOT BE"
    )
