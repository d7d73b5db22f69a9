"""Schedules that outlive their process: files beside torch's own cache, and in torch's archive.

    store = Store.of(options)               # None: nothing is kept
    key = Key.of(graph, Digests.of(graph), options, machine, "cpu", groups)
    entry = store.find(key)                 # None: a miss, and the log says why
    store.keep(key, KeptSchedule.of(key, program, agreement))

`torch.compiler.save_cache_artifacts()` takes the entries that a process used into its archive, and
`load_cache_artifacts` puts them into the folder of another process.

Note [Entries]
    An entry is JSON: the text of a lowered Program, the proof of what ran, and the facts that both
    depend on: the serial Program (which has the shapes, layouts and teams), the options, the
    calibration, the versions. A file is named by its facts. It is read only where they are those of
    the reader and its digest is right; everything else is a miss. The proof holds for one text,
    whose digest it names: ranks that agree on another one prove that.

    Ranks use entries together or not at all. One without an entry is handed that of a peer with
    the same facts, so one host's folder serves all hosts, and what one rank compiled all others.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

import interlace
from interlace.comm.rendezvous.board import Board, Note
from interlace.cost import Machine
from interlace.errors import AgreementError, InterlaceError
from interlace.ir import Program, parse, print_program
from interlace.ir.program import no_collections
from interlace.ir.sizes import FIXED
from interlace.options import Options
from interlace.runtime.machine import gpus_of, machine_for
from interlace.runtime.prepare.agreement import Agreement, Digests, Proof, digest, text_topic
from interlace.torch_private import backends_of
from interlace.torch_private.caches import (
    CacheArtifact,
    CacheArtifactFactory,
    CacheArtifactManager,
    are_graphs_cached,
    cache_dir,
)
from interlace.trace.tracks import write_whole
from interlace.verify import Report
from interlace.verify.report import Symmetry

log = logging.getLogger(__name__)

FORMAT = 2
"""Version of an entry's JSON."""
FOLDER = "interlace"
DIGITS = 16
APART = frozenset(
    ("timeout_s", "trace", "static_outputs", "calibration", "cache", "cache_size", "schedules")
)
"""Options that no schedule depends on, or (the calibration) that count by what they stand for."""


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """The versions that a schedule depends on: Interlace's with a digest of its sources."""
    place, sources = str(Path(interlace.__file__).parent), hashlib.sha256()
    for folder, _, names in sorted(os.walk(place)):  # in a third of the time of `Path.rglob`
        for name in sorted(names):
            if name.endswith((".py", ".txt")):
                sources.update(f"{folder.removeprefix(place)}/{name}".encode())
                sources.update(Path(folder, name).read_bytes())
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "interlace": f"{interlace.__version__} {sources.hexdigest()[:DIGITS]}",
        "torch": torch.__version__,
        "triton": triton,
    }


def machine_fact(machine: Machine) -> str:
    """The calibration that strategies are chosen by, as a fact of a key."""
    return f"{machine.name} {digest(repr(machine))[:DIGITS]}"


@dataclass(frozen=True, slots=True)
class Key:
    """The facts that a schedule depends on."""

    kind: str
    facts: Mapping[str, str]

    @classmethod
    def of(
        cls,
        graph: Program,
        digests: Digests,
        options: Options,
        machine: Machine,
        device: str,
        groups: Mapping[str, ProcessGroup],
    ) -> Key:
        """The key of a serial Program with these digests, which is lowered with these options for
        this machine."""
        there = {name: [b.name() for b in backends_of(group)] for name, group in groups.items()}
        named = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in APART}
        places = [(op.site, op.loc.module and str(op.loc)) for op in graph.ops]
        facts = {
            "graph": digest(repr((digests.text, graph.sites, graph.remarks, places))),
            **{f"option {name}": str(value) for name, value in named.items()},
            "calibration": machine_fact(machine),
            "device": gpus_of(device) or device,
            "backends": _json({name: sorted(set(names)) for name, names in there.items()}),
            **versions(),
        }
        return cls(graph.name, facts)

    @property
    def of_graph(self) -> str:
        """The part of its name that all entries of the graph share."""
        return f"{re.sub('[^0-9A-Za-z_]', '_', self.kind)}-{self.facts['graph'][:DIGITS]}"

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.of_graph}-{digest(_json(dict(self.facts)))[:DIGITS]}.json"


