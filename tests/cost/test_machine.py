"""Machines: built-in figures against what was measured, and calibration files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from interlace.cost import Machine, SiteKey, SiteTime, default_machine, default_path, fingerprint
from interlace.cost.machine import GemmTime
from interlace.cost.op_times import op_cost
from interlace.errors import CalibrationError
from interlace.ir import DType, Program, parse

H200 = default_machine("cuda")
MB = 1e6


def seconds_of(program: Program, index: int = 0) -> float:
    """The seconds of one op."""
    teams = {team.name: team for team in program.teams}
    return op_cost(program.ops[index], program.boxes(0), H200, teams, program.where(0)).seconds


@pytest.mark.parametrize(
    ("total", "bus"), [(16 * MB, 144e9), (64 * MB, 237e9), (256 * MB, 284e9), (1024 * MB, 321e9)]
)
def test_all_gather_on_h200(total: float, bus: float) -> None:
    rows = int(total / 2 / 1024 / 4)
    program = parse(
        f"def p(tp: Team[4], x: bf16[{rows}, 1024], y: out[bf16[{4 * rows}, 1024]]):\n"
        "    main: all_gather(x, y, team=tp)\n"
    )
    assert seconds_of(program) == pytest.approx(total * 3 / 4 / bus, rel=0.12)


@pytest.mark.parametrize(("nbytes", "rate"), [(2 * MB, 120e9), (16 * MB, 285e9), (1e9, 360e9)])
def test_peer_copy_on_h200(nbytes: float, rate: float) -> None:
    link = H200.link("peer")
    assert link.latency_s + nbytes / link.bandwidth == pytest.approx(nbytes / rate, rel=0.12)


@pytest.mark.parametrize(
    ("heads", "backward", "us"),
    [(16, False, 482), (16, True, 1378), (8, False, 280), (8, True, 775)],
)
def test_attention_on_h200(heads: int, backward: bool, us: float) -> None:
    """cuDNN's kernels of a causal attention; the model was fitted to 16 heads."""
    shape = f"bf16[1, {heads}, 8192, 128]"
    name, tensors = "aten._scaled_dot_product_flash_attention", "q, k, v"
    if backward:
        name, tensors = f"{name}_for_cpu_backward", "v, q, k, v, v, q"
    call = f'    main: call("{name}{"" if backward else "_for_cpu"}.default", {tensors}, 0.0, True'
    head = f"def p(q: {shape}, k: {shape}, v: {shape}):\n"
    causal = seconds_of(parse(f"{head}{call}, out=(y := {shape}))\n"))
    assert causal == pytest.approx(us * 1e-6, rel=0.05)
    whole = seconds_of(parse(f"{head}{call.replace('True', 'False')}, out=(y := {shape}))\n"))
    assert 1.7 * causal < whole < 2 * causal


def test_a_flag_before_the_dropout_makes_no_attention_causal() -> None:
    """`compute_log_sumexp` stands before it, and what is as by default is not given."""
    shape = "bf16[1, 16, 8192, 128]"
    head = f"def p(q: {shape}, k: {shape}, v: {shape}):\n"
    name = "aten._scaled_dot_product_efficient_attention.default"

    def seconds(more: str) -> float:
        call = f'    main: call("{name}", q, k, v, None, True{more}, out=(y := {shape}))\n'
        return seconds_of(parse(head + call))

    assert seconds("") == seconds(", 0.0, False") > 1.7 * seconds(", 0.0, True")


def test_a_machine_at_its_power_limit_computes_more_slowly() -> None:
    gemm = GemmTime(dtype="bf16", m=8, k=8, n=8, seconds=1e-6)
    limited = H200.replace(gemms=(gemm,)).power_limited
    assert limited.flops(DType.bf16) == H200.sustained * H200.flops(DType.bf16) < 750e12
    assert limited.gemms[0].seconds == pytest.approx(1e-6 / H200.sustained)
    assert limited.memory_bandwidth == H200.memory_bandwidth
    assert limited.link("peer").steals == H200.link("peer").draws > H200.link("peer").steals
    assert limited.link("nccl").steals == H200.link("nccl").steals
    assert limited.power_limited == limited, "it is there already"
    assert default_machine("cpu").power_limited == default_machine("cpu")


def test_an_unknown_transport_is_like_the_default() -> None:
    assert H200.link("ucc") == H200.link(None) == H200.link("nccl")
    assert H200.link("ucc", between=True) == H200.link(None, between=True) != H200.link(None)
    assert H200.flops(DType.i32) == dict(H200.gemm_flops)["other"]


