"""`interlace bench optimizer`: a tiny model trained on two ranks by all ways that are there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.pool import Pool
from typer.testing import CliRunner

from interlace.cli import app
from interlace_bench.bars import judge, missed
from interlace_bench.optimizer import SIZES, Llama, work
from interlace_bench.ranks import here
from interlace_bench.settings import OPTIMIZERS, OptimizerSettings

pytestmark = pytest.mark.timeout(300)


def raced() -> Any:
    """The report, and the rows that were told meanwhile."""
    settings = OptimizerSettings(model="tiny", seconds=0.5, commit="abc")
    events: list[dict[str, Any]] = []
    report = work(settings, here(torch.device("cpu")), events.append)
    return report, [row for event in events if event["event"] == "rows" for row in event["rows"]]


def test_ways_train_alike_and_rows_tell_what_is_exposed(pool: Pool) -> None:
    (report, told), (nothing, _) = pool(2).run(raced, replace=True, timeout_s=110)
    assert nothing is None
    rows = {row["way"]: row for row in report["rows"]}
    assert [row["way"] for row in told] == list(rows) == list(OPTIMIZERS)
    error = rows.pop("torchtitan")["error"]
    assert "torchtitan is not installed" in error or error.endswith("torchtitan runs on GPUs")
    assert "'nccl' is not there for tensors of the CPU" in rows.pop("overlap-nccl")["error"]
    assert rows["torch-ddp"]["off"] <= 1, "of the change of weights that torch's Muon makes"
    for name, row in rows.items():
        assert row["error"] == ""
        assert row["off"] == 0 or name == "torch-ddp", "ours have the bits of the synchronous way"
        assert row["step_ms"] > 0
        assert row["commit"] == "abc"
    none, gather = rows["no-gather"]["step_ms"], rows["synchronous"]["exposed_ms"]
    for row in rows.values():
        assert row["exposed_ms"] == pytest.approx(row["step_ms"] - none)
        assert row["exposed_share"] == pytest.approx(row["exposed_ms"] / gather)
        assert row["gather_ms"] == gather
        assert row["over_no_gather"] == pytest.approx(row["step_ms"] / none)


def row(**given: Any) -> dict[str, Any]:
    kept = {"model": "llama3-8b", "dtype": "bf16", "world": 2, "error": "", "device": "cuda"}
    return {**kept, "exposed_share": 0.04, "peak_bytes": 100.0, "over_no_gather": 1.02, **given}


def test_bars() -> None:
    twin = row(way="synchronous", exposed_share=1.0, peak_bytes=100.0)
    good = [row(way="overlap"), twin]
    assert len(judge("optimizer", good)) == 3
    assert not missed(judge("optimizer", good))
    assert not judge("optimizer", [each | {"device": "cpu"} for each in good])
    for wrong in ({"exposed_share": 0.06}, {"peak_bytes": 102.0}):
        assert len(missed(judge("optimizer", [row(way="overlap", **wrong), twin]))) == 1
    slow = row(way="overlap", over_no_gather=1.04)
    assert missed(judge("optimizer", [slow])) == ["step over one without a gather"]
    assert not judge("optimizer", [twin])


@pytest.mark.parametrize(("option", "value"), [("--model", "huge"), ("--only", "ours")])
def test_what_is_not_there_is_refused(option: str, value: str) -> None:
    done = CliRunner().invoke(app, ["bench", "optimizer", "--device", "cpu", option, value])
    assert done.exit_code == 2
    told = f"'{value}' is not one of" if option == "--model" else f"{option} {value}: choose from"
    assert told in done.output


def test_the_model_is_a_llama() -> None:
    size = SIZES["tiny"]
    model = Llama(size)
    tokens = torch.randint(size.vocabulary, (2, 5))
    whole = model(tokens)
    assert whole.shape == (2, 5, size.vocabulary)
    torch.testing.assert_close(model(tokens[:, :3]), whole[:, :3])  # causal
