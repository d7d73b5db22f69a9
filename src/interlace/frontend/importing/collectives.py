"""Functional collectives as Collectives of a serial Program.

A functional collective returns at once and `wait_tensor` waits; in a serial Program the Collective
is complete where it stands, so the wait vanishes. Results are fresh buffers; sources are made
contiguous, as torch does. A team of one rank communicates nothing.

    full = empty(f32[8, 4])
    main: all_gather(x, full, team=tp)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import fx

from interlace.frontend.importing.types import Args
from interlace.ir import Collective, Team, View
from interlace.ir.sizes import Int

if TYPE_CHECKING:
    from interlace.frontend.importing.importer import Importer, Normaliser, Value

REDUCTIONS = {"product": "prod"} | {name: name for name in ("sum", "avg", "prod", "min", "max")}


def _emit(
    imp: Importer,
    node: fx.Node,
    kind: str,
    team: Team,
    src: View,
    sizes: tuple[Int, ...],
    reduce: str | None = None,
    root: int | None = None,
    counts: tuple[View, View] | tuple[None, None] = (None, None),
) -> View:
    """One collective into a fresh buffer of `sizes`; a copy where there is one rank."""
    if team.size == 1:
        return imp.copied(src)
    named = None if reduce is None else REDUCTIONS.get(str(reduce).lower())
    if named is None and reduce is not None:
        raise imp.unsupported(node, f"reduction {reduce!r}", f"Use one of {sorted(REDUCTIONS)}")
    src = imp.contiguous(src)
    dst = imp.empty(kind, imp.box(src).dtype, sizes)
    at = {"team": team.name, "src": src, "dst": dst, "loc": imp.loc}
    sent, received = counts
    imp.emit(Collective(kind=kind, reduce=named, root=root, sent=sent, received=received, **at))
    return dst


def all_gather(imp: Importer, node: fx.Node, src: View, group: object) -> View:
    """Every rank's `src`, one after another along dimension 0."""
    team, (first, *rest) = imp.team(node, group), imp.sizes(src) or (1,)
    rows = imp.reshaped(src, (first, *rest))
    return _emit(imp, node, "all_gather", team, rows, (first * team.size, *rest))


def _reduce_scatter(imp: Importer, node: fx.Node, src: View, reduce: str, group: object) -> View:
    """This rank's part, along dimension 0, of the reduction of every rank's `src`."""
    team, (first, *rest) = imp.team(node, group), imp.sizes(src)
    width = _divided(imp, node, first, 0, team)
    return _emit(imp, node, "reduce_scatter", team, src, (width, *rest), reduce)


def _all_reduce(imp: Importer, node: fx.Node, src: View, reduce: str, group: object) -> View:
    return _emit(imp, node, "all_reduce", imp.team(node, group), src, imp.sizes(src), reduce)


def _broadcast(imp: Importer, node: fx.Node, src: View, root: int, group: object) -> View:
    team = imp.team(node, group)
    return _emit(imp, node, "broadcast", team, src, imp.sizes(src), root=int(root))


def _all_to_all(
    imp: Importer, node: fx.Node, src: View, received: object, sent: object, group: object
) -> View:
    team, parts = imp.team(node, group), imp.arg(received)
    if team.size > 1 and len({*parts, *imp.arg(sent)}) > 1:  # see exchanges.py
        raise imp.unsupported(node, "its parts are uneven", "Pad them to one size")
    return _emit(imp, node, "all_to_all", team, src, (sum(parts), *imp.sizes(src)[1:]))


def _exchange_rows(
    imp: Importer, node: fx.Node, src: View, sent: object, came: object, rows: object, group: object
) -> View:
    team, counts = imp.team(node, group), [imp.contiguous(imp.view(each)) for each in (sent, came)]
    if team.size == 1:
        raise imp.unsupported(node, "its group has one rank", "Leave the exchange out")
    sizes = imp.arg(rows), *imp.sizes(src)[1:]
    return _emit(imp, node, "all_to_all", team, src, sizes, counts=(counts[0], counts[1]))


