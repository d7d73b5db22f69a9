"""Wrong use becomes a typed error on every rank that says what, where and how to mend it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import (
    TEXTS,
    Outcome,
    attempt,
    executor_of,
    inputs_of,
    prepared,
    program_of,
    world_group,
)
from tests.support.pool import Pool

from interlace.errors import ExecutorError, TeamError
from interlace.ir import Program, parse
from interlace.runtime import Executor


def executor(program: Program | str, timeout_s: float = 3.0) -> Executor:
    return executor_of(program, timeout_s=timeout_s)


# -- order ---------------------------------------------------------------------------------------


def call_in_different_order(first: str, second: str) -> list[Outcome]:
    one, two = prepared(first, timeout_s=10), prepared(second, timeout_s=10)
    inputs = {id(e): inputs_of(e.program, dist.get_rank(), 5) for e in (one, two)}
    one.run(inputs[id(one)])
    dist.barrier()  # or a slow rank hears of it in the run that must still go well
    order = (one, two) if dist.get_rank() != 1 else (two, one)
    found = [attempt(lambda: order[0].run(inputs[id(order[0])]))]
    one.reset()
    for either in (one, two):
        found.append(attempt(lambda e=either: len(e.run(inputs[id(e)]))))
        either.close()
    return found


PAIRS = [("get", "put"), ("pipeline", "shift"), ("get", "pipeline")]


@pytest.mark.parametrize("pair", [*PAIRS, ("get", "get"), ("shift", "shift")])  # equal ones are two
def test_ranks_that_call_in_different_order_hear_both_names(
    pool: Pool, pair: tuple[str, str]
) -> None:
    names = [program_of(kind, 3).name for kind in pair]
    for first, *after in pool(3).run(call_in_different_order, *pair):
        error, text, seconds = first
        assert error == "AgreementError"
        assert all(repr(name) in text for name in names)
        assert "different order" in text
        assert seconds < 5
        assert [outcome[:2] for outcome in after] == [("result", "1")] * 2


# -- agreement -----------------------------------------------------------------------------------


def prepare_different(first: str, second: str) -> Outcome:
    kind = first if dist.get_rank() == 0 else second
    return attempt(executor(parse(TEXTS[kind](dist.get_world_size()))).prepare)


def test_ranks_that_prepare_different_programs_see_who_has_which(pool: Pool) -> None:
    for error, text, _ in pool(2).run(prepare_different, "get", "put"):
        assert error == "AgreementError"
        assert "rank 0, 'gather_matmul_get'" in text
        assert "rank 1, 'gather_matmul_put'" in text
        assert "ranks prepare Programs that do not go together" in text


SCALARS = """
def shifted(tp: Team[2], x: f32[2, 2]):
    y = empty(f32[2, 2])
    main: all_reduce(x, y, team=tp, reduce="sum")
    main: call("aten.add.Tensor", y, {}, out=(z := f32[2, 2]))
    return z
"""


def run_own_scalar() -> list[float]:
    with executor(parse(SCALARS.format(float(dist.get_rank())))).prepare() as own:
        return own.run([torch.ones(2, 2)])[0].flatten().tolist()


def test_programs_that_differ_in_scalars_alone_agree(pool: Pool) -> None:
    assert pool(2).run(run_own_scalar) == [[2.0] * 4, [3.0] * 4]


SLICES = """
def sliced(tp: Team[2], x: f32[2, 4], v: f32[2, 2]):
    y = empty(f32[2, 2])
    main: call("aten.clone.default", x[:, {0}:{1}], out=(mine := f32[2, 2]))
    main: all_reduce(mine, y, team=tp, reduce="sum"){2}
    return y
