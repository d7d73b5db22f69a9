"""accumulate: a matmul whose result is added to something adds to that in place.

    mm.out(x, v, out=s); mm.out(y, w, out=t); add.out(s, t, out=z)
    mm.out(x, v, out=z); addmm_(z, y, w)

The gradients that several matmuls give one tensor need no pass over memory to be added up, and no
memory of their own. A matmul accumulates in 32 bits or more, so the sum is rounded once less.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import ClassVar

from interlace.ir import Alloc, Buffer, Call, Op, Program, Reshape, View, views_in
from interlace.ir.program import map_values
from interlace.ir.sizes import Int
from interlace.passes.overlaps import representatives
from interlace.passes.sites.cone import made_by, result_of

SUMS = ("aten.add.Tensor", "aten.add.out")
MADE = ("aten.mm.default", "aten.mm.out")
INTO = "aten.addmm_.default"
MATMULS = ("aten.mm.out", "aten.addmm.out", INTO)


@dataclass(frozen=True)
class Accumulate:
    """Lets matmuls add up what calls of `aten.add` did."""

    name: ClassVar[str] = "accumulate"

    def run(self, program: Program) -> Program:
        """The same Program with fewer sums."""
        rewrite = _Rewrite(program)
        for i, op in enumerate(program.ops):
            if isinstance(op, Call) and op.fn in SUMS and len(op.args) == 2 and not op.kwargs:
                rewrite.sum(i)
        return rewrite.program()


@dataclass(frozen=True, slots=True)
class _Sum:
    """A sum of `old` and of what a matmul makes."""

    old: View
    matmul: int
    out: View | None
    """Where it goes; None: into memory of its own."""


class _Rewrite:
    """The list of ops as it changes: an op that is gone is None."""

    def __init__(self, program: Program) -> None:
        self.before = program
        self.ops: list[Op | None] = [*program.ops]
        self.buffers = program.buffers()
        self.box = program.boxes(representatives(program)[0])
        self.returned = {view.buffer for arg in program.returned() for view in views_in(arg)}
        self.touches: defaultdict[str, list[int]] = defaultdict(list)
        """By buffer, the ops that read or write it, but for its Alloc."""
        self.allocs: dict[str, int] = {}
        self.sooner: defaultdict[int, list[int]] = defaultdict(list)
        """By op, the Allocs that stand before it now."""
        for i, op in enumerate(program.ops):
            if isinstance(op, Alloc):
                self.allocs[op.buffer.name] = i
            for name in _touched(op):
                self.touches[name].append(i)

    def program(self) -> Program:
        """The Program that it has become."""
        moved = {at for listed in self.sooner.values() for at in listed}
        order = [
            one
            for at in range(len(self.ops))
            for one in (*self.sooner.get(at, ()), *(() if at in moved else (at,)))
        ]
        ops: list[Op] = [op for at in order if (op := self.ops[at]) is not None]
        used = {a.view.buffer for op in ops for a in (*op.reads(), *op.writes())} | self.returned
        gone = {*self.buffers} - used
        kept = [op for op in ops if not (isinstance(op, Alloc) and op.buffer.name in gone)]
        return self.before.replace(ops=tuple(kept)) if len(kept) < len(self.ops) else self.before

    def sum(self, i: int) -> None:
        """Drops the sum `i` where a matmul can do it."""
        op = self.ops[i]
        assert isinstance(op, Call)
        first, second = op.args
        if not (isinstance(first, View) and isinstance(second, View)):
            return
        if first.buffer == second.buffer or op.mutates:
            return
        for old, added in ((first, second), (second, first)):
            found = self.matched(i, op, old, added)
            if found is not None:
                self.accumulate(i, op, found)
                return

    def matched(self, i: int, op: Call, old: View, added: View) -> _Sum | None:
        """What the sum `i` adds, if a matmul can add it to `old`."""
        matmul = self.last(added.buffer, i)
        if matmul is None or not self.passing(added, i) or not self.passing(old, i):
            return None
        made, maker = self.ops[matmul], self.last(old.buffer, i)
        if not (isinstance(made, Call) and made.fn in MADE and not made.kwargs):
            return None
        if result_of(made) != View(added.buffer) or maker is None or maker >= matmul:
            return None  # equal: what it is added to is a factor of the matmul, too
        boxes = self.box(old), self.box(added), self.box(op.outs[0]) if op.outs else None
        if boxes[0].sizes != boxes[1].sizes or boxes[0].dtype != boxes[1].dtype:
            return None
        if not op.outs:
            own = op.fresh[0]
            fits = own.name not in self.returned and own.dtype == boxes[0].dtype
            fits &= own.strides is None
            return _Sum(old, matmul, None) if fits else None
        (out,) = op.outs
        begin = self.begin(old.buffer, i)
        if boxes[2] is None or begin is None or not self.movable(old.buffer, begin, i):
            return None
        fits = boxes[2].sizes == self.box(View(old.buffer)).sizes
        fits &= boxes[2].dtype == boxes[0].dtype and boxes[2].contiguous
        meanwhile = any(begin <= at < i for at in self.touches[out.buffer])
        late = self.allocs.get(out.buffer, -1) > begin
        late &= self.buffers[out.buffer].kind == "symmetric"  # else it may be declared sooner
        return _Sum(old, matmul, out) if fits and not (meanwhile or late) else None

    def accumulate(self, i: int, op: Call, found: _Sum) -> None:
        """Lets the matmul add to what is there; the sum goes."""
        name = found.old.buffer
        if found.out is None:
            self.rename(op.fresh[0], found.old, i)
        else:
            self.move(name, found.out, i)
        made = self.ops[found.matmul]
        assert isinstance(made, Call)
        into = found.out or self.matrix(name, self.box(made_by(made)).sizes)
        args = (into, *made.args)
        added = dataclasses.replace(made, fn=INTO, args=args, outs=(into,), fresh=(), mutates=True)
        self.put(found.matmul, added)
        self.put(i, None)

    # what is where

    def last(self, name: str, i: int) -> int | None:
        """The last op before `i` that touches a buffer."""
        return max((at for at in self.touches[name] if at < i), default=None)

    def begin(self, name: str, i: int) -> int | None:
        """The op that writes all of what a buffer holds before `i`, to which others may add."""
        for at in reversed([at for at in self.touches[name] if at < i]):
            op = self.ops[at]
            assert op is not None
            if not any(access.view.buffer == name for access in op.reads()):
                return at if any(access.view == View(name) for access in op.writes()) else None
        return None

    def movable(self, name: str, begin: int, i: int) -> bool:
        """Whether only matmuls touch a buffer between two ops, and all of it."""
        ops = [self.ops[at] for at in self.touches[name] if begin <= at < i]
        return all(
            isinstance(op, Call)
            and op.fn in MATMULS
            and all(v == View(name) for v in (*op.views(), *op.outs) if v.buffer == name)
            for op in ops
        )

    def passing(self, view: View, i: int) -> bool:
        """Whether a view is all of a buffer of this Program, of which nothing is used after `i`
        before it is written anew."""
        buffer = self.buffers[view.buffer]
        if buffer.kind not in ("local", "fresh") or view.buffer in self.returned:
            return False
        if buffer.strides is not None or not all(isinstance(s, Reshape) for s in view.steps):
            return False
        after = min((at for at in self.touches[view.buffer] if at > i), default=None)
        if after is None:
            return True
        op = self.ops[after]
        assert op is not None
        anew = any(access.view == View(view.buffer) for access in op.writes())
        return anew and not any(access.view.buffer == view.buffer for access in op.reads())

    def matrix(self, name: str, sizes: tuple[Int, ...]) -> View:
        """A buffer as a matrix of these sizes."""
        whole = View(name)
        return whole if self.box(whole).sizes == sizes else whole.view(*sizes)

    # changes

    def put(self, i: int, op: Op | None) -> None:
        """Sets op `i`."""
        for name in _touched(self.ops[i]):
            self.touches[name].remove(i)
        self.ops[i] = op
        for name in _touched(op):
            bisect.insort(self.touches[name], i)

    def move(self, name: str, out: View, i: int) -> None:
        """Lets what a buffer holds before `i` be made in `out`."""
        begin = self.begin(name, i)
        assert begin is not None
        declared = self.allocs.get(out.buffer, -1)
        if declared > begin:
            self.sooner[begin].append(declared)
            self.allocs[out.buffer] = begin
        for at in [at for at in self.touches[name] if begin <= at < i]:
            op = self.ops[at]
            assert op is not None
            self.put(at, map_values(op, lambda value: out if value == View(name) else value))

    def rename(self, own: Buffer, old: View, i: int) -> None:
        """Lets every op behind `i` find a sum of its own memory in what it was added to."""
        sizes = self.box(View(own.name)).sizes
        place = old if self.box(old).sizes == sizes else old.view(*sizes)

        def moved(value: object) -> object:
            if isinstance(value, View) and value.buffer == own.name:
                return View(place.buffer, (*place.steps, *value.steps))
            return value

        for at in [at for at in self.touches[own.name] if at > i]:
            op = self.ops[at]
            assert op is not None
            self.put(at, map_values(op, moved))


def _touched(op: Op | None) -> set[str]:
    """The buffers that an op reads or writes."""
    return {access.view.buffer for access in (*op.reads(), *op.writes())} if op else set()
