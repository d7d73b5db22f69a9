"""`save_recording`: what this rank had recorded, into a file for `check_recorded`.

    threading.Timer(600, save_recording, ["dumps"]).start()    # on every rank

It holds torch's flight recorder, with the ranks of each process group (gloo does not record them),
and where Python's main thread is.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from interlace.errors import InterlaceError

Plain = dict[str, Any]
NUM_FRAMES = 64


def save_recording(folder: str | os.PathLike[str]) -> Path:
    """Writes what this rank has recorded so far into a folder, as `trace_rank_3.json`.

    It waits for no other rank, so any thread of a rank that hangs may call it.

    Args:
        folder: the folder, which is made where need be.

    Returns:
        The path of the file.

    Raises:
        InterlaceError: there is no process group, or the file cannot be written.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        raise InterlaceError("there is no process group: call save_recording() while there is one")
    rank = dist.get_rank()
    config = _groups()
    entries = _entries(config)
    plain: Plain = {
        "version": "2.10",
        "rank": rank,
        "pg_config": config,
        "entries": entries,
        "host": _stack(),
    }
    path = Path(folder) / f"trace_rank_{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain), encoding="utf-8")
    except OSError as error:
        raise InterlaceError(
            f"cannot write {path} ({error.strerror}): name another folder"
        ) from error
    return path


def _groups() -> Plain:
    """The process groups of this rank, as a dump lists them."""
    import torch.distributed as dist

    from interlace.torch_private import process_groups

    found: Plain = {}
    for group in process_groups():
        ranks = sorted(dist.get_process_group_ranks(group))
        name = group.group_name
        found[name] = {"name": name, "desc": group.group_desc, "ranks": str(ranks)}
    return found


def _entries(config: Plain) -> list[Plain]:
    """Records of gloo and NCCL, in order of time; each library counts calls of a group for itself,
    so where both serve one group, gloo's part is a group of its own."""
    from interlace.torch_private import flight_records

    records = flight_records()
    recorded = [json.loads(records.get(library, "{}")) for library in ("nccl", "gloo")]
    nccl, gloo = (plain.get("entries", []) for plain in recorded)
    for plain in recorded:  # Interlace's own groups are none of torch's process groups
        for name, group in plain.get("pg_config", {}).items():
            if name.startswith("interlace/"):
                config[name] = group
    if not nccl or not gloo:
        return nccl or gloo
    for entry in gloo:
        name, desc = entry["process_group"]
        entry["process_group"] = [f"{name}/gloo", desc]
        if name in config:
            config[f"{name}/gloo"] = {**config[name], "name": f"{name}/gloo"}
    first = nccl[0]["record_id"] + gloo[0]["record_id"]
    merged = sorted([*nccl, *gloo], key=lambda entry: entry["time_created_ns"])
    for number, entry in enumerate(merged):
        entry["record_id"] = first + number
    return merged


def _stack() -> list[Plain]:
    """Where the main thread is, the innermost frame first, from the innermost that is the user's:
    neither Python's own, nor torch's, nor ours."""
    main = threading.main_thread().ident
    frame = sys._current_frames().get(main) if main is not None else None
    stack = traceback.extract_stack(frame)[::-1] if frame is not None else []
    own = [one for one in stack if not _is_library(one.filename)]
    return [
        {"name": one.name, "filename": one.filename, "line": one.lineno or 0}
        for one in (own or stack)[:NUM_FRAMES]
    ]


def _is_library(file: str) -> bool:
    standard = file.startswith(os.path.dirname(os.__file__)) and "site-packages" not in file
    ours = file.startswith(str(Path(__file__).parents[2]))
    return standard or ours or "/torch/" in file or file.startswith("<")
