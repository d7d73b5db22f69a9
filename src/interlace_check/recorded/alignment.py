"""Lays the records of all ranks side by side: number by number in each process group, and message
by message between each two ranks.

Up to a point all members have issued the same, and it has ended. From there on each group, and
each channel of messages, is `Open`, and the ranks' Programs are made of what is open. What the
dumps cannot say, and what was taken for granted instead, stands in `Aligned.assumed`.

>>> aligned = align(dumps)
>>> aligned.open[0].missing     # ranks that did not issue number `aligned.open[0].seq`
(2,)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from interlace.errors import RecordingError
from interlace_check.recorded.entries import (
    Dump,
    Entry,
    EntryContent,
    GroupKey,
    IssuedCall,
    ranks_in_words,
)

MAX_OPEN = 1024
"""Groups and channels whose open ops are looked at."""

DUMP = "fix: dump with interlace.save_recording(folder), which notes the ranks of each group"

Channel = tuple[GroupKey, int, int]
"""Messages of a group from one global rank to another."""


@dataclass(frozen=True, slots=True)
class Open:
    """A group that is not settled from a number on, or a channel that is not from a message on."""

    group: GroupKey
    start: int
    """The first number that had not ended on all ranks."""
    seq: int
    """The first number at which members disagree or are missing; without any, `start`."""
    calls: Mapping[int, IssuedCall]
    """Calls that the ranks issued at number `seq`."""
    missing: tuple[int, ...]
    """Ranks with a dump that did not issue it."""
    silent: tuple[int, ...]
    """Ranks of which that is not known: there is no dump, or it lacks what came before."""
    differs: str = ""
    """Property that the members disagree on: kind, size or element type."""
    num_behind: int = 0
    """Further numbers of the group that some rank has issued."""
    messages: tuple[tuple[Entry, ...], tuple[Entry, ...]] | None = None
    """Sends and receives of a channel, from the first that is not settled; None for a group."""

    @property
    def what(self) -> str:
        """The op at number `seq`."""
        return f"number {self.seq}" if self.messages is None else f"message {self.seq}"


@dataclass(slots=True)
class Aligned:
    """The dumps side by side."""

    dumps: Mapping[int, Dump]
    world: tuple[int, ...]
    open: list[Open] = field(default_factory=list[Open])
    assumed: list[str] = field(default_factory=list[str])

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks without a dump."""
        return tuple(rank for rank in self.world if rank not in self.dumps)


def align(dumps: Sequence[Dump]) -> Aligned:
    """The dumps of one run side by side."""
    aligned = Aligned({dump.rank: dump for dump in dumps}, ())
    members = _resolve(dumps, aligned)
    ranks = {rank for group in members for rank in members[group]}
    aligned.world = tuple(sorted({*ranks, *aligned.dumps}))
    for dump in dumps:
        if not dump.begins and dump.entries:
            first = dump.entries[0].record
            aligned.assumed.append(
                f"rank {dump.rank}: its dump begins with record {first}; what its peers issued "
                "before that is taken to have been issued and to have ended there"
            )
        if dump.gaps:
            aligned.assumed.append(
                f"rank {dump.rank}: records are missing between others; they are taken to be of "
                "ops that had ended"
            )
    calls, channels = _sorted_out(dumps)
    for group in members:
        _GroupNumbers(group, members[group], calls.get(group, {}), aligned).find()
    for channel, (sends, recvs) in channels.items():
        _match(channel, sends, recvs, aligned)
    if len(aligned.open) > MAX_OPEN:
        aligned.assumed.append(
            f"{len(aligned.open) - MAX_OPEN:,} further groups, or pairs of ranks, have ops that "
            "are open, and were left out"
        )
        del aligned.open[MAX_OPEN:]
    return aligned


# Which ranks a group has


def _resolve(dumps: Sequence[Dump], aligned: Aligned) -> dict[GroupKey, tuple[int, ...]]:
    """The members of each group; entries then name one and the same key for one group.

    Where it is unclear which ranks a group has, and nothing waits in it, its entries are left out.
    """
    keys: dict[tuple[str, tuple[int, ...] | None], GroupKey] = {}
    configured: dict[str, list[GroupKey]] = defaultdict(list)
    left_out: Counter[str] = Counter()
    finished: dict[str, bool] = {}
    for dump in dumps:
        for group in dump.groups:
            if (group.name, group.ranks) not in keys:
                keys[group.name, group.ranks] = group
                configured[group.name].append(group)
    whole = tuple(range(max((dump.rank for dump in dumps), default=-1) + 1))
    for dump in dumps:
        for entry in dump.entries:
            group = entry.group
            if group.ranks is None:
                known = [one for one in configured[group.name] if dump.rank in (one.ranks or ())]
                if not known and group.desc == "default_pg":
                    known = [GroupKey(group.name, group.desc, whole)]
                    configured[group.name] += known
                    aligned.assumed.append(
                        f"group {group}: the dumps do not say which ranks it has; taken to be "
                        f"{ranks_in_words(whole)}"
                    )
                if len(known) != 1:
                    if group.name not in finished:
                        finished[group.name] = _is_finished(group.name, dumps)
                    if not finished[group.name]:
                        raise RecordingError(_unclear(entry, known))
                    left_out[str(group)] += 1
                    continue
                (group,) = known
            entry.group = keys.setdefault((group.name, group.ranks), group)
    aligned.assumed += [
        f"group {name}: it is unclear which ranks it has; {count} records of it, which had ended, "
        "alike on all ranks that have any and that went on, were left out"
        for name, count in left_out.items()
    ]
    return {group: group.ranks or () for group in keys.values()}


