"""Findings in the run's words, from what is open and from the verifier's verdict on it.

>>> for finding in RecordedExplainer(aligned, ranks, verdict).findings():
...     print(finding)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from interlace.verify.report import Finding
from interlace_check.recorded.alignment import Aligned, Open
from interlace_check.recorded.entries import Entry, IssuedCall, ranks_in_words
from interlace_check.recorded.programs import RecordedProgram, RecordedStep
from interlace_check.recorded.report import RecordedFinding, RecordedOp, fault, unrecorded

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
MATCHED = (
    "messages between two ranks are matched in order, whatever their tags: issue them in one order "
    "at both ends, with one size and element type"
)
GONE = (
    "find out whether it ended, raised or was blocked before it could write one (its log, its exit "
    "code); a rank inside destroy_process_group() writes none"
)


class RecordedExplainer:
    """The findings of one run."""

    def __init__(
        self, aligned: Aligned, ranks: Sequence[RecordedProgram], verdict: Sequence[Finding]
    ) -> None:
        self.aligned, self.ranks, self.verdict = aligned, ranks, verdict
        self.absent = {*aligned.absent}
        self.waits: dict[int, list[Entry]] = {}
        """For each rank, what it issued and what had not ended: the first op of each stream."""
        for rank in ranks:
            first: dict[str, Entry] = {}
            for op, step in zip(rank.ops, rank.origins, strict=True):
                if step.entry is not None and step.entry.may_wait:
                    first.setdefault(op.stream, step.entry)
            self.waits[rank.rank] = list(first.values())

    def findings(self) -> list[RecordedFinding]:
        """All of them."""
        alike = [one for one in self.aligned.open if not one.differs]
        cycles = [self.cycle(one) for one in self.verdict if one.kind == "deadlock"]
        findings = [
            *(self.mismatch(one) for one in self.aligned.open if one.differs),
            *cycles,
            *(self.missing(one) for one in alike if one.missing),
            *self.no_dump(alike),
            *(self.launch_order() if not cycles else ()),
        ]
        explained = bool(findings)
        for one in alike:
            if not one.missing and not self.awaited_absent(one):
                findings.append(self.unfinished(one, explained))
        return findings

    def stands(self, rank: int) -> list[RecordedOp]:
        """Where a rank is that has not come to an op: what it waits for, or what it did last."""
        waits = self.waits.get(rank, [])
        if waits:
            return [_issued(entry, "waits here itself") for entry in waits[:NUM_SHOWN]]
        dump = self.aligned.dumps.get(rank)
        if dump is None:
            return [unrecorded(rank, "no dump", "is not known to have issued it")]
        host = f"; its host is at {dump.host}" if str(dump.host) else ""
        if dump.last is None:
            return [unrecorded(rank, "no record", f"has issued nothing at all{host}")]
        role = f"issued this last, and waits for nothing that it issued{host}"
        return [_issued(dump.last, role)]

    # Disagreement

    def mismatch(self, found: Open) -> RecordedFinding:
        usual, _ = Counter(call.contents for call in found.calls.values()).most_common(1)[0]
        most = [rank for rank, call in found.calls.items() if call.contents == usual]
        others = [rank for rank in found.calls if rank not in most]
        message = f"members of group {found.group} disagree on the {found.differs} of {found.what}"
        if others:
            message += f": {ranks_in_words(others)} against {ranks_in_words(most)}"
        fix = f"issue the same {found.differs} on all ranks, in one order"
        if found.messages is not None:
            fix = MATCHED
        shown = [*most[:1], *others[:NUM_SHOWN]] if others else list(found.calls)[:NUM_SHOWN]
        ops = [_called(found.calls[rank], "issued") for rank in shown]
        waiting = [rank for rank in found.calls if found.calls[rank].first.may_wait]
        return fault("mismatch", message, ops, fix, waiting, others)

    # Waiting

    def steps(self, finding: Finding) -> list[tuple[int, RecordedStep]]:
        """The ranks and steps that a finding of the verifier is about."""
        return [(ref.rank, self.ranks[ref.at[0]].origins[ref.at[1]]) for ref in finding.ops]

    def cycle(self, finding: Finding) -> RecordedFinding:
        """A circle that the verifier found, by the records behind its ops."""
        ops: dict[tuple[int, str], RecordedOp] = {}
        hosts = False
        for rank, step in self.steps(finding):
            if step.expected:
                hosts = True
                role = "has not issued this, for which a peer waits"
                ops[rank, step.text] = unrecorded(rank, step.text, role)
            elif step.entry is not None:
                role = "waits here"
                if step.entry.state == "completed":
                    role = "comes first here; recorded as completed, although its peer's end waits"
                ops[rank, step.text] = _issued(step.entry, role)
        ranks = sorted({op.rank for op in ops.values()})
        message = f"{ranks_in_words(ranks)} wait for each other"
        if hosts:
            message += (
                ": each waits in an op that another has not issued, and the host of that one "
                "stays behind an op that waits itself"
            )
        return fault("cycle", message, ops.values(), HOSTS if hosts else CROSSED, ranks, ranks)

    def missing(self, found: Open) -> RecordedFinding:
        """Ranks that wait in an op, and those that did not issue it and where they are."""
        calls = [call for call in found.calls.values() if call.first.may_wait]
        first = next(iter(found.calls.values()))
        missing, waiting = found.missing, [call.first.rank for call in calls]
        if found.messages is not None:
            verbs = ("receive", "send") if first.first.is_send else ("send", "receive")
            message = (
                f"{ranks_in_words(missing)} did not {verbs[0]} what rank {first.first.rank} waits "
                f"to {verbs[1]}: {first.text}"
            )
        else:
            message = (
                f"{ranks_in_words(missing)} did not issue {first.text}; "
                f"{ranks_in_words(waiting)} wait{'s' if len(waiting) == 1 else ''} there"
            )
        if found.num_behind:
            plural = "s" if found.num_behind > 1 else ""
            message += f" ({found.num_behind} further number{plural} of the group issued behind it)"
        if found.silent:
            message += f"; of {ranks_in_words(found.silent)} it is not known"
        ops = [_called(call, "waits here") for call in calls[:NUM_SHOWN]]
        free = [rank for rank in missing if not self.waits.get(rank)]
        for rank in (free or list(missing))[:NUM_SHOWN]:
            ops += self.stands(rank)
        fix = ELSEWHERE.format(ranks=ranks_in_words(free)) if free else ""
        return fault("missing", message, ops, fix, waiting, missing, not free)

    def awaited_absent(self, found: Open) -> set[int]:
        """Ranks without a dump that an op may wait for."""
        return set() if found.missing else self.absent & {*found.silent}

    def no_dump(self, alike: Sequence[Open]) -> Iterator[RecordedFinding]:
        """Ranks without a dump, for which others may wait."""
        waits: dict[int, list[RecordedOp]] = {rank: [] for rank in self.aligned.absent}
        for found in alike:
            for rank in self.awaited_absent(found):
                waits[rank] += [_called(call, "waits here") for call in found.calls.values()]
        same: dict[tuple[RecordedOp, ...], list[int]] = defaultdict(list)
        for rank, ops in waits.items():
            same[tuple(ops)].append(rank)
        for ops, ranks in same.items():
            if not ops:
                self.aligned.assumed.append(
                    f"{ranks_in_words(ranks)} left no dump; nothing that others recorded waits "
                    "there"
                )
                continue
            waiting = sorted({op.rank for op in ops})
            message = (
                f"{ranks_in_words(ranks)} left no dump, and all others issued what they share "
                f"with {'it' if len(ranks) == 1 else 'them'}; {ranks_in_words(waiting)} may wait "
                "there"
            )
            yield fault("no-dump", message, ops[:NUM_SHOWN], GONE, waiting, ranks)

    def launch_order(self) -> Iterator[RecordedFinding]:
        for finding in self.verdict:
            steps = [step.entry for _, step in self.steps(finding)]
            late = [one for one in steps if one is not None and not one.ended]
            if finding.kind != "launch-order" or len(late) < len(steps):
                continue
            ranks = sorted({one.rank for one in late})
            message = (
                f"{ranks_in_words(ranks)} launched ops of several groups in opposite order, "
                "and none of them ended: on a GPU each may hold what the other needs"
            )
            ops = [_issued(one, "was launched first") for one in late]
            fix = "launch the ops of all groups in one order on all ranks"
            yield fault("launch-order", message, ops, fix, ranks, ranks)

    # Issued by all

    def unfinished(self, found: Open, explained: bool) -> RecordedFinding:
        late = {rank: call for rank, call in found.calls.items() if not call.ended}
        states: dict[str, list[int]] = defaultdict(list)
        for rank, call in late.items():
            states[call.first.state].append(rank)
        call = next(iter((late or found.calls).values()))
        states_in_words = ", ".join(
            f"{state} on {ranks_in_words(on)}" for state, on in states.items()
        )
        message = f"all known members issued {call.text}, and it had not ended: {states_in_words}"
        fix = "" if explained else UNEXPLAINED
        ops = [_called(late[on[0]], "had not ended") for on in states.values()]
        return fault("unfinished", message, ops, fix, late, (), explained)


def _issued(entry: Entry, role: str, text: str = "") -> RecordedOp:
    """A record as a finding shows it."""
    return RecordedOp(
        rank=entry.rank,
        line=0,
        stream="",
        text=text or entry.text,
        role=role,
        loc=str(entry.loc),
        record=entry.record,
        state=entry.state,
    )


def _called(call: IssuedCall, role: str) -> RecordedOp:
    return _issued(call.first, role, call.text)
