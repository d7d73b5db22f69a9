"""Whether the Programs of a set register the same parameters on every rank of a team.

findings = disagreements(builder, explainer, regions)

What one rank reads or writes of a peer's is the peer's parameter of the same name, so each Program
of the set must have it: registered with that team, of the same kind and as large.
"""

from __future__ import annotations

from interlace.verify.build import Builder, Slot
from interlace.verify.explain import Explainer
from interlace.verify.graph import Frame
from interlace.verify.regions import Regions
from interlace.verify.report import Finding
from interlace.verify.source import Version


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
    for ((team, ranks), name), has in told.items():
        first, (frame, version) = next(iter(has.items()))
        wanted = _facts(frame, version, regions)
        for rank in ranks:
            if rank not in frames:
                continue
            if rank not in has:
                said = f"rank {rank} has no such parameter"
            elif (facts := _facts(*has[rank], regions)) != wanted:
                said = f"on rank {rank} it is an {facts[0]} of {facts[1]} bytes"
            else:
                continue
            enter = frame.place.source.enter
            assert enter is not None
            role = f"registers the {wanted[0]} {name}, of {wanted[1]} bytes"
            findings.append(
                Finding(
                    "mismatch",
                    f"rank {first} registers {name} with team {team}, and {said}",
                    (explainer.ref(frame, enter, role, name),),
                    f"register {name} with {team} on every rank of it, with the same sizes",
                    ranks=tuple(sorted({first, rank})),
                )
            )
            break
    return findings


def _facts(frame: Frame, version: Version, regions: Regions) -> tuple[str, int]:
    return version.buffer.kind, regions.at(version.spot, frame.place.where).hi