def _is_finished(name: str, dumps: Sequence[Dump]) -> bool:
    """True if nothing waits in the groups of a name: each rank that recorded any of it issued the
    same there, saw it end, and went on. (gloo does not say if an op ended by a time-out: then the
    ranks differ, or it was their last.)"""
    issued = [
        (dump, mine)
        for dump in dumps
        if (mine := [entry for entry in dump.entries if entry.group.name == name])
    ]
    alike = {tuple((entry.seq, entry.content) for entry in mine) for _, mine in issued}
    ended = all(entry.ended for _, mine in issued for entry in mine)
    return len(alike) == 1 and ended and all(mine[-1] is not dump.last for dump, mine in issued)


def _unclear(entry: Entry, known: Sequence[GroupKey]) -> str:
    """The error for an op that may wait in a group of which the ranks are not known."""
    if known:
        listed = " and ".join(ranks_in_words(one.ranks or ()) for one in known)
        found = f"{len(known)} groups of the name {entry.group} hold rank {entry.rank}: {listed}"
        return f"{found}; no dump says of which its op is. {DUMP}"
    return f"no dump says which ranks group {entry.group} has (gloo does not record them). {DUMP}"


def _sorted_out(
    dumps: Sequence[Dump],
) -> tuple[
    dict[GroupKey, dict[int, dict[int, IssuedCall]]],
    dict[Channel, tuple[list[Entry], list[Entry]]],
]:
    """Collectives by group, rank and number; sends and receives by channel."""
    issued: dict[GroupKey, dict[int, dict[int, list[Entry]]]] = defaultdict(dict)
    channels: dict[Channel, tuple[list[Entry], list[Entry]]] = {}
    for dump in dumps:
        for entry in _latest([one for one in dump.entries if one.group.ranks is not None]):
            if entry.peer is None:
                mine = issued[entry.group].setdefault(dump.rank, {})
                mine.setdefault(entry.seq, []).append(entry)
                continue
            sends = entry.is_send
            way = (entry.rank, entry.peer) if sends else (entry.peer, entry.rank)
            ends = channels.setdefault((entry.group, *way), ([], []))
            ends[0 if sends else 1].append(entry)
    calls = {
        group: {
            rank: {seq: IssuedCall(tuple(same)) for seq, same in mine.items()}
            for rank, mine in by_rank.items()
        }
        for group, by_rank in issued.items()
    }
    return calls, channels


def _latest(entries: Sequence[Entry]) -> list[Entry]:
    """The entries without those of groups that were destroyed and made again under one name: their
    numbers begin anew. Calls that NCCL is still coalescing have one number, and come last."""
    later: dict[tuple[GroupKey, bool], Entry] = {}
    again: set[tuple[GroupKey, bool]] = set()
    counted: set[tuple[GroupKey, bool]] = set()
    kept: list[Entry] = []
    for entry in reversed(entries):
        key = (entry.group, entry.is_message)
        after = later.setdefault(key, entry)
        if after.seq != entry.seq:
            counted.add(key)
        alone = entry.batch is None and (entry.backend == "gloo" or key in counted)
        if after.seq < entry.seq or (after is not entry and after.seq == entry.seq and alone):
            again.add(key)
        later[key] = entry
        if key not in again:
            kept.append(entry)
    return kept[::-1]


# Collectives


