"""`python -m interlace.demo.rank SETTINGS`: a rank that `launch.py` started.

It tells its parent in lines of JSON what happens, hears from it (on stdin) where the store is, and
ends as soon as the parent is gone: that is watched before anything slow is imported.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.demo.lesson import Lesson
from interlace.errors import InterlaceError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

Tell = Callable[[dict[str, Any]], None]
Connect = Callable[[timedelta], "TCPStore"]
Work = Callable[[dict[str, Any], Connect, Tell], dict[str, Any] | None]
FAILED, ORPHANED = 3, 4


def main() -> None:
    """Works as one rank of the demo, by the settings on the command line."""
    serve(_work)


def serve(work: Work) -> None:
    """Does `work` as one rank that `launch` started, and tells the parent how it went."""
    settings = json.loads(sys.argv[1])
    rank = settings["rank"]
    heard: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(heard,), daemon=True).start()
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)  # whatever else prints goes to the log

        def tell(event: dict[str, Any]) -> None:
            if rank == 0 or event["event"] in ("started", "error"):
                channel.write(json.dumps({**event, "rank": rank}) + "\n")
                channel.flush()

        try:
            tell({"event": "started"})
            report = work(settings, lambda limit: _store(rank, heard, tell, limit), tell)
            if report is not None:
                tell({"event": "report", "report": report})
        except BaseException as error:
            traceback.print_exc()
            ours = isinstance(error, InterlaceError)
            told = {"type": type(error).__name__, "message": str(error), "ours": ours}
            tell({"event": "error", **told})
            os._exit(FAILED)  # threads of a broken run may not end by themselves


def _work(settings: dict[str, Any], connect: Connect, tell: Tell) -> dict[str, Any] | None:
    import torch

    from interlace.demo.group import joined
    from interlace.demo.worker import work

    torch.set_num_threads(settings["threads"])
    rank, world = settings["rank"], settings["world"]
    lesson = Lesson.from_json(settings["lesson"])
    limit = timedelta(seconds=lesson.time_out_s)
    how = {"store": connect(limit), "rank": rank, "world_size": world}
    with joined(lesson.device, limit, local=rank, **how) as device:
        return work(lesson, Path(settings["out"]), tell, device)


def _store(rank: int, heard: queue.Queue[str], tell: Tell, limit: timedelta) -> TCPStore:
    """Rank 0 opens the store on a port of its own; the others hear of the port from the parent."""
    from torch.distributed import TCPStore

    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
        tell({"event": "store", "port": store.port})
        return store
    return TCPStore("127.0.0.1", int(heard.get()), is_master=False, timeout=limit)


def _listen(heard: queue.Queue[str]) -> None:
    """Takes what the parent says; when stdin closes, the parent is gone and nobody needs this."""
    for line in sys.stdin:
        heard.put(line)
    os._exit(ORPHANED)


if __name__ == "__main__":
    main()
