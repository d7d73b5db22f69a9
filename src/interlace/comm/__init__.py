"""Teams and what moves bytes between their ranks.

teams.py         a team over a process group, its set-up and reset
resets.py        resets of all teams, also of those that are not set up
backends.py      a team's backends of torch, connected by all of its ranks or by none
control.py       the block where ranks see each other's runs, progress and errors
between_hosts.py the same where they share no memory
collectives.py   every kind of collective on gloo, NCCL or UCC; sums in rank order

rendezvous/      how ranks find one another, agree in bounded time, and notice who is gone
host/            what the processes of one host share: memory, signals, slots, messages
cuda/            the same on GPUs
"""

from interlace.comm.backends import limit_s
from interlace.comm.between_hosts import Contacts, HostsControl
from interlace.comm.collectives import Spec, bind_collective
from interlace.comm.control import Control
from interlace.comm.host.messages import Mailbox, Transfer, exchange
from interlace.comm.host.peer_collectives import bind_peer_collective, staged_nbytes
from interlace.comm.host.shared_memory import Segment
from interlace.comm.host.signals import BoundedWait, fence, stamp
from interlace.comm.host.slots import Slot, SlotPool
from interlace.comm.host.workspace import Demand, Workspace
from interlace.comm.rendezvous.board import Board
from interlace.comm.teams import (
    TeamComm,
    attending,
    counts,
    release_teams,
    team_of,
)