def test_no_built_in_model() -> None:
    with pytest.raises(CalibrationError, match="no built-in model of device 'abacus'"):
        default_machine("abacus")


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_calibration_round_trip(device: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    site = SiteKey(kind="all_gather_matmul", dtype="bf16", m=8, k=8, n=8, world=2, graph=True)
    machine = default_machine(device).replace(
        gemms=(GemmTime(dtype="bf16", m=8, k=8, n=8, seconds=1e-6),),
        sites=(SiteTime(site=site, strategy="peer/put", seconds=1e-6),),
    )
    machine.save(path)
    assert Machine.load(path) == machine.replace(host=fingerprint())
    assert list(tmp_path.iterdir()) == [path], "nothing half written is left"


def edited(tmp_path: Path, **fields: Any) -> Path:
    """A calibration file with some fields changed; None takes one away."""
    path = tmp_path / "machine.json"
    default_machine("cpu").save(path)
    data = json.loads(path.read_text())
    for name, value in fields.items():
        place = data if name == "schema" else data["machine"]
        place.pop(name, None)
        if value is not None:
            place[name] = value
    path.write_text(json.dumps(data))
    return path


BAD = """
{"schema": 0} | schema 0
{"launch_s": null} | missing fields ['launch_s']
{"warp": 9} | unknown fields ['warp']
{"memory_bandwidth": "fast"} | memory_bandwidth is 'fast'
{"memory_bandwidth": 0} | memory_bandwidth is 0
{"attention": [1, 0]} | attention[1] is 0
{"backend": "nccl"} | one for the backend 'nccl'
{"gemm_flops": {"f32": 1e9}} | needs an entry 'other'
{"links": {"gloo": {"speed": 1}}} | links.gloo: missing fields
{"links": {"gloo": {"speed": 1}}} | unknown fields ['speed']
{"links": {"gloo": {"latency_s": 0, "bandwidth": 1, "curves": {"get": []}}}} | links.gloo.curves.get is
{"links": {"gloo": {"latency_s": 0, "bandwidth": 1, "curves": {"get": [[1, 2], [2, 1]]}}}} | never falls
{"gemms": [{"dtype": "f32", "m": 1, "k": 1, "n": 0, "seconds": 1}]} | gemms[0].n is 0
{"sites": [3]} | sites[0] is 3; it should be a JSON object
{"sites": [{"site": {"m": 1, "k": 1, "n": 1, "world": 2}, "seconds": 1, "strategy": "ring"}]} | missing fields ['dtype', 'kind']
{"gemm_tiles": [[1, 2]]} | gemm_tiles[0] is 3 numbers
{"between": {"mpi": {"latency_s": 0, "bandwidth": 1}}} | between needs a link for the backend 'gloo'
{"host": "a ship at sea"} | made for 'a ship at sea'
"""  # noqa: E501
"""Fields of a calibration file that are refused, and what the error says; null takes one away."""


@pytest.mark.parametrize(("fields", "told"), [row.split(" | ") for row in BAD.split("\n") if row])
def test_bad_calibration(fields: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError) as raised:
        Machine.load(edited(tmp_path, **json.loads(fields)))
    assert told in str(raised.value)


def test_another_host_on_request(tmp_path: Path) -> None:
    path = edited(tmp_path, host="a ship at sea")
    assert Machine.load(path, any_host=True).host == "a ship at sea"


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="cannot read"):
        Machine.load(tmp_path / "absent.json")
    path = tmp_path / "broken.json"
    path.write_text("{")
    with pytest.raises(CalibrationError, match="is not JSON"):
        Machine.load(path)
    path.write_text("[" * 200_000)
    with pytest.raises(CalibrationError, match="is not JSON: maximum recursion depth"):
        Machine.load(path)
    os.mkfifo(tmp_path / "pipe")  # nobody ever writes to it
    for name in ("pipe", ""):
        with pytest.raises(CalibrationError, match="is no file"):
            Machine.load(tmp_path / name)
    path.write_text("[]")
    with pytest.raises(CalibrationError, match="should be a JSON object"):
        Machine.load(path)
    with pytest.raises(CalibrationError, match="cannot write"):
        H200.save(tmp_path / "absent" / "machine.json")


def test_what_a_get_costs_its_ranks() -> None:
    """Measured: a stream stops where it raises a signal, and gets of more than two GPUs take longer
    than puts."""
    seconds: dict[tuple[int, str], float] = {}
    for size in (2, 4):
        program = parse(f"""
def p(tp: Team[{size}], x: bf16[4096, 4096], y: out[bf16[4096, 4096]]):
    slot = alloc(bf16[4096, 4096], symmetric=tp)
    main: put(x, slot, peer=tp.rank + 1)
    main: notify(told, to=tp.rank + 1)
    main: expect(told, tp.rank - 1)
    main: get(slot, peer=tp.rank + 1, dst=y)
""")
        seconds |= {
            (size, type(op).__name__): seconds_of(program, i) for i, op in enumerate(program.ops)
        }
    assert seconds[2, "Get"] == seconds[2, "Put"] == seconds[4, "Put"]
    assert 1.2 < seconds[4, "Get"] / seconds[4, "Put"] < 1.5
    assert seconds[4, "Notify"] == 6e-6 > seconds[4, "Expect"]


def test_where_files_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_path().parent == default_path("4 x NVIDIA H200").parent == tmp_path / "interlace"
    assert default_path("4 x NVIDIA H200") != default_path("2 x NVIDIA H200") != default_path()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative, which the standard says to ignore")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_path().parent == tmp_path / "home" / ".cache" / "interlace"


def test_a_gpu_file_belongs_to_its_gpus(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    H200.replace(host=fingerprint("4 x NVIDIA H200")).save(path)
    assert Machine.load(path).name == "h200", "nobody looked for GPUs"
    assert Machine.load(path, gpus="4 x NVIDIA H200").name == "h200"
    with pytest.raises(CalibrationError, match="made for '4 x NVIDIA H200"):
        Machine.load(path, gpus="8 x NVIDIA H200")
