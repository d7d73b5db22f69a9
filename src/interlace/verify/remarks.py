"""Remarks on what the model leaves out: schedules that are sound here and may hang elsewhere.

    findings += remarks(builder, explainer)

Two communicators whose collectives two ranks launch in opposite order (on a GPU, each kernel may
hold what the other needs), and one name for the signals of two teams (which other libraries would
take for one signal). docs/semantics.md, "What it does not show", has the reasons.
"""

from __future__ import annotations

from itertools import combinations

from interlace.verify.build import Builder, Queue, Signal
from interlace.verify.explain import Explainer
from interlace.verify.graph import Meeting
from interlace.verify.report import Finding


def remarks(builder: Builder, explainer: Explainer) -> list[Finding]:
    """All remarks; they say nothing against the schedule."""
    return [*_launch_order(builder, explainer), *_shared_names(builder, explainer)]


def _launch_order(builder: Builder, explainer: Explainer) -> list[Finding]:
    """Pairs of queues whose collectives two ranks issue in opposite order."""
    issued: dict[int, list[tuple[Queue, int, Meeting]]] = {}
    for queue, members in builder.queues.items():
        for rank, mine in members.items():
            first = [(queue, k, at) for k, at in enumerate(mine) if at.frame.run == 0]
            issued.setdefault(rank, []).extend(first)
    usual: dict[tuple[Queue, Queue], list[tuple[Queue, int, Meeting]]] = {}
    found: list[Finding] = []
    for mine in issued.values():
        queues = list(dict.fromkeys(queue for queue, _, _ in mine))
        for pair in combinations(queues if len(queues) > 1 else (), 2):
            both = [each for each in mine if each[0] in pair]
            both.sort(key=lambda each: each[2].begin)
            other = usual.setdefault(pair, both)
            if other[0][2].frame.place.source is not both[0][2].frame.place.source:
                found += _opposite(builder, explainer, other, both)
    return found


def _opposite(
    builder: Builder,
    explainer: Explainer,
    one: list[tuple[Queue, int, Meeting]],
    two: list[tuple[Queue, int, Meeting]],
) -> list[Finding]:
    """A remark on the first place where two ranks' lists part, if streams leave the order open."""
    for (queue, k, mine), (queue_2, k_2, theirs) in zip(one, two, strict=False):
        if (queue, k) == (queue_2, k_2):
            continue
        later = next((at for *key, at in one if key == [queue_2, k_2]), None)
        before = builder.graph.before
        if later is None or before(mine.end, later.end) or before(later.end, mine.end):
            return []
        ranks = mine.frame.place.rank, theirs.frame.place.rank
        return [
            Finding(
                "launch-order",
                f"rank {ranks[0]} launches a collective of {_named(queue)} before one of "
                f"{_named(queue_2)}, rank {ranks[1]} the other way round, on streams that may run "
                "at once: on a GPU the two may wait for each other's multiprocessors",
                (
                    explainer.ref(mine.frame, mine.item, "is launched first"),
                    explainer.ref(theirs.frame, theirs.item, "is launched first"),
                ),
                "launch them in one order on all ranks, or order the two with an event",
                "remark",
                ranks,
            )
        ]
    return []


def _named(queue: Queue) -> str:
    return f"team {queue[0].name}" + (f" by {queue[1]}" if queue[1] else "")


def _shared_names(builder: Builder, explainer: Explainer) -> list[Finding]:
    """Signals of two teams that have a name, a writer and a reader in common."""
    if len({signal[1].name for signal, run in builder.raised if run == 0}) < 2:
        return []
    first: dict[tuple[str, int, int], Signal] = {}
    found: dict[tuple[str, str, str], Finding] = {}
    for (signal, run), raised in builder.raised.items():
        name, team, writer, reader = signal
        other = first.setdefault((name, writer, reader), signal)
        key = name, other[1].name, team.name
        if run == 0 and other[1] is not team and key not in found:
            ops = [
                explainer.ref(*raises[0][2:], f"raises {name} of team {of.name}")
                for of, raises in ((other[1], builder.raised[other, 0]), (team, raised))
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
