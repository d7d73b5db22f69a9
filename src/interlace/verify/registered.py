"""Whether the Programs of a set register the same parameters on every rank of a team.

findings = disagreements(builder, explainer, regions)

What one rank reads or writes of a peer's is the peer's parameter of the same name, so each Program
of the set must have it: registered with that team, of the same kind, element type, sizes and
strides, since a rank finds a peer's elements where its own would be.
"""

from __future__ import annotations

from interlace.ir.order import Slot
from interlace.ir.types import contiguous_strides
from interlace.verify.accesses.regions import Regions
from interlace.verify.explain import Explainer
from interlace.verify.happens_before.build import Builder
from interlace.verify.happens_before.graph import Frame
from interlace.verify.happens_before.source import Version
from interlace.verify.report import Finding


def disagreements(builder: Builder, explainer: Explainer, regions: Regions) -> list[Finding]:
    """A finding of kind `mismatch` for each parameter that some rank lacks or has otherwise."""
    frames = {frame.place.rank: frame for frame in builder.graph.frames if frame.run == 0}
    told: dict[Slot, dict[int, tuple[Frame, Version]]] = {}
    for rank, frame in frames.items():
        for number, version in enumerate(frame.place.source.versions):
            if version.registered:
                slot = builder.slot(frame.place, number)
                told.setdefault(slot, {})[rank] = frame, version
    findings: list[Finding] = []
    for (team, name), has in told.items():
        first, (frame, version) = next(iter(has.items()))
        wanted = _facts(frame, version, regions)
        for rank in team.ranks:
            if rank not in frames:
                continue
            if rank not in has:
                said = f"rank {rank} has no such parameter"
            elif (facts := _facts(*has[rank], regions)) != wanted:
                said = f"on rank {rank} it is an {facts[0]} {facts[1]}, not {wanted[1]}"
                if facts[1] == wanted[1]:
                    said = f"on rank {rank} it is an {facts[0]}, not an {wanted[0]}"
            else:
                continue
            enter = frame.place.source.enter
            assert enter is not None
            role = f"registers the {wanted[0]} {name}: {wanted[1]}"
            findings.append(
                Finding(
                    "mismatch",
                    f"rank {first} registers {name} with team {team.name}, and {said}",
                    (explainer.ref(frame, enter, role, name),),
                    f"register {name} with {team.name} on every rank of it, with the same element "
                    "type, sizes and strides",
                    ranks=tuple(sorted({first, rank})),
                )
            )
            break
    return findings


def _facts(frame: Frame, version: Version, regions: Regions) -> tuple[str, str]:
    """Its kind, and how its elements lie."""
    box = regions.at(version.spot, frame.place.where).box
    text = f"{box.dtype}{list(box.sizes)}"
    usual = contiguous_strides(box.sizes)
    steps = zip(box.sizes, box.strides, usual, strict=True)
    if box.numel and any(size > 1 and one != other for size, one, other in steps):
        text += f".strides({', '.join(map(str, box.strides))})"
    return version.buffer.kind, text
