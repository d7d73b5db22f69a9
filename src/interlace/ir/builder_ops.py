"""The builder's ops: a method for each, taking handles."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TypedDict, cast

from interlace.errors import ProgramError
from interlace.ir.handle import Handle, Scope
from interlace.ir.ops import (
    Arg,
    Call,
    Collective,
    Copy,
    Expect,
    Free,
    Fused,
    FusedMember,
    Get,
    Group,
    HostSync,
    Loc,
    Name,
    Notify,
    Op,
    Put,
    Record,
    Recv,
    Send,
    Wait,
)
from interlace.ir.types import Buffer, DType, Index, Others, RankIndex, Table, Team
from interlace.ir.view import View

Viewed = Handle | View


class Common(TypedDict):
    """What every op has."""

    stream: str
    site: int | None
    loc: Loc


class BuilderOps:
    """Emits ops onto the current stream, for the current site and module."""

    def __init__(self, teams: tuple[Team, ...], ranks: tuple[int, ...] | None) -> None:
        self.scope = Scope(teams, ranks)
        self.ops: list[Op] = []
        self.pending: dict[str, Buffer] = {}
        self.current_stream = "main"
        self.current_site: int | None = None
        self.current_module = ""
        self.open_group: list[Send | Recv] | None = None
        self.open_fused: list[tuple[FusedMember, ...]] | None = None
        self.open_part: list[FusedMember] | None = None
        self.num_events = 0

    def emit(self, op: Op) -> None:
        """Adds an op, to the open group or part if there is one."""
        name = type(op).__name__
        if self.open_part is not None:
            if not isinstance(op, FusedMember):
                holds = "calls, waits, expects, records and notifies"
                raise ProgramError(f"a part holds {holds} only: move the {name} out of it")
            self.open_part.append(op)
        elif self.open_fused is not None:
            raise ProgramError(f"a fused op holds parts: put the {name} in `with p.part():`")
        elif self.open_group is None:
            self.ops.append(op)
        elif isinstance(op, Send | Recv):
            self.open_group.append(op)
        else:
            raise ProgramError(f"a group holds sends and receives only: move the {name} out of it")

    @contextmanager
    def group(self) -> Generator[None]:
        """The sends and receives inside start and end together."""
        common = self.common()
        before, self.open_group = self.open_group, []
        members = self.open_group
        try:
            yield
        finally:
            self.open_group = before
        self.emit(Group(ops=tuple(members), **common))

    @contextmanager
    def fused(self) -> Generator[None]:
        """The parts inside run as one kernel."""
        common = self.common()
        before, self.open_fused = self.open_fused, []
        parts = self.open_fused
        try:
            yield
        finally:
            self.open_fused = before
        self.emit(Fused(parts=tuple(parts), **common))

    @contextmanager
    def part(self) -> Generator[None]:
        """The calls, waits, expects, records and notifies inside are one part of a fused op."""
        if self.open_fused is None or self.open_part is not None:
            raise ProgramError("a part stands in a fused op: open it with `with p.fused():`")
        members = self.open_part = []
        try:
            yield
        finally:
            self.open_part = None
        self.open_fused.append(tuple(members))

    def common(self) -> Common:
        """Stream, site and location of the op that the caller is about to emit."""
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame.f_back is not None and frame.f_globals.get("__name__", "") in _INSIDE:
            frame = frame.f_back
        loc = Loc(self.current_module, frame.f_code.co_filename, frame.f_lineno)
        return Common(stream=self.current_stream, site=self.current_site, loc=loc)

    def handle(self, buffer: Buffer) -> Handle:
        """A handle of a whole buffer, which is known from here on."""
        self.scope.buffers[buffer.name] = buffer
        return Handle(self.scope, View(buffer.name))

    def team_name(self, team: Team | str | None, peer: Index | Others | None = None) -> str:
        """The name of a team: as given, or the peer's, or the only one there is."""
        if team is not None:
            return team if isinstance(team, str) else team.name
        if isinstance(peer, RankIndex | Others):
            return peer.team
        if len(self.scope.teams) == 1:
            return self.scope.teams[0].name
        raise ProgramError("it is unclear which team this is for: give team=")

    def arg(self, value: object) -> Arg:
        """A value as an argument of a call, or as a result."""
        if isinstance(value, Handle):
            return value.ir
        if isinstance(value, list | tuple):
            return tuple(map(self.arg, cast("Sequence[object]", value)))
        if value is None or isinstance(value, View | Name | DType | int | float | str | complex):
            return value
        raise ProgramError(
            f"{value!r} cannot be an argument: give handles, numbers, strings, element types, "
            "None, or tuples of these"
        )

    def call(
        self,
        fn: str,
        *args: object,
        out: Viewed | Sequence[Viewed] = (),
        mutates: bool = False,
        rng: bool = False,
        **kwargs: object,
    ) -> None:
        """Runs an aten overload, a kernel or a region; `out` are the views that it fills.

        Handles of `fresh(...)` in `out` are what the call makes itself.
        """
        listed = (out,) if isinstance(out, Handle | View) else tuple(out)
        views = tuple(map(_view, listed))
        fresh = tuple(
            self.pending.pop(view.buffer)
            for view in views
            if view.covers_buffer and view.buffer in self.pending
        )
        made = {buffer.name for buffer in fresh}
        self.emit(
            Call(
                fn=fn,
                args=tuple(map(self.arg, args)),
                kwargs=tuple((key, self.arg(value)) for key, value in kwargs.items()),
                outs=tuple(view for view in views if view.buffer not in made),
                fresh=fresh,
                mutates=mutates,
                rng=rng,
                **self.common(),
            )
        )

    def mm(self, a: Viewed, b: Viewed, out: Viewed) -> None:
        """`out = a @ b` for matrices."""
        self.call("aten.mm.out", a, b, out=out)

    def copy(self, src: Viewed, dst: Viewed) -> None:
        """`src` into `dst`."""
        self.emit(Copy(src=_view(src), dst=_view(dst), **self.common()))

    def free(self, *buffers: Handle | str) -> None:
        """Gives the storage of buffers back, once the stream gets here."""
        for buffer in buffers:
            name = buffer if isinstance(buffer, str) else buffer.ir.buffer
            self.emit(Free(buffer=name, **self.common()))

    def record(self, event: str | None = None) -> str:
        """An event at this point of the stream; gives its name."""
        if event is None:
            self.num_events += 1
            event = f"e{self.num_events}"
        self.emit(Record(event=event, **self.common()))
        return event

    def wait(self, event: str) -> None:
        """The stream waits for an event."""
        self.emit(Wait(event=event, **self.common()))

    def host_sync(self) -> None:
        """The host waits for the stream."""
        self.emit(HostSync(**self.common()))

    def send(
        self,
        src: Viewed,
        peer: Index,
        *,
        team: Team | str | None = None,
        backend: str | None = None,
    ) -> None:
        """`src` to a peer that receives it."""
        name = self.team_name(team, peer)
        self.emit(Send(src=_view(src), peer=peer, team=name, backend=backend, **self.common()))

    def recv(
        self,
        dst: Viewed,
        peer: Index,
        *,
        team: Team | str | None = None,
        backend: str | None = None,
    ) -> None:
        """Into `dst` from a peer that sends it."""
        name = self.team_name(team, peer)
        self.emit(Recv(dst=_view(dst), peer=peer, team=name, backend=backend, **self.common()))

    def put(self, src: Viewed, dst: Viewed, peer: Index, *, team: Team | str | None = None) -> None:
        """`src` into `dst` of a peer: a view of a symmetric buffer."""
        name = self.team_name(team, peer)
        self.emit(Put(src=_view(src), dst=_view(dst), peer=peer, team=name, **self.common()))

    def get(
        self,
        src: Viewed,
        dst: Viewed | None = None,
        *,
        peer: Index,
        team: Team | str | None = None,
    ) -> None:
        """`src` of a peer, a view of a symmetric buffer, into `dst` here (default: the same)."""
        name = self.team_name(team, peer)
        to = None if dst is None else _view(dst)
        self.emit(Get(src=_view(src), dst=to, peer=peer, team=name, **self.common()))

    def notify(
        self, signal: str, to: Index | Others, *, value: int = 1, team: Team | str | None = None
    ) -> None:
        """Raises a signal on a peer."""
        name = self.team_name(team, to)
        self.emit(Notify(signal=signal, peer=to, team=name, value=value, **self.common()))

    def expect(
        self, signal: str, peer: Index | Others, *, value: int = 1, team: Team | str | None = None
    ) -> None:
        """The stream waits for a signal of a peer."""
        name = self.team_name(team, peer)
        self.emit(Expect(signal=signal, peer=peer, team=name, value=value, **self.common()))

    def collective(
        self,
        kind: str,
        src: Viewed | None = None,
        dst: Viewed | None = None,
        *,
        reduce: str | None = None,
        root: Index | None = None,
        splits: Table | str | None = None,
        team: Team | str | None = None,
        backend: str | None = None,
    ) -> None:
        """A collective of any kind."""
        self.emit(
            Collective(
                kind=kind,
                src=None if src is None else _view(src),
                dst=None if dst is None else _view(dst),
                reduce=reduce,
                root=root,
                splits=splits.name if isinstance(splits, Table) else splits,
                team=self.team_name(team),
                backend=backend,
                **self.common(),
            )
        )


def _view(viewed: Viewed) -> View:
    return viewed.ir if isinstance(viewed, Handle) else viewed


_INSIDE = frozenset(
    {__name__, "interlace.ir.builder", "interlace.ir.builder_collectives", "contextlib"}
)
"""Modules whose frames are passed over when an op is told which line wrote it."""