class _GroupNumbers:
    """One group: finds the first number that is not settled."""

    def __init__(
        self,
        group: GroupKey,
        members: Sequence[int],
        calls: Mapping[int, Mapping[int, IssuedCall]],
        aligned: Aligned,
    ) -> None:
        self.group, self.calls, self.aligned = group, calls, aligned
        self.known: list[int] = []
        """Members of which it is known how far they came."""
        self.silent: list[int] = []
        for rank in members:
            dump = aligned.dumps.get(rank)
            whole = dump is not None and dump.begins and not dump.gaps
            (self.known if whole or rank in calls else self.silent).append(rank)
        self.top = {rank: max(calls.get(rank, {}), default=-1) for rank in self.known}
        self.ended = {
            rank: max((seq for seq, call in mine.items() if call.ended), default=-1)
            for rank, mine in calls.items()
        }

    def find(self) -> None:
        """Adds the group to what is open, if it is."""
        numbers = sorted({seq for mine in self.calls.values() for seq in mine})
        start: int | None = None
        at: int | None = None
        for seq in numbers:
            met, missing = self.at(seq)
            waits = missing and any(call.first.may_wait for call in met.values())
            if self.differs(met, missing) or waits:
                at = seq
                break
            late = any(seq > self.ended[rank] for rank in met)
            if start is None and (late or (seq == numbers[-1] and self.unsure(met))):
                start = seq
        at = start if at is None else at
        if at is not None:
            self.aligned.open.append(self.opened(at if start is None else start, at, numbers))
        unsure = [rank for rank in self.silent if rank in self.aligned.dumps]
        if numbers and unsure:
            self.aligned.assumed.append(
                f"group {self.group}: {ranks_in_words(unsure)} recorded nothing of it since its "
                "dump begins, so it is not known how far it came"
            )

    def at(self, seq: int) -> tuple[dict[int, IssuedCall], tuple[int, ...]]:
        """Calls issued at a number, by rank, and the ranks that have not reached it."""
        met = {rank: mine[seq] for rank, mine in self.calls.items() if seq in mine}
        return met, tuple(rank for rank in self.known if self.top[rank] < seq)

    def unsure(self, met: Mapping[int, IssuedCall]) -> bool:
        """Returns True if the last op may wait for a rank without a dump: gloo does not say how it
        ended, in time or by a time-out."""
        gloo = any(call.first.backend == "gloo" for call in met.values())
        return gloo and any(rank not in self.aligned.dumps for rank in self.silent)

    def opened(self, start: int, seq: int, numbers: Sequence[int]) -> Open:
        met, missing = self.at(seq)
        return Open(
            group=self.group,
            start=start,
            seq=seq,
            calls=met,
            missing=missing,
            silent=tuple(self.silent),
            differs=self.differs(met, missing),
            num_behind=len(numbers) - numbers.index(seq) - 1,
        )

    def differs(self, met: Mapping[int, IssuedCall], missing: Sequence[int]) -> str:
        """Property that members disagree on at a number; empty if none."""
        contents = {call.contents for call in met.values()}
        if len(contents) > 1 and (found := unlike(contents)):
            return found
        moved = [entry.moved for call in met.values() for entry in call.entries]
        if missing or len(met) < len(self.known) or self.silent or None in moved:
            return ""
        sent, received = (sum(one[side] for one in moved if one) for side in (0, 1))
        return "size" if sent != received else ""


def unlike(contents: Iterable[tuple[EntryContent, ...]]) -> str:
    """Property in which calls that should be identical differ; empty if none."""
    calls = list(contents)
    if len({tuple(one.label for one in call) for call in calls}) > 1:
        return "kind"
    for members in zip(*calls, strict=True):
        sizes = {one.elements for one in members if one.elements is not None}
        if len(sizes) > 1:
            return "size"
        if len({one.dtype for one in members if one.dtype}) > 1:
            return "element type"
    return ""


# Messages


def _match(
    channel: Channel, sends: Sequence[Entry], recvs: Sequence[Entry], aligned: Aligned
) -> None:
    """The n-th send of a channel is the n-th receive. Where the begin of a dump is lost, those are
    matched of which neither end has ended."""
    group, source, target = channel
    ends = [aligned.dumps.get(rank) for rank in (source, target)]
    absent = tuple(rank for rank in (source, target) if rank not in aligned.dumps)
    if not all(dump is not None and dump.begins and not dump.gaps for dump in ends):
        sends = [one for one in sends if one.may_wait]
        recvs = [one for one in recvs if one.may_wait]
        said = (
            f"messages from rank {source} to rank {target}: the begin of a dump is lost, so those "
            "that had not ended were matched in order"
        )
        if not absent and said not in aligned.assumed:
            aligned.assumed.append(said)
    for place in range(max(len(sends), len(recvs))):
        pair = [*sends[place : place + 1], *recvs[place : place + 1]]
        differs = unlike([_message(one) for one in pair]) if len(pair) == 2 and not absent else ""
        waits = not all(one.ended for one in pair) if len(pair) == 2 else pair[0].may_wait
        if differs or waits or absent:
            both = min(len(sends), len(recvs))
            left = [*sends[both:], *recvs[both:]]
            lacks = not differs and not absent and bool(left) and left[0].may_wait
            calls = left[:1] if lacks else pair
            aligned.open.append(
                Open(
                    group=group,
                    start=pair[0].seq,
                    seq=calls[0].seq,
                    calls={one.rank: IssuedCall((one,)) for one in sorted(calls, key=_rank)},
                    missing=(target if left[0].is_send else source,) if lacks else (),
                    silent=absent,
                    differs=differs,
                    messages=(tuple(sends[place:]), tuple(recvs[place:])),
                )
            )
            return


def _rank(entry: Entry) -> int:
    return entry.rank


def _message(entry: Entry) -> tuple[EntryContent, ...]:
    return (entry.content._replace(label="message"),)
