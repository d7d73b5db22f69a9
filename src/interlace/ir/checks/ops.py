"""Checks of single ops: names, teams, peers, sizes and element types.

Most hold for any op: for its fields by their roles (`interlace.ir.fields`), for what it reads and
what it writes, for what it waits for, raises and frees. `_RULES` has what else an op must keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from interlace.errors import InterlaceError
from interlace.ir.box import Box
from interlace.ir.checks.context import CheckContext, check_arguments, check_buffer, check_operator
from interlace.ir.checks.effects import check_effects
from interlace.ir.collective_kinds import REDUCTIONS
from interlace.ir.fields import FieldForm, form_of
from interlace.ir.kernels import kernel_matmul
from interlace.ir.operators import matmul_of
from interlace.ir.ops import (
    KINDS,
    RNG,
    UNORDERED,
    Call,
    Collective,
    Copy,
    Fused,
    Get,
    Op,
    Ordering,
    Put,
    SignalLevel,
)
from interlace.ir.sizes import Int
from interlace.ir.text.printer import print_view
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import VALUE_BITS, Index, Others
from interlace.ir.view import View

_CHECKED = frozenset({"team", "index", "peer", "table", "declaration", "member", "part"})
"""Roles whose values have rules of their own, beside those for what an op reads and writes."""


class OpChecker:
    """Checks the ops of one Program in order."""

    def __init__(self, context: CheckContext) -> None:
        self.context = context
        self.regions = {region.name: region for region in context.program.regions}
        self.sites = {site.id for site in context.program.sites}
        self.events: set[str] = set()
        self.agreed: set[tuple[object, ...]] = set()
        """Collectives and the boxes of their two views, by what they are: they fit together."""
        self.raised: dict[tuple[str, str], dict[tuple[int, int], int]] = {}
        """Value of each signal of a team after its notifies to one rank, by writer and reader."""
        self.raised_to_itself: dict[tuple[str, str], dict[tuple[int, int], int]] = {}
        self.raised_to_all: dict[tuple[str, str], int] = {}

    def check(self, op: Op) -> None:
        """Raises a BrokenRule if the op breaks a rule."""
        context = self.context
        if op.site is not None and op.site not in self.sites:
            fix = f'declare it: site({op.site}, "all_gather_matmul")'
            raise context.fault(f"no site {op.site}", fix)
        for field in form_of(type(op)).fields:
            if field.role in _CHECKED and getattr(op, field.name) is not None:
                self.field(op, field)
        reads, writes = op.reads(), op.writes()
        for access in (*reads, *writes):
            if access.peer is not None:
                self.remote(access.view, access.team)
        ordering = op.ordering()
        if ordering is not UNORDERED:
            self.order(ordering)
        rule = _RULES.get(type(op))
        if rule is not None:
            rule(self, op)
        for access in (*reads, *writes):
            if access.view != RNG:
                context.boxes(access.view)
        for access in writes:
            if access.view != RNG:
                self.writable(access.view)

    def field(self, op: Any, field: FieldForm) -> None:
        """Checks a field of any op by the rules of its role."""
        context, value = self.context, getattr(op, field.name)
        match field.role:
            case "team":
                context.team(value)
            case "index" | "peer":
                self.peer(value, op.team, field.name)
            case "table":
                if value not in context.tables:
                    raise context.unknown("table", value, context.tables)
            case "declaration":
                check_buffer(context, value, ("local", "symmetric", "fresh"))
                context.declare(value)
            case "member":
                self.members(op, "group", "group", value, field)
            case "part":
                for part in value or ((),):
                    self.members(op, "fused op", "part", part, field)
            case _:
                raise TypeError(f"no check for {field.role}")

    def members(
        self, op: Op, what: str, inner: str, members: Sequence[Op], field: FieldForm
    ) -> None:
        """The ops that stand in another."""
        if not members:
            fix = f"put {field.how.holding} in it, or leave it out"
            raise self.context.fault(f"an empty {inner}", fix)
        for member in members:
            if member.stream != op.stream:
                raise self.context.fault(
                    f"a {what} on {op.stream!r} holds an op on {member.stream!r}",
                    f"a {what} and its members share one stream",
                )
            self.check(member)

    def show(self, view: View) -> str:
        """A view with its element type and sizes (on the first rank that is looked at)."""
        box = self.context.boxes(view)[0]
        return f"{print_view(view, self.context.program)} ({_type(box)})"

    def writable(self, view: View) -> None:
        """Two elements of what is written are never the same bytes."""
        boxes = self.context.boxes(view)
        if not any(box.overlaps_itself for box in boxes):
            return
        if any(0 in box.strides for box in boxes):
            why, fix = "a stride of 0", "write the view that was expanded"
        else:
            why, fix = (
                f"strides {boxes[0].strides}",
                "write a view whose strides step over its rows",
            )
        raise self.context.fault(
            f"{self.show(view)} is written, but its elements overlap ({why})", fix
        )

    def same(self, op: Copy | Put | Get) -> None:
        """Two views have equal sizes, and equal element types if these are not converted."""
        context, what = self.context, form_of(type(op)).word
        src, dst = op.src, op.target if isinstance(op, Get) else op.dst
        converts = isinstance(op, Copy)
        pairs = zip(context.ranks, context.boxes(src), context.boxes(dst), strict=True)
        for rank, from_, to in pairs:
            if from_.sizes != to.sizes or (from_.dtype != to.dtype and not converts):
                raise context.fault(
                    f"{what} from {print_view(src, context.program)} ({_type(from_)}) to "
                    f"{print_view(dst, context.program)} ({_type(to)}) on rank {rank}",
                    f"{what} between equal sizes" + ("" if converts else " and element types"),
                )

    def call(self, op: Call) -> None:
        context = self.context
        region = self.regions.get(op.fn)
        if region is None and "." not in op.fn:
            raise context.fault(
                f"{op.fn!r} is no region of this program, and no operator such as aten.mm.out",
                did_you_mean(op.fn, self.regions, "regions are"),
            )
        if region is None:
            check_operator(context, op.fn)
            check_effects(context, op)
        check_arguments(context, op.args, op.kwargs)
        if op.outs and op.fresh and not op.mutates:
            raise context.fault(
                "a call fills views or makes its outputs, not both",
                "allocate all of them before the call, or declare all in out=(t := ...)",
            )
        if op.mutates:
            args = {view.buffer for view in op.views()}
            for view in op.outs:
                if view.buffer not in args:
                    raise context.fault(
                        f"{view.buffer!r} is written in place, but is no argument",
                        "mutates=True lists in out= those arguments that are written",
                    )
        if region is not None:
            takes, gives = len(region.inputs), len(region.outputs)
            has = (len(op.args), len(op.fresh or op.outs))
            if has != (takes, gives) or op.kwargs:
                raise context.fault(
                    f"region {op.fn!r} takes {takes} and gives {gives}; here it has {has[0]} "
                    f"arguments{' and keywords' if op.kwargs else ''} and {has[1]} outputs",
                    f"call it as {op.fn}({', '.join(region.inputs)})",
                )
        for view in (*op.views(), *op.outs):
            context.boxes(view)
        for buffer in op.fresh:
            check_buffer(context, buffer, ("fresh",))
            context.declare(buffer)
        wrong = _matmul_mismatch(op, context.boxes)
        if wrong is not None:
            raise context.fault(wrong, "write views of (m, k), (k, n) and (m, n)")

    def collective(self, op: Collective) -> None:
        context = self.context
        kind = KINDS.get(op.kind)
        if kind is None:
            raise context.unknown("collective", op.kind, KINDS)
        team = context.team(op.team)
        if kind.reduces and op.reduce not in REDUCTIONS:
            reduce = (
                f"no reduction {op.reduce!r}" if op.reduce else f"{op.kind} lacks its reduction"
            )
            raise context.fault(reduce, f"write reduce= one of {', '.join(REDUCTIONS)}")
        if not kind.reduces and op.reduce is not None:
            raise context.fault(f"{op.kind} reduces nothing", "leave reduce= out")
        if kind.rooted != (op.root is not None):
            fix = "write root=0 or another rank of the team" if kind.rooted else "leave root= out"
            has = "lacks its" if kind.rooted else "has no"
            raise context.fault(f"{op.kind} {has} root", fix)
        at_root = self.at_root(op)
        for view, role, name in ((op.src, kind.reads, "src"), (op.dst, kind.writes, "dst")):
            needed = role == "all" or (role == "root" and any(at_root))
            if view is None and needed:
                raise context.fault(f"{op.kind} lacks {name}", f"give {op.kind}(src, dst, ...)")
            if view is not None and role == "none":
                raise context.fault(f"{op.kind} takes no views", f"write {op.kind}(team={op.team})")
            boxes = {} if view is None else {id(box): box for box in context.boxes(view)}
            if view is not None and not all(box.contiguous for box in boxes.values()):
                raise context.fault(
                    f"{self.show(view)} is not contiguous", "copy it to a contiguous buffer first"
                )
        values = None if op.splits is None else context.tables[op.splits].values
        if values is not None and len(values) != team.size:
            what = f"table {op.splits!r} has {len(values)} entries for {team.size} ranks"
            raise context.fault(what, f"give one for each rank of {op.team!r}")
        if op.src is not None and op.dst is not None:
            both = context.boxes(op.src), context.boxes(op.dst)
            key = op.kind, op.team, op.splits, *map(id, both)  # layers have them alike
            if key in self.agreed:
                return
            context.spend(len(context.wheres))
            self.agreed.add(key)
            found = zip(context.wheres, *both, strict=True)
            if values is None:  # then it does not matter which rank has them
                found = {(id(src), id(dst)): (w, src, dst) for w, src, dst in found}.values()
            for where, src, dst in found:
                index = where.members[op.team].index
                wrong = _collective_mismatch(op.kind, src, dst, index, team.size, values)
                if wrong is not None:
                    raise context.fault(
                        f"{op.kind} from {_type(src)} to {_type(dst)} on rank {where.rank}: "
                        f"{wrong}",
                        "correct the views, or name the table of uneven parts: splits=rows",
                    )

    def at_root(self, op: Collective) -> list[bool]:
        """True for each rank that is the root; raises where members disagree on the root."""
        context = self.context
        if op.root is None:
            return [False] * len(context.wheres)
        roots = context.indices(op.root)
        agreed: dict[int, int] = {}  # by the first rank of the team
        for where, root in zip(context.wheres, roots, strict=True):
            if agreed.setdefault(where.members[op.team].ranks[0], root) != root:
                raise context.fault(
                    f"the members of {op.team!r} do not agree on the root",
                    "a root is a number, the same on every member",
                )
        places = [where.members[op.team].index for where in context.wheres]
        return [place == root for place, root in zip(places, roots, strict=True)]

    def peer(self, peer: Index | Others, team: str, what: str) -> None:
        """A rank that exists in the team, on every rank that runs this."""
        context, size = self.context, self.context.team(team).size
        if isinstance(peer, Others):
            if peer.team != team:
                raise context.fault(f"{peer} are not of team {team!r}", f"write {team}.others")
            return
        for rank, found in zip(context.ranks, context.indices(peer), strict=True):
            if not 0 <= found < size:
                raise context.fault(
                    f"{what} {found} of team {team!r} does not exist (on rank {rank})",
                    f"the team's ranks are 0 to {size - 1}; {team}.rank + 1 counts modulo {size}",
                )

    def remote(self, view: View, team: str | None) -> None:
        """A view of a peer's memory: of a symmetric or registered buffer of that team."""
        context = self.context
        buffer = context.buffer(view)
        if buffer.team != team:
            word = "registered" if buffer.registered else buffer.kind
            of = word if buffer.team is None else f"{word} on {buffer.team!r}"
            fix = f"declare it {buffer.name} = alloc(..., symmetric={team})"
            if buffer.kind in ("input", "output"):
                fix = f"register it with the team: {buffer.name}: f32[...].registered({team})"
            raise context.fault(f"{buffer.name!r} is {of}: peers of {team!r} cannot reach it", fix)

    def fused(self, op: Fused) -> None:
        for member in op.members:
            if isinstance(member, Call) and member.fresh:
                raise self.context.fault(
                    f"a fused {member.fn} makes its outputs itself",
                    "allocate them before the fused op, and give them as out=",
                )
        if op.kernel is None:
            return
        context = self.context
        context.spend(len(context.wheres) * len(op.members))
        for rank, where in enumerate(context.wheres):
            try:
                box: Callable[[View], Box] = lambda view, at=rank: context.boxes(view)[at]  # noqa: E731
                kernel_matmul(op, box, context.buffers, where)
            except InterlaceError as error:
                raise context.fault(
                    f"the parts are not what {op.kernel.kind} does: {error}",
                    "write them as it does, or leave kernel= out: they then run one after another",
                ) from None

    def order(self, ordering: Ordering) -> None:
        """Checks what an op waits for, raises and frees, and notes the event that it records."""
        context = self.context
        if ordering.records is not None:
            self.events.add(ordering.records)
        if ordering.waits is not None and ordering.waits not in self.events:
            raise context.fault(
                f"nothing before this records event {ordering.waits!r}",
                did_you_mean(ordering.waits, self.events, "events recorded so far are"),
            )
        if ordering.frees is not None:
            if context.buffer(View(ordering.frees)).kind in ("input", "output"):
                raise context.fault(
                    f"{ordering.frees!r} belongs to the caller",
                    "free only what the program allocates",
                )
        for level in (ordering.raises, ordering.expects):
            if level is not None and not 1 <= level.value < 1 << VALUE_BITS:
                fix = f"count from 1, and to {(1 << VALUE_BITS) - 1} at most"
                raise context.fault(f"value {level.value} of signal {level.signal!r}", fix)
        if ordering.raises is not None:
            self.grows(ordering.raises)

    def grows(self, level: SignalLevel) -> None:
        """Each notify of a signal raises it."""
        key = level.signal, level.team
        of_pairs = self.raised.setdefault(key, {})
        self.context.spend(len(self.context.wheres) + len(of_pairs))
        if isinstance(level.peer, Others):
            found = [(value, reader) for (_, reader), value in of_pairs.items()]
            first = self.context.wheres[0].members[level.team]
            if len(first.ranks) > 1:
                other = 0 if first.index else 1
                self._raises(level, *max([(self.raised_to_all.get(key, 0), other), *found]))
                self.raised_to_all[key] = level.value
            return
        for where in self.context.wheres:
            reader = where.index(level.peer)
            pair, pairs = (where.rank, reader), of_pairs
            to_all = self.raised_to_all.get(key, 0)
            if reader == where.members[level.team].index:  # which is none of the others
                pairs, to_all = self.raised_to_itself.setdefault(key, {}), 0
            self._raises(level, max(to_all, pairs.get(pair, 0)), reader)
            pairs[pair] = level.value

    def _raises(self, level: SignalLevel, before: int, reader: int) -> None:
        if level.value <= before:
            raise self.context.fault(
                f"signal {level.signal!r} to rank {reader} of {level.team!r} goes from "
                f"{before} to {level.value}",
                f"values only grow: write value={before + 1}, or use another signal",
            )