"""
WRITES = """
    main: copy(v, x[:, 0:2])"""


def run_own_slice(more: str) -> tuple[list[float], bool]:
    first = 2 * dist.get_rank()
    with executor(parse(SLICES.format(first, first + 2, more))).prepare() as own:
        assert own.agreement is not None
        result = own.run([torch.arange(8.0).view(2, 4), torch.zeros(2, 2)])[0]
        return result.flatten().tolist(), bool(own.agreement.texts)


def test_programs_that_read_other_parts_of_an_input_agree(pool: Pool) -> None:
    """Each rank slices what came in whole: that cannot race, unless the input is written too."""
    assert pool(2).run(run_own_slice, "") == [([2.0, 4.0, 10.0, 12.0], False)] * 2
    assert pool(2).run(run_own_slice, WRITES) == [([2.0, 4.0, 10.0, 12.0], True)] * 2


def instantiated_alone() -> list[float]:
    program = parse(SCALARS.format(1.0)).instantiate(dist.get_rank())
    with executor(program).prepare() as own:
        return own.run([torch.ones(2, 2)])[0].flatten().tolist()


def test_instantiated_programs_agree_as_a_set(pool: Pool) -> None:
    assert pool(2).run(instantiated_alone) == [[3.0] * 4] * 2


def recompile_alone() -> list[Outcome]:
    with executor(program_of("get", 2), 20.0).prepare() as first:
        inputs = inputs_of(first.program, dist.get_rank(), 1)
        found = [attempt(lambda: len(first.run(inputs)))]
        if dist.get_rank() == 0:
            other = executor(program_of("put", 2), 20.0)
            found.append(attempt(other.prepare))
        else:
            found.append(attempt(lambda: first.run(inputs)))
        return found


def test_a_rank_that_recompiles_alone_is_an_error_on_both(pool: Pool) -> None:
    (_, alone), (_, other) = pool(2).run(recompile_alone, replace=True)
    assert alone[0] == "AgreementError"
    assert "rank 1 did not come" in alone[1]
    assert other[0] == "AgreementError"
    assert "rank 0 recompiled alone" in other[1]
    assert max(alone[2], other[2]) < 5, "nobody waits for the time-out"


# -- what is missing -----------------------------------------------------------------------------

UCC = """
def wants(tp: Team[2], x: f32[2, 2]):
    y = empty(f32[2, 2])
    main: all_reduce(x, y, team=tp, reduce="sum", backend="{}")
    return y
"""


def prepare_text(text: str) -> Outcome:
    return attempt(executor(parse(text)).prepare)


@pytest.mark.parametrize("backend", ["ucc", "nccl"])
def test_a_missing_backend_says_how_to_mend_it(pool: Pool, backend: str) -> None:
    for error, text, _ in pool(2).run(prepare_text, UCC.format(backend)):
        assert error == "BackendError"
        assert f"'{backend}' is not there" in text
        assert "choose gloo or peer" in text


HUGE = """
def huge(tp: Team[2], x: f32[2, 2]):
    full = alloc(f32[1099511627776, 64], symmetric=tp)
    main: copy(x, full.slice(0, 0, 2).slice(1, 0, 2))
    main: free(full)
    return x
