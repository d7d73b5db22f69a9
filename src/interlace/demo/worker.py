"""What each rank of the demo does: train every way, then put together what all ranks saw.

    report = work(lesson, out=Path("interlace-demo"), tell=print)   # under torchrun, on every rank

`python -m interlace.demo.worker` is the same for a rank that `launch.py` started: it tells its
parent in lines of JSON, and ends when the parent is gone.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from interlace.cost import Timeline
from interlace.demo.data import read_text
from interlace.demo.report import Graph, Outcome, make_report
from interlace.demo.train import WAYS, Lesson, Trained, train
from interlace.errors import InterlaceError

Tell = Callable[[dict[str, Any]], None]


def work(lesson: Lesson, out: Path, tell: Tell) -> dict[str, Any] | None:
    """Trains all ways on this rank of the default process group; rank 0 writes and reports."""
    rank, world = dist.get_rank(), dist.get_world_size()
    lesson.model.check(world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    text = read_text()
    store = dist.distributed_c10d._get_default_store()
    outcomes: list[Outcome] = []
    for way in WAYS:
        trained = train(way, lesson, mesh, text, tell)
        store.set(f"demo/{way}/{rank}", json.dumps(_seen(trained)))
        if rank == 0:
            seen = [json.loads(store.get(f"demo/{way}/{other}")) for other in range(world)]
            outcomes.append(_together(trained, seen))
        dist.barrier()
    torch.compiler.reset()
    report = make_report(lesson, world, outcomes, out) if rank == 0 else None
    dist.barrier()
    return report


def _seen(trained: Trained) -> dict[str, Any]:
    """What the other ranks need to know of this one."""
    return {
        "gradients": trained.gradients,
        "parameters": trained.parameters,
        "timelines": [bound.executor.timeline().to_json() for bound in trained.captured.bound],
    }


def _together(trained: Trained, seen: list[dict[str, Any]]) -> Outcome:
    """One way, as all ranks saw it."""
    graphs: list[Graph] = []
    for place, bound in enumerate(trained.captured.bound):
        parts = [Timeline.from_json(rank["timelines"][place]) for rank in seen]
        spans = tuple(span for part in parts for span in part.spans)
        measured = Timeline(spans, bound.program.name, "measured")
        graphs.append(Graph(bound.kind, bound.program, bound.report, measured))
    return Outcome(
        way=trained.way,
        losses=trained.losses,
        step_s=trained.step_s,
        gradients=[rank["gradients"] for rank in seen],
        parameters=[rank["parameters"] for rank in seen],
        graphs=graphs,
    )


def main() -> None:
    """A rank that `launch.py` started: settings come as JSON, and so does what it tells."""
    settings = json.loads(sys.argv[1])
    rank, world = settings["rank"], settings["world"]
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)  # whatever else prints goes to the log

        def tell(event: dict[str, Any]) -> None:
            if rank == 0 or event["event"] == "error":
                channel.write(json.dumps({**event, "rank": rank}) + "\n")
                channel.flush()

        try:
            torch.set_num_threads(settings["threads"])
            lesson = Lesson.from_json(settings["lesson"])
            limit = timedelta(seconds=lesson.time_out_s)
            store = _store(rank, tell, limit)
            threading.Thread(target=_end_with_parent, args=(sys.stdin,), daemon=True).start()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
            report = work(lesson, Path(settings["out"]), tell)
            dist.destroy_process_group()
            if report is not None:
                tell({"event": "report", "report": report})
        except BaseException as error:
            traceback.print_exc()
            ours = isinstance(error, InterlaceError)
            told = {"type": type(error).__name__, "message": str(error), "ours": ours}
            tell({"event": "error", **told})
            channel.flush()
            os._exit(3)  # threads of a broken run may not end by themselves


def _store(rank: int, tell: Tell, limit: timedelta) -> dist.TCPStore:
    """Rank 0 opens the store on a port of its own; the others hear of the port from the parent."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        tell({"event": "store", "port": store.port})
        return store
    port = sys.stdin.readline().strip()
    if not port:
        os._exit(3)  # the parent gave up
    return dist.TCPStore("127.0.0.1", int(port), is_master=False, timeout=limit)


def _end_with_parent(stdin: TextIO) -> None:
    """The parent holds the other end of stdin: when that closes, nobody needs this rank."""
    while stdin.readline():
        pass
    os._exit(4)


if __name__ == "__main__":
    main()
