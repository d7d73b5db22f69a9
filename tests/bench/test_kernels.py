"""`bench kernels` at sizes of a CPU: what is right is timed, what is wrong or absent is a row."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.alone import Alone
from typer.testing import CliRunner

from interlace.errors import OptionError, UnsupportedError
from interlace.nn.functional import cross_entropy
from interlace_bench.commands.commands import bench
from interlace_bench.kernels import adam, grouped, losses, muon
from interlace_bench.kernels.case import COPY, OURS, KernelCase, time_case
from interlace_bench.kernels.host import COUNTS, LAYERS, host_cases
from interlace_bench.kernels.work import cases_of
from interlace_bench.race import Opened, Racer, Variant, race_hosts
from interlace_bench.rows import read
from interlace_bench.settings import KERNELS, KernelSettings

CPU = torch.device("cpu")
ALONE = Alone(CPU)
pytestmark = pytest.mark.timeout(200)


def opened(case: KernelCase, name: str) -> Opened:
    (one,) = [one for one in case.build(CPU) if one.name == name]
    return one.open()


# -- the command ---------------------------------------------------------------------------------


def invoked(*args: str) -> Any:
    return CliRunner().invoke(bench, ["kernels", "--device", "cpu", *args])


@pytest.mark.usefixtures("launched_on_pool")
@pytest.mark.parametrize("only", ["adam", pytest.param("adam,host", marks=pytest.mark.slow)])
def test_the_command_writes_rows(only: str, tmp_path: Path) -> None:
    args = ("--only", only, "--seconds", "12", "--out", str(tmp_path))
    args += ("--world", "2", "--seconds", "60") if "host" in only else ()
    done = invoked(*args, "--json", "--commit", "abc")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    rows = read(tmp_path / "kernels.csv")
    assert len(rows) == len(report["rows"]) > 10
    assert {row["op"] for row in rows} == set(only.split(","))
    for row in rows:
        assert row["commit"] == "abc"
        assert row["torch"] == torch.__version__
        assert row["date"]
        if row["error"]:
            assert row["median_us"] == ""
            assert "torchao" in row["error"]
        else:
            assert 0 < float(row["least_us"]) <= float(row["median_us"]) <= float(row["p90_us"])
            assert 0 <= float(row["off"]) <= 4
    if "host" in only:
        teams = {row["shape"] for row in rows if "a team of 2" in row["shape"]}
        runs = [f"Executor.run, {calls} calls" for calls in COUNTS]
        layers = [f"{kind} 64x64x64" for kind in LAYERS]
        assert teams == {f"{what}, a team of 2" for what in (*runs, *layers)}
    shared = [row for row in rows if row["op"] == "adam" and row["way"] == COPY]
    assert len(shared) == len(adam.FORMATS)
    assert all(float(row["share"]) == pytest.approx(1) for row in shared)


@pytest.mark.usefixtures("launched_on_pool")
def test_the_command_as_a_table(tmp_path: Path) -> None:
    done = invoked("--only", "grouped", "--seconds", "6", "--out", str(tmp_path), "--verbose")
    assert done.exit_code == 0, done.output
    assert "grouped 4x48x16x32 even f32 forward+backward" in done.stdout
    assert f"wrote {tmp_path}/kernels.csv" in done.stdout
    assert "s] grouped 8x64x16x32 skewed f32 forward+backward: torch" in done.stderr


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--only", "magic"), "--only magic: choose from cross-entropy"),
        (("--seconds", "0"), "--seconds > 0"),
        (("--device", "tpu"), "Invalid value for '--device'"),
    ],
)
def test_errors_say_what_to_mend(args: tuple[str, ...], told: str) -> None:
    done = invoked(*args)
    assert done.exit_code == 2
    assert told in done.stderr


# -- cases ---------------------------------------------------------------------------------------


def test_every_op_has_cases() -> None:
    for small in (True, False):
        found = cases_of(KernelSettings(small=small), CPU)
        assert [*dict.fromkeys(case.op for case in found)] == list(KERNELS)
        assert len({str(case) for case in found}) == len(found)
    assert str(found[0]) == "cross-entropy 8192x128256 bf16 forward+backward"
    assert {case.op for case in cases_of(KernelSettings(only="adam,host"), CPU)} == {"adam", "host"}
    with pytest.raises(OptionError, match="choose from"):
        KernelSettings(only="magic")


def odd(name: str) -> Variant:
    """A variant that is right, wrong, raises, or is not there."""

    def run(x: float) -> float:
        if name == "raises":
            raise ValueError("in the middle")
        return x

    def make() -> Opened:
        if name == "absent":
            raise UnsupportedError("magic is not installed")
        return Opened(run, lambda: math.nan if name == "nan" else 3.0 if name == "wrong" else 0.5)

    return Variant(name, make, sets=[(1.0,)])


def test_what_is_wrong_absent_or_raises_is_a_row_without_a_time() -> None:
    names = ["right", "wrong", "nan", "raises", "absent"]
    made = [odd(name) for name in names]
    known: Any = {"op": "odd", "shape": "1", "dtype": "f32", "does": "nothing"}
    case = KernelCase(**known, build=lambda device: made, limit=2.0, nbytes=10)
    rows = {row["way"]: row for row in time_case(case, ALONE, 0.05)}
    assert list(rows) == [*names, COPY]
    assert rows["right"]["median_us"] > 0
    assert rows["right"]["share"] == pytest.approx(
        10 / rows["right"]["median_us"] / 1e3 / rows[COPY]["gbs"], rel=1e-3
    )
    told = {"wrong": "off by 3", "nan": "off by nan", "raises": "in the middle", "absent": "magic"}
    for name, text in told.items():
        assert text in rows[name]["error"]
        assert math.isnan(rows[name]["median_us"])


@pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is not None, reason="Liger is installed here"
)
def test_rivals_that_are_not_installed_say_so() -> None:
    with pytest.raises(UnsupportedError, match="liger_kernel is not installed"):
        opened(losses.cross_entropy_cases(small=True)[0], "liger")


@pytest.mark.parametrize("number", range(len(losses.SMALL)))
def test_losses_that_are_wrong_are_seen(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = losses.cross_entropy_cases(small=True)[number]
    assert opened(case, OURS).off() < 1
    assert opened(case, "torch").off() < 1
    worse = functools.partial(_scaled, cross_entropy)
    monkeypatch.setattr(losses, "cross_entropy", worse)
    assert opened(case, OURS).off() > losses.LOOSE


def _scaled(loss: Any, *args: Any, **options: Any) -> torch.Tensor:
    return loss(*args, **options) * 1.01


def test_gradients_that_are_wrong_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, up: torch.Tensor) -> torch.Tensor:
            return up * 1.01

    def bad(x: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.cross_entropy(Wrong.apply(x), y)

    monkeypatch.setattr(losses, "cross_entropy", bad)
    assert opened(losses.cross_entropy_cases(small=True)[0], OURS).off() > losses.LOOSE

    def fused(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
        return F.cross_entropy(F.linear(h, Wrong.apply(w)), y)

    (case,) = losses.linear_cases(small=True)
    assert opened(case, OURS).off() < 1
    assert opened(case, f"{OURS} f32 sums").off() < 1
    monkeypatch.setattr(losses, "linear_cross_entropy", fused)
    assert opened(case, OURS).off() > losses.LOOSE


@pytest.mark.parametrize("kind", adam.FORMATS, ids=lambda kind: kind.name)
def test_steps_that_are_wrong_are_seen(kind: adam.Format, monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = [c for c in adam.adam_cases(small=True) if c.shape.endswith(f" {kind.name}")]
    known = {one.name: one for one in case.build(CPU)}
    assert set(known) == {OURS, *kind.rivals}
    assert known[OURS].open().off() < adam.LOOSE
    monkeypatch.setattr(adam, "LR", 1.2e-3)
    given = functools.partial(adam.AdamW, lr=1e-3, **kind.options)
    like = torch.nn.Parameter(torch.zeros(1, dtype=losses.DTYPES[kind.dtype]))
    assert adam._off(given, like) > adam.LOOSE


@pytest.mark.parametrize("name", [OURS, "torch"])
def test_grouped_gradients_that_are_wrong_are_seen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in grouped.grouped_cases(small=True):
        variants = {one.name: one for one in case.build(CPU)}
        assert variants[OURS].open().off() < 1
        assert variants[name].open().off() < 1, "what runs before do not count"
    layer = grouped.grouped_layer
    monkeypatch.setattr(
        grouped, "grouped_layer", lambda *args: (layer(*args)[0], lambda: args[1].mul_(1.01))
    )
    assert opened(grouped.grouped_cases(small=True)[0], OURS).off() > grouped.LOOSE


def test_updates_of_muon_that_are_wrong_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = muon.muon_cases(small=True)
    for case in cases:
        for one in case.build(CPU):
            made = one.open()
            assert made.off() < 1, (str(case), one.name)
            made.run(*one.sets[0])
    monkeypatch.setattr(muon, "exact", lambda update: update)
    assert all(opened(case, OURS).off() > 1 for case in cases)


def test_group_sizes() -> None:
    for groups, tokens, how in ((8, 64, "even"), (64, 32768, "skewed"), (128, 4096, "skewed")):
        sizes = grouped.group_sizes(groups, tokens, how)
        assert len(sizes) == groups
        assert sum(sizes) == tokens
        assert (min(sizes) == 0) is (how == "skewed")
    assert grouped.group_sizes(4, 10, "even") == [2, 3, 2, 3]


# -- the host ------------------------------------------------------------------------------------


def test_host_times_take_turns_and_are_of_many_calls() -> None:
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}

    def broken() -> None:
        raise ValueError("no")

    threads = torch.get_num_threads()
    found = {
        name: Racer(Variant(name, lambda opened=opened: opened), opened)
        for name, run in {**runs, "broken": broken}.items()
        for opened in [Opened(run, lambda: 0.0)]
    }
    race_hosts(ALONE, [*found.values()], seconds=5.0)
    assert torch.get_num_threads() == threads
    assert len(found["a"].host) == len(found["b"].host) == 1000
    assert found["broken"].problem == "rank 0: ValueError: no"
    turns = sum(one != other for one, other in pairwise(order))
    assert turns >= 10, "a block of one, a block of the other"


def test_host_cases_compute_what_torch_does() -> None:
    for case in host_cases():
        for variant in case.build(CPU):
            one = variant.open()
            assert one.off() <= case.limit, (case.shape, variant.name)
            one.run(*variant.sets[0])
