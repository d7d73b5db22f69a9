"""Checks of single ops: names, teams, peers, sizes and element types."""

from __future__ import annotations

from interlace.ir.box import Box
from interlace.ir.check_context import Context
from interlace.ir.check_program import check_arguments, check_buffer, check_operator
from interlace.ir.check_shapes import collective_mismatch, matmul_mismatch
from interlace.ir.ops import (
    KINDS,
    REDUCTIONS,
    RNG,
    Alloc,
    Call,
    Collective,
    Copy,
    Expect,
    Free,
    Fused,
    Get,
    Group,
    Notify,
    Op,
    Put,
    Record,
    Recv,
    Send,
    Wait,
)
from interlace.ir.text.printer import print_view
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import VALUE_BITS, Index, Others
from interlace.ir.view import View


class OpChecker:
    """Checks the ops of one Program in order."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.regions = {region.name: region for region in context.program.regions}
        self.sites = {site.id for site in context.program.sites}
        self.events: set[str] = set()
        self.raised: dict[tuple[str, str, int, int], int] = {}

    def check(self, op: Op) -> None:
        """Raises a Fault if the op breaks a rule."""
        context = self.context
        if op.site is not None and op.site not in self.sites:
            raise context.fault(
                f"no site {op.site}", f'declare it: site({op.site}, "all_gather_matmul")'
            )
        match op:
            case Alloc(buffer=buffer):
                check_buffer(context, buffer, ("local", "symmetric", "fresh"))
                context.declare(buffer)
            case Call():
                self.call(op)
            case Free(buffer=name):
                if context.buffer(View(name)).kind in ("input", "output"):
                    raise context.fault(
                        f"{name!r} belongs to the caller", "free only what the program allocates"
                    )
            case Record(event=event):
                self.events.add(event)
            case Wait(event=event):
                if event not in self.events:
                    raise context.fault(
                        f"nothing before this records event {event!r}",
                        did_you_mean(event, self.events, "events recorded so far are"),
                    )
            case Copy(src=src, dst=dst):
                self.same(src, dst, "copy", dtypes=False)
            case Collective():
                self.collective(op)
            case Send() | Recv():
                self.peer(op.peer, op.team)
            case Group():
                self.group(op)
            case Fused():
                self.fused(op)
            case Put(src=src, dst=dst):
                self.remote(dst, op.peer, op.team)
                self.same(src, dst, "put")
            case Get(src=src):
                self.remote(src, op.peer, op.team)
                self.same(src, op.target, "get")
            case Notify() | Expect():
                self.signal(op)
            case _:
                pass
        for access in (*op.reads(), *op.writes()):
            if access.view != RNG:
                context.boxes(access.view)
        for access in op.writes():
            if access.view != RNG:
                self.writable(access.view)

    def show(self, view: View) -> str:
        """A view with its element type and sizes (on the first rank that is looked at)."""
        box = self.context.boxes(view)[0]
        return f"{print_view(view, self.context.program)} ({_type(box)})"

    def writable(self, view: View) -> None:
        """Two elements of what is written are never the same bytes."""
        box = self.context.boxes(view)[0]
        if any(size > 1 and step == 0 for size, step in zip(box.sizes, box.strides, strict=True)):
            raise self.context.fault(
                f"{self.show(view)} is written, but its elements overlap (a stride of 0)",
                "write the view that was expanded",
            )

    def same(self, src: View, dst: View, what: str, dtypes: bool = True) -> None:
        """Two views have equal sizes, and equal element types if these are not converted."""
        context = self.context
        pairs = zip(context.ranks, context.boxes(src), context.boxes(dst), strict=True)
        for rank, from_, to in pairs:
            if from_.sizes != to.sizes or (dtypes and from_.dtype != to.dtype):
                raise context.fault(
                    f"{what} from {print_view(src, context.program)} ({_type(from_)}) to "
                    f"{print_view(dst, context.program)} ({_type(to)}) on rank {rank}",
                    f"{what} between equal sizes" + (" and element types" if dtypes else ""),
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
        wrong = matmul_mismatch(op, context.boxes)
        if wrong is not None:
            raise context.fault(wrong, "mend the views: (m, k) times (k, n) gives (m, n)")

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
            if view is not None and not all(box.contiguous for box in context.boxes(view)):
                raise context.fault(
                    f"{self.show(view)} is not contiguous", "copy it to a contiguous buffer first"
                )
        values = None
        if op.splits is not None:
            table = context.tables.get(op.splits)
            if table is None:
                raise context.unknown("table", op.splits, context.tables)
            values = table.values
            if len(values) != team.size:
                what = f"table {op.splits!r} has {len(values)} entries for {team.size} ranks"
                raise context.fault(what, f"give one for each rank of {op.team!r}")
        if op.src is not None and op.dst is not None:
            boxes = zip(context.wheres, context.boxes(op.src), context.boxes(op.dst), strict=True)
            for where, src, dst in boxes:
                index = where.members[op.team].index
                wrong = collective_mismatch(op.kind, src, dst, index, team.size, values)
                if wrong is not None:
                    raise context.fault(
                        f"{op.kind} from {_type(src)} to {_type(dst)} on rank {where.rank}: "
                        f"{wrong}",
                        "mend the views, or name the table of uneven parts: splits=rows",
                    )

    def at_root(self, op: Collective) -> list[bool]:
        """Whether each rank is the root, which all members must agree on."""
        context = self.context
        if op.root is None:
            return [False] * len(context.wheres)
        self.in_team(op.root, op.team, "root")
        roots = context.indices(op.root)
        agreed: dict[tuple[int, ...], int] = {}
        for where, root in zip(context.wheres, roots, strict=True):
            if agreed.setdefault(where.members[op.team].ranks, root) != root:
                raise context.fault(
                    f"the members of {op.team!r} do not agree on the root",
                    "a root is a number, the same on every member",
                )
        places = [where.members[op.team].index for where in context.wheres]
        return [place == root for place, root in zip(places, roots, strict=True)]

    def in_team(self, index: Index, team: str, what: str) -> None:
        size = self.context.team(team).size
        for rank, found in zip(self.context.ranks, self.context.indices(index), strict=True):
            if not 0 <= found < size:
                raise self.context.fault(
                    f"{what} {found} of team {team!r} does not exist (on rank {rank})",
                    f"the team's ranks are 0 to {size - 1}; {team}.rank + 1 counts modulo {size}",
                )

    def peer(self, peer: Index | Others, team: str) -> None:
        if not isinstance(peer, Others):
            self.in_team(peer, team, "peer")
            return
        self.context.team(team)
        if peer.team != team:
            fix = f"write {team}.others"
            raise self.context.fault(f"{peer} are not of team {team!r}", fix)

    def remote(self, view: View, peer: Index, team: str) -> None:
        """A view of a peer's memory: of a symmetric or registered buffer of that team."""
        context = self.context
        self.peer(peer, team)
        buffer = context.buffer(view)
        if buffer.team != team:
            word = "registered" if buffer.registered else buffer.kind
            of = word if buffer.team is None else f"{word} on {buffer.team!r}"
            fix = f"declare it {buffer.name} = alloc(..., symmetric={team})"
            if buffer.kind in ("input", "output"):
                fix = f"register it with the team: {buffer.name}: f32[...].registered({team})"
            raise context.fault(f"{buffer.name!r} is {of}: peers of {team!r} cannot reach it", fix)

    def group(self, op: Group) -> None:
        if not op.ops:
            raise self.context.fault("an empty group", "put sends and receives in it")
        for member in op.ops:
            if member.stream != op.stream:
                raise self.context.fault(
                    f"a group on {op.stream!r} holds an op on {member.stream!r}",
                    "a group and its members share one stream",
                )
            self.check(member)

    def fused(self, op: Fused) -> None:
        context = self.context
        if not op.parts or not all(op.parts):
            raise context.fault("an empty part", "put what the kernel does in it, or leave it out")
        for member in op.members:
            if member.stream != op.stream:
                raise context.fault(
                    f"a fused op on {op.stream!r} holds an op on {member.stream!r}",
                    "a fused op and its members share one stream",
                )
            if isinstance(member, Call) and member.fresh:
                raise context.fault(
                    f"a fused {member.fn} makes its outputs itself",
                    "allocate them before the fused op, and give them as out=",
                )
            self.check(member)

    def signal(self, op: Notify | Expect) -> None:
        context = self.context
        self.peer(op.peer, op.team)
        if not 1 <= op.value < 1 << VALUE_BITS:
            fix = f"count from 1, and to {(1 << VALUE_BITS) - 1} at most"
            raise context.fault(f"value {op.value} of signal {op.signal!r}", fix)
        if isinstance(op, Expect):
            return
        for where in context.wheres:
            member = where.members[op.team]
            if isinstance(op.peer, Others):
                readers = [i for i in range(len(member.ranks)) if i != member.index]
            else:
                readers = [where.index(op.peer)]
            for reader in readers:
                key = (op.signal, op.team, where.rank, reader)
                before = self.raised.get(key, 0)
                if op.value <= before:
                    raise context.fault(
                        f"signal {op.signal!r} to rank {reader} of {op.team!r} goes from {before} "
                        f"to {op.value}",
                        f"values only grow: write value={before + 1}, or use another signal",
                    )
                self.raised[key] = op.value


def _type(box: Box) -> str:
    return f"{box.dtype}[{', '.join(map(str, box.sizes))}]"
