"""Schedules that outlive their process: used again, refused, shared between ranks, shipped."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.config as dist_config
from tests.frontend.models import local
from tests.frontend.test_schedules import batch, mlp
from tests.support.pool import Pool
from torch import fx, nn

import interlace
from interlace.cost import default_machine
from interlace.errors import UnsupportedError
from interlace.frontend import backend, binding
from interlace.frontend.explain import graphs_of
from interlace.frontend.importing.nodes import name_groups
from interlace.frontend.store import KeptSchedule, Key, Store, content_of, default_folder
from interlace.options import Options
from interlace.runtime.prepare import agreement
from interlace.runtime.prepare.agreement import Agreement, Digests, Proof, agree_and_prove, digest
from interlace.verify import check

TEXT = """
def double(x: f32[4], s: f32[()]):
    main: call("aten.mul.Tensor", x, s, out=(y := f32[4]))
    return y
"""
STAGES = "import, cache, agreement, choice, lowering, proof, binding"


def bits(x: torch.Tensor) -> bytes:
    return local(x).detach().contiguous().numpy().tobytes()


def results(run: Callable[..., torch.Tensor], model: nn.Module) -> list[bytes]:
    """The bits of a step's loss and gradients."""
    model.zero_grad()
    loss = run(batch()).square().mean()
    loss.backward()
    return [bits(loss), *(bits(p.grad) for p in model.parameters() if p.grad is not None)]


