"""Functional collectives as Collectives of a serial Program.

A functional collective returns at once and `wait_tensor` waits; in a serial Program the Collective
is complete where it stands, so the wait vanishes. Results are fresh buffers; sources are made
contiguous, as torch does. A team of one rank communicates nothing.

    full = empty(f32[8, 4])
    main: all_gather(x, full, team=tp)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import fx

from interlace.frontend.importing.lowerings import passed_on
from interlace.frontend.importing.types import Args
from interlace.ir import Collective, Team, View
from interlace.ir.sizes import Int

if TYPE_CHECKING:
    from interlace.frontend.importing.importer import Importer, Lowering

REDUCTIONS = {"sum": "sum", "avg": "avg", "product": "prod", "prod": "prod"} | {
    name: name for name in ("min", "max")
}


def _emit(
    imp: Importer,
    node: fx.Node,
    kind: str,
    team: Team,
    src: View,
    sizes: tuple[Int, ...],
    reduce: str | None = None,
    root: int | None = None,
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
    imp.emit(Collective(kind=kind, reduce=named, root=root, **at))
    return dst


def all_gather(imp: Importer, node: fx.Node, src: View, group: object) -> View:
    """Every rank's `src`, one after another along dimension 0."""
    team, (first, *rest) = imp.team(node, group), imp.sizes(src) or (1,)
    rows = imp.reshaped(src, (first, *rest))
    return _emit(imp, node, "all_gather", team, rows, (first * team.size, *rest))


def reduce_scatter(imp: Importer, node: fx.Node, src: View, reduce: str, group: object) -> View:
    """This rank's part, along dimension 0, of the reduction of every rank's `src`."""
    team, (first, *rest) = imp.team(node, group), imp.sizes(src)
    if first % team.size:
        raise imp.unsupported(
            node,
            f"{first} rows do not divide among the {team.size} ranks of {team.name}",
            "Pad dimension 0 to a multiple, as DTensor does",
        )
    return _emit(imp, node, "reduce_scatter", team, src, (first // team.size, *rest), reduce)


def all_reduce(imp: Importer, node: fx.Node, src: View, reduce: str, group: object) -> View:
    """The reduction of every rank's `src`."""
    return _emit(imp, node, "all_reduce", imp.team(node, group), src, imp.sizes(src), reduce)


def broadcast(imp: Importer, node: fx.Node, src: View, root: int, group: object) -> View:
    """The root's `src` on every rank."""
    team, sizes = imp.team(node, group), imp.sizes(src)
    return _emit(imp, node, "broadcast", team, src, sizes, root=int(root))


def _of(lower: Callable[..., View], *places: int) -> Lowering:
    """A collective of a tensor, or of each of a list; `places` has the positions of what `lower`
    takes beside it."""

    def lowering(imp: Importer, node: fx.Node, args: Args) -> Any:
        given = [args[i] for i in places]
        if isinstance(args[0], list | tuple):
            return tuple(lower(imp, node, src, *given) for src in imp.arg(args[0]))
        return lower(imp, node, imp.view(args[0]), *given)

    return lowering


_all_gather = _of(all_gather, 2)
_reduce_scatter = _of(reduce_scatter, 1, 3)
_all_reduce = _of(all_reduce, 1, 2)
_broadcast = _of(broadcast, 1, 2)


def _all_to_all(imp: Importer, node: fx.Node, args: Args) -> View:
    src, team = imp.contiguous(imp.view(args[0])), imp.team(node, args[3])
    received, sent = imp.arg(args[1]), imp.arg(args[2])
    if team.size == 1:
        return imp.copied(src)
    if len({*received, *sent}) > 1:  # those of compiled code run as traced: see exchanges.py
        raise imp.unsupported(node, "its parts are uneven", "Pad them to one size")
    _, *rest = imp.sizes(src)
    return _emit(imp, node, "all_to_all", team, src, (sum(received), *rest))


def _shard_dim_all_to_all(imp: Importer, node: fx.Node, args: Args) -> View:
    """Gathers along one dimension and shards another: blocks of one become blocks of the other."""
    src, gather_dim, shard_dim, group = imp.view(args[0]), args[1], args[2], args[3]
    team, sizes = imp.team(node, group), list(imp.sizes(src))
    if team.size == 1:
        return imp.copied(src)
    gather_dim, shard_dim = gather_dim % len(sizes), shard_dim % len(sizes)
    if sizes[shard_dim] % team.size:
        raise imp.unsupported(
            node,
            f"dimension {shard_dim} of {sizes[shard_dim]} does not divide among {team.size} ranks",
            "Pad it to a multiple",
        )
    width = sizes[shard_dim] // team.size
    block = [*sizes]
    block[shard_dim] = width
    pieces = [src.slice(shard_dim, i * width, (i + 1) * width) for i in range(team.size)]
    stacked = [block[0] * team.size, *block[1:]]
    sent = imp.concatenated(pieces, 0, tuple(stacked), f"{node.name}_in")
    got = _emit(imp, node, "all_to_all", team, sent, tuple(stacked))
    parts = [got.slice(0, i * block[0], (i + 1) * block[0]) for i in range(team.size)]
    block[gather_dim] *= team.size
    return imp.concatenated(parts, gather_dim, tuple(block), node.name)


def _in_place(imp: Importer, node: fx.Node, args: Args) -> Any:
    raise imp.unsupported(
        node,
        "it writes its argument behind the graph's back",
        "Use the functional collective of that name, which gives a new tensor",
    )


def _point_to_point(imp: Importer, node: fx.Node, args: Args) -> Any:
    raise imp.unsupported(
        node,
        "point-to-point messages carry tags, and a Program matches them in order",
        "Write the exchange as a Program with Send and Recv (`interlace.program`)",
    )


_PLAIN: dict[str, Lowering] = {
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_into_tensor_coalesced"), _all_gather),
    **dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"), _reduce_scatter),
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced"), _all_reduce),
    "broadcast": _broadcast,
    "all_to_all_single": _all_to_all,
    **dict.fromkeys(("all_reduce_", "all_reduce_coalesced_", "broadcast_"), _in_place),
    **dict.fromkeys(("all_gather_into_tensor_out", "reduce_scatter_tensor_out"), _in_place),
    **dict.fromkeys(("wait_tensor", "_wrap_tensor_autograd"), passed_on),
    **dict.fromkeys(("isend", "irecv", "batch_p2p_ops"), _point_to_point),
}

COLLECTIVES: dict[str, Callable[[Importer, fx.Node, Args], Any]] = {
    **{f"_c10d_functional.{name}.default": lower for name, lower in _PLAIN.items()},
    "_c10d_functional_autograd.all_gather_into_tensor.default": _all_gather,
    "_c10d_functional_autograd.reduce_scatter_tensor.default": _reduce_scatter,
    "_c10d_functional_autograd.all_to_all_single.default": _all_to_all,
    "_dtensor.shard_dim_alltoall.default": _shard_dim_all_to_all,
}
"""Lowerings by operator."""
