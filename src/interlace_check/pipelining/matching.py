"""Pairs the n-th send between two ranks with the n-th receive: NCCL has no tags, gloo's are 0.

    >>> list(exchanges(sequences, layout))
    [PipeliningFinding(kind='exchanged', message='rank 1 to rank 0, message 3: ...')]

The receive gets whatever comes next on its communicator: shapes of microbatches are alike, so that
nothing fails, and a gradient is added to the wrong microbatch. torch's own simulator pairs sends
with receives by name, and therefore does not see it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from interlace_check.pipelining.actions import RECEIVES, SENDS
from interlace_check.pipelining.report import PipeliningFinding, fault
from interlace_check.pipelining.schedule import Key, Layout, Placed

Ends = tuple[list[Placed], list[Placed]]
"""Sends and receives, in the order in which the two ranks issue them."""


def _channels(sequences: Sequence[Sequence[Placed]], layout: Layout) -> dict[tuple[int, int], Ends]:
    """The messages by the ranks that send and receive them."""
    found: dict[tuple[int, int], Ends] = {}
    for rank, sequence in enumerate(sequences):
        for placed in sequence:
            sends = placed.action.kind in SENDS
            if not sends and placed.action.kind not in RECEIVES:
                continue
            peer = layout.peer(placed.action)
            if peer is not None and peer != rank:
                channel = (rank, peer) if sends else (peer, rank)
                found.setdefault(channel, ([], []))[0 if sends else 1].append(placed)
    return found


def exchanges(sequences: Sequence[Sequence[Placed]], layout: Layout) -> Iterator[PipeliningFinding]:
    """The messages that go to the wrong receive, and those without another end."""
    for (sender, receiver), (sends, receives) in sorted(_channels(sequences, layout).items()):
        expected = [_received_as(send, layout) for send in sends]
        given = [receive.key for receive in receives]
        way = f"rank {sender} to rank {receiver}"
        for rank, lacking in (
            (receiver, _surplus(sends, expected, given)),
            (sender, _surplus(receives, given, expected)),
        ):
            for placed in lacking:
                other = layout.other_end(placed.action)
                message = f"{way}: {placed} has no `{other}` on rank {rank}"
                fix = f"add `{other}` to rank {rank}"
                yield fault("unmatched", message, fix, placed)
        yield from _crossed(way, sends, receives, layout)


def _crossed(
    way: str, sends: list[Placed], receives: list[Placed], layout: Layout
) -> Iterator[PipeliningFinding]:
    """The first message that a receive for another takes; the others follow from it."""
    wrong = [
        k
        for k, (send, receive) in enumerate(zip(sends, receives, strict=False))
        if _received_as(send, layout) != receive.key
    ]
    if not wrong:
        return
    send, receive = sends[wrong[0]], receives[wrong[0]]
    what = {"F": "the activation", "B": "the gradient"}
    one, other = send.action, receive.action
    message = (
        f"{way}, message {wrong[0] + 1}: {send} is taken by {receive}: {what[one.kind[-1]]} of "
        f"microbatch {one.microbatch} from stage {one.stage} arrives as {what[other.kind[-1]]} of "
        f"microbatch {other.microbatch} for stage {other.stage}"
    )
    if len(wrong) > 1:
        message += f" ({len(wrong)} of {len(sends)} messages go wrong)"
    fix = "issue the receives in the order of the sends: " + ", ".join(
        f"`{layout.other_end(each.action)}`" for each in sends[wrong[0] : wrong[0] + 3]
    )
    yield fault("exchanged", message, fix, send, receive)


def _received_as(send: Placed, layout: Layout) -> Key:
    other = layout.other_end(send.action)
    return other.kind, other.stage, other.microbatch


def _surplus(placed: list[Placed], keys: list[Key], others: list[Key]) -> list[Placed]:
    """The actions whose key occurs among the others less often."""
    left = Counter(others)
    surplus: list[Placed] = []
    for place, key in zip(placed, keys, strict=True):
        left[key] -= 1
        if left[key] < 0:
            surplus.append(place)
    return surplus