class Lines(logging.Handler):
    """Lines of Interlace's log, while it is open."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._log = logging.getLogger("interlace.frontend")

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        self._log.addHandler(self)
        self._log.setLevel(logging.INFO)
        return self.lines

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.setLevel(logging.NOTSET)


def step(cache: str, prove: bool = True) -> tuple[list[bytes], list[bool], list[str]]:
    """The bits of a compiled step, which graphs an earlier process had compiled, and the log. With
    `prove` False, whoever lowers or proves fails."""
    torch.compiler.reset()
    model = mlp()
    with pytest.MonkeyPatch.context() as patch, Lines() as lines:
        if not prove:
            patch.delattr(binding, "lower")
            patch.delattr(agreement, "verdict")
        compiled = torch.compile(model, backend=backend, options={"cache": cache})
        told = results(compiled, model)
    kept = [bound.is_kept for graph in graphs_of(compiled) for bound in graph.bound]
    return told, kept, lines


def test_a_second_process_neither_lowers_nor_proves(pool: Pool, tmp_path: Path) -> None:
    first = pool(2).run(step, str(tmp_path), replace=True)
    second = pool(2).run(step, str(tmp_path), False)
    for (wanted, kept, lines), (found, kept_then, lines_then) in zip(first, second, strict=True):
        assert found == wanted
        assert (kept, kept_then) == ([False, False], [True, True])
        (missed, _), (bound, _) = ([x for x in lines if w in x] for w in ("no kept", "bound "))
        assert missed.endswith(f"it is new to {tmp_path}")
        assert re.sub(r" \d+\.\d+", "", re.search(r"\((.*)\)", bound)[1]) == STAGES  # type: ignore[index]
        ours = [line for line in lines_then if "bound " in line]
        assert all(line.endswith(", as an earlier process kept it") for line in ours)
        assert len(ours) == 2


def cases(folder: Path) -> dict[str, Any]:
    """Steps whose ranks have folders in different states: rank 0's is damaged, rank 1's is empty,
    one rank keeps nothing."""
    own = str(folder / str(dist.get_rank()))
    told: dict[str, Any] = {"new": step(own)[:2]}
    if dist.get_rank() == 1:
        for path in Path(own).iterdir():
            path.unlink()
    told["handed over"] = step(own, False)[:2]
    told["written"] = len(list(Path(own).iterdir()))
    if dist.get_rank() == 0:
        for path in Path(own).iterdir():
            path.write_text(path.read_text()[:-40])
    told["damaged"] = step(own, False)[:2]
    told["off"] = step("off" if dist.get_rank() else own)[:2]
    told["on again"] = step(own, False)[:2]
    return told


def test_a_rank_that_has_nothing_is_handed_what_a_peer_has(pool: Pool, tmp_path: Path) -> None:
    for told in pool(2).run(cases, tmp_path):
        wanted, kept = told["new"]
        assert kept == [False, False]
        assert told["handed over"] == told["damaged"] == (wanted, [True, True])
        assert told["written"] == 2
        assert told["off"] == (wanted, [False, False])
        assert told["on again"] == (wanted, [True, True])


def entry_of(text: str = TEXT, **options: Any) -> tuple[Key, KeptSchedule]:
    """The entry of a Program, as its own lowering."""
    program = interlace.parse(text)
    digests = Digests.of(program)
    key = Key.of(program, digests, Options(**options), default_machine("cpu"), "cpu", {})
    proof = Proof(Digests.of(program), check(program))
    return key, KeptSchedule.of(key, program, Agreement(1, proof))


def changed(text: str, **changes: Any) -> str:
    """An entry with other content and the right digest."""
    content = content_of(text)[0] | changes
    plain = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return json.dumps({"content": content, "digest": digest(plain)})


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no_object": lambda text: "[1]",
    "a_bit": lambda text: text.replace("aten.mul.Tensor", "aten.mum.Tensor"),
    "the_verdict": lambda text: text.replace('"num_ranks":1', '"num_ranks":8'),
    "foreign": lambda text: entry_of(TEXT.replace("mul", "add"))[1].text,
    "another_format": lambda text: changed(text, format=0),
    "no_program": lambda text: changed(text, program="def f("),
    "no_proof": lambda text: changed(text, proof={}),
    "nothing": lambda text: changed(text, facts=None),
    "no_facts": lambda text: changed(text, facts=[]),
    "deep": lambda text: "[" * 100_000 + "]" * 100_000,
    "another_text": lambda text: changed(text, program=TEXT.replace("mul", "add")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_an_entry_that_is_not_right_is_a_miss(
    damage: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (key, entry), store = entry_of(), Store(tmp_path)
    store.keep(key, entry)
    found = store.find(key)
    assert found is not None
    assert (found.program, found.proof) == (entry.program, entry.proof)
    path = tmp_path / key.name
    path.write_text(damage(path.read_text()))
    assert store.find(key) is None
    (line,) = caplog.messages
    assert line.startswith(f"{path} is not used, and is written anew: ")
    (tmp_path / f"{key.of_graph}-of_another_key.json").write_text(path.read_text())
    path.unlink()
    assert store.find(key) is None, "the look for what differs meets it, too"
    store.keep(key, entry)
    assert store.find(key) == found


def test_the_proof_of_programs_that_differ_is_kept_for_none_of_them() -> None:
    key, entry = entry_of()
    assert entry.proof is not None
    agreement = Agreement(1, entry.proof, texts=((TEXT, (0,)), (TEXT.replace("mul", "add"), (1,))))
    of_a_set = KeptSchedule.of(key, entry.program, agreement)
    assert of_a_set.proof is None
    assert KeptSchedule.read(of_a_set.text).proof is None


def test_other_facts_are_a_miss_that_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, entry = entry_of()
    store = Store(tmp_path)
    store.keep(key, entry)
    caplog.set_level(logging.INFO, "interlace.frontend.store")
    assert store.find(entry_of(strategy="ring", timeout_s=9.0)[0]) is None
    assert store.find(entry_of(timeout_s=9.0)[0]) is not None
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    from interlace.frontend.store import versions

    versions.cache_clear()
    try:
        assert store.find(entry_of()[0]) is None
    finally:
        versions.cache_clear()
    assert [line.partition(": ")[2] for line in caplog.messages] == [
        "it was compiled with another option strategy",
        "it was compiled with another torch",
    ]


def test_a_folder_that_cannot_be_written_keeps_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    key, entry = entry_of()
    Store(tmp_path / "file").keep(key, entry)
    assert Store(tmp_path / "file").find(key) is None
    assert "a schedule is not kept" in caplog.messages[0]


SIZES = """
def double(B: Size[8], x: f32[B]):
    assume(B >= 2, B <= 64)
    main: call("aten.mul.Tensor", x, 2.0, out=(y := f32[B]))
    return y
