"""Builder of a Program whose ops stand for steps of another software's schedule.

p = OriginBuilder("rank_0", (team,), ranks=(0,), nothing=None)
p.at("main", origin=step)
p.call("aten.neg.default", x, out=y)
p.origins                           # [step]: what each op stands for
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from interlace.ir.build.builder import Builder
from interlace.ir.ops import Loc, Op
from interlace.ir.types import Team

NOWHERE = Loc()
T = TypeVar("T")
"""A step of the schedule."""


class OriginBuilder(Builder, Generic[T]):
    """Builder that notes for each op which step of the schedule it stands for."""

    def __init__(
        self, name: str, teams: Sequence[Team], ranks: tuple[int, ...] | None, nothing: T
    ) -> None:
        super().__init__(name, tuple(teams), ranks)
        self.origins: list[T] = []
        self.current_origin = nothing
        self.current_loc = NOWHERE
        self.returns()

    def at(self, stream: str, origin: T, loc: Loc = NOWHERE) -> None:
        """The next ops run on that stream and stand for that step."""
        self.current_stream, self.current_origin, self.current_loc = stream, origin, loc

    def emit(self, op: Op) -> None:
        before = len(self.ops)
        super().emit(op)
        if len(self.ops) > before:
            self.origins.append(self.current_origin)

    def common(self) -> dict[str, Any]:
        """Stream and location of the op: a line of the schedule, not one of this package."""
        return {"stream": self.current_stream, "site": None, "loc": self.current_loc}
