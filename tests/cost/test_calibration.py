"""Calibration: a machine whose figures are known is found again in the timelines it gives."""

from __future__ import annotations

import dataclasses
import random

import pytest

from interlace.cost import Link, Machine, Span, Timeline, calibrate, default_machine, simulate
from interlace.errors import CalibrationError
from interlace.ir import Program, parse

TRUE = default_machine("cpu").replace(
    gemm_flops=(("f32", 25e9), ("bf16", 9e9), ("other", 10e9)),
    memory_bandwidth=3e9,
    launch_s=20e-6,
    lanes=4,
    links=(
        ("gloo", Link(latency_s=400e-6, bandwidth=0.5e9, lane=1.0)),
        ("peer", Link(latency_s=35e-6, bandwidth=2e9, lane=1.0)),
    ),
)


def exercise() -> Program:
    """Matmuls, copies and transfers of several sizes, one after another."""
    lines = [
        "def exercise(tp: Team[2], x: f32[1024, 1024], y: f32[1024, 1024], h: bf16[1024, 1024]):",
        "    full = alloc(f32[1024, 1024], symmetric=tp)",
        "    out = alloc(f32[1024, 1024])",
        "    half = alloc(bf16[1024, 1024])",
    ]
    for rows in (2, 64, 256, 1024):
        part, even = f"[0:{rows}]", f"[0:{rows // 2}]"
        lines += [
            f'    main: call("aten.mm.out", x{part}, y, out=out{part})',
            f'    main: call("aten.mm.out", h{part}, h, out=half{part})',
            f"    main: copy(x{part}, out{part})",
            f"    main: all_gather(x{even}, out{part}, team=tp)",
            f'    main: all_reduce(out{part}, out{part}, reduce="sum", team=tp)',
            f"    main: put(x{part}, full{part}, peer=tp.rank + 1)",
        ]
    lines += [f"    main: copy(x[{i}:{i + 1}][:, 0:4], out[{i}:{i + 1}][:, 0:4])" for i in range(3)]
    return parse("\n".join([*lines, "    main: free(full)", "    return ()"]))


def close(found: Machine, rel: float) -> None:
    """Asserts that the figures are the true ones."""
    for dtype in ("f32", "bf16"):
        assert dict(found.gemm_flops)[dtype] == pytest.approx(dict(TRUE.gemm_flops)[dtype], rel=rel)
    assert found.memory_bandwidth == pytest.approx(TRUE.memory_bandwidth, rel=rel)
    assert found.launch_s == pytest.approx(TRUE.launch_s, rel=rel)
    for transport in ("gloo", "peer"):
        link, true = found.link(transport), TRUE.link(transport)
        assert link.bandwidth == pytest.approx(true.bandwidth, rel=rel)
        assert link.latency_s == pytest.approx(true.latency_s, rel=rel)


def test_known_figures_are_found_again() -> None:
    program = exercise()
    close(calibrate([(program, simulate(program, TRUE))], default_machine("cpu")), rel=0.02)


def test_noise_and_late_ranks_do_little(seed: int) -> None:
    rng = random.Random(seed)
    program = exercise()
    clean = simulate(program, TRUE)
    runs: list[tuple[Program, Timeline]] = []
    for _ in range(5):
        late = rng.randrange(2)
        spans = [
            dataclasses.replace(
                span,
                end_s=span.end_s
                + span.seconds * rng.random() * 0.04
                + (0.05 if span.rank == late and span.name.startswith("all_") else 0.0),
            )
            for span in clean.spans
        ]
        runs.append((program, Timeline(tuple(spans), "", "measured")))
    close(calibrate(runs, default_machine("cpu")), rel=0.25)


def test_what_was_not_seen_keeps_its_figure() -> None:
    start = default_machine("cpu")
    program = parse("def p(x: f32[512, 512], y: f32[512, 512]):\n    main: copy(x, y)\n")
    found = calibrate([(program, simulate(program, TRUE))], start, name="half")
    assert found.links == start.links
    assert found.gemm_flops == start.gemm_flops
    assert found.memory_bandwidth != start.memory_bandwidth
    assert found.name == "half"
    assert found.host


def test_one_size_tells_the_bandwidth_alone() -> None:
    start = default_machine("cpu")
    program = parse(
        'def p(tp: Team[2], x: f32[512, 512]):\n    main: all_reduce(x, x, reduce="sum", team=tp)\n'
    )
    link = calibrate([(program, simulate(program, TRUE))], start).link("gloo")
    assert link.latency_s == start.link("gloo").latency_s
    nbytes = 512 * 512 * 4
    true = TRUE.link("gloo")
    assert link.latency_s + nbytes / link.bandwidth == pytest.approx(
        true.latency_s + nbytes / true.bandwidth, rel=1e-3
    )


@pytest.mark.parametrize(
    ("small", "large", "latency"),
    [(2.0, 1.0, 1.0), (1.0, 100.0, 0.0)],
    ids=["more bytes in less time", "less than no latency"],
)
def test_noise_that_no_link_explains(small: float, large: float, latency: float) -> None:
    program = parse(
        "def p(tp: Team[2], x: f32[8], y: f32[64]):\n"
        '    main: all_reduce(x, x, reduce="sum", team=tp)\n'
        '    main: all_reduce(y, y, reduce="sum", team=tp)\n'
    )
    spans = [
        Span(rank, "main", index, "all_reduce", 0.0, end, kind="comm")
        for rank in (0, 1)
        for index, end in enumerate((small, large))
    ]
    link = calibrate([(program, Timeline(tuple(spans)))], default_machine("cpu")).link("gloo")
    assert link.latency_s >= latency
    assert link.bandwidth > 0


def test_nothing_to_calibrate_with() -> None:
    program = exercise()
    stray = Timeline((Span(0, "main", 10**6, "?", 0, 1), Span(9, "main", 0, "?", 0, 1)))
    for runs in ([], [(program, Timeline(()))], [(program, stray)]):
        with pytest.raises(CalibrationError, match="trace=True"):
            calibrate(runs, default_machine("cpu"))