"""


def test_a_proof_keeps_the_sizes_that_it_is_for() -> None:
    program = interlace.parse(SIZES)
    proof = Proof(Digests.of(program), check(program))
    key = Key.of(program, Digests.of(program), Options(), default_machine("cpu"), "cpu", {})
    entry = KeptSchedule.of(key, program, Agreement(1, proof))
    read = KeptSchedule.read(entry.text)
    assert read.proof == proof
    assert read.proof is not None
    assert read.proof.report.sizes == proof.report.sizes
    known = agree_and_prove(read.program, 0, [], 1.0, known=read.proof)
    assert known.proof is read.proof


def writes(folder: Path) -> int:
    """Entries that were read whole while both ranks wrote one."""
    (key, entry), store = entry_of(), Store(folder)
    dist.barrier()
    found = 0
    for _ in range(100):
        store.keep(key, entry)
        found += store.find(key) is not None
    return found


def test_ranks_that_write_one_entry_read_it_whole(pool: Pool, tmp_path: Path) -> None:
    assert pool(2).run(writes, tmp_path) == [100, 100]
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


# -- torch's sockets -------------------------------------------------------------------------------


def in_folder(folder: Path) -> str:
    """Has torch's caches of this process in a folder of each rank; gives ours in it."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / str(dist.get_rank()))
    return str(default_folder())


def archived(folder: Path) -> tuple[list[bytes], list[bool], bytes]:
    """A step, and torch's archive of the caches."""
    told, kept, _ = step(in_folder(folder))
    archive, info = torch.compiler.save_cache_artifacts()  # type: ignore[misc]
    assert len(info.artifacts["interlace"]) >= 2
    return told, kept, archive


def from_archive(folder: Path, archives: list[bytes]) -> tuple[list[bytes], list[bool]]:
    """A step after the archive was loaded into an empty folder."""
    cache = in_folder(folder)
    assert torch.compiler.load_cache_artifacts(archives[dist.get_rank()]) is not None
    return step(cache, False)[:2]


def test_schedules_travel_in_the_archive_of_torch(pool: Pool, tmp_path: Path) -> None:
    first = pool(2).run(archived, tmp_path / "a", replace=True)
    archives = [archive for _, _, archive in first]
    second = pool(2).run(from_archive, tmp_path / "b", archives, replace=True)
    assert [kept for _, kept, _ in first] == [[False, False]] * 2
    assert second == [(told, [True, True]) for told, _, _ in first]


def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def aot_compiled(one: bool) -> tuple[bytes, list[bytes]]:
    """The model as torch writes it, and the bits of a step of the eager one; with `one`, rank 0
    alone traces."""
    model = mlp()
    wanted = results(model, model)
    if one and dist.get_rank():
        return b"", wanted
    with dist_config.patch(compile_on_one_rank=one):
        compiled: Any = torch.compile(forward, backend=backend, fullgraph=True)
        done = compiled.aot_compile(((model, batch()), {}))
        file = io.BytesIO(type(done).serialize(done).serialized_data)
    return file.getvalue(), wanted


def loaded(files: list[bytes]) -> list[bytes]:
    """The bits of a step of the model that was loaded."""
    model = mlp()
    data = io.BytesIO(files[dist.get_rank()] or files[0])
    run = torch.compiler.load_compiled_function(data)
    first = results(lambda x: run(model, x), model)
    assert results(lambda x: run(model, x), model) == first
    return first


@pytest.mark.parametrize("one", [False, True], ids=["each_rank", "one_rank"])
def test_a_function_that_torch_wrote_is_loaded(pool: Pool, one: bool) -> None:
    written = pool(2).run(aot_compiled, one, replace=True)
    files = [data for data, _ in written]
    assert bool(files[1]) != one
    found = pool(2).run(loaded, files, replace=True)
    plain = pool(2).run(step, "off")
    assert found == [told for told, _, _ in plain]
    for ours, (_, eager) in zip(found, written, strict=True):
        assert len(ours) == len(eager)


def test_sizes_by_rank_are_refused() -> None:
    import torch.distributed._ops.device_mesh  # registers the operator

    graph = fx.Graph()
    operator = torch.ops.device_mesh._runtime_compute_coordinate_on_dim.default
    graph.call_function(operator, (graph.placeholder("mesh"), 0))
    with pytest.raises(UnsupportedError, match="compile_on_one_rank"):
        name_groups(graph)


def dynamic() -> str:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", dist.group.WORLD)  # type: ignore[arg-type]

    compiled: Any = torch.compile(fn, backend=backend, fullgraph=True, dynamic=True)
    try:
        compiled.aot_compile(((torch.ones(4),), {}))
    except UnsupportedError as error:
        return str(error)
    return ""


def test_sizes_that_change_do_not_travel(pool: Pool) -> None:
    for told in pool(2).run(dynamic):
        assert "give torch.compile(..., dynamic=False)" in told
