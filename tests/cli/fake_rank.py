"""A rank that does not train: what `launch` does with each way of ending. Run by test_launch.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def main() -> None:
    """Does what the settings say this rank does."""
    settings = json.loads(sys.argv[1])
    rank, does = settings["rank"], settings["does"]
    mine = does[rank] if rank < len(does) else does[-1]

    def tell(**event: object) -> None:
        print(json.dumps({**event, "rank": rank}), flush=True)

    tell(event="way", way="eager", doing="nothing")
    if rank == 0:
        tell(event="store", port=4321)
    elif mine != "deaf":
        assert sys.stdin.readline().strip() == "4321"
    if mine == "die":
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if mine == "exit":
        sys.exit(7)
    if mine == "hang":
        time.sleep(600)
    if mine == "wait":  # until the parent is gone
        sys.stdin.read()
    if mine in ("team", "peer", "foreign"):
        kind = {"team": "TeamError", "peer": "PeerError", "foreign": "ValueError"}[mine]
        if mine == "team":
            time.sleep(0.3)  # those who only repeat it are heard first
        tell(event="error", type=kind, message=f"{mine} said", ours=mine != "foreign")
        sys.exit(3)
    if rank == 0:
        tell(event="report", report={"port": 4321, "lesson": settings["lesson"]})


main()
