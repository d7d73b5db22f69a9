"""Pipelines of passes: what a pass is, their text, how they run, and those that lower a Program.

    >>> passes = parse_pipeline("decompose{strategy=peer,chunks=4},schedule")
    >>> passes[0].strategy, passes[0].chunks
    ('peer', 4)
    >>> overlapped = run_pipeline(program, passes)

A pass is a frozen dataclass with a name and options, whose `run` maps a Program to a Program, and
remarks on what it declines. One that asks the cost model has a field `machine`.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

from interlace.cost import Machine
from interlace.cost.choose import Estimate
from interlace.errors import PassError, choose_from
from interlace.ir import Program, Remark, validate
from interlace.ir.program import exchanged_sizes, no_collections
from interlace.ir.sizes import MOST, deciding
from interlace.options import Options
from interlace.passes.accumulate import Accumulate
from interlace.passes.decompose import Decompose
from interlace.passes.find_sites import Analysis, FindSites
from interlace.passes.form_regions import FormRegions
from interlace.passes.fuse import Fuse
from interlace.passes.insert_sync import InsertSync
from interlace.passes.place_resharding import PlaceResharding
from interlace.passes.plan_memory import PlanMemory
from interlace.passes.schedule import Schedule
from interlace.passes.strategies.choose import Chooser
from interlace.passes.take_turns import TakeTurns
from interlace.strategies import rows_of
from interlace.verify import check as prove


@runtime_checkable
class Pass(Protocol):
    """A frozen dataclass that turns a Program into another."""

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def run(self, program: Program) -> Program:
        """The Program after this pass. Pure: `program` stays as it is."""
        ...


PASSES: dict[str, type[Pass]] = {
    item.name: item
    for item in (
        FindSites,
        PlaceResharding,
        Decompose,
        Accumulate,
        FormRegions,
        Schedule,
        PlanMemory,
        InsertSync,
        TakeTurns,
        Fuse,
    )
}
"""The passes by name, in the order in which they make sense."""


def parse_pipeline(text: str, machine: Machine | None = None) -> tuple[Pass, ...]:
    """The passes that `text` names, such as `find_sites,decompose{strategy=ring}`.

    `machine` goes to every pass that asks the cost model.
    """
    if not text.strip():
        raise PassError(f"no pass in {text!r}: name some of {', '.join(PASSES)}")
    try:
        tree = ast.parse(f"[{text.translate(_BRACES)}]", mode="eval").body
    except SyntaxError:
        raise PassError(
            f"{text!r} is no pipeline: passes are separated by commas, and the options of a pass "
            "stand in braces, as in a{b=1,c=[2,3]}"
        ) from None
    assert isinstance(tree, ast.List)
    return tuple([_make(node, machine) for node in tree.elts])


_BRACES = str.maketrans("{}", "()")
"""With these a pipeline is Python: a list of names and calls."""


@no_collections()
def run_pipeline(
    program: Program,
    passes: Iterable[Pass] | str,
    check: bool = False,
    on_pass: Callable[[Pass, Program], object] | None = None,
) -> Program:
    """Runs passes over a Program, one after another.

    Args:
        program: an SPMD Program. Of one with named sizes the result is for the bucket of those at
            hand, but for sizes without bounds that are no other rank's concern.
        passes: passes, or text such as `find_sites,decompose{strategy=ring}`.
        check: validates every Program between, and proves the last.
        on_pass: called as `on_pass(item, program)` after each pass, with the Program that it made.

    Returns:
        The Program after all passes.

    Raises:
        PassError: the Program is one rank's alone, a pass is unknown or cannot take it.
        SoundnessError: the last Program is unsound, with `check`.
    """
    if program.rank is not None:
        raise PassError(
            f"{program.name} is the Program of rank {program.rank} alone: passes decide for all "
            "ranks. fix: run them first, then instantiate(rank)"
        )
    if program.sizes.sizes:
        bounded = {size.name for size in program.sizes.sizes if size.high < MOST}
        names = exchanged_sizes(program) | bounded
        program = program.replace(sizes=program.sizes.bucket(names, alike=True))
    for item in parse_pipeline(passes) if isinstance(passes, str) else passes:
        with deciding(program.sizes) as known:
            made = item.run(program)
        program = made.replace(sizes=known.size_class()) if made.sizes.sizes else made
        if check:
            validate(program)
        if on_pass is not None:
            on_pass(item, program)
    if check:
        prove(program).raise_if_unsound()
    return program


def lowering(
    options: Options, machine: Machine | None = None, protocol: str | None = None, chunks: int = 0
) -> tuple[Pass, ...]:
    """The passes that lower a serial Program with these options; `protocol` and `chunks` are those
    of `decompose`."""
    later: tuple[Pass, ...] = ()
    if options.regions == "inductor":  # eager ones gain nothing
        later = Accumulate(), FormRegions()
    if not options.overlap:
        serial = Decompose(machine=machine, strategy="serial")
        return FindSites(), serial, *later, PlanMemory(), InsertSync()
    later = *later, Schedule(), PlanMemory(), InsertSync(), TakeTurns()
    auto, amid = options.strategy == "auto", tuple[str, ...]()
    if auto and machine is not None and machine.device != "cpu":
        copies = options.transport in ("auto", "peer") and "peer" in dict(machine.links)
        amid = ("copies", "serial") if copies else ("serial",)
    decompose = Decompose(options.strategy, protocol, chunks, None, machine, amid, later)
    found = FindSites(), PlaceResharding(position=options.resharding), decompose, *later
    fuses = auto or any(row.fuses for row in rows_of(options.strategy))
    return (*found, Fuse()) if fuses else found


@no_collections()
def lower(
    program: Program,
    options: Options,
    machine: Machine | None = None,
    protocol: str | None = None,
    chunks: int = 0,
    on_pass: Callable[[Pass, Program], object] | None = None,
) -> Program:
    """Overlaps a serial Program (with `overlap=False`: makes it ready to run).

    A Program with messages, signals or one-sided copies by hand is left as written, with a remark:
    its streams and its order may be what keeps ranks from waiting for each other.

    Args:
        program: as it was imported, or as the builder made it.
        options: those that concern passes: `overlap`, `strategy`, `resharding`, `regions`, ...
        machine: the model that strategies are chosen by; by default that of each pass.
        protocol, chunks: of `decompose`; None and 0 choose for each site.
        on_pass: as in `run_pipeline`.

    Returns:
        The lowered Program.

    Raises:
        PassError: a pass cannot take the Program, or a strategy cannot be what is asked for.
    """
    orders = [op.ordering() for op in program.ops]
    by_hand = any(op.one_sided for op in program.ops)
    if by_hand or any(order.messages or order.raises or order.expects for order in orders):
        text = "left as written: it has messages, signals or one-sided copies by hand"
        return program.remarked([Remark("lower", text)])
    passes = lowering(options, machine, protocol, chunks)
    made = run_pipeline(program, passes, on_pass=on_pass)
    pinned = {n: v for n, v in made.sizes.pinned.items() if n not in program.sizes.pinned}
    if pinned:
        # Sites are followed, and proofs found, by numbers where they were not by names. One at a
        # time: where the smallest, such as a batch, is a number, others need not be pinned.
        _, name = min((value, name) for name, value in pinned.items())
        return lower(program.pin([name]), options, machine, protocol, chunks, on_pass)
    return made


def candidates(
    program: Program, options: Options, machine: Machine
) -> dict[int, tuple[Estimate, ...]]:
    """The estimates of each site that can be overlapped, serial first; of a Program with named
    sizes for the values in its head."""
    passes = FindSites(), PlaceResharding(position=options.resharding)
    marked = run_pipeline(program.at(program.sizes.values), passes)
    analysis, chooser = Analysis.of(marked), Chooser(machine, 0)
    return {
        number: chooser.candidates(analysis.values, item.site)
        for item in analysis.found
        if (number := marked.ops[item.collective].site) is not None and item.site is not None
    }


def spell(item: Pass) -> str:
    """The pass as pipeline text: its name, and in braces the options that are not the default."""
    given: list[str] = []
    for field in dataclasses.fields(item):
        value = getattr(item, field.name)
        if value != field.default and field.metadata.get("text", True):
            given.append(f"{field.name}={spell_value(value)}")
    return f"{item.name}{{{','.join(given)}}}" if given else item.name


def spell_value(value: object) -> str:
    """An option's value as pipeline text."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        values = cast("tuple[object, ...]", value)
        return f"[{','.join(map(spell_value, values))}]"
    return "none" if value is None else str(value)


