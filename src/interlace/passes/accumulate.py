"""accumulate: a matmul whose result is added to that of another adds to it in place.

    mm.out(x, v, out=s); mm.out(y, w, out=t); add.out(s, t, out=z)
    mm.out(x, v, out=z); addmm_(z, y, w)

The gradients that several matmuls give one tensor need no pass over memory to be added up, and no
memory of their own. A matmul accumulates in 32 bits or more, so the sum is rounded once less.

It looks at the order of the list alone: what is on several streams, or shares memory, is left.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from interlace.ir import Alloc, Buffer, Call, Free, Op, Program, Reshape, View, views_in
from interlace.ir.overlap import representatives
from interlace.ir.program import map_values
from interlace.ir.types import TableEntry
from interlace.passes.rewrite import Rewrite
from interlace.passes.sites.cone import result_of

SUMS = ("aten.add.Tensor", "aten.add.out")
MADE = ("aten.mm.default", "aten.mm.out")
INTO = "aten.addmm_.default"
MATMULS = (*MADE, "aten.addmm.default", "aten.addmm.out", INTO)


@dataclass(frozen=True)
class Accumulate:
    """Lets matmuls add up what calls of `aten.add` did."""

    name: ClassVar[str] = "accumulate"

    def run(self, program: Program) -> Program:
        """The same Program with fewer sums."""
        sums = _Sums(program)
        for i, op in program.calls().items():
            if op.fn in SUMS and len(op.args) == 2 and not op.kwargs:
                sums.sum(i)
        return sums.program()


class _Sums:
    """The list of ops as it changes: an op that is gone is None."""

    def __init__(self, program: Program) -> None:
        self.before = program
        self.ops: list[Op | None] = [*program.ops]
        self.buffers = program.buffers()
        self.box = program.boxes(representatives(program)[0])
        self.returned = {view.buffer for arg in program.returned() for view in views_in(arg)}
        self.uses: defaultdict[str, list[int]] = defaultdict(list)
        """For each buffer the ops that read, write or free it."""
        self.allocs: dict[str, int] = {}
        self.rewrite = Rewrite(program.ops)
        for i, op in enumerate(program.ops):
            if isinstance(op, Alloc):
                self.allocs[op.buffer.name] = i
            for name in _used(op):
                self.uses[name].append(i)

    def program(self) -> Program:
        """The Program that it has become."""
        changed = False
        for at, (op, before) in enumerate(zip(self.ops, self.before.ops, strict=True)):
            if op is not before:
                self.rewrite.replace(at, *(() if op is None else (op,)))
                changed = True
        if not changed:
            return self.before
        ops = self.rewrite.ops()
        used = {name for op in ops for name in _used(op)} | self.returned
        kept = [op for op in ops if not isinstance(op, Alloc) or op.buffer.name in used]
        return self.before.replace(ops=tuple(kept))

    def sum(self, i: int) -> None:
        """Drops the sum `i` where a matmul can do it."""
        op = self.ops[i]
        assert isinstance(op, Call)
        first, second = op.args
        if isinstance(first, View) and isinstance(second, View):
            for old, added in ((first, second), (second, first)):
                if (matmul := self.adds(i, op, old, added)) is not None:
                    self.accumulate(i, op, old, matmul)
                    return

    def adds(self, i: int, op: Call, old: View, added: View) -> int | None:
        """The matmul that makes `added` and can add it to `old`, which another made before."""
        at, matmul = self.last_use(old.buffer, i), self.last_use(added.buffer, i)
        if at is None or matmul is None or at >= matmul:  # equal: `old` is a factor, too
            return None
        made = self.ops[matmul]
        if not isinstance(made, Call) or made.fn not in MADE or made.kwargs:
            return None
        begin = self.first_write(old.buffer, i)
        if result_of(made) != View(added.buffer) or begin is None:
            return None
        if any(one is not None and one.stream != op.stream for one in self.ops[begin:i]):
            return None
        sum_of, other = self.buffers[old.buffer], self.buffers[added.buffer]
        alike = (sum_of.shape, sum_of.dtype, old.steps) == (other.shape, other.dtype, added.steps)
        if not (alike and _plain(sum_of) and _plain(other)):
            return None
        if not all(isinstance(step, Reshape) for step in old.steps):
            return None
        if not self.dies(added.buffer, i, declared=bool(made.fresh)):
            return None
        fits = self.lies_there(i, op, old) if op.fresh else self.lies_in(i, op, old, begin)
        return matmul if fits else None

    def lies_there(self, i: int, op: Call, old: View) -> bool:
        """True if the sum, which has memory of its own, can lie where `old` does from now on."""
        (own,) = op.fresh
        if own.name in self.returned or own.strides is not None:
            return False
        if own.dtype != self.buffers[old.buffer].dtype or old.buffer in self.returned:
            return False
        freed = any(isinstance(self.ops[at], Free) for at in self.uses[own.name])
        return not freed and self.uses[old.buffer][-1] == i

    def lies_in(self, i: int, op: Call, old: View, begin: int) -> bool:
        """True if all ops that make `old` can make it where the sum goes."""
        if len(op.outs) != 1 or old.steps or op.written:
            return False
        (out,) = op.outs
        box, first = self.box(out), self.ops[begin]
        declared = isinstance(first, Call) and bool(first.fresh)
        if declared or not self.dies(old.buffer, i, declared=False):
            return False
        if (box.sizes, box.dtype) != (self.box(old).sizes, self.box(old).dtype):
            return False
        # Between them there is nothing but computation: no signal allows or awaits the write.
        between = [op for op in self.ops[begin:i] if op is not None]
        if not all(isinstance(op, Alloc | Call) for op in between) or not box.contiguous:
            return False
        if any(begin <= at < i for at in self.uses[out.buffer]):
            return False
        if self.allocs.get(out.buffer, -1) > begin:  # a slot is taken where it says
            return self.buffers[out.buffer].kind != "symmetric"
        return True

    def accumulate(self, i: int, op: Call, old: View, matmul: int) -> None:
        """Lets the matmul add to what is there; the sum goes."""
        into = View(old.buffer)
        if op.fresh:  # what comes later finds the sum where `old` lies
            name = op.fresh[0].name
            self.redirect(name, old, [at for at in self.uses[name] if at > i])
        else:
            (into,) = op.outs
            self.move(old.buffer, into, i)
        made = self.ops[matmul]
        assert isinstance(made, Call)
        args = (into, *made.args)
        added = dataclasses.replace(made, fn=INTO, args=args, outs=(into,), fresh=(), mutates=True)
        self.put(matmul, added)
        self.put(i, None)

    # what is where

    def last_use(self, name: str, i: int) -> int | None:
        """The last op before `i` that uses a buffer."""
        return max((at for at in self.uses[name] if at < i), default=None)

    def first_write(self, name: str, i: int) -> int | None:
        """The op that writes what a buffer holds before `i`, to which matmuls may have added since;
        None where others use it."""
        for at in reversed([at for at in self.uses[name] if at < i]):
            op = self.ops[at]
            if not (isinstance(op, Call) and op.fn in MATMULS):
                return None
            if result_of(op) == View(name):
                return at
            if op.fn != INTO or [v for v in op.views() if v.buffer == name] != [View(name)]:
                return None
        return None

    def dies(self, name: str, i: int, declared: bool) -> bool:
        """True if no op reads a buffer after `i` before one writes it anew; if the op that goes
        declares it, True if no op uses it again."""
        if self.buffers[name].kind not in ("local", "fresh") or name in self.returned:
            return False
        after = min((at for at in self.uses[name] if at > i), default=None)
        if after is None or declared:
            return after is None
        op = self.ops[after]
        assert op is not None
        anew = any(access.view == View(name) for access in op.writes())
        return anew and not any(access.view.buffer == name for access in op.reads())

    # changes

    def put(self, i: int, op: Op | None) -> None:
        """Sets op `i`."""
        for name in _used(self.ops[i]):
            self.uses[name].remove(i)
        self.ops[i] = op
        for name in _used(op):
            bisect.insort(self.uses[name], i)

    def move(self, name: str, out: View, i: int) -> None:
        """Lets what a buffer holds before `i` be made in `out`."""
        begin = self.first_write(name, i)
        assert begin is not None
        if self.allocs.get(out.buffer, -1) > begin:
            at = self.allocs.pop(out.buffer)
            self.rewrite.before(begin, self.before.ops[at])
            self.rewrite.replace(at)
        self.redirect(name, out, [at for at in self.uses[name] if begin <= at < i])

    def redirect(self, name: str, to: View, uses: Iterable[int]) -> None:
        """Lets these ops find in another view what they take from a buffer."""

        def moved(value: object) -> object:
            if isinstance(value, View) and value.buffer == name:
                return View(to.buffer, (*to.steps, *value.steps))
            return value

        for at in uses:
            op = self.ops[at]
            assert op is not None
            self.put(at, map_values(op, moved))


def _plain(buffer: Buffer) -> bool:
    """True if a buffer has memory of its own, dense and as large on all ranks."""
    ranked = any(isinstance(dim, TableEntry) for dim in buffer.shape)
    return buffer.strides is None and buffer.storage is None and not ranked


def _used(op: Op | None) -> set[str]:
    """The buffers that an op reads, writes or frees."""
    if op is None or isinstance(op, Free):
        return {op.buffer} if op is not None else set()
    return {access.view.buffer for access in (*op.reads(), *op.writes())}