_RULES: dict[type[Op], Callable[[OpChecker, Any], None]] = {
    Call: OpChecker.call,
    Collective: OpChecker.collective,
    Copy: OpChecker.same,
    Fused: OpChecker.fused,
    Get: OpChecker.same,
    Put: OpChecker.same,
}
"""Rules of a kind of op beside the rules for all: how the sizes of its views fit together."""


def _type(box: Box) -> str:
    return f"{box.dtype}[{', '.join(map(str, box.sizes))}]"


def _collective_mismatch(
    kind: str, src: Box, dst: Box, index: int, size: int, splits: tuple[Int, ...] | None
) -> str | None:
    """Why `src` and `dst` of member `index` do not fit the kind; None if they do."""
    if src.dtype != dst.dtype:
        return "the element types differ"
    scales = KINDS[kind].scales
    if splits is None and not scales:
        if src.sizes != dst.sizes:
            return "the sizes differ"
        if kind == "all_to_all" and (not src.sizes or src.sizes[0] % size):
            return f"dimension 0 does not divide into {size} parts"
        return None
    if not src.sizes or not dst.sizes or src.sizes[1:] != dst.sizes[1:]:
        return "the sizes after dimension 0 differ"
    rows = (src.sizes[0], dst.sizes[0])
    if scales:
        part, whole = rows if scales == "gather" else rows[::-1]
        own = part if splits is None else splits[index]
        total = size * part if splits is None else sum(splits)
        if (part, whole) != (own, total):
            return f"the whole has {whole} rows, and this rank's part {part}: {own} of {total}"
        return None
    if splits is not None and kind == "all_to_all":
        total, even = sum(splits), size * splits[index]
        if rows not in ((total, even), (even, total)):
            return f"one has {total} rows (one part a rank), the other {even} (this rank's parts)"
        return None
    return "this kind takes no splits"


