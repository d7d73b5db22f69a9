"""Runs as torch's flight recorder leaves them behind, made op by op.

    run = Run(2)
    run.each("all_reduce", [4])          # every rank of the default group
    run.call(0, "all_reduce", [8])       # rank 0 alone
    run.write(folder)                    # one JSON file a rank

What ends, ends as with NCCL: a collective when all members have issued it alike and all before it
in the group has ended; a message when both ends are there and all before it between the two has.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

DEFAULT = "0"
Plain = dict[str, Any]


class Run:
    def __init__(self, world: int, backend: str = "nccl") -> None:
        self.world, self.backend = world, backend
        self.groups: dict[str, tuple[str, list[int]]] = {
            DEFAULT: ("default_pg", list(range(world)))
        }
        self.entries: dict[int, list[Plain]] = {rank: [] for rank in range(world)}
        self.numbers: dict[tuple[int, str, str], int] = defaultdict(int)
        self.first: dict[int, int] = {}
        """The record with which the dump of a rank begins."""
        self.markers: dict[tuple[int, str, int], Plain] = {}
        """What ends a batch of messages. The recorder writes it as a collective, and sets the state
        of it alone."""

    def group(self, name: str, ranks: Iterable[int], desc: str = "undefined") -> str:
        self.groups[name] = (desc, list(ranks))
        return name

    def each(
        self, kind: str, size: Sequence[int] = (4,), group: str = DEFAULT, **more: Any
    ) -> None:
        for rank in self.groups[group][1]:
            self.call(rank, kind, size, group, **more)

    def call(
        self,
        rank: int,
        kind: str,
        size: Sequence[int] = (4,),
        group: str = DEFAULT,
        dtype: str = "Float",
        line: int = 0,
        out: Sequence[int] | None = None,
        coalesced: bool = False,
    ) -> Plain:
        if not coalesced:
            self.numbers[rank, group, "collective"] += 1
        sizes = [] if kind == "barrier" else [list(size)]
        outs = [list(out)] if out is not None else sizes
        return self.add(rank, group, kind, sizes, outs, dtype, False, line)

    def send(self, rank: int, to: int, size: Sequence[int] = (4,), **more: Any) -> None:
        self.message(rank, "send", to, size, **more)

    def recv(self, rank: int, source: int, size: Sequence[int] = (4,), **more: Any) -> None:
        self.message(rank, "recv", source, size, **more)

    def batch(
        self,
        rank: int,
        messages: Sequence[tuple[str, int]],
        size: Sequence[int] = (4,),
        **more: Any,
    ) -> None:
        """`batch_isend_irecv`: the messages, and the marker that ends them."""
        group = more.get("group", DEFAULT)
        for place, (way, peer) in enumerate(messages):
            self.message(rank, way, peer, size, coalesced=place > 0, **more)
        marker = self.add(rank, group, "coalesced", [], [], "", False, 0)
        self.markers[rank, group, marker["p2p_seq_id"]] = marker

    def message(
        self,
        rank: int,
        way: str,
        peer: int,
        size: Sequence[int],
        group: str = DEFAULT,
        dtype: str = "Float",
        line: int = 0,
        coalesced: bool = False,
    ) -> None:
        if not coalesced:
            self.numbers[rank, group, "p2p"] += 1
        ranks = self.groups[group][1]
        arrow = "->" if way == "send" else "<-"
        name = f"{way} {ranks.index(rank)}{arrow}{ranks.index(peer)}"
        sizes = [list(size)]
        self.add(rank, group, name, sizes, sizes, dtype, True, line)

    def add(
        self,
        rank: int,
        group: str,
        name: str,
        inputs: list[list[int]],
        outputs: list[list[int]],
        dtype: str,
        p2p: bool,
        line: int,
    ) -> Plain:
        mine = self.entries[rank]
        entry: Plain = {
            "record_id": len(mine),
            "pg_id": list(self.groups).index(group),
            "process_group": [group, self.groups[group][0]],
            "collective_seq_id": self.numbers[rank, group, "collective"],
            "p2p_seq_id": self.numbers[rank, group, "p2p"],
            "op_id": len(mine) + 1,
            "profiling_name": f"{self.backend}:{name}",
            "time_created_ns": 1_700_000_000_000_000_000 + len(mine),
            "input_sizes": inputs,
            "input_dtypes": [dtype] * len(inputs),
            "output_sizes": outputs,
            "output_dtypes": [dtype] * len(outputs),
            "state": "scheduled",
            "time_discovered_started_ns": 0,
            "time_discovered_completed_ns": 0,
            "retired": False,
            "timeout_ms": 600000,
            "is_p2p": p2p,
        }
        if line:
            entry["frames"] = [
                {"name": "all_reduce", "filename": "/x/torch/distributed/c10d.py", "line": 3},
                {"name": "step", "filename": "train.py", "line": line},
            ]
        mine.append(entry)
        return entry

    # What has ended

    def settle(self) -> None:
        """Sets the states."""
        for group, (_, ranks) in self.groups.items():
            calls = {rank: self._numbered(rank, group) for rank in ranks}
            for seq in sorted({seq for mine in calls.values() for seq in mine}):
                met = [mine.get(seq, []) for mine in calls.values()]
                looks = {
                    json.dumps(
                        [[e["profiling_name"], e["input_sizes"], e["input_dtypes"]] for e in c]
                    )
                    for c in met
                }
                if len(looks) > 1 and not all("all_to_all" in look for look in looks):
                    break
                for entry in (entry for call in met for entry in call):
                    entry.update(state="completed", retired=True)
        self._settle_messages()

    def _numbered(self, rank: int, group: str) -> dict[int, list[Plain]]:
        found: dict[int, list[Plain]] = defaultdict(list)
        markers = list(map(id, self.markers.values()))
        for entry in self.entries[rank]:
            mine = entry["process_group"][0] == group and not entry["is_p2p"]
            if mine and id(entry) not in markers:
                found[entry["collective_seq_id"]].append(entry)
        return found

    def _settle_messages(self) -> None:
        """Runs the messages of all ranks: one by one between two ranks, batches at once."""
        queues: dict[tuple[int, str, str], dict[int, list[Plain]]] = defaultdict(dict)
        for rank, entries in self.entries.items():
            for entry in (one for one in entries if one["is_p2p"]):
                group, number = entry["process_group"][0], entry["p2p_seq_id"]
                single = (rank, group, number) not in self.markers
                ends = str(sorted(self._ends(entry))) if single else "all"
                queues[rank, group, ends].setdefault(number, []).append(entry)
        while True:
            heads = [next(iter(queue.values())) for queue in queues.values() if queue]
            open_ends = [
                (e["process_group"][0], *self._ends(e), e["profiling_name"].split(":")[1][:4])
                for head in heads
                for e in head
            ]
            met = [
                key
                for key, queue in queues.items()
                if queue and all(self._met(e, open_ends) for e in next(iter(queue.values())))
            ]
            if not met:
                break
            for rank, group, ends in met:
                queue = queues[rank, group, ends]
                number = next(iter(queue))
                (first, *_) = queue.pop(number)
                ended = self.markers.get((rank, group, number), first)
                ended.update(state="completed", retired=True)

    def _ends(self, entry: Plain) -> tuple[int, int]:
        name = entry["profiling_name"].split(":")[1].split(" ")[1]
        a, b = name.replace("<-", "->").split("->")
        source, target = (int(a), int(b)) if "->" in name else (int(b), int(a))
        return source, target

    def _met(self, entry: Plain, open_ends: list[tuple[str, int, int, str]]) -> bool:
        other = "recv" if "send" in entry["profiling_name"] else "send"
        return (entry["process_group"][0], *self._ends(entry), other) in open_ends

    # Files

    def dump(self, rank: int) -> Plain:
        config = {
            name: {"name": name, "desc": desc, "ranks": str(ranks)}
            for name, (desc, ranks) in self.groups.items()
            if rank in ranks
        }
        return {
            "version": "2.10",
            "comm_lib_version": "2.27.3",
            "pg_config": config,
            "pg_status": {"0": {"last_enqueued_collective": str(len(self.entries[rank]))}},
            "entries": self.entries[rank][self.first.get(rank, 0) :],
        }

    def write(self, folder: Path, without: Iterable[int] = ()) -> Path:
        self.settle()
        folder.mkdir(parents=True, exist_ok=True)
        for rank in set(range(self.world)) - set(without):
            (folder / f"trace_rank_{rank}.json").write_text(json.dumps(self.dump(rank)))
        return folder
