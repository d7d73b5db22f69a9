"""place_resharding: a gather stands on the side of a computation where fewer bytes move.

    gather(x: f32) -> cast to bf16 -> matmul      becomes      cast to bf16 -> gather -> matmul

This holds for computations of each element (a cast, a pointwise operator) and of each row (a sum
over the last dimension). Reductions stay: rounding before a sum is not rounding after it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from interlace.errors import PassError, choose_from
from interlace.ir import (
    Arg,
    AsStrided,
    Buffer,
    Call,
    Cast,
    Collective,
    Program,
    Remark,
    View,
    map_views,
)
from interlace.ir.operators import is_kind
from interlace.ir.overlap import representatives
from interlace.passes.find_sites import FindSites
from interlace.passes.rewrite import Rewrite, declaring
from interlace.passes.sites.cone import operands, result_of
from interlace.passes.sites.recognise import uses_of
from interlace.passes.sites.rows import Refused
from interlace.passes.sites.values import PADS, Dataflow


@dataclass(frozen=True)
class PlaceResharding:
    """Moves gathers across the computation beside them."""

    name: ClassVar[str] = "place_resharding"
    position: str = "auto"
    """Where a gather stands: `before` the computation, `after` it, or where fewer bytes move."""

    def __post_init__(self) -> None:
        if self.position not in (known := ("auto", "before", "after")):
            fix = choose_from(self.position, known)
            raise PassError(f"place_resharding: position={self.position!r}: {fix}")

    def run(self, program: Program) -> Program:
        """The Program with its gathers moved, and its sites found again if any was."""
        remarks: list[Remark] = []
        moving = True
        while moving:
            program, found, moving = self._sweep(program)
            remarks += found
            if moving:
                program = FindSites().run(program) if program.sites else program
        return program.remarked(remarks)

    def _sweep(self, program: Program) -> tuple[Program, list[Remark], bool]:
        """The Program after the first move that is to be made; or else why there is none."""
        values = Dataflow(program, representatives(program)[0])
        declined: list[Remark] = []
        for i, op in values.collectives.items():
            try:
                moved = self._moved(values, i, op)
            except Refused as refusal:
                declined.append(Remark(self.name, str(refusal), op.site))
            else:
                if moved is not None:
                    return moved[0], [Remark(self.name, moved[1], op.site)], True
        return program, declined, False

    def _moved(self, values: Dataflow, i: int, op: Collective) -> tuple[Program, str] | None:
        """The Program with a computation moved across a gather, and what moved."""
        if op.kind != "all_gather" or op.src is None or op.dst is None or not op.dst.covers_buffer:
            return None
        name = op.dst.buffer
        if values.maker(name) is None or values.buffers[name].kind != "fresh":
            return None
        gather = _Gather(values, i, op, op.src, name)
        found = gather.to_shard(self.position) if self.position != "before" else None
        return found or (gather.to_whole(self.position) if self.position != "after" else None)


@dataclass(frozen=True, slots=True)
class _Gather:
    """An all-gather of `src` into the buffer `name`."""

    values: Dataflow
    index: int
    op: Collective
    src: View
    name: str

    def to_shard(self, position: str) -> tuple[Program, str] | None:
        """The computation on the gathered tensor moves in front of the gather."""
        values, name = self.values, self.name
        uses, related = uses_of(values, name)
        for j in uses:
            call = values.calls.get(j)
            if call is None:
                continue
            operand, result = _operand(call), result_of(call)
            if operand is None or result is None:
                continue
            rowwise = is_kind(call.fn, "reduction")
            if rowwise and not (operand == View(name) and _over_last(values, call, operand)):
                continue
            before, after = values.buffers[name].dtype, values.buffers[result.buffer].dtype
            if position == "auto" and after.itemsize > before.itemsize:
                continue
            what = f"{call.fn} ({before} to {after})"
            why = self._kept_whole(uses, related, call, result, operand)
            if not why:
                program = self._before(j, related, operand, call)
                return program, f"gathers after {what}: each rank computes on its shard"
            if rowwise or after.itemsize < before.itemsize or position == "after":
                raise Refused(f"the gather stays before {what}: {why}")
        return None

    def _kept_whole(
        self, uses: list[int], related: set[str], call: Call, result: View, operand: View
    ) -> str:
        """Why a computation must see the whole gathered tensor."""
        values = self.values
        if len(uses) > 1 or related & values.returned:
            return "the gathered tensor is used otherwise too"
        if values.buffers[result.buffer].kind != "fresh" or call.outs:
            return "its result has a place of its own"
        if not values.whole(operand):
            return "it takes a part of the gathered tensor"
        moves = [m for n in related - {self.name} for m in values.makers[n]]
        calls = [values.calls[m] for m in moves if m in values.calls]
        if len(calls) < len(moves):
            return "copies stand between"
        pads = any(op.fn == PADS for op in calls)
        if pads and not is_kind(call.fn, "cast"):
            return "padding stands between"
        steps = [step for op in (call, *calls) for view in op.views() for step in view.steps]
        if any(isinstance(step, Cast | AsStrided) for step in steps):
            return "its bytes are taken for another type between"
        return ""

    def to_whole(self, position: str) -> tuple[Program, str] | None:
        """The gather moves in front of the computation that makes its shard."""
        values, src = self.values, self.src
        made = values.maker(src.buffer)
        if made is None or not values.whole(src):
            return None
        j, call = made[0], values.calls.get(made[0])
        operand = _operand(call) if call is not None else None
        if call is None or operand is None or is_kind(call.fn, "reduction"):
            return None
        before, after = values.box(operand).dtype, values.box(src).dtype
        if not call.fresh or (position == "auto" and before.itemsize >= after.itemsize):
            return None
        what = f"{call.fn} ({before} to {after})"
        rewritten = any(j < k < self.index for k in values.makers.get(operand.buffer, ()))
        if not values.box(operand).contiguous or rewritten:
            raise Refused(f"the gather stays after {what}: its operand is strided or written again")
        program = self._behind(j, operand, call)
        return program, f"gathers before {what}: each rank computes on the gathered tensor"

    def _before(self, j: int, related: set[str], operand: View, call: Call) -> Program:
        """Call j on the shard, then the gather; its uses see the gathered result."""
        values, name, src = self.values, self.name, self.src
        (result,) = call.fresh
        full = values.buffers[name]
        if not src.covers_buffer and self.op.splits is not None:
            raise Refused("the shards are uneven parts of a buffer")
        sizes = values.box(src).sizes
        shape = values.buffers[src.buffer].shape if src.covers_buffer else sizes
        if is_kind(call.fn, "reduction"):
            keeps = len(result.shape) == len(full.shape)
            shape = (*shape[:-1], 1) if keeps else shape[:-1]
            full = dataclasses.replace(full, shape=result.shape)
        shard_name = values.names.copy().new(f"{name}_shard")
        shard = Buffer(shard_name, result.dtype, shape, "fresh")
        rewrite = Rewrite(values.program.ops)
        rewrite.before(self.index, _computed(call, operand, src, shard))
        rewrite.replace(self.index, dataclasses.replace(self.op, src=View(shard.name)))
        rewrite.replace(j)
        self._declared(rewrite, dataclasses.replace(full, dtype=result.dtype))
        for k, other in values.calls.items():
            if k != j and related & {buffer.name for buffer in other.fresh}:
                typed = [dataclasses.replace(b, dtype=result.dtype) for b in other.fresh]
                rewrite.replace(k, dataclasses.replace(other, fresh=tuple(typed)))
        return _renamed(values.program.replace(ops=rewrite.ops()), result.name, operand)

    def _behind(self, j: int, operand: View, call: Call) -> Program:
        """The gather of the operand, then call j on all of it."""
        values, name, src = self.values, self.name, self.src
        full, dtype = values.buffers[name], values.box(operand).dtype
        narrow = Buffer(values.names.copy().new(f"{name}_{dtype}"), dtype, full.shape, "fresh")
        others = set(values.users.get(src.buffer, ())) - {self.index}
        # Of uneven shards these steps give each rank sizes of its own.
        shard = View(operand.buffer, (*operand.steps, *src.steps))
        rewrite = Rewrite(values.program.ops)
        rewrite.replace(self.index, dataclasses.replace(self.op, src=shard, dst=View(narrow.name)))
        rewrite.after(self.index, _computed(call, operand, View(narrow.name), full))
        if not others and src.buffer not in values.returned:
            rewrite.replace(j)
        self._declared(rewrite, narrow)
        return values.program.replace(ops=rewrite.ops())

    def _declared(self, rewrite: Rewrite, buffer: Buffer) -> None:
        """Declares another buffer where the gathered tensor was."""
        index = self.values.allocs[self.name]
        rewrite.replace(index, declaring(self.values.program.ops[index], buffer))


def _computed(call: Call, operand: View, other: View, result: Buffer) -> Call:
    """The same computation of another operand, into another buffer."""
    made = map_views(call, lambda view: other if view == operand else view)
    return dataclasses.replace(made, fresh=(result,))


def _operand(op: Call) -> View | None:
    """The only tensor that a computation by elements or by rows takes."""
    if not is_kind(op.fn, "pointwise", "cast", "reduction"):
        return None
    views = [arg for arg in operands(op) if isinstance(arg, View)]
    return views[0] if len(views) == 1 and result_of(op) is not None else None


def _over_last(values: Dataflow, call: Call, operand: View) -> bool:
    """True if a reduction is over the last of at least two dimensions."""
    last = len(values.box(View(operand.buffer)).sizes) - 1
    dims: Arg = call.args[1] if len(call.args) > 1 else None
    listed = dims if isinstance(dims, tuple) else (dims,)
    return last > 0 and listed in ((-1,), (last,))


def _renamed(program: Program, name: str, view: View) -> Program:
    """The Program with every view of a buffer taken of `view` instead."""

    def change(old: View) -> View:
        return View(view.buffer, (*view.steps, *old.steps)) if old.buffer == name else old

    def result(arg: Arg) -> Arg:
        if isinstance(arg, View):
            return change(arg)
        return tuple(map(result, arg)) if isinstance(arg, tuple) else arg

    results = None if program.results is None else tuple(map(result, program.results))
    return program.replace(ops=tuple(map_views(op, change) for op in program.ops), results=results)