def _matmul_mismatch(op: Call, boxes: Callable[[View], tuple[Box, ...]]) -> str | None:
    """Why the views of a matmul do not fit together; None if they do, or if it is no matmul."""
    matmul = matmul_of(op.fn)
    if matmul is None or len(op.args) < matmul.lhs + 2:
        return None
    a, b = op.args[matmul.lhs : matmul.lhs + 2]
    outs = (*op.outs, *(View(buffer.name) for buffer in op.fresh))
    if not (isinstance(a, View) and isinstance(b, View)) or len(outs) != 1:
        return None
    for left, right, out in zip(boxes(a), boxes(b), boxes(outs[0]), strict=True):
        rank = 3 if matmul.batched else 2
        if not len(left.sizes) == len(right.sizes) == len(out.sizes) == rank:
            return f"{op.fn} takes views of {rank} dimensions: {_sizes(left, right, out)}"
        (m, k), (k2, n) = left.sizes[-2:], right.sizes[-2:]
        batches = {left.sizes[:-2], right.sizes[:-2], out.sizes[:-2]}
        if k != k2 or out.sizes[-2:] != (m, n) or len(batches) != 1:
            return f"{op.fn} of sizes that do not fit: {_sizes(left, right, out)}"
        blocks = op.args[matmul.blocks] if matmul.blocks is not None else 0
        if isinstance(blocks, int) and blocks > 1 and m % blocks:
            return f"{op.fn} of {m} rows, which are not {blocks} equal blocks of one scale each"
        if not matmul.scaled and not left.dtype == right.dtype == out.dtype:
            return f"{op.fn} of {left.dtype} and {right.dtype} into {out.dtype}"
    return None


def _sizes(left: Box, right: Box, out: Box) -> str:
    return f"{left.sizes} times {right.sizes} into {out.sizes}"
