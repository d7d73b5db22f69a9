"""The builder's collectives: a method for each kind of the table `KINDS`.

p.all_gather(x, full, backend="gloo")
p.reduce_scatter(partial, y, splits=rows)
"""

from __future__ import annotations

from typing import TypedDict, Unpack

from interlace.ir.builder_ops import BuilderOps, Viewed
from interlace.ir.types import Index, Table, Team


class Where(TypedDict, total=False):
    """Who takes part, and what moves the bytes."""

    team: Team | str | None
    backend: str | None


class Parts(Where, total=False):
    """The same, with a table of uneven parts."""

    splits: Table | str | None


class BuilderCollectives(BuilderOps):
    """Emits collectives; `team` may be left out where there is only one."""

    def all_gather(self, src: Viewed, dst: Viewed, **how: Unpack[Parts]) -> None:
        """Every rank's `src`, in order of ranks, into every rank's `dst`."""
        self.collective("all_gather", src, dst, **how)

    def reduce_scatter(
        self, src: Viewed, dst: Viewed, *, reduce: str = "sum", **how: Unpack[Parts]
    ) -> None:
        """Part r of every rank's `src`, reduced, into rank r's `dst`."""
        self.collective("reduce_scatter", src, dst, reduce=reduce, **how)

    def all_reduce(
        self,
        src: Viewed,
        dst: Viewed | None = None,
        *,
        reduce: str = "sum",
        **how: Unpack[Where],
    ) -> None:
        """Every rank's `src`, reduced, into every rank's `dst` (default: in place)."""
        self.collective("all_reduce", src, src if dst is None else dst, reduce=reduce, **how)

    def broadcast(
        self, src: Viewed, dst: Viewed | None = None, *, root: Index = 0, **how: Unpack[Where]
    ) -> None:
        """The root's `src` into every rank's `dst` (default: in place)."""
        self.collective("broadcast", src, src if dst is None else dst, root=root, **how)

    def all_to_all(self, src: Viewed, dst: Viewed, **how: Unpack[Parts]) -> None:
        """Part r of this rank's `src` into this rank's part of rank r's `dst`."""
        self.collective("all_to_all", src, dst, **how)

    def gather(self, src: Viewed, dst: Viewed, *, root: Index = 0, **how: Unpack[Parts]) -> None:
        """Every rank's `src`, in order of ranks, into the root's `dst`."""
        self.collective("gather", src, dst, root=root, **how)

    def scatter(self, src: Viewed, dst: Viewed, *, root: Index = 0, **how: Unpack[Parts]) -> None:
        """Part r of the root's `src` into rank r's `dst`."""
        self.collective("scatter", src, dst, root=root, **how)

    def reduce(
        self,
        src: Viewed,
        dst: Viewed,
        *,
        root: Index = 0,
        reduce: str = "sum",
        **how: Unpack[Where],
    ) -> None:
        """Every rank's `src`, reduced, into the root's `dst`."""
        self.collective("reduce", src, dst, root=root, reduce=reduce, **how)

    def barrier(self, **how: Unpack[Where]) -> None:
        """No rank's stream goes on before every rank's has come here."""
        self.collective("barrier", **how)
