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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from interlace.ir import Buffer, Call, Op, Program, Reshape, View
from interlace.ir.overlap import representatives
from interlace.ir.program import map_views
from interlace.ir.types import TableEntry
from interlace.passes.rewrite import Rewrite
from interlace.passes.sites.cone import result_of
from interlace.passes.uses import allocs_of, returned_by, used_by

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
    """The ops by their places in the list, as they change."""

    def __init__(self, program: Program) -> None:
        self.before = program
        self.ops: dict[int, Op] = dict(enumerate(program.ops))
        self.calls = program.calls()
        self.buffers = program.buffers()
        self.box = program.boxes(representatives(program)[0])
        self.returned, self.allocs = returned_by(program), allocs_of(program.ops)
        self.uses: defaultdict[str, list[int]] = defaultdict(list)
        """For each buffer the ops that read, write or free it."""
        self.rewrite = Rewrite(program.ops)
        for i, op in self.ops.items():
            for name in _used(op):
                self.uses[name].append(i)

    def program(self) -> Program:
        """The Program that it has become."""
        changed = [i for i, op in enumerate(self.before.ops) if self.ops.get(i) is not op]
        if not changed:
            return self.before
        for i in changed:
            self.rewrite.replace(i, *(self.ops[i],) if i in self.ops else ())
        ops = self.rewrite.ops()
        used = {name for op in ops for name in _used(op)} | self.returned
        kept = [op for op in ops if (b := op.ordering().takes) is None or b.name in used]
        return self.before.replace(ops=tuple(kept))

    def sum(self, i: int) -> None:
        """Drops the sum `i` where a matmul can do it: of one term on top of the other."""
        op = self.calls[i]
        first, second = op.args
        if not (isinstance(first, View) and isinstance(second, View)):
            return
        for old, added in ((first, second), (second, first)):
            matmul, begin = self.last_use(added.buffer, i), self.first_write(old.buffer, i)
            if matmul is None or begin is None or not self.adds(i, matmul, begin, old, added):
                continue
            if op.fresh and self.lies_there(i, op, old):
                (own,) = op.fresh  # what comes later finds the sum where `old` lies
                self.redirect(own.name, old, [at for at in self.uses[own.name] if at > i])
                into = View(old.buffer)
            elif not op.fresh and self.lies_in(i, op, old, begin):
                (into,) = op.outs
                if self.allocs.get(into.buffer, -1) > begin:
                    at = self.allocs.pop(into.buffer)
                    self.rewrite.before(begin, self.before.ops[at])
                    self.rewrite.replace(at)
                uses = [at for at in self.uses[old.buffer] if begin <= at < i]
                self.redirect(old.buffer, into, uses)
            else:
                continue
            made = self.calls[matmul]
            changes = {"args": (into, *made.args), "outs": (into,), "fresh": (), "mutates": True}
            self.put(matmul, dataclasses.replace(made, fn=INTO, **changes))
            self.put(i, None)
            return

    def adds(self, i: int, matmul: int, begin: int, old: View, added: View) -> bool:
        """True if a matmul makes `added`, and can add it to `old`, which others made before."""
        last, made = self.last_use(old.buffer, i), self.calls.get(matmul)
        if last is None or last >= matmul:  # equal: `old` is a factor, too
            return False
        if made is None or made.fn not in MADE or made.kwargs:
            return False
        if result_of(made) != View(added.buffer):
            return False
        if any(op.stream != self.calls[i].stream for op in self.between(begin, i)):
            return False
        sum_of, other = self.buffers[old.buffer], self.buffers[added.buffer]
        return (
            (sum_of.shape, sum_of.dtype, old.steps) == (other.shape, other.dtype, added.steps)
            and _plain(sum_of)
            and _plain(other)
            and all(isinstance(step, Reshape) for step in old.steps)
            and self.dies(added.buffer, i, declared=bool(made.fresh))
        )

    def lies_there(self, i: int, op: Call, old: View) -> bool:
        """True if the sum, which has memory of its own, can lie where `old` does from now on."""
        (own,) = op.fresh
        if {own.name, old.buffer} & self.returned or own.strides is not None:
            return False
        freed = any(self.ops[at].ordering().frees for at in self.uses[own.name])
        alike = own.dtype == self.buffers[old.buffer].dtype
        return alike and not freed and self.uses[old.buffer][-1] == i

    def lies_in(self, i: int, op: Call, old: View, begin: int) -> bool:
        """True if all ops that make `old` can make it where the sum goes."""
        if len(op.outs) != 1 or old.steps or op.written:
            return False
        (out,) = op.outs
        box = self.box(out)
        if self.calls[begin].fresh or not self.dies(old.buffer, i, declared=False):
            return False
        if (box.sizes, box.dtype) != (self.box(old).sizes, self.box(old).dtype):
            return False
        # Between them there is nothing but computation: no signal allows or awaits the write.
        computes = all(
            at in self.calls or self.ops[at].ordering().takes is not None
            for at in range(begin, i)
            if at in self.ops
        )
        if not computes or not box.contiguous:
            return False
        if any(begin <= at < i for at in self.uses[out.buffer]):
            return False
        if self.allocs.get(out.buffer, -1) > begin:  # a slot is taken where it says
            return self.buffers[out.buffer].kind != "symmetric"
        return True

    # what is where

    def between(self, begin: int, end: int) -> Iterator[Op]:
        """The ops from one place up to another."""
        return (self.ops[at] for at in range(begin, end) if at in self.ops)

    def last_use(self, name: str, i: int) -> int | None:
        """The last op before `i` that uses a buffer."""
        return max((at for at in self.uses[name] if at < i), default=None)

    def first_write(self, name: str, i: int) -> int | None:
        """The op that writes what a buffer holds before `i`, to which matmuls may have added since;
        None where others use it."""
        for at in reversed([at for at in self.uses[name] if at < i]):
            op = self.calls.get(at)
            if op is None or op.fn not in MATMULS:
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
        anew = any(access.view == View(name) for access in op.writes())
        return anew and not any(access.view.buffer == name for access in op.reads())

    # changes

    def put(self, i: int, op: Op | None) -> None:
        """Sets op `i`; None: it goes."""
        for name in _used(self.ops.pop(i)):
            self.uses[name].remove(i)
        self.calls.pop(i, None)
        if op is not None:
            self.ops[i] = op
            if isinstance(op, Call):
                self.calls[i] = op
            for name in _used(op):
                bisect.insort(self.uses[name], i)

    def redirect(self, name: str, to: View, uses: Iterable[int]) -> None:
        """Lets these ops find in another view what they take from a buffer."""

        def moved(view: View) -> View:
            return View(to.buffer, (*to.steps, *view.steps)) if view.buffer == name else view

        for at in uses:
            self.put(at, map_views(self.ops[at], moved))


def _plain(buffer: Buffer) -> bool:
    """True if a buffer has memory of its own, dense and as large on all ranks."""
    ranked = any(isinstance(dim, TableEntry) for dim in buffer.shape)
    return buffer.strides is None and buffer.storage is None and not ranked


def _used(op: Op) -> set[str]:
    """The buffers that an op reads, writes or frees."""
    freed = op.ordering().frees
    return used_by((op,)) | ({freed} if freed is not None else set())
