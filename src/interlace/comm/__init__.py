"""Teams and what moves bytes between their ranks.

teams.py              a team over a process group, its set-up and reset
connections.py        a team's backends of torch, connected by all of its ranks or by none
backends.py           backends of torch that a team has for itself
control.py            the block where ranks see each other's runs, progress and errors
signals.py            counters in shared memory, and the one bounded wait
patience.py           time-outs in time that was seen to pass, and calls that may not come back
slots.py              the pool of symmetric slots, two copies each
registered.py         parameters of callers that peers reach
workspace.py          an Executor's signals, message boxes and staging areas
collectives.py        every kind of collective on gloo, NCCL or UCC
peer_collectives.py   the same kinds through shared memory
messages.py           Send, Recv and Group
board.py, greeting.py, sharing.py, shared_memory.py, liveness.py, reductions.py: what these stand on
"""

from interlace.comm.backends import BACKENDS, limit_s
from interlace.comm.board import Board
from interlace.comm.collectives import Spec, bind_collective
from interlace.comm.control import Control
from interlace.comm.messages import Incoming, Outgoing, PeerIncoming, PeerOutgoing, exchange
from interlace.comm.peer_collectives import bind_peer_collective, staged_nbytes
from interlace.comm.registered import Registered, share_on_host
from interlace.comm.shared_memory import Segment
from interlace.comm.signals import Wait, fence, stamp
from interlace.comm.slots import Slot, SlotPool, Use
from interlace.comm.teams import TeamComm, known_lives, known_team, release_teams, team_of
from interlace.comm.workspace import Demand, Message, Workspace

__all__ = [
    "BACKENDS",
    "Board",
    "Control",
    "Demand",
    "Incoming",
    "Message",
    "Outgoing",
    "PeerIncoming",
    "PeerOutgoing",
    "Registered",
    "Segment",
    "Slot",
    "SlotPool",
    "Spec",
    "TeamComm",
    "Use",
    "Wait",
    "Workspace",
    "bind_collective",
    "bind_peer_collective",
    "exchange",
    "fence",
    "known_lives",
    "known_team",
    "limit_s",
    "release_teams",
    "share_on_host",
    "staged_nbytes",
    "stamp",
    "team_of",
]
