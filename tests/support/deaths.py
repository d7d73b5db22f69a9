"""Ranks that are killed at random moments of set-up, with the store on rank 0.

    victim, errors = trial(pool, 3, seed)
    assert not wrong(victim, errors)

In a trial the ranks of a new job agree, prepare and run one Program after another until one of them
is killed. The others end with the error that they get, as scripts do.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.runtime.programs import TEXTS, inputs_of, prepared, world_group
from tests.support.pool import Pool

from interlace.comm import release_teams
from interlace.errors import InterlaceError
from interlace.frontend.teams import consent_of_ranks

LIMIT_S = 20.0
LONGEST_S = 0.5
"""The latest moment of a death; set-up goes on until then."""
_DEATHS = (
    r"process of ((?:rank \d+(?: and )?)+) has ended",
    r"((?:ranks? [\d, and]+)) cannot [^:]*: the process has ended",
    r"(rank \d+) of team \w+ died",
)


def blamed(text: str) -> set[int]:
    """The ranks that an error says have ended by themselves."""
    told = (match for pattern in _DEATHS for match in re.findall(pattern, text))
    return {int(number) for match in told for number in re.findall(r"\d+", match)}


def job(folder: str, victim: int, delay: float, seed: int) -> None:
    """One rank of a job that ends when `victim` is killed; its error is left in the folder."""
    rank, world = dist.get_rank(), dist.get_world_size()
    store: Any = None
    told: list[Any] = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        told = [store.port]
    dist.broadcast_object_list(told)
    dist.destroy_process_group()
    store = store or dist.TCPStore("127.0.0.1", told[0], is_master=False)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    dist.barrier()
    if rank == victim:
        threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begun, found = time.monotonic(), ("nothing", "")
    try:
        for number, kind in enumerate(cycle(random.Random(seed).sample(list(TEXTS), len(TEXTS)))):
            consent_of_ranks([str(number)], [(world_group(), True)], LIMIT_S)
            with prepared(kind, timeout_s=LIMIT_S) as executor:
                executor.run(inputs_of(executor.program, rank, seed))
            if number % 2:
                release_teams()
    except Exception as error:
        kind = "" if isinstance(error, InterlaceError) else "untyped "
        found = kind + type(error).__name__, str(error)
    seconds = time.monotonic() - begun - delay
    Path(folder, f"{rank}.part").write_text(json.dumps([*found, seconds]))
    os.rename(Path(folder, f"{rank}.part"), Path(folder, f"{rank}.json"))
    os._exit(1)


def trial(pool: Pool, world: int, seed: int) -> tuple[int, list[tuple[str, str, float]]]:
    """Who was killed, and the errors of the others with their seconds."""
    draw = random.Random(seed)
    victim, delay = draw.randrange(world), draw.uniform(0.0, LONGEST_S)
    with tempfile.TemporaryDirectory(prefix="deaths-") as folder:
        pool(world).run(job, folder, victim, delay, seed, may_die=range(world), timeout_s=60)
        survivors = [rank for rank in range(world) if rank != victim]
        return victim, [json.loads(Path(folder, f"{r}.json").read_text()) for r in survivors]


def wrong(victim: int, errors: list[tuple[str, str, float]]) -> list[str]:
    """Lists the wrong reports of survivors; empty where all blame only the rank that was killed."""
    return [
        f"rank {victim} was killed; {error} after {seconds:.1f} s: {text}"
        for error, text, seconds in errors
        if blamed(text) != {victim} or error.startswith("untyped")
    ]