def _shard_dim_all_to_all(
    imp: Importer, node: fx.Node, src: View, gather_dim: int, shard_dim: int, group: object
) -> View:
    """Gathers along one dimension and shards another: blocks of one become blocks of the other."""
    team, sizes = imp.team(node, group), list(imp.sizes(src))
    if team.size == 1:
        return imp.copied(src)
    gather_dim, shard_dim = gather_dim % len(sizes), shard_dim % len(sizes)
    width = _divided(imp, node, sizes[shard_dim], shard_dim, team)
    block = [*sizes]
    block[shard_dim] = width
    pieces = [src.slice(shard_dim, i * width, (i + 1) * width) for i in range(team.size)]
    stacked = (block[0] * team.size, *block[1:])
    sent = imp.concatenated(pieces, 0, stacked, f"{node.name}_in")
    received = _emit(imp, node, "all_to_all", team, sent, stacked)
    parts = [received.slice(0, i * block[0], (i + 1) * block[0]) for i in range(team.size)]
    block[gather_dim] *= team.size
    return imp.concatenated(parts, gather_dim, tuple(block), node.name)


def _divided(imp: Importer, node: fx.Node, size: Int, dim: int, team: Team) -> Int:
    """The part of a dimension that a rank gets."""
    if size % team.size:
        raise imp.unsupported(
            node,
            f"dimension {dim} of {size} does not divide among the {team.size} ranks of {team.name}",
            "Pad it to a multiple, as DTensor does",
        )
    return size // team.size


def refuse(imp: Importer, node: fx.Node, args: Args) -> View:
    """Refuses what writes its argument behind the graph's back, and messages."""
    raise imp.unsupported(
        node,
        "it writes its argument behind the graph's back, or is a message with a tag",
        "Use the functional collective of that name, which gives a new tensor, or write an "
        "exchange of messages as a Program (`interlace.program`)",
    )


_OPERATORS: dict[str, tuple[Callable[..., View], tuple[int, ...]]] = {
    "_c10d_functional.all_gather_into_tensor": (all_gather, (2,)),
    "_c10d_functional.all_gather_into_tensor_coalesced": (all_gather, (2,)),
    "_c10d_functional_autograd.all_gather_into_tensor": (all_gather, (2,)),
    "_c10d_functional.reduce_scatter_tensor": (_reduce_scatter, (1, 3)),
    "_c10d_functional.reduce_scatter_tensor_coalesced": (_reduce_scatter, (1, 3)),
    "_c10d_functional_autograd.reduce_scatter_tensor": (_reduce_scatter, (1, 3)),
    "_c10d_functional.all_reduce": (_all_reduce, (1, 2)),
    "_c10d_functional.all_reduce_coalesced": (_all_reduce, (1, 2)),
    "_c10d_functional.broadcast": (_broadcast, (1, 2)),
    "_c10d_functional.all_to_all_single": (_all_to_all, (1, 2, 3)),
    "_c10d_functional_autograd.all_to_all_single": (_all_to_all, (1, 2, 3)),
    "interlace.exchange_rows": (_exchange_rows, (1, 2, 3, 4)),
    "_dtensor.shard_dim_alltoall": (_shard_dim_all_to_all, (1, 2, 3)),
    "_c10d_functional.wait_tensor": (lambda imp, node, src: src, ()),
    "_c10d_functional._wrap_tensor_autograd": (lambda imp, node, src: src, ()),
}
"""Function that imports an operator of one tensor, and the places of its further arguments."""


def _normaliser(convert: Callable[..., View], places: tuple[int, ...]) -> Normaliser:
    def each(imp: Importer, node: fx.Node, args: Args) -> Value:
        beside = [args[i] for i in places]
        if isinstance(args[0], list | tuple):
            return tuple(convert(imp, node, src, *beside) for src in imp.arg(args[0]))
        return convert(imp, node, imp.view(args[0]), *beside)

    return each


COLLECTIVES = {f"{name}.default": _normaliser(*row) for name, row in _OPERATORS.items()}
"""Normalisers by operator."""
