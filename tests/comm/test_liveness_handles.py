"""Watching processes holds descriptors, and lets go of them with the watcher."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from interlace.comm.rendezvous.liveness import PeerProcess, identity

OPEN = Path("/proc/self/fd")


@pytest.mark.skipif(not (OPEN.is_dir() and hasattr(os, "pidfd_open")), reason="needs pidfds")
def test_a_forgotten_watcher_leaves_no_descriptor() -> None:
    before = len(list(OPEN.iterdir()))
    lives = [PeerProcess.of(*identity()) for _ in range(8)]
    assert all(life.alive() for life in lives)
    if len(list(OPEN.iterdir())) == before:
        pytest.skip("this system lets no process be watched")
    del lives
    assert len(list(OPEN.iterdir())) == before
