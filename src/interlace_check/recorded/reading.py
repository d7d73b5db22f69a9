"""Reads a folder of flight-recorder dumps, one JSON file for each rank.

Whatever the files hold, reading takes bounded time and memory and ends in Dumps or in a
RecordingError that names the file, the record and the key.

>>> dumps, _ = read_folder(Path("dumps"))
>>> dumps[0].rank, len(dumps[0].entries)
(0, 12)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn, cast

from interlace.errors import RecordingError
from interlace.ir.ops import Loc
from interlace_check.recorded.entries import (
    INPUTS,
    LABELS,
    NOWHERE,
    OUTPUTS,
    CoalescedEntries,
    Dump,
    Entry,
    EntryContent,
    GroupKey,
    elements,
    is_marker,
    shown,
)

MAX_FILE_BYTES = 1 << 26
"""Bytes of one file: some 100,000 records."""
MAX_FOLDER_BYTES = 1 << 32
"""Bytes of all files of a folder."""
MAX_ENTRIES = 1 << 18
"""Records of one rank."""
MAX_RANK = 1 << 16
MAX_DIMS = 64
MAX_COUNT = 1 << 62
"""Sizes, numbers and records are counted with 64 bits."""
MAX_FRAMES = 1 << 16
MAX_TENSORS = 1 << 16
"""Tensors of one op: lists of a gather hold one for each rank."""
NUMBER = re.compile(r"(\d{1,9})$")
ENDS = re.compile(r"(send|recv) (\d{1,9})(->|<-)(\d{1,9})")
STATES = ("scheduled", "started", "completed")
PICKLE = b"\x80"
"""The first byte of a pickle."""
TO_JSON = (
    "fix: write it as JSON from the run itself "
    "(torch._C._distributed_c10d._dump_fr_trace_json(), or _dump_nccl_trace_json()), or convert a "
    'pickle that you trust: python -c "import json, pickle, sys; json.dump(pickle.load(open('
    "sys.argv[1], 'rb')), open(sys.argv[1] + '.json', 'w'))\" FILE"
)


def read_folder(folder: Path) -> tuple[list[Dump], list[str]]:
    """The dump of each rank, and the files that are not named after one.

    Raises RecordingError for a folder or a file that cannot be read.
    """
    try:
        found = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise RecordingError(
            f"cannot read {folder} ({error.strerror}): name the folder that holds the dumps"
        ) from error
    converted = {path.name.removesuffix(".json") for path in found if path.suffix == ".json"}
    files = [
        path
        for path in found
        if not path.name.startswith(".") and not (path.name in converted and _is_pickle(path))
    ]
    named = [path for path in files if _rank_of(path) is not None or path.suffix == ".json"]
    if not named:
        raise RecordingError(
            f"{folder} holds no dump: each is a file whose name ends in its rank, such as "
            "trace_rank_3 or trace_rank_3.json"
        )
    if sum(path.stat().st_size for path in named) > MAX_FOLDER_BYTES:
        raise RecordingError(
            f"the files of {folder} have more than {MAX_FOLDER_BYTES} bytes in all"
        )
    dumps: dict[int, Dump] = {}
    for path in named:
        dump = read_file(path)
        if dump.rank in dumps:
            raise RecordingError(
                f"{path.name} and {dumps[dump.rank].file} are both dumps of rank {dump.rank}: "
                "put each run into a folder of its own"
            )
        dumps[dump.rank] = dump
    left_out = [path.name for path in files if path not in named]
    return [dumps[rank] for rank in sorted(dumps)], left_out


def _is_pickle(path: Path) -> bool:
    """Returns True if a file is a pickle: a converted one has its JSON beside it."""
    try:
        with path.open("rb") as file:
            return file.read(1) == PICKLE
    except OSError:
        return False


def read_file(path: Path) -> Dump:
    """One dump. Raises RecordingError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise RecordingError(f"cannot read {path.name}: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise RecordingError(f"{path.name} has more than {MAX_FILE_BYTES} bytes")
    return parse_dump(data, path.name, _rank_of(path))


def parse_dump(data: bytes, file: str, rank: int | None = None) -> Dump:
    """A dump from the bytes of its file; `rank` is that of the file's name."""
    if data[:1] == PICKLE:
        raise RecordingError(
            f"{file} is a pickle, and reading a pickle runs what is in it, so it was not read: "
            f"{TO_JSON}"
        )
    try:
        plain = json.loads(data)
    except RecursionError:
        raise RecordingError(f"{file} is nested too deeply to be a dump") from None
    except ValueError as error:  # not UTF-8, or not JSON, or a number of too many digits
        raise RecordingError(
            f"{file} is not JSON ({error}). {TO_JSON}. If it is no dump, move it elsewhere"
        ) from None
    return _DumpReader(file).dump(plain, rank)


def _rank_of(path: Path) -> int | None:
    of_ray = path.suffix == ".log" and path.stem.isdigit()
    number = NUMBER.search(path.stem if of_ray or path.suffix == ".json" else path.name)
    return int(number[1]) if number else None


class _DumpReader:
    """Reads one file; errors say where in it they are."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.at = "the dump"
        self.locs: dict[tuple[str, str, int], Loc] = {("", "", 0): NOWHERE}

    def refuse(self, what: str) -> NoReturn:
        raise RecordingError(
            f"{self.file}: {self.at}: {shown(what)}. fix: give the JSON that torch's flight "
            "recorder writes, unchanged"
        )

    def dump(self, plain: object, rank: int | None) -> Dump:
        plain = self.mapping(plain, "the file")
        if "rank" in plain:
            rank = self.number(plain["rank"], "rank")
        if rank is None:
            self.refuse("neither its name nor a key `rank` says which rank it is of")
        if rank >= MAX_RANK:
            self.refuse(f"rank {rank} is out of range")
        if "entries" not in plain and "pg_config" not in plain and "version" not in plain:
            self.refuse("it has none of the keys version, pg_config and entries")
        groups = self.groups(plain.get("pg_config") or {})
        records = self.items(plain.get("entries") or [], "entries", MAX_ENTRIES)
        numbers: list[int] = []
        batches = CoalescedEntries()
        for index, record in enumerate(records):
            self.at = f"entry {index}"
            self.entry(self.mapping(record, "it"), rank, groups, numbers, batches)
        self.at = "host"
        host = self.loc(plain.get("host") or [])
        self.at = "pg_status"
        idle = self.idle(plain.get("pg_status") or {})
        return Dump(
            rank=rank,
            file=self.file,
            entries=tuple(batches.entries),
            groups=tuple(groups.values()),
            begins=numbers[0] == 0 if numbers else idle,
            gaps=bool(numbers) and numbers[-1] - numbers[0] + 1 > len(numbers),
            host=host,
        )

    def groups(self, config: object) -> dict[str, GroupKey]:
        """The process groups by name. A rank of gloo has none."""
        self.at = "pg_config"
        found: dict[str, GroupKey] = {}
        for name, about in self.mapping(config, "pg_config").items():
            about = self.mapping(about, f"group {name!r}")
            ranks = about.get("ranks", [])
            if isinstance(ranks, str):
                ranks = self.nested(ranks)
            listed = self.items(ranks, "ranks", MAX_RANK)
            numbers = tuple(self.number(one, "a rank", MAX_RANK) for one in listed)
            if len(set(numbers)) < len(numbers):
                self.refuse(f"group {name!r} lists a rank twice")
            desc = self.text(about.get("desc", ""), "desc")
            if numbers:
                found[name] = GroupKey(name, desc, numbers)
        return found

    def nested(self, text: str) -> object:
        """A list of ranks, which a dump writes as text."""
        try:
            return cast(object, json.loads(text))
        except (ValueError, RecursionError):
            self.refuse(f"ranks {text[:40]!r} is not a list of numbers")

    def idle(self, status: object) -> bool:
        """Returns True if no group has issued anything, as far as the dump says."""
        for about in self.mapping(status, "pg_status").values():
            last = self.mapping(about, "pg_status").get("last_enqueued_collective", -1)
            if str(last) not in ("-1", "0"):
                return False
        return True

    def entry(
        self,
        plain: Mapping[str, object],
        rank: int,
        groups: Mapping[str, GroupKey],
        numbers: list[int],
        batches: CoalescedEntries,
    ) -> None:
        """Adds one record, but for a message that does not say where it goes."""
        numbers.append(self.number(self.get(plain, "record_id"), "record_id"))
        if len(numbers) > 1 and numbers[-1] <= numbers[-2]:
            self.refuse("record_id does not grow")
        names = self.items(self.get(plain, "process_group"), "process_group", 2)
        if len(names) != 2:
            self.refuse("process_group is not [name, description]")
        name, desc = self.text(names[0], "process_group"), self.text(names[1], "process_group")
        group = groups.get(name) or GroupKey(name, desc, None)
        if group.ranks is not None and rank not in group.ranks:
            self.refuse(
                f"rank {rank} issued an op of group {group}, which is of ranks "
                f"{list(group.ranks)}: name the file after the rank that wrote it"
            )
        full = self.text(self.get(plain, "profiling_name"), "profiling_name")
        backend, _, called = full.rpartition(":")
        sent = ENDS.fullmatch(called)
        called = sent[1] if sent else called
        p2p = plain.get("is_p2p", False) is True
        state = self.text(self.get(plain, "state"), "state")
        if state not in STATES:
            self.refuse(f"state {state!r} is none of {', '.join(STATES)}")
        retired = plain.get("retired") is True
        marker = is_marker(called)
        numbered = "p2p_seq_id" if p2p and not marker else "collective_seq_id"
        content, sizes = self.content(plain, called)
        entry = Entry(
            rank=rank,
            record=numbers[-1],
            group=group,
            seq=self.number(self.get(plain, numbered), numbered),
            name=called,
            content=content,
            sizes=sizes,
            state=state,
            # gloo never says that an op has completed; there, a retired one has ended.
            ended=state == "completed" or (backend == "gloo" and retired),
            retired=retired,
            loc=self.loc(plain.get("frames") or []),
            peer=self.peer(sent, rank, group) if sent and p2p else None,
            backend="gloo" if backend == "gloo" else None,
            moved=self.moved(plain) if content.label == "all_to_all" else None,
        )
        if marker:
            p2p_seq = self.number(plain.get("p2p_seq_id", 0), "p2p_seq_id")
            batches.end(entry, p2p_seq, begins=numbers[0] == 0)
        elif not p2p or entry.is_message:
            batches.add(entry)

    def peer(self, sent: re.Match[str], rank: int, group: GroupKey) -> int:
        """The other end of a message, from its places in the group."""
        mine, other = int(sent[2]), int(sent[4])
        if group.ranks is not None:
            if max(mine, other) >= len(group.ranks):
                self.refuse(f"{sent[0]}: group {group} has {len(group.ranks)} ranks")
            mine, other = group.ranks[mine], group.ranks[other]
        if mine != rank:
            self.refuse(
                f"{sent[0]} is of rank {mine}, not {rank}: name the file after the rank that "
                "wrote it"
            )
        return other

    def content(
        self, plain: Mapping[str, object], called: str
    ) -> tuple[EntryContent, tuple[tuple[int, ...], ...]]:
        label = LABELS.get(called, called)
        side = "output" if label in OUTPUTS else "input"
        sizes = self.sizes(plain.get(f"{side}_sizes") or [])
        types = self.items(plain.get(f"{side}_dtypes") or [], f"{side}_dtypes", MAX_TENSORS)
        texts = {self.text(one, "a dtype") for one in types}
        dtype = texts.pop() if len(texts) == 1 else " ".join(sorted(texts))
        compared = label in INPUTS or label in OUTPUTS
        return EntryContent(label, elements(sizes) if compared else None, dtype), sizes

    def moved(self, plain: Mapping[str, object]) -> tuple[int, int] | None:
        """Elements that an all-to-all sends and receives; None where no sizes were recorded."""
        sent, received = (
            elements(self.sizes(plain.get(f"{side}_sizes") or [])) for side in ("input", "output")
        )
        return None if sent is None or received is None else (sent, received)

    def sizes(self, plain: object) -> tuple[tuple[int, ...], ...]:
        tensors = self.items(plain, "sizes", MAX_TENSORS)
        sizes = tuple(
            tuple(self.number(n, "a size") for n in self.items(one, "sizes", MAX_DIMS))
            for one in tensors
        )
        if (elements(sizes) or 0) >= MAX_COUNT:
            self.refuse("its sizes are out of range")
        return sizes

    def loc(self, plain: object) -> Loc:
        """The source line that issued the op: the first that is not torch's own."""
        found = ("", "", 0)
        for frame in self.items(plain, "frames", MAX_FRAMES):
            about = self.mapping(frame, "a frame")
            file = self.text(about.get("filename", ""), "filename")
            own = "/torch/" not in file
            if own or not found[1]:
                name = self.text(about.get("name", ""), "name")
                found = (name, file, self.number(about.get("line", 0), "line", 1 << 31))
            if own:
                break
        if found not in self.locs:
            name, file, line = found
            self.locs[found] = Loc(shown(name), shown(file), line)
        return self.locs[found]

    # Plain values

    def get(self, plain: Mapping[str, object], key: str) -> object:
        if key not in plain:
            self.refuse(f"it has no {key}")
        return plain[key]

    def mapping(self, plain: object, what: str) -> Mapping[str, object]:
        if not isinstance(plain, dict):
            self.refuse(f"{what} is not a JSON object")
        return cast(Mapping[str, object], plain)

    def items(self, plain: object, what: str, most: int) -> Sequence[object]:
        if not isinstance(plain, list):
            self.refuse(f"{what} is not a list")
        found = cast(list[object], plain)
        if len(found) > most:
            self.refuse(f"{what} holds more than {most} items")
        return found

    def number(self, plain: object, what: str, below: int = MAX_COUNT) -> int:
        if not isinstance(plain, int) or isinstance(plain, bool) or not 0 <= plain < below:
            self.refuse(f"{what} is not a number from 0 to {below - 1}")
        return plain

    def text(self, plain: object, what: str) -> str:
        if not isinstance(plain, str):
            self.refuse(f"{what} is not a text")
        return plain