def _make(node: ast.expr, machine: Machine | None) -> Pass:
    call = node if isinstance(node, ast.Call) else None
    name = ast.unparse(call.func if call else node)
    if name not in PASSES:
        raise PassError(f"no pass named {name!r}: {choose_from(name, PASSES)}")
    cls = PASSES[name]
    fields = {field.name: field for field in dataclasses.fields(cls)}
    known = [name for name, field in fields.items() if field.metadata.get("text", True)]
    given: dict[str, Any] = {}
    for option in (*call.args, *call.keywords) if call else ():
        if not isinstance(option, ast.keyword) or option.arg not in known:
            what = ast.unparse(option)
            fix = choose_from(what.partition("=")[0], known) if known else "it has none"
            raise PassError(f"pass {name} has no option {what!r}: {fix}")
        given[option.arg] = _value(option.value)
        _check_type(f"pass {name}: {option.arg}", fields[option.arg].type, given[option.arg])
    if machine is not None and "machine" in fields:
        given["machine"] = machine
    return cls(**given)


def _check_type(option: str, kind: object, value: object) -> None:
    """Raises PassError for an option whose value is of another type than its annotation says."""
    fits = {"int": type(value) is int, "str": isinstance(value, str)}
    if not fits.get(str(kind), value is None or isinstance(value, tuple) == ("tuple" in str(kind))):
        raise PassError(f"{option}={spell_value(value)}: give a value of type {kind}")


def _value(node: ast.expr) -> object:
    if isinstance(node, ast.List):
        return tuple(map(_value, node.elts))
    text = ast.unparse(node)
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return text if isinstance(node, ast.Name) else ast.literal_eval(node)
    except ValueError:
        raise PassError(f"{text!r} is no value: give a word, a number or a list") from None
