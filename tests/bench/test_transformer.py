"""`interlace bench transformer`: tiny layers trained on two ranks."""

from __future__ import annotations

import csv
import functools
import importlib
import importlib.util
import math
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.pool import Pool
from torch._inductor import config as inductor_config
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from interlace.cli import app
from interlace.cost import Span
from interlace.cost.op_times import at_hand
from interlace.demo.model import Plain
from interlace.errors import UnsupportedError
from interlace.float8 import Recipe
from interlace.frontend import binding
from interlace.ir import Call, Notify, Op, parse
from interlace.runtime import Executor
from interlace.trace.account import divided, totals
from interlace_bench.layers.account import (
    GAP,
    accounts_of,
    kernels,
    of_kernel,
    of_layouts,
    show,
)
from interlace_bench.layers.models import (
    MODELS,
    DistGemm,
    Gathered,
    Layers,
    NoCommunication,
    flops,
)
from interlace_bench.layers.training import LIMIT, LayerVariants, Stages, limit, rows_of, work
from interlace_bench.race import prepare
from interlace_bench.ranks import here
from interlace_bench.settings import TransformerSettings

pytestmark = pytest.mark.timeout(300)
CPU = torch.device("cpu")


def bench(*args: str, code: int = 0) -> Any:
    done = CliRunner().invoke(app, ["bench", "transformer", *args])
    assert done.exit_code == code, done.output
    return done


WAYS = ("eager", "layers", "async-tp")
ALL_WAYS = ("eager", "compile", "layers", "layers-fp8", "compile-fp8", "async-tp")


def raced(ways: tuple[str, ...]) -> Any:
    """The report of a run of tiny layers, and the rows that were told meanwhile."""
    given: Any = {"model": "tiny", "sequence": 32, "dtype": "f32", "seconds": 0.5}
    settings = TransformerSettings(**given, strategy="peer", only=",".join(ways))
    events: list[dict[str, Any]] = []
    report = work(settings, here(CPU), events.append)
    return report, [row for event in events if event["event"] == "rows" for row in event["rows"]]


@pytest.mark.parametrize("ways", [WAYS, pytest.param(ALL_WAYS, marks=pytest.mark.slow)], ids=len)
def test_ways_train_alike_and_rows_tell_what_overlap_gains(
    pool: Pool, ways: tuple[str, ...]
) -> None:
    (report, told), (nothing, _) = pool(2).run(raced, ways, replace=True, timeout_s=110)
    assert nothing is None
    *rows, absent = told
    assert [row["way"] for row in report["rows"]] == [row["way"] for row in told] == list(ways)
    assert "async-tp needs GPUs" in absent["error"]
    for row in rows:
        assert row["error"] == ""
        assert row["off"] <= limit(row["way"]), "in roundings of f32, from eager"
        assert min(row["forward_ms"], row["backward_ms"], row["step_ms"], row["tokens_s"]) > 0
        assert math.isnan(row["speedup"]), "Inductor did not run"
        assert math.isnan(row["exposed_ms"]), "nor did the ideal"
        assert row["commit"]
        assert math.isfinite(row["peak_bytes"] + row["rest_bytes"]), "of this process"


def dist_gemm_off() -> tuple[str, float]:
    """The refusal on a CPU, and how far torchtitan's functions are off by torch's plain fallbacks
    of the fused operators, whose kernels need GPUs."""
    plain: Any = importlib.import_module("torch.distributed._symmetric_memory")
    importlib.import_module("tests.support.titan")  # tells torchtitan of the CPU, once for all
    linear: Any = importlib.import_module("torchtitan.distributed.linear")
    here_alone = torch.library.Library("symm_mem", "IMPL")
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        here_alone.impl(f"fused_{name}", getattr(plain, f"_fused_{name}_fallback"), "CPU")
    given: Any = {"model": "tiny", "sequence": 32, "batch": 2, "dtype": "f32"}
    trained = LayerVariants(TransformerSettings(**given), here(CPU))
    with pytest.raises(UnsupportedError) as refused:
        trained.training("dist-gemm")
    training = trained._on_shards(DistGemm(trained._group, linear))
    original = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: object = None) -> torch.Tensor:
        return original(a, b)  # of the same dtype, f32; torch has the other on GPUs alone

    with mock.patch.object(torch, "mm", mm):
        found = training.results(*trained.sets[0])
    return str(refused.value), trained._off(found, trained._known, None)


