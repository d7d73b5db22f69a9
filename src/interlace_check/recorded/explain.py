"""Findings in the run's words, from what is open and from the verifier's verdict on it.

>>> for finding in RecordedExplainer(aligned, recorded, verdict).findings():
...     print(finding)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from interlace.verify.report import Finding, OpRef, Report
from interlace_check.recorded.alignment import Aligned, Open, OpenChannel
from interlace_check.recorded.entries import Entry, IssuedCall
from interlace_check.recorded.programs import Recorded, Step
from interlace_check.recorded.report import RecordedFinding, RecordedOp
from interlace_check.recorded.words import ranks_in_words, times

NUM_SHOWN = 4
"""Ranks of each side that a finding shows."""
ELSEWHERE = (
    "look where the host of {ranks} is (py-spy dump, its log): it has not come to this op. Issue "
    "it on every rank of the group, or on none"
)
HOSTS = (
    "issue the ops of these groups in one order on all ranks, and let no host wait for one "
    "(synchronize, .item(), .tolist()) before it has issued what peers need to go on"
)
UNEXPLAINED = (
    "the dumps show no fault of order: look at the ranks where it is only scheduled (their GPU is "
    "busy with what comes before it), and at the network and the library's log"
)
CROSSED = (
    "let one rank receive first, or issue the messages together (torch.distributed."
    "batch_isend_irecv)"
)


class RecordedExplainer:
    """The findings of one run."""

    def __init__(self, aligned: Aligned, recorded: Recorded, verdict: Report | None) -> None:
        self.aligned, self.recorded, self.verdict = aligned, recorded, verdict
        self.waits: dict[int, list[Entry]] = {}
        """For each rank, what it issued and what had not ended: the first op of each stream."""
        for program, steps in zip(recorded.programs, recorded.steps, strict=True):
            first: dict[str, Entry] = {}
            for op, step in zip(program.ops, steps, strict=True):
                if step.entry is not None and step.entry.may_wait:
                    first.setdefault(op.stream, step.entry)
            self.waits[program.world[0]] = list(first.values())

    def findings(self) -> list[RecordedFinding]:
        """All of them."""
        found: list[RecordedFinding] = []
        found += [self.mismatch(one) for one in self.aligned.open if one.differs]
        found += [self.crossed(one) for one in self.aligned.channels if one.differs]
        cycles = self.cycles()
        found += cycles
        alike = [one for one in self.aligned.open if not one.differs]
        found += [self.missing(one) for one in alike if one.missing]
        here = [one for one in self.aligned.channels if not self.is_absent(one)]
        found += [self.unmatched(one) for one in here if _lacks(one)]
        found += self.absent(alike)
        found += [self.lone(entry) for entry in self.aligned.lone]
        if not cycles:
            found += self.launch_order()
        explained = bool(found)
        level = [one for one in alike if not one.missing and not self.awaits_absent(one)]
        found += [self.unfinished(one, explained) for one in level]
        done = [one for one in here if not one.differs and not _lacks(one)]
        found += [self.undelivered(one, explained) for one in done]
        return found

    # Ops as they are shown

    def issued(self, entry: Entry, role: str) -> RecordedOp:
        return RecordedOp(entry.rank, entry.text, role, entry.record, entry.state, str(entry.loc))

    def called(self, call: IssuedCall, role: str) -> RecordedOp:
        return RecordedOp(
            call.first.rank,
            call.text,
            role,
            call.first.record,
            call.first.state,
            str(call.first.loc),
        )

    def stands(self, rank: int) -> list[RecordedOp]:
        """Where a rank is that has not come to an op: what it waits for, or what it did last."""
        waits = self.waits.get(rank, [])
        if waits:
            return [self.issued(entry, "waits here itself") for entry in waits[:NUM_SHOWN]]
        dump = self.aligned.dumps.get(rank)
        if dump is None:
            return [RecordedOp(rank, "no dump", "is not known to have issued it")]
        at = f"; its host is at {dump.host}" if str(dump.host) else ""
        if dump.last is None:
            return [RecordedOp(rank, "no record", f"has issued nothing at all{at}")]
        role = f"issued this last, and waits for nothing that it issued{at}"
        return [self.issued(dump.last, role)]

    # Disagreement

    def mismatch(self, found: Open) -> RecordedFinding:
        usual, _ = Counter(call.contents for call in found.calls.values()).most_common(1)[0]
        most = [rank for rank, call in found.calls.items() if call.contents == usual]
        others = [rank for rank in found.calls if rank not in most]
        message = (
            f"members of group {found.group} disagree on the {found.differs} of number {found.seq}"
        )
        if others:
            message += f": {ranks_in_words(others)} against {ranks_in_words(most)}"
        fix = f"issue the same {found.differs} on all ranks, in one order"
        for rank, shift in found.shifts.items():
            what = "left out" if shift > 0 else "made"
            more = "" if shift > 0 else " more than its peers"
            later = f"{abs(shift)} {'later' if shift > 0 else 'earlier'}"
            message += (
                f"; rank {rank} {what} {times(abs(shift), 'call')}{more}: from there on its "
                f"calls are those that its peers issue {later}"
            )
            here, there = f"rank {rank}", "its peers issue"
            if shift < 0:
                here, there = "its peers", f"rank {rank} issues"
            fix = f"issue on {here} what {there} at number {found.seq}, or on no rank"
        calls = [(found.calls[rank], "issued") for rank in (*most[:1], *others[:NUM_SHOWN])]
        if not others:
            calls = [(call, "issued") for call in list(found.calls.values())[:NUM_SHOWN]]
        ops = [self.called(call, role) for call, role in calls]
        waiting = tuple(rank for rank in found.calls if found.calls[rank].first.may_wait)
        return RecordedFinding("mismatch", message, tuple(ops), fix, waiting, tuple(others))

    def crossed(self, found: OpenChannel) -> RecordedFinding:
        _, source, target = found.channel
        send, recv = found.sends[0], found.recvs[0]
        return RecordedFinding(
            "mismatch",
            f"a message from rank {source} to rank {target} of group {found.channel[0]} has "
            f"another {found.differs} at its two ends",
            (self.issued(send, "sends"), self.issued(recv, "receives")),
            "messages between two ranks are matched in order, whatever their tags: issue them in "
            "one order at both ends, with one size and element type",
            tuple(sorted({source, target})),
            (),
        )

    # Waiting

    def step(self, ref: OpRef) -> Step:
        number, index = ref.at
        return self.recorded.steps[number][index]

    def cycles(self) -> list[RecordedFinding]:
        """The circles that the verifier found, by the records behind their ops."""
        reports = self.verdict.errors if self.verdict is not None else ()
        return [self.cycle(one) for one in reports if one.kind == "deadlock"]

    def cycle(self, finding: Finding) -> RecordedFinding:
        ops: dict[tuple[int, str], RecordedOp] = {}
        hosts = False
        for ref in finding.ops:
            step = self.step(ref)
            if step.expected:
                hosts = True
                role = "has not issued this, for which a peer waits"
                ops[ref.rank, step.text] = RecordedOp(ref.rank, step.text, role)
            elif step.entry is not None:
                ops[ref.rank, step.text] = self.issued(step.entry, _role(step.entry))
        ranks = sorted({op.rank for op in ops.values()})
        message = f"{ranks_in_words(ranks)} wait for each other"
        if hosts:
            message += (
                ": each waits in an op that another has not issued, and the host of that one "
                "stays behind an op that waits itself"
            )
        fix = HOSTS if hosts else CROSSED
        return RecordedFinding(
            "cycle", message, tuple(ops.values()), fix, tuple(ranks), tuple(ranks)
        )

    def missing(self, found: Open) -> RecordedFinding:
        call = next(iter(found.calls.values()))
        waiting = [rank for rank, one in found.calls.items() if one.first.may_wait]
        message = (
            f"{ranks_in_words(found.missing)} did not issue {call.text}; "
            f"{ranks_in_words(waiting)} wait{'s' if len(waiting) == 1 else ''} there"
        )
        if found.num_behind:
            message += (
                f" ({times(found.num_behind, 'further number')} of the group issued behind it)"
            )
        if found.silent:
            message += f"; of {ranks_in_words(found.silent)} it is not known"
        return self._missing(
            message, [found.calls[rank] for rank in waiting], waiting, found.missing
        )

    def unmatched(self, found: OpenChannel) -> RecordedFinding:
        _, source, target = found.channel
        both = min(len(found.sends), len(found.recvs))
        sent = len(found.sends) > both
        entry = (found.sends if sent else found.recvs)[both]
        other, verb = (target, "receive") if sent else (source, "send")
        message = f"rank {other} did not {verb} what rank {entry.rank} waits to "
        message += f"{'send' if sent else 'receive'}: {entry.text}"
        return self._missing(message, [IssuedCall((entry,))], [entry.rank], [other])

    def _missing(
        self,
        message: str,
        calls: Iterable[IssuedCall],
        waiting: Sequence[int],
        missing: Sequence[int],
    ) -> RecordedFinding:
        ops = [self.called(call, "waits here") for call in list(calls)[:NUM_SHOWN]]
        free = [rank for rank in missing if not self.waits.get(rank)]
        for rank in (free or list(missing))[:NUM_SHOWN]:
            ops += self.stands(rank)
        fix = ELSEWHERE.format(ranks=ranks_in_words(free)) if free else ""
        return RecordedFinding(
            "missing", message, tuple(ops), fix, tuple(waiting), tuple(missing), not free
        )

    def lone(self, entry: Entry) -> RecordedFinding:
        return RecordedFinding(
            "unknown-group",
            f"rank {entry.rank} alone recorded {entry.text}, and nothing after it; no dump says "
            "which ranks the group has: if it has others, they did not issue it",
            (self.issued(entry, "may wait here"),),
            "dump with interlace.save_recording(folder), which keeps the ranks of each group (gloo "
            "does not record them)",
            (entry.rank,),
        )

    def awaits_absent(self, found: Open) -> bool:
        return not found.missing and bool({*found.silent} & {*self.aligned.absent})

    def is_absent(self, found: OpenChannel) -> bool:
        return bool({*found.channel[1:]} & {*self.aligned.absent})

    def absent(self, alike: Sequence[Open]) -> list[RecordedFinding]:
        """Ranks without a dump, for which others may wait."""
        ops: dict[int, list[RecordedOp]] = {rank: [] for rank in self.aligned.absent}
        for found in alike:
            if found.differs or not self.awaits_absent(found):
                continue
            for rank in {*found.silent} & {*self.aligned.absent}:
                ops[rank] += [self.called(call, "waits here") for call in found.calls.values()]
        for channel in self.aligned.channels:
            for rank in {*channel.channel[1:]} & {*self.aligned.absent}:
                one = (*channel.sends, *channel.recvs)[0]
                ops[rank].append(self.issued(one, "waits here"))
        findings: list[RecordedFinding] = []
        same: dict[tuple[RecordedOp, ...], list[int]] = {}
        for rank, waits in ops.items():
            same.setdefault(tuple(waits), []).append(rank)
        for waits, ranks in same.items():
            if not waits:
                self.aligned.assumed.append(
                    f"{ranks_in_words(ranks)} left no dump; nothing that others recorded waits "
                    "there"
                )
                continue
            waiting = tuple(sorted({op.rank for op in waits}))
            findings.append(
                RecordedFinding(
                    "no-dump",
                    f"{ranks_in_words(ranks)} left no dump, and all others issued what they share "
                    f"with {'it' if len(ranks) == 1 else 'them'}; {ranks_in_words(waiting)} may "
                    "wait there",
                    waits[:NUM_SHOWN],
                    "find out whether it ended, raised or was blocked before it could write one "
                    "(its log, its exit code); a rank inside destroy_process_group() writes none",
                    waiting,
                    tuple(ranks),
                )
            )
        return findings

    def launch_order(self) -> list[RecordedFinding]:
        findings: list[RecordedFinding] = []
        for finding in self.verdict.findings if self.verdict is not None else ():
            steps = [self.step(ref) for ref in finding.ops]
            entries = [step.entry for step in steps if step.entry is not None]
            unended = [one for one in entries if not one.ended]
            if finding.kind != "launch-order" or len(unended) < len(steps):
                continue
            ranks = tuple(sorted({one.rank for one in unended}))
            findings.append(
                RecordedFinding(
                    "launch-order",
                    f"{ranks_in_words(ranks)} launched ops of several groups in opposite order, "
                    "and none of them ended: on a GPU each may hold what the other needs",
                    tuple(self.issued(one, "was launched first") for one in unended),
                    "launch the ops of all groups in one order on all ranks",
                    ranks,
                    ranks,
                )
            )
        return findings

    # Issued by all

    def unfinished(self, found: Open, explained: bool) -> RecordedFinding:
        late = {rank: call for rank, call in found.calls.items() if not call.ended}
        states: dict[str, list[int]] = {}
        for rank, call in late.items():
            states.setdefault(call.first.state, []).append(rank)
        call = next(iter((late or found.calls).values()))
        said = ", ".join(f"{state} on {ranks_in_words(on)}" for state, on in states.items())
        message = f"all known members issued {call.text}, and it had not ended: {said}"
        fix = "" if explained else UNEXPLAINED
        first = {call.first.state: call for call in reversed(late.values())}
        ops = tuple(self.called(call, "had not ended") for call in first.values())
        return RecordedFinding("unfinished", message, ops, fix, tuple(late), (), explained)

    def undelivered(self, found: OpenChannel, explained: bool) -> RecordedFinding:
        pair = [one for one in (found.sends[0], found.recvs[0]) if not one.ended]
        message = f"both ends issued {pair[0].text}, and it had not ended"
        ops = tuple(self.issued(one, "had not ended") for one in pair)
        fix = "" if explained else UNEXPLAINED
        waiting = tuple(one.rank for one in pair)
        return RecordedFinding("unfinished", message, ops, fix, waiting, (), explained)


def _role(entry: Entry) -> str:
    """What an op does in a circle."""
    if entry.state == "completed":
        return "comes first here; recorded as completed, although its peer's end waits"
    return "waits here"


def _lacks(found: OpenChannel) -> bool:
    """Whether one end has more messages than the other, and waits for the first of them."""
    both = min(len(found.sends), len(found.recvs))
    left = (*found.sends[both:], *found.recvs[both:])
    return not found.differs and bool(left) and left[0].may_wait
