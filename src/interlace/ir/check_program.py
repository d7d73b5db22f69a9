"""Checks of what stands around the ops: teams, tables, parameters, sites, regions, results."""

from __future__ import annotations

from collections.abc import Iterable

from interlace.ir.call_names import FIX, WORDS, refusal
from interlace.ir.check_context import Context, span
from interlace.ir.ops import Arg, Name, views_in
from interlace.ir.program import Region
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import (
    MAX_BYTES,
    MAX_DIMS,
    Buffer,
    DType,
    Team,
    contiguous_strides,
)


def check_header(context: Context) -> None:
    """Everything but the ops and the results."""
    program = context.program
    _unique(context, [team.name for team in program.teams], "team")
    for team in program.teams:
        _check_team(context, team)
        context.teams[team.name] = team
    context.tag = ("ranks", 0)
    ranks = program.ranks
    if ranks is not None and (not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0):
        raise context.fault(
            f"ranks{ranks} are no set of ranks", "name each global rank once, from 0"
        )
    context.place_ranks()
    _unique(context, [table.name for table in program.tables], "table")
    for place, table in enumerate(program.tables):
        context.tag = ("table", place)
        if table.team not in context.teams:
            raise context.unknown("team", table.team, context.teams)
        size = context.teams[table.team].size
        if len(table.values) != size or min(table.values, default=0) < 0:
            what = f"table {table.name!r} holds {list(table.values)} for {size} ranks"
            raise context.fault(what, f"give one number >= 0 for each rank of {table.team!r}")
        context.tables[table.name] = table
    context.tag = ("header", 0)
    for buffer in program.params:
        check_buffer(context, buffer, ("input", "output"))
        context.declare(buffer)
    _check_sites(context)
    for place, region in enumerate(program.regions):
        context.tag = ("region", place)
        _check_region(context, region)
    _unique(context, [region.name for region in program.regions], "region")


def check_results(context: Context) -> None:
    """What a run returns: views of what outlives it, numbers and None."""
    context.tag = ("results", 0)
    for result in context.program.returned():
        if _names_in(result):
            raise context.fault(
                "a result is no value of a region", "return views of buffers, numbers or None"
            )
        for view in views_in(result):
            kind = context.buffer(view).kind
            context.boxes(view)
            if kind in ("local", "symmetric"):
                raise context.fault(
                    f"{view.buffer!r} is {kind}: its memory is used again after the run",
                    f"copy it to an output, or declare it fresh: {view.buffer} = empty(...)",
                )


def check_buffer(context: Context, buffer: Buffer, kinds: tuple[str, ...]) -> None:
    """A declaration: its name is new, and kind, sizes, strides and team make sense together."""
    name = buffer.name
    if name in context.buffers or name in context.teams or name in context.tables:
        raise context.fault(
            f"{name!r} is declared already",
            "give each buffer, team and table a name of its own; a second alloc a second name",
        )
    if name == "rng":
        raise context.fault(
            "'rng' is the state of the random numbers", "give the buffer another name"
        )
    if buffer.kind not in kinds:
        raise context.fault(
            f"{name!r} is declared as {buffer.kind}", f"here a buffer is {' or '.join(kinds)}"
        )
    sizes = [context.dims(dim) for dim in buffer.shape]
    if any(size < 0 for found in sizes for size in found):
        raise context.fault(f"{name!r} has a size below 0", "give sizes >= 0")
    strides = buffer.strides
    if strides is not None and (len(strides) != len(sizes) or min(strides, default=0) < 0):
        raise context.fault(
            f"{name!r} has {len(sizes)} sizes and strides {list(strides)}",
            "give one stride >= 0, in elements, for each dimension",
        )
    for found in set(zip(*sizes, strict=True)):
        steps = strides if strides is not None else contiguous_strides(found)
        if len(found) > MAX_DIMS or span(found, steps, buffer.dtype) + buffer.offset > MAX_BYTES:
            raise context.fault(
                f"{name!r} has too many dimensions or bytes",
                f"keep to {MAX_DIMS} dimensions, and to what 64 bits count in bytes",
            )
    if (buffer.team is not None) != (buffer.kind == "symmetric" or buffer.registered):
        raise context.fault(
            f"{name!r} is {buffer.kind} and has {'no' if buffer.team is None else 'a'} team",
            "a symmetric buffer, a registered parameter, and no other, has a team: alloc(..., "
            "symmetric=tp), or x: f32[8, 4].registered(tp)",
        )
    if buffer.registered and strides is not None and 0 in strides:
        raise context.fault(
            f"{name!r} is registered, but its elements overlap (a stride of 0)",
            "register the tensor that was expanded",
        )
    if buffer.offset < 0 or (buffer.offset and buffer.kind != "local"):
        raise context.fault(
            f"{name!r} is {buffer.kind} at offset {buffer.offset}",
            "an offset is a number of bytes >= 0 into the storage of local buffers",
        )
    if buffer.storage is not None and buffer.kind not in ("local", "symmetric"):
        raise context.fault(
            f"{name!r} is {buffer.kind} and names a storage",
            "only local and symmetric buffers share storage",
        )
    if buffer.offset % buffer.dtype.itemsize:
        raise context.fault(
            f"{name!r} starts at byte {buffer.offset}, amid an element",
            f"choose a multiple of {buffer.dtype.itemsize}",
        )
    if buffer.team is not None:
        _check_alike(context, buffer, buffer.team)