@pytest.mark.torchtitan
@pytest.mark.skipif(
    importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"
)
def test_dist_gemm_computes_what_eager_does(pool: Pool) -> None:
    """Of two sequences: their rows are gathered position by position."""
    for refusal, off in pool(2).run(dist_gemm_off, timeout_s=110):
        assert refusal == "dist-gemm needs GPUs"
        assert off <= LIMIT


HELD_S = 0.06


def accounted() -> list[dict[str, Any]]:
    """The account of a compiled layer whose second rank is late with its first signal."""

    def hold(rank: int, index: int, op: Op) -> None:
        if rank == 1 and isinstance(op, Notify) and op.signal == "all_gather_shard_ready":
            time.sleep(HELD_S)

    given: Any = {"model": "tiny", "sequence": 512, "dtype": "f32", "account": True, "seconds": 1}
    settings = TransformerSettings(**given, strategy="peer", only="compile,ideal")
    with mock.patch.object(binding, "Executor", functools.partial(Executor, before_op=hold)):
        variants = LayerVariants(settings, here(CPU))
        found = accounts_of(variants, settings.names, lambda event: None)
    torch.compiler.reset()
    return found


def test_an_account_adds_up_to_the_time_over_the_ideal(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a run of two ranks: by part, with ops and modules, and little that has no name."""
    (found,), _ = pool(2).run(accounted, timeout_s=150)
    lines, over = found["lines"], found["over_ms"]
    assert sum(line["ms"] for line in lines) == pytest.approx(over)
    assert sum(line["share"] for line in lines) == pytest.approx(1)
    (rest,) = [line["ms"] for line in lines if line["part"] == "rest"]
    assert abs(rest) <= 0.1 * over, lines
    awaited = [line for line in lines if "expect all_gather_shard_ready" in line["what"]]
    assert {line["part"] for line in awaited} == {"idle, signal"}
    assert {line["module"] for line in awaited} == {
        "layers.0.attention",
        "layers.0.feed_forward.down",
    }
    assert sum(line["ms"] for line in awaited) == pytest.approx(2e3 * HELD_S, rel=0.1)
    parts = {line["part"] for line in lines}
    named = {"idle, launch", "elementwise", "attention", "boundaries", "matmuls in chunks"}
    assert named | {"copies", "sums", "matmuls slower than alone"} <= parts
    matmuls = [line for line in lines if line["part"] == "matmuls slower than alone"]
    assert {line["layer"] for line in matmuls} == {"layers.0"}
    assert all(re.match(r"aten.mm.* \d+x\d+x\d+", line["what"]) for line in matmuls)
    assert all(re.match("(forward|backward) [0-9]", line["ops"]) for line in matmuls)
    show([found])
    text = capsys.readouterr().out
    assert "\ncompile, forward and backward on rank 0: " in text
    assert re.search(r"\ncompile, by layer:\npart +layers.0 +in none\n", text)


@pytest.mark.slow
def test_an_account_is_printed_and_written(tmp_path: Path) -> None:
    args = ("--device", "cpu", "--model", "tiny", "--sequence", "64", "--dtype", "f32")
    more = ("--seconds", "0.5", "--only", "compile,inductor,ideal", "--out", str(tmp_path))
    text = bench(*args, *more, "--account").stdout
    with (tmp_path / "account.csv").open() as file:
        lines = list(csv.DictReader(file))
    for way in ("compile", "inductor"):
        assert f"\n{way}, forward and backward on rank 0: " in text
        own = [line for line in lines if line["way"] == way]
        over = float(own[0]["took_ms"]) - float(own[0]["ideal_ms"])
        assert sum(float(line["ms"]) for line in own) == pytest.approx(over, rel=1e-2, abs=0.1)
    assert all(line["commit"] and line["world"] == "2" for line in lines)


def test_a_matmul_in_place_is_timed_alone() -> None:
    program = parse(
        """
def f(x: f32[4, 8], w: f32[8, 6], y: f32[4, 6]):
    main: call("aten.addmm_.default", y, x, w, out=y, mutates=True)
    main: call("aten.mm.out", x, w, out=y)
    return y
"""
    )
    box = at_hand(program.boxes(0))
    for op in program.ops:
        assert isinstance(op, Call)
        result: Any = of_layouts(op, box, torch.device("cpu"))()
        assert result.shape == (4, 6)


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("gather_kernel", "matmuls"),
        ("scatter_kernel", "matmuls"),
        ("awaited_sum_kernel", "sums"),
        ("exchange_kernel", "exposed communication"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(void const*)", "attention"),
        ("triton_poi_fused_0", "elementwise"),
    ],
)
def test_kernels_of_ours_have_their_part(kernel: str, part: str) -> None:
    assert of_kernel(Span(0, "", 0, kernel, 0, 1)).part == part


def test_kernels_of_a_gpus_profile_are_those_behind_the_last_spin() -> None:
    """With communication where nothing computes, by the names that kernels have on a GPU."""
    found = [
        ("void at::native::elementwise_kernel<128>", 0, 9),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", 10, 20),
        ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NTT", 20, 50),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 40, 60),
        ("Memcpy PtoP (Device -> Device)", 60, 62),
        ("Memcpy DtoD (Device -> Device)", 70, 75),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", 75, 95),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", 95, 99),
    ]
    kinds: Any = {"is_user_annotation": False, "device_type": DeviceType.CUDA}
    events: list[Any] = [
        SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), **kinds)
        for name, start, end in found
    ]
    host = SimpleNamespace(name="aten::mm", time_range=SimpleNamespace(start=21, end=90), **kinds)
    host.device_type = DeviceType.CPU
    lines = divided(kernels([*events, host], cuda=True), of_kernel, lambda at: GAP)
    assert {part: round(seconds * 1e6) for part, seconds in totals(lines).items()} == {
        "exposed communication": 12,
        "idle, launch": 8,
        "matmuls": 30,
        "attention": 20,
        "copies": 5,
        "elementwise": 4,
    }


def forms() -> list[dict[str, Any]]:
    """The rows of one command for several depths and forms."""
    given: Any = {
        "model": "tiny",
        "sequence": 32,
        "dtype": "f32",
        "seconds": 0.4,
        "only": "compile",
    }
    settings = TransformerSettings(**given, layers="1,2", forms="blocks+checkpoint")
    report = work(settings, here(CPU), lambda event: None)
    return [] if report is None else report["rows"]


@pytest.mark.slow
def test_depths_and_forms_of_one_command(pool: Pool) -> None:
    rows, none = pool(2).run(forms, replace=True, timeout_s=110)
    assert none == []
    assert [row["error"] for row in rows] == [""] * 2
    told = [(row["form"], row["layers"]) for row in rows]
    assert told == [("blocks+checkpoint", 1), ("blocks+checkpoint", 2)]
    assert all(row["off"] <= LIMIT for row in rows)


def checked() -> str | None:
    """The problem of `layers` that have forgotten to sum the gradients of norms."""
    given: Any = {"model": "tiny", "sequence": 32, "batch": 2, "dtype": "f32"}
    settings = TransformerSettings(**given, strategy="serial")
    trained = LayerVariants(settings, here(CPU))
    trained._sum = lambda copied: None  # type: ignore[method-assign]
    racer = prepare(trained.ranks, trained.variant("layers"))
    torch.compiler.reset()
    return racer.problem


def test_a_wrong_gradient_is_not_timed(pool: Pool) -> None:
    for problem in pool(2).run(checked):
        assert "wrong: off by" in str(problem)


def float8_offs() -> tuple[float, float, float]:
    """How far off FP8 is where inputs are rounded otherwise, in what such a rounding moves and in
    roundings; and where a gradient is wrong by a quarter."""
    settings = TransformerSettings(model="tiny", layers="3", sequence=64, dtype="bf16")
    trained = LayerVariants(settings, here(CPU))
    known, units = trained._float8()
    serial, (x, target) = trained._layers({"strategy": "serial"}, Recipe()), trained.sets[0]
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) - 0.5
    moved = (x.detach() * (1 + noise * 2**-7)).bfloat16().requires_grad_()
    found = serial.results(moved, target)
    wrong = [*known[:-1], 1.25 * known[-1]]
    offs = [trained._off(found, known, each) for each in (units, None)]
    return offs[0], offs[1], trained._off(wrong, known, units)


def test_float8_is_held_against_what_a_rounding_moves(pool: Pool) -> None:
    """Which is more than what other dtypes may be off; a wrong gradient is more than that."""
    told = pool(2).run(float8_offs, timeout_s=110)
    assert all(off <= limit("compile-fp8") for off, _, _ in told)
    assert any(plain > LIMIT for _, plain, _ in told)
    assert all(wrong > limit("compile-fp8") for _, _, wrong in told)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ideal_computes_a_ranks_part_of_what_torch_counts(ranks: int) -> None:
    """torch counts the half of attention that the causal mask leaves out."""
    maps = NoCommunication(torch.randn(3, 32, 64), 32 // ranks) if ranks > 1 else Plain()
    module = Layers(MODELS["tiny"], 2, None, ranks, maps)
    x = torch.randn(3, 32 // ranks, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        y = module(x)
        attention = counter.get_flop_counts()["Global"][torch.ops.aten.bmm]
        forward = counter.get_total_flops()
        y.backward(torch.randn(3, 32 // ranks, 64))
    whole = flops(MODELS["tiny"], layers=2, batch=3, sequence=32)
    assert whole == ranks * (forward - attention // 2)
    assert counter.get_total_flops() == 3 * forward
    assert x.grad is not None
    assert all(weight.grad is not None for weight in module.parameters())


class Counted(Gathered):
    """Counts the matmuls of each graph that Inductor cut."""

    def __init__(self) -> None:
        self.matmuls: list[int] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        self.matmuls.append(sum(node.target in products for node in graph.nodes))
        assert not any("interlace_bench" in str(node.target) for node in graph.nodes)


@pytest.mark.slow
def test_the_stages_of_the_ideal_are_a_forward_and_a_backward() -> None:
    """What follows a gather in backward depends on no gradient: Inductor would compute it, and all
    that follows from it, in forward. A layer has 7 maps, each with a matmul for x and one for w."""
    counted, dims, layers = Counted(), MODELS["tiny"], 2
    maps = NoCommunication(torch.randn(1, 32, 64), 16)
    module = torch.compile(
        Layers(dims, layers, None, 2, maps), options={"post_grad_custom_pre_pass": counted}
    )
    with inductor_config.patch(force_disable_caches=True):  # which would not ask the pass
        module(torch.randn(1, 16, 64, requires_grad=True)).sum().backward()
    torch.compiler.reset()
    assert counted.matmuls == [7 * layers, 14 * layers]


def test_rows_are_over_the_ideal_and_the_faster_of_inductors() -> None:
    """Where the ideal takes 10 ms and Inductor 12."""
    both = {"inductor": 12.0, "inductor-graph": 13.0, "compile": 10.4, "ideal": 10.0}
    times = {way: Stages(ms / 3e3, ms / 1.5e3, 1e-3) for way, ms in both.items()}
    rows = {row["way"]: row for row in rows_of(TransformerSettings(model="llama3-70b"), 4, times)}
    assert rows["compile"]["speedup"] == pytest.approx(12 / 10.4)
    assert rows["compile"]["exposed_ms"] == pytest.approx(0.4)
    assert rows["compile"]["exposed_share"] == pytest.approx(0.4 / 10.4)


def test_rates_follow_from_the_times() -> None:
    settings = TransformerSettings(model="llama3-8b", batch=2)
    (row,) = rows_of(settings, 4, {"eager": Stages(0.1, 0.2, 0.1)})
    assert row["tokens_s"] == pytest.approx(2 * 8192 / 0.4 / 4)
    forward = flops(MODELS["llama3-8b"], layers=1, batch=2, sequence=8192)
    assert row["tflops"] == pytest.approx(3 * forward / 0.3 / 4 / 1e12)
    assert math.isnan(row["exposed_ms"])


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--model", "gpt5"), "Invalid value for '--model'"),
        (("--only", "magic"), "--only magic: choose from eager"),
        (("--dtype", "f8"), "'f8' is not one of 'bf16', 'f32'"),
        (("--layers", "0"), "must be >= 1"),
        (("--layers", "1,few"), "--layers 1,few: give numbers, with commas"),
        (("--account", "--only", "compile"), "over the ideal: give --only ideal and another way"),
        (("--forms", "parts"), "--forms parts: choose from whole, blocks"),
    ],
)
def test_errors_say_what_to_mend(args: tuple[str, ...], told: str) -> None:
    assert told in bench("--model", "llama3-70b", *args, code=2).stderr
