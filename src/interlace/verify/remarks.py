"""Remarks on what the model leaves out: schedules that are sound here and may hang elsewhere.

    findings += remarks(builder, explainer)

Collectives and messages that two ranks launch in opposite order (NCCL runs those of a team in the
order in which they are launched, and of two teams each kernel may hold what the other needs), and
one name for the signals of two teams (which other libraries would take for one signal).
docs/semantics.md, "What it does not show", has the reasons.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

from interlace.ir.ops import Recv, Send
from interlace.ir.order import Signal
from interlace.verify.deadlock import circles
from interlace.verify.explain import Explainer
from interlace.verify.happens_before.build import Builder
from interlace.verify.report import Finding


def remarks(builder: Builder, explainer: Explainer) -> list[Finding]:
    """All remarks; they say nothing against the schedule."""
    return [*_launch_order(builder, explainer), *_shared_names(builder, explainer)]


def _launch_order(builder: Builder, explainer: Explainer) -> list[Finding]:
    """Whether ranks would wait for each other if each ran its collectives and messages one after
    another, in the order of its list, as NCCL does those of a team and may do those of all."""
    graph, spans = builder.graph, defaultdict[int, dict[int, int]](dict)
    queues = {
        queue: members for queue, members in builder.meetings.queues.items() if _by_nccl(queue[1])
    }
    ends = [at for both in builder.meetings.channels.values() for end in both for at in end]
    ends = [at for at in ends if isinstance(op := at.item.op, Send | Recv) and _by_nccl(op.backend)]
    if (len(queues) < 2 and not ends) or len(graph.order) < len(graph.preds):
        return []
    ends += [at for members in queues.values() for mine in members.values() for at in mine]
    for at in ends:
        spans[at.frame.place.rank][at.begin] = at.end
    blocks = dict(graph.blocks)
    for mine in spans.values():
        for (_, end), (begin, _) in pairwise(sorted(mine.items())):
            blocks[begin] = [*blocks.get(begin, ()), end]
    serial = replace(graph, blocks=blocks)
    stuck = {*range(len(graph.preds))} - {*serial.sequence()}
    for steps in circles(serial, stuck):
        launched = [step for step in steps if step.part[0].place is step.other[0].place]
        ranks = sorted({step.part[0].place.rank for step in launched})
        ops = [explainer.ref(*step.other, "is launched first") for step in launched]
        return [
            Finding(
                "launch-order",
                "collectives and messages on streams that may run at once wait for each other if "
                "each rank runs its own one after another, as they are listed: NCCL does so with "
                "those of one team, and those of two teams may need the same multiprocessors",
                tuple(ops),
                "launch them in one order on all ranks, put messages that belong together into one "
                'group, or name the backend that runs them (backend="peer")',
                "remark",
                tuple(ranks),
            )
        ]
    return []


def _by_nccl(backend: str | None) -> bool:
    return backend in (None, "nccl")


def _shared_names(builder: Builder, explainer: Explainer) -> list[Finding]:
    """Signals of two teams that have a name, a writer and a reader in common."""
    if len({signal[1].name for signal, run in builder.meetings.raised if run == 0}) < 2:
        return []
    first: dict[tuple[str, int, int], Signal] = {}
    found: dict[tuple[str, str, str], Finding] = {}
    for (signal, run), raised in builder.meetings.raised.items():
        name, team, writer, reader = signal
        other = first.setdefault((name, writer, reader), signal)
        key = name, other[1].name, team.name
        if run == 0 and other[1] is not team and key not in found:
            ops = [
                explainer.ref(*raises[0][1][:2], f"raises {name} of team {of.name}")
                for of, raises in ((other[1], builder.meetings.raised[other, 0]), (team, raised))
            ]
            found[key] = Finding(
                "shared-name",
                f"signal {name} of team {other[1].name} and signal {name} of team {team.name} are "
                f"two signals, though rank {writer} raises both for rank {reader}",
                tuple(ops),
                "give each a name of its own",
                "remark",
                (writer,),
            )
    return list(found.values())