"""


def test_too_little_shared_memory_gives_figures_and_advice(pool: Pool) -> None:
    for error, text, seconds in pool(2).run(prepare_text, HUGE):
        assert error == "SharedMemoryError"
        assert "512 TiB" in text
        assert "GiB free" in text or "MiB free" in text
        assert "--shm-size" in text
        assert seconds < 2
    assert pool(2).run(prepare_text, UCC.format("peer"))[0][0] == "result"


# -- inputs --------------------------------------------------------------------------------------


def run_with_malformed() -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    with prepared("get") as own:
        x, w = inputs_of(own.program, dist.get_rank(), 3)
        malformed: dict[str, list[Any]] = {
            "count": [x],
            "kind": [x.tolist(), w],
            "dtype": [x.double(), w],
            "shape": [x[:1], w],
            "strides": [x.t().contiguous().t(), w],
            "device": [x.to("meta"), w],
            "sparse": [x.to_sparse(), w],
            "nested": [torch.nested.nested_tensor([x[0], x[1]]), w],
            "rows": [torch.nested.nested_tensor([x[0], x[1]], layout=torch.jagged), w],
        }
        for what, given in malformed.items():
            found[what] = attempt(lambda given=given: own.run(given))
            own.run([x, w])  # a refused input leaves the Executor usable
    return found


MALFORMED = {
    "count": "takes 2 inputs (x, w), not 1",
    "kind": "input 0 ('x') of gather_matmul_get is a list, not a tensor",
    "dtype": "has dtype torch.float64, not torch.float32: convert it with .to(torch.float32)",
    "shape": "has shape [1, 3], not [2, 3]",
    "strides": "has strides [1, 2], not [3, 1]: make it so, with .contiguous()",
    "device": "is on meta, not on cpu: move it with .to('cpu')",
    "sparse": "is torch.sparse_coo, not a dense tensor: convert it, with .to_dense()",
    "nested": "input 0 ('x') of gather_matmul_get is nested, not a dense tensor: convert it",
    "rows": "is nested, not a dense tensor",
}


def test_malformed_inputs_are_refused_before_anything_runs(pool: Pool) -> None:
    for found in pool(2).run(run_with_malformed):
        for what, words in MALFORMED.items():
            error, text, _ = found[what]
            assert error == "ExecutorError", what
            assert words in text


@pytest.mark.parametrize("negated", [False, True], ids=["conjugated", "negated"])
def test_what_torch_conjugates_only_when_it_reads_is_refused(negated: bool) -> None:
    """Its memory holds other numbers, which a peer, or a copy on a GPU, would take."""
    z = torch.tensor([[1 + 2j, 3 - 4j]], dtype=torch.complex64)
    marked, how = (z.conj().imag, "neg") if negated else (z.conj(), "conj")
    kind = "f32[1, 2].strides(4, 2)" if negated else "c64[1, 2]"
    text = f"def f(x: {kind}, y: out[{kind}]):\n    main: copy(x, y)\n    return y"
    own = Executor(parse(text)).prepare()
    out = torch.empty_strided(marked.shape, marked.stride(), dtype=marked.dtype)
    good = torch.empty_strided(marked.shape, marked.stride(), dtype=marked.dtype).copy_(marked)
    for inputs, given in (([marked], None), ([good], [marked])):
        with pytest.raises(ExecutorError, match=rf"put 0 .* give \.resolve_{how}\(\)"):
            own.run(inputs, given)
    (found,) = own.run([good], [out])
    assert torch.equal(found, good)


def use_wrongly() -> list[Outcome]:
    fresh = executor(program_of("get", 2))
    found = [attempt(lambda: fresh.run([])), attempt(fresh.prepare)]
    fresh.prepare()  # again: nothing to do
    found.append(attempt(fresh.timeline))
    fresh.close()
    fresh.close()
    found.append(attempt(lambda: fresh.run([])))
    return found


def test_use_out_of_turn_is_explained(pool: Pool) -> None:
    for unprepared, ready, untraced, closed in pool(2).run(use_wrongly):
        assert unprepared[0] == "ExecutorError"
        assert "prepare()" in unprepared[1]
        assert ready[0] == "result"
        assert "trace=True" in untraced[1]
        assert "closed" in closed[1]


def teams_that_do_not_fit() -> list[str]:
    program, found = program_of("get", 3), []
    for groups in ({"tp": world_group()}, {}, {"dp": world_group()}):
        try:
            Executor(program, groups=groups)
        except TeamError as error:
            found.append(str(error))
    return found


def test_groups_that_do_not_fit_the_teams_are_refused(pool: Pool) -> None:
    for small, none, stray in pool(2).run(teams_that_do_not_fit):
        assert "tp[3]" in small
        assert "rank 0 of 2" in small or "rank 1 of 2" in small
        assert "groups={'tp'" in none
        assert "no team named 'dp'" in stray
