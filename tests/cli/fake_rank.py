"""Ranks that do not train: what `launch` does with each way of ending. For test_launch.py."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from interlace import errors
from interlace.launch import Tell


def work(settings: Mapping[str, Any], tell: Tell) -> dict[str, Any] | None:
    """Does what the settings say this rank does."""
    rank, does = int(os.environ["RANK"]), settings["does"]
    (Path(settings["folder"]) / str(os.getpid())).touch()
    tell({"event": "way", "way": "eager", "doing": "nothing"})
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set(f"up/{rank}", "")
    store.wait([f"up/{other}" for other in range(len(does))])
    match does[rank]:
        case "die":
            frames = "".join(f"frame #{number}: in a library\n" for number in range(30))
            print(f"the last words\n{frames}", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hang" | "wait":  # until the parent ends it
            time.sleep(600)
        case "team":
            raise errors.TeamError("team said")
        case "foreign":
            raise ValueError("foreign said")
    return {"world": os.environ["WORLD_SIZE"], "does": does} if rank == 0 else None
