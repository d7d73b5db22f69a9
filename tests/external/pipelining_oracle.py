"""A second opinion on pipeline schedules: plays the actions one by one and follows the data.

    assert plays_right([["0F0", "0SEND_F0", ...], ["1RECV_F0", ...]], "pair")

It shares nothing with `check_pipelining`: it splits tokens itself, keeps queues as lists, and calls
a schedule right if it runs to its end and every result has the history that it has on one process.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

Token = tuple[int, str, int]


class Wrong(Exception):
    """The runtime refuses, nothing goes on, or a result has another history."""


def split(text: str) -> list[Token]:
    """The tokens of a cell, without what concerns sharding and reduction alone."""
    found = re.findall(r"(\d+)([A-Z_]+?)(\d+)(?![A-Z_])", text)
    return [(int(stage), kind, int(microbatch)) for stage, kind, microbatch in found]


def plays_right(rows: Sequence[Sequence[str]], model: str) -> bool:
    """Whether the schedule is right under a model of communication."""
    try:
        _Player([[token for cell in row for token in split(cell)] for row in rows], model).play()
    except Wrong:
        return False
    return True


class _Player:
    def __init__(self, rows: list[list[Token]], model: str) -> None:
        self.rows, self.model = rows, model
        self.owner: dict[int, int] = {}
        for rank, row in enumerate(rows):
            for stage, kind, _ in row:
                if kind in "FBIW" and self.owner.setdefault(stage, rank) != rank:
                    raise Wrong("two owners")
        self.last = max(self.owner)
        self.count = 1 + max(m for row in rows for _, kind, m in row if kind in "FBIW")
        self.at = [0] * len(rows)
        self.queues: dict[tuple[int, int, int], list[int]] = defaultdict(list)
        """Messages that were issued and have not ended, by rank and queue: numbers of ends."""
        self.ends: list[tuple[bool, Token, tuple[int, int]]] = []
        self.channels: dict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(
            lambda: ([], [])
        )
        self.number: dict[tuple[int, Token], int] = {}
        self.over: set[int] = set()
        self.values: dict[Token, object] = {}
        self.payload: dict[int, object] = {}
        self.taken: set[int] = set()

    def play(self) -> None:
        while self.messages() or any([self.advance(rank) for rank in range(len(self.rows))]):
            pass
        if any(at < len(row) for at, row in zip(self.at, self.rows, strict=True)):
            raise Wrong("stuck")
        if len(self.over) < len(self.ends):
            raise Wrong("a message without its other end")
        received = {number for number, (sends, *_) in enumerate(self.ends) if not sends}
        if received - self.taken:
            raise Wrong("received for nothing")
        self.compare()

    def compare(self) -> None:
        for stage in range(self.last + 1):
            for m in range(self.count):
                full = (stage, "B", m) in self.values
                halves = [(stage, kind, m) in self.values for kind in "IW"]
                if full == all(halves) or any(halves) != all(halves):
                    raise Wrong("backward missing or doubled")
                kinds = "FB" if full else "FI"
                for kind in kinds:
                    if self.values.get((stage, kind, m)) != self.history(stage, kind, m):
                        raise Wrong("another history")

    def history(self, stage: int, kind: str, m: int) -> object:
        """What a result is made from, on one process: hashes keep it small."""
        value: object = ("x", m)
        for each in range(stage + 1 if kind == "F" else self.last + 1):
            value = hash(("F", each, m, value))
        if kind != "F":
            for each in range(self.last, stage - 1, -1):
                value = hash(("B", each, m, value if each < self.last else None))
        return value

    def messages(self) -> bool:
        """Ends every message whose two ends are at the head of their queues."""
        moved = False
        heads = {queue[0] for queue in self.queues.values() if queue}
        for sends, receives in self.channels.values():
            for send, receive in zip(sends, receives, strict=False):
                if send in self.over or send not in heads or receive not in heads:
                    continue
                moved = True
                self.payload[receive] = self.payload[send]
                for number in (send, receive):
                    self.over.add(number)
                    for queue in self.queues.values():
                        if queue and queue[0] == number:
                            queue.pop(0)
        return moved

    def advance(self, rank: int) -> bool:
        if self.at[rank] >= len(self.rows[rank]):
            return False
        token = self.rows[rank][self.at[rank]]
        stage, kind, m = token
        if self.owner.get(stage) != rank:
            raise Wrong("not this rank's stage")
        if kind.startswith(("SEND", "RECV")):
            self.issue(rank, token)
        elif kind.startswith("WAIT"):
            number = self.number.get((rank, (stage, kind.removeprefix("WAIT_"), m)))
            if number is not None and number not in self.over:
                return False
        elif not self.compute(rank, token):
            return False
        self.at[rank] += 1
        return True

    def issue(self, rank: int, token: Token) -> None:
        stage, kind, m = token
        peer = self.owner.get(stage + (1 if kind in ("SEND_F", "RECV_B") else -1))
        if peer is None or peer == rank or (rank, token) in self.number:
            raise Wrong("to nobody, or twice")
        sends, number = kind.startswith("SEND"), len(self.ends)
        if sends:
            made = [self.values.get((stage, one, m)) for one in ("F" if kind[-1] == "F" else "BI")]
            self.payload[number] = next((value for value in made if value is not None), None)
            if self.payload[number] is None:
                raise Wrong("sent before it was made")
        self.ends.append((sends, token, (rank, peer)))
        self.number[rank, token] = number
        way = {"rank": (0, 0), "pair": (peer, 0), "direction": (peer, int(sends))}[self.model]
        self.queues[(rank, *way)].append(number)
        pair = (rank, peer) if sends else (peer, rank)
        self.channels[pair][0 if sends else 1].append(number)

    def compute(self, rank: int, token: Token) -> bool:
        stage, kind, m = token
        if token in self.values:
            raise Wrong("twice")
        if kind == "W":
            if (stage, "I", m) not in self.values:
                raise Wrong("W before I")
            self.values[token] = True
            return True
        forward = kind == "F"
        if not forward and (stage, "F", m) not in self.values:
            raise Wrong("backward before forward")
        if forward and stage == self.last:
            if any((stage, "F", later) in self.values for later in range(m + 1, self.count)):
                raise Wrong("losses out of order")
        value: object = ("x", m) if forward else None
        beside = stage - 1 if forward else stage + 1
        if 0 <= beside <= self.last:
            if beside not in self.owner:
                raise Wrong("a stage is missing")
            if self.owner[beside] == rank:
                made = [self.values.get((beside, one, m)) for one in ("F" if forward else "BI")]
                value = next((one for one in made if one is not None), None)
                if value is None:
                    raise Wrong("input not made yet")
            else:
                number = self.number.get((rank, (stage, "RECV_F" if forward else "RECV_B", m)))
                if number is None or number in self.taken:
                    raise Wrong("input not received")
                if number not in self.over:
                    return False
                self.taken.add(number)
                value = self.payload[number]
        self.values[token] = hash(("F" if forward else "B", stage, m, value))
        return True