def check_operator(context: Context, fn: str) -> None:
    """The name of what a call runs: no attribute of Python's, and nothing that touches files."""
    why = refusal(fn)
    if why is not None:
        raise context.fault(why, FIX)


def check_arguments(
    context: Context, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]
) -> None:
    """Keywords are names of arguments, and words for values of torch's are of the table."""
    for key, _ in kwargs:
        if not key.isidentifier():
            raise context.fault(
                f"{key!r} is no name of an argument", "write it as the operator's schema does"
            )
    for arg in (*args, *(value for _, value in kwargs)):
        for word in _texts_in(arg):
            if word.startswith("@") and word not in WORDS:
                raise context.fault(
                    f"no value named {word!r} that an operator could take",
                    did_you_mean(word, WORDS, "values are"),
                )


def _texts_in(arg: Arg) -> list[str]:
    if isinstance(arg, str) and not isinstance(arg, DType):
        return [arg]
    return [text for item in arg for text in _texts_in(item)] if isinstance(arg, tuple) else []


def _check_alike(context: Context, buffer: Buffer, team: str) -> None:
    """What peers reach has the same size on all ranks."""
    context.team(team)
    sizes: dict[tuple[int, ...], set[int]] = {}
    for i, where in enumerate(context.wheres):
        numel = 1
        for dim in buffer.shape:
            numel *= context.dims(dim)[i]
        sizes.setdefault(where.members[team].ranks, set()).add(numel)
    if any(len(found) > 1 for found in sizes.values()):
        found = sorted({numel for each in sizes.values() for numel in each})
        raise context.fault(
            f"{buffer.name!r} is {'registered' if buffer.registered else 'symmetric'}, but has "
            f"{found} elements on different ranks",
            "give it the largest size on every rank, and use a part of it",
        )


def _check_team(context: Context, team: Team) -> None:
    if team.size < 1:
        raise context.fault(f"team {team.name!r} has {team.size} ranks", "give it 1 or more")
    if team.groups is None:
        return
    listed = [rank for group in team.groups for rank in group]
    if not listed or any(len(group) != team.size for group in team.groups):
        raise context.fault(
            f"team {team.name!r} of {team.size} ranks has groups of another size",
            "give each group as many ranks as the team has",
        )
    if len(set(listed)) != len(listed) or min(listed) < 0:
        raise context.fault(
            f"the groups of team {team.name!r} name a rank twice, or one below 0",
            "each global rank stands in one group at most",
        )


def _check_sites(context: Context) -> None:
    ids: set[int] = set()
    for place, site in enumerate(context.program.sites):
        if site.id in ids:
            context.tag = ("site", place)
            raise context.fault(f"site {site.id} is there twice", "number each site differently")
        ids.add(site.id)
    for place, remark in enumerate(context.program.remarks):
        if remark.site is not None and remark.site not in ids:
            context.tag = ("remark", place)
            raise context.fault(f"no site {remark.site}", f"sites are {sorted(ids)[:12]}")


def _check_region(context: Context, region: Region) -> None:
    known = set(region.inputs)
    if len(known) != len(region.inputs):
        raise context.fault(
            f"region {region.name!r} has an input twice", "name each input differently"
        )
    for node in region.body:
        check_operator(context, node.fn)
        check_arguments(context, node.args, node.kwargs)
        for arg in (*node.args, *(value for _, value in node.kwargs)):
            for name in _names_in(arg):
                _known_value(context, region, name, known)
            if any(True for _ in views_in(arg)):
                raise context.fault(
                    f"region {region.name!r} uses a buffer of the program",
                    "make it an input of the region",
                )
        for out in node.outs:
            if out in known:
                what = f"region {region.name!r} gives {out!r} twice"
                raise context.fault(what, "name each value differently")
            known.add(out)
    for name in region.outputs:
        _known_value(context, region, name, known)


def _known_value(context: Context, region: Region, name: str, known: set[str]) -> None:
    if name not in known:
        what = f"region {region.name!r} has no value {name!r} here"
        raise context.fault(what, did_you_mean(name, known, "values are"))


def _names_in(arg: Arg) -> list[str]:
    if isinstance(arg, Name):
        return [arg.name]
    return [name for item in arg for name in _names_in(item)] if isinstance(arg, tuple) else []


def _unique(context: Context, names: Iterable[str], family: str) -> None:
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            if family != "team":
                context.tag = (family, place)
            raise context.fault(f"{family} {name!r} is there twice", "give the second another name")
        seen.add(name)