@dataclass(frozen=True, slots=True)
class KeptSchedule:
    """A kept schedule."""

    text: str
    """The entry as a file has it."""
    facts: Mapping[str, str]
    program: Program
    proof: Proof | None
    """The proof of what ran; None where it has remarks, which are not kept, or is of a set of
    Programs that differ."""

    @classmethod
    def of(cls, key: Key, program: Program, agreement: Agreement) -> KeptSchedule:
        """The entry of a Program that ranks agreed on and proved."""
        proof, written = None if agreement.texts else agreement.proof, print_program(program)
        content = {
            "format": FORMAT,
            "facts": dict(key.facts),
            "program": written,
            "proof": proof and _told(program, proof, digest(written)),
        }
        text = _json({"content": content, "digest": digest(_json(content))})
        return cls(text, key.facts, program, proof)

    @classmethod
    @no_collections()
    def read(cls, text: str) -> KeptSchedule:
        """The entry that a file holds; ValueError where it is none."""
        with no_entry():
            content, facts = content_of(text)
            program = parse(content["program"])
            proof = _proof_of(content["proof"], digest(content["program"]))
            return cls(text, facts, program, proof)


@contextlib.contextmanager
def no_entry() -> Iterator[None]:
    """Raises ValueError for whatever a text that is no entry leads to."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RecursionError, InterlaceError) as error:
        raise ValueError(f"{type(error).__name__}: {error}".partition("\n")[0]) from error


def content_of(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of an entry, which is whole, and its facts; ValueError where it is not."""
    with no_entry():
        whole = json.loads(text)
        if whole["digest"] != digest(_json(whole["content"])):
            raise ValueError("it is damaged: its digest is another")
        content: dict[str, Any] = whole["content"]
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, not {FORMAT}")
        return content, {str(name): str(value) for name, value in content["facts"].items()}


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of kept schedules."""

    folder: Path

    @classmethod
    def of(cls, options: Options) -> Store | None:
        """The store of these options; None: nothing is kept."""
        if options.cache == "off" or (options.cache == "auto" and not are_graphs_cached()):
            return None
        return cls(default_folder() if options.cache == "auto" else Path(options.cache))

    def find(self, key: Key) -> KeptSchedule | None:
        """The entry of these facts, and None where there is none that can be used."""
        path = self.folder / key.name
        try:
            entry = KeptSchedule.read(path.read_text(encoding="utf-8"))
            if entry.facts != key.facts:
                raise ValueError("it has other facts than its name says")
        except FileNotFoundError:
            log.info("no kept schedule of this %s graph: %s", key.kind, self._why(key))
            return None
        except (OSError, ValueError) as error:
            log.warning("%s is not used, and is written anew: %s", path, error)
            return None
        record(key.name, entry)
        return entry

    def keep(self, key: Key, entry: KeptSchedule) -> None:
        """Writes an entry; where that fails, it is not kept, and the log says why."""
        try:
            write_whole(self.folder / key.name, entry.text)
        except InterlaceError as error:
            log.warning("a schedule is not kept: %s", error)
            return
        record(key.name, entry)

    def facts(self, pattern: str = "*") -> list[dict[str, str] | None]:
        """The facts of the entries in files of these names; None for a file that holds none."""
        found: list[dict[str, str] | None] = []
        for path in sorted(self.folder.glob(f"{pattern}.json")):
            try:
                found.append(content_of(path.read_text(encoding="utf-8"))[1])
            except (OSError, ValueError):
                found.append(None)
        return found

    def _why(self, key: Key) -> str:
        """Why there is no entry of a key: what differs in those of the same graph."""
        names = key.facts.keys()
        others = filter(None, self.facts(f"{key.of_graph}-*"))
        reasons = {name for facts in others for name in names if facts.get(name) != key.facts[name]}
        if reasons:
            return f"it was compiled with another {', another '.join(sorted(reasons))}"
        return f"it is new to {self.folder}"


def misfits(facts: Mapping[str, str]) -> list[str]:
    """The facts of an entry that are not those of this installation and machine."""
    device = "cpu" if facts.get("device") == "cpu" else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        return ["device"]
    known = {name: {value} for name, value in versions().items()} | machine_facts(device)
    return [name for name, values in known.items() if facts.get(name) not in values]


@lru_cache(maxsize=2)
def machine_facts(device: str) -> dict[str, set[str]]:
    """The facts that entries of this machine may have, for `cpu` or `cuda`."""
    machines = [machine_for(Options(graph=graph), device) for graph in (False, True)]
    return {
        "device": {gpus_of(device) or device},
        "calibration": set(map(machine_fact, machines)),
    }


def default_folder() -> Path:
    """The folder beside torch's own cache."""
    return Path(cache_dir()) / FOLDER


