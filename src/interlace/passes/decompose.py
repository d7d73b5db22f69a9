"""decompose: sites become chunks, so that communication can run under computation.

One decomposer reads every strategy as a row of data (`interlace/strategies.py`). A site whose
strategy cannot serve it stays serial, with a remark; `auto` takes the strategy with the shortest
predicted time of the site in isolation, `serial` among them.

    decompose{strategy=peer,transport=put}
    decompose{strategy=pipeline,chunks=4,sites=[1,3]}

Everything is emitted on the stream `main`, in an order in which no rank waits for what a peer lists
later; `schedule` then gives the transfers a stream of their own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import ClassVar

from interlace.cost import Machine
from interlace.errors import PassError
from interlace.ir import Collective, Op, Program, Remark, Site
from interlace.ir.overlap import representatives
from interlace.passes.dependencies import Before, dependencies
from interlace.passes.find_sites import FoundSite, analyse, in_blocks, without_moves
from interlace.passes.sites.recognise import MatmulSite
from interlace.passes.sites.values import Dataflow
from interlace.passes.strategies.choose import Choice, Chooser
from interlace.passes.strategies.whole import lifted, unmovable
from interlace.passes.strategies.write import has_kernel, refusal, write, write_whole
from interlace.strategies import REPLACED, STRATEGIES, names, rows_of

COPIES = STRATEGIES["copies", None]


@dataclass(frozen=True, slots=True)
class Analysis:
    """The sites of a Program, and what they were found by."""

    program: Program
    values: Dataflow
    before: Before
    found: tuple[FoundSite, ...]

    @classmethod
    def of(cls, program: Program) -> Analysis:
        """The analysis of a Program that `find_sites` has marked."""
        serial = {op.site for op in program.collectives().values()}
        done = [s.id for s in program.sites if s.strategy != "serial" or s.id not in serial]
        values = Dataflow(program, representatives(program)[0])
        before = dependencies(program, touched=values.touched)
        return cls(program, values, before, analyse(values, before, done))


@dataclass(slots=True)
class TrialCache:
    """Results of a pass that is run again, with other sites: it takes them as they are."""

    choices: dict[object, Choice] = field(default_factory=dict[object, Choice])
    """Choices of sites, with what sites that are alike have in common as the key."""
    analysis: Analysis | None = None

    def of(self, program: Program) -> Analysis:
        """The analysis of a Program; of named sizes it notes facts, and is made anew."""
        if self.analysis is None or self.analysis.program is not program or program.sizes.sizes:
            self.analysis = Analysis.of(program)
        return self.analysis


@dataclass(frozen=True)
class Decompose:
    """Replaces sites by their chunks."""

    name: ClassVar[str] = "decompose"
    strategy: str = "auto"
    transport: str | None = None
    """Transport of `peer`: `get` or `put`; None takes the faster one for each site."""
    chunks: int = 0
    """Slices of `pipeline`, pieces of `fused`; 0 lets the strategy choose."""
    sites: tuple[int, ...] | None = None
    """The sites to work on; None: all."""
    copied: tuple[int, ...] = ()
    """Sites among these that have the strategy `copies` if it serves them, whatever the others
    have."""
    machine: Machine | None = field(default=None, metadata={"text": False})
    known: TrialCache = field(
        default_factory=TrialCache, compare=False, repr=False, metadata={"text": False}
    )

    def __post_init__(self) -> None:
        if self.strategy in REPLACED:
            fix = f"fix: use strategy={REPLACED[self.strategy]}"
            raise PassError(f"decompose: the strategy {self.strategy} went. {fix}")
        if self.strategy not in names():
            known = ", ".join(names())
            raise PassError(f"decompose: no strategy {self.strategy!r}: one of {known}")
        known = dict.fromkeys(row.transport for row in rows_of(self.strategy))
        if self.transport is not None and self.transport not in known:
            ways = " or ".join(known) or "no transport to choose"
            raise PassError(
                f"decompose: {self.strategy} has {ways}, and not transport={self.transport}"
            )
        if self.chunks < 0:
            raise PassError(f"decompose: {self.chunks} chunks; give 0 or more")

    def run(self, program: Program) -> Program:
        """The Program with its sites decomposed."""
        known = {site.id: site for site in program.sites}
        if self.sites is not None and not known.keys() >= set(self.sites):
            missing = sorted(set(self.sites) - known.keys())
            raise PassError(f"decompose: no sites {missing}; known are {sorted(known)}")
        analysis = self.known.of(program)
        values, before = analysis.values, analysis.before
        taken = values.names.copy()
        choose = Chooser(self.machine, self.chunks, self.known.choices)
        changed: dict[int, Site] = {}
        remarks: list[Remark] = []
        blocks: list[list[int]] = []
        written: dict[int, list[Op]] = {}
        overlapped: list[MatmulSite] = []
        anchors: dict[int, int] = {}
        slots: dict[str, str] = {}
        for found in analysis.found:
            number = program.ops[found.collective].site
            if number is None or (self.sites is not None and number not in self.sites):
                continue
            site = known.get(number) or program.site(number)
            collective = values.collectives[found.collective]
            copied = number in self.copied and not unmovable(values, collective)
            if copied or (found.site is None and rows_of(self.strategy) == (COPIES,)):
                choice = self._copies(values, collective)
            elif found.site is None:
                changed[number] = dataclasses.replace(site, reason=found.reason or site.reason)
                continue
            else:
                choice = self._choose(choose, values, found)
            changed[number] = choice.on(site)
            if choice.remark:
                remarks.append(Remark(self.name, choice.remark, number))
            if choice.row is not None and choice.row.whole:
                changed[number] = dataclasses.replace(changed[number], chunks=None)
                made, raised = write_whole(values, taken, collective, choice.row, number)
                written[found.collective] = made
                slots |= raised
            elif choice.row is not None and found.site is not None:
                anchors[len(blocks)] = found.collective
                blocks.append(list(found.site.ops))
                overlapped.append(found.site)
                gpu = self.machine is not None and self.machine.device == "cuda"
                made, raised = write(
                    values, taken, found.site, choice.row, choice.chunks, number, gpu
                )
                written[found.collective] = made
                slots |= raised
        ops = _rebuilt(program, without_moves(before, overlapped), blocks, anchors, written)
        ops = lifted(ops, slots) if slots else ops
        sites = tuple(changed.get(site.id, site) for site in program.sites)
        result = program.replace(ops=ops, sites=sites, tables=tuple(taken.tables))
        return result.remarked(remarks)

    def _copies(self, values: Dataflow, op: Collective) -> Choice:
        """Copies of a collective as a whole, whether or not matmuls are at it."""
        text = unmovable(values, op)
        if text:
            text = f"copies cannot serve it: {text}"
            return Choice(reason=text, remark=text)
        return Choice(COPIES, reason="requested")

    def _choose(self, choose: Chooser, values: Dataflow, found: FoundSite) -> Choice:
        assert found.site is not None
        if self.strategy == "auto":
            return choose.choose(values, found.site)
        if self.strategy == "serial":
            return Choice(reason="requested")
        rows = rows_of(self.strategy, self.transport)
        row = rows[0]
        why = refusal(values, found.site, row)
        if row.fuses and not why and self.machine is not None:
            if not has_kernel(values, found.site, self.machine):
                why = "the GPUs have no such kernel"
        text = f"{self.strategy} cannot serve this site: {why}"
        other = STRATEGIES[row.instead] if row.instead else None
        if why and other and not refusal(values, found.site, other):
            text = f"{text}; {other.name} copies instead"
            choice = choose.choose(values, found.site, (other,))
            return dataclasses.replace(choice, reason=text, remark=text)
        return Choice(reason=text, remark=text) if why else choose.choose(values, found.site, rows)


def _rebuilt(
    program: Program,
    before: Before,
    blocks: list[list[int]],
    anchors: dict[int, int],
    written: dict[int, list[Op]],
) -> tuple[Op, ...]:
    placed = in_blocks(before, blocks, anchors)
    assert placed is not None, "find_sites lets no sites pass that depend on one another"
    ops: list[Op] = []
    for block in placed:
        new = next((written[i] for i in block if i in written), None)
        ops += new if new is not None else [program.ops[i] for i in block]
    return tuple(ops)