def shared(
    entries: Mapping[int, Note], own: KeptSchedule | None, board: Board, me: int, limit_s: float
) -> KeptSchedule | None:
    """The entry that this rank is to use: None on all ranks, or on none.

    Each rank's note has the name of its key and the digest of its entry, which is empty where it
    has none; the key is empty where it keeps nothing.
    """
    holders: dict[str, int] = {}
    for rank, note in sorted(entries.items()):
        if note["kept"][1]:
            holders.setdefault(note["kept"][0], rank)
    keys = {note["kept"][0] for note in entries.values()}
    if (
        "" in keys
        or keys - holders.keys()
        or len({str(n["kernels"]) for n in entries.values()}) > 1
    ):
        return None
    wanted = {key: entries[rank]["kept"][1] for key, rank in holders.items()}
    lacking = [r for r, n in sorted(entries.items()) if n["kept"][1] != wanted[n["kept"][0]]]
    key = entries[me]["kept"][0]
    if any(entries[rank]["kept"][0] == key for rank in lacking) and holders[key] == me:
        assert own is not None
        board.post(text_topic(me, entries[me]), {"text": own.text})
    if me not in lacking:
        return own
    holder = holders[key]
    notes = board.collect({holder: text_topic(holder, entries[holder])}, limit_s)
    if holder not in notes:
        raise AgreementError(
            f"rank {holder} did not hand over its kept schedule within {limit_s:g} s: see whether "
            "it failed or stalled"
        )
    return KeptSchedule.read(notes[holder]["text"])


# -- proofs ----------------------------------------------------------------------------------------


def _told(program: Program, proof: Proof, text: str) -> dict[str, Any] | None:
    """A proof as plain data, with the digest of the text that it is of; its sizes are the head of a
    Program that does nothing."""
    report = proof.report
    if report.findings or report.num_left_out:
        return None
    head = Program(name="sizes", teams=program.teams, sizes=report.sizes, ranks=program.ranks)
    return {
        "text": text,
        "of": asdict(proof.of),
        "num_ops": report.num_ops,
        "num_ranks": report.num_ranks,
        "seconds": report.seconds,
        "sizes": print_program(head) if report.sizes.sizes else "",
        "single": report.single,
        "symmetry": report.symmetry.to_json() if report.symmetry else None,
        "in_order": report.in_order,
    }


def _proof_of(told: dict[str, Any] | None, text: str) -> Proof | None:
    if told is None:
        return None
    if told["text"] != text:
        raise ValueError("its proof is of another text")
    report = Report(
        (),
        told["num_ops"],
        told["num_ranks"],
        seconds=told["seconds"],
        sizes=parse(told["sizes"]).sizes if told["sizes"] else FIXED,
        single=told["single"],
        symmetry=told["symmetry"] and Symmetry(**{k: (*v,) for k, v in told["symmetry"].items()}),
        in_order=told["in_order"],
    )
    return Proof(Digests(**told["of"]), report)


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# -- torch's archive -------------------------------------------------------------------------------


@CacheArtifactFactory.register
class ScheduleArtifact(CacheArtifact):
    """A kept schedule in the archive of `torch.compiler.save_cache_artifacts()`."""

    @staticmethod
    def type() -> str:
        """The name by which torch finds this class."""
        return "interlace"

    def populate_cache(self) -> None:
        """Puts the entry into the folder of this process."""
        if Path(self.key).name != self.key:  # a name from elsewhere
            log.warning("a kept schedule of the archive is not used: its key is %r", self.key)
            return
        try:
            write_whole(default_folder() / self.key, self.content.decode())
        except (InterlaceError, UnicodeDecodeError) as error:
            log.warning("a kept schedule of the archive is not used: %s", error)


def record(name: str, entry: KeptSchedule) -> None:
    """Has torch take an entry into its archive."""
    CacheArtifactManager.record_artifact(ScheduleArtifact.type(), name, entry.text.encode())
