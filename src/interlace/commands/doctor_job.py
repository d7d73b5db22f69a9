"""`interlace doctor` under torchrun: the hosts of a job, the links between them, what teams use.

    job = survey(checks, time_out_s=60)         # on every rank; rank 0 gets what was found
    show_job(job)

What ranks know of their hosts goes through the store, before gloo connects them: where gloo listens
on loopback, nothing could. Then a few MB are sent inside each host and between each and the next,
and the teams that there are, of each host's ranks and of all, are set up.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from ipaddress import ip_address
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interlace.commands.doctor import Inspection
from interlace.commands.output import say, table
from interlace.errors import BackendError, CommTimeoutError, InterlaceError
from interlace.ir import Team
from interlace.strategies import STRATEGIES, Strategy, names

if TYPE_CHECKING:
    from interlace.comm import Board
    from interlace_bench.ranks import Ranks
    from interlace_bench.transfers import Figure

Note = dict[str, Any]
SMALL, LARGE = 8, 1 << 20
"""Bytes of the messages."""
SIOCGIFADDR = 0x8915
SAME = "python", "torch", "interlace", "device"
"""What must be the same on every host."""
JOINING = "gloo", "NCCL", "device"
"""Where one of these is broken, ranks could only wait for each other."""


@dataclass(frozen=True, slots=True)
class Job:
    """What rank 0 tells. Plain data, as `--json` has it."""

    checks: list[Inspection]
    """Of rank 0's host, of other hosts where they differ, and of the job."""
    hosts: list[Note]
    links: list[Note]
    teams: list[Note]


def survey(found: Sequence[Inspection], time_out_s: float) -> Job | None:
    """Looks at the whole job; all its ranks call it, each with what it `found` on its host.

    Raises:
        CommTimeoutError: the store of torch.distributed did not answer in time.
        AgreementError: a rank did not come in time.
        BackendError: gloo, or NCCL, failed once the ranks were connected.
    """
    import torch.distributed as dist

    from interlace.comm import Board
    from interlace.launch import joined, prepare_for_gpus
    from interlace_bench.ranks import here, pick_device

    prepare_for_gpus(os.environ)
    device, limit = pick_device("auto"), timedelta(seconds=time_out_s)
    try:
        store, rank, world = next(dist.rendezvous("env://", timeout=limit))
    except (RuntimeError, ValueError) as error:
        raise CommTimeoutError(
            f"the ranks of this job did not meet in the store of torch.distributed: {error}. See "
            "that all are started, and that MASTER_ADDR and MASTER_PORT can be reached from here"
        ) from error
    board = Board(store, range(world), rank, "interlace/doctor", limit_s=time_out_s)
    board.announce()
    told = board.exchange("doctor", _note(found, device), time_out_s)
    hosts = _hosts(told)
    own = [*job_checks(hosts)]
    checks, links, teams = [*_local_checks(hosts), *own], list[Note](), list[Note]()
    if any(check.state == "broken" and check.name.startswith(JOINING) for check in own):
        return None if rank else Job(checks, hosts, links, teams)
    try:
        _connect(board, dist.PrefixStore("doctor/gloo", store), time_out_s)
    except InterlaceError as error:
        fix = "let hosts reach where gloo listens, on any port (firewalls: docs/how-to/hosts.md)"
        checks.append(Inspection("gloo between ranks", "broken", str(error), fix))
        return None if rank else Job(checks, hosts, links, teams)
    how: Any = {"store": dist.PrefixStore("doctor", store), "rank": rank, "world_size": world}
    try:
        with joined(device, limit, 3 * time_out_s, **how) as where:
            ranks = here(where)
            links = list(_links(ranks, hosts))
            teams = list(_teams(ranks, hosts, time_out_s))
            ranks.align()  # none leaves, perhaps with the store, while others ask it
    except (RuntimeError, ValueError) as error:
        name, reason = "NCCL" if device == "cuda" else "gloo", str(error).splitlines()[0]
        raise BackendError(f"{name} does not serve the ranks of this job: {reason}") from error
    failed = [(f"team of {team['name']}", team["problem"]) for team in teams]
    failed += [(f"messages, {link['link']}", link["error"]) for link in links]
    checks += [Inspection(what, "broken", why) for what, why in failed if why]
    return None if rank else Job(checks, hosts, links, teams)


def _connect(board: Board, store: Any, time_out_s: float) -> None:
    """Sees that gloo can connect all ranks, and raises on all what kept one; `init_process_group`
    alone would wait far longer on those that another cannot reach."""

    from interlace.comm.backends import connect

    def look() -> None:
        if board.is_over("gloo"):
            board.decide("gloo")  # raises what a peer gave up for

    everyone = {*board.ranks}
    known = "all ranks", look, lambda: board.ended(everyone) & everyone
    with board.attending(["gloo"]):
        connect("gloo", store, board.rank, len(everyone), time_out_s, *known)
    board.exchange("gloo", {}, time_out_s)


# -- what a rank tells ---------------------------------------------------------------------------


def _note(found: Sequence[Inspection], device: str) -> Note:
    import torch

    import interlace
    from interlace.comm.teams import host

    speaks = os.environ.get("LOCAL_RANK", "0") == "0"
    return {
        "host": host(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "interlace": interlace.__version__,
        "device": device,
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", ""),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", ""),
        "resolves": _resolved(socket.gethostname()),
        "checks": [asdict(item) for item in found] if speaks else [],
        **_gloo(),
    }


def _resolved(name: str) -> list[str]:
    """The addresses of a host name, as this host sees them."""
    try:
        return sorted({str(found[4][0]) for found in socket.getaddrinfo(name, None)})
    except OSError:
        return []


def _gloo() -> Note:
    """Where gloo listens on this host, each address with its interface; or why it cannot."""
    import torch.distributed as dist

    before = _listening()
    try:
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=1))
    except RuntimeError as error:
        return {"gloo": [], "gloo_error": str(error).splitlines()[0]}
    new = sorted({address for address, _ in _listening() - before})
    del alone
    return {"gloo": [[_interface(address), address] for address in new], "gloo_error": ""}


def _listening() -> set[tuple[str, int]]:
    """Addresses and ports where this process listens for TCP."""
    found = set[tuple[str, int]]()
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed since
            if not os.readlink(file).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as one:
                inet = one.family in (socket.AF_INET, socket.AF_INET6)
                if inet and one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found.add(one.getsockname()[:2])
    return found


def _interface(address: str) -> str:
    """The interface of this host whose IPv4 address that is; empty where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                found = fcntl.ioctl(one, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == address:
                    return name
    return ""


# -- what follows from it ------------------------------------------------------------------------


def _hosts(told: Sequence[Note]) -> list[Note]:
    """What ranks told, by host, in the order of their first ranks."""
    found: dict[str, Note] = {}
    for rank, note in enumerate(told):
        place = note.pop("host")
        known = found.setdefault(place, {"name": place.split("/")[0], "ranks": [], **note})
        known["ranks"].append(rank)
        known["checks"] = known["checks"] or note["checks"]
    return list(found.values())


def _local_checks(hosts: Sequence[Note]) -> Iterator[Inspection]:
    """What the first host found, and the others where that is another state."""
    first = {check["name"]: Inspection(**check) for check in hosts[0]["checks"]}
    yield from first.values()
    for host in hosts[1:]:
        for check in host["checks"]:
            name = check["name"]
            if name not in first or check["state"] != first[name].state:
                yield Inspection(**{**check, "name": f"{name} on {host['name']}"})


def job_checks(hosts: Sequence[Note]) -> Iterator[Inspection]:
    """Whether the hosts have the same, and can reach one another."""
    several = len(hosts) > 1
    for what in SAME:
        if len({host[what] for host in hosts}) > 1:
            listed = ", ".join(f"{host[what]} on {host['name']}" for host in hosts)
            yield Inspection(f"{what} of the hosts", "broken", listed, "have the same on each")
    for host in hosts:
        yield _gloo_check(host, several)
        asked, name = host["NCCL_SOCKET_IFNAME"], f"NCCL on {host['name']}"
        if host["device"] == "cuda" and several and asked == "lo":
            fix = "set NCCL_SOCKET_IFNAME on each host to its interface that joins them"
            yield Inspection(name, "broken", "NCCL_SOCKET_IFNAME=lo", fix)
        elif host["device"] == "cuda":
            yield Inspection(name, "ok", f"NCCL_SOCKET_IFNAME={asked}" if asked else "as it likes")


def _gloo_check(host: Note, several: bool) -> Inspection:
    """Whether other hosts can reach gloo on this one."""
    name, asked = f"gloo on {host['name']}", host["GLOO_SOCKET_IFNAME"]
    given = f"GLOO_SOCKET_IFNAME={asked}" if asked else "GLOO_SOCKET_IFNAME is not set"
    fix = "set GLOO_SOCKET_IFNAME on each host to its interface that joins them (`ip -br address`)"
    if host["gloo_error"]:
        return Inspection(name, "broken", f"{given}: {host['gloo_error']}", fix)
    found = f"listens on {_places(host)} ({given})"
    lost = not host["resolves"] or any(ip_address(each).is_loopback for each in host["resolves"])
    if several and lost:
        found += f"; to itself the host's name means {', '.join(host['resolves']) or 'no address'}"
    if several and any(ip_address(address).is_loopback for _, address in host["gloo"]):
        return Inspection(name, "broken", f"{found}: no other host can reach it", fix)
    if several and lost:
        found += ", so keep GLOO_SOCKET_IFNAME, and give torchrun addresses"
    return Inspection(name, "ok", found)


def _places(host: Note) -> str:
    return ", ".join(f"{name} {address}".strip() for name, address in host["gloo"])


# -- what is tried -------------------------------------------------------------------------------


def _links(ranks: Ranks, hosts: Sequence[Note]) -> Iterator[Note]:
    """A small and a large message between two ranks of each host, and from each host to the next:
    both ranks send at once."""
    pairs = [(host["name"], *host["ranks"][:2]) for host in hosts if len(host["ranks"]) > 1]
    pairs += [
        (f"{one['name']} - {two['name']}", one["ranks"][0], two["ranks"][0])
        for one, two in pairwise(hosts)
    ]
    for name, *pair in pairs:
        small, large = (_messages(ranks, pair, nbytes) for nbytes in (SMALL, LARGE))
        yield {
            "link": name,
            "ranks": pair,
            "backend": small.backend,
            "small_us": small.seconds * 1e6,
            "large_gbs": large.bandwidth / 1e9,
            "error": small.error or large.error,
        }


def _messages(ranks: Ranks, pair: Sequence[int], nbytes: int) -> Figure:
    import torch
    import torch.distributed as dist

    from interlace_bench.transfers import attempt, timed

    out = torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device)
    into, peer = torch.zeros_like(out), pair[ranks.me == pair[0]]

    def run() -> None:
        ops = [dist.P2POp(dist.isend, out, peer), dist.P2POp(dist.irecv, into, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    call, guess = run if ranks.me in pair else None, 2e-4 + nbytes / 1e9
    facts: Note = {"kind": "send", "backend": "nccl" if ranks.cuda else "gloo", "nbytes": nbytes}
    facts |= {"pattern": f"{pair[0]}-{pair[1]}", "ranks": ranks.size, "moved": float(nbytes)}
    return attempt(ranks, facts, lambda: timed(ranks, call, guess))


def _teams(ranks: Ranks, hosts: Sequence[Note], time_out_s: float) -> Iterator[Note]:
    """The team of all ranks, and those of each host's, which are set up: the strategies that serve
    each, and why others run serially."""
    import torch.distributed as dist

    several, limit = len(hosts) > 1, timedelta(seconds=time_out_s)
    places = tuple([tuple(host["ranks"]) for host in hosts]) if several else None
    teams: list[tuple[Team, list[int], Any]] = [
        (Team("all ranks", ranks.size, hosts=places), [*range(ranks.size)], ranks.group)
    ]
    for host in hosts:
        if several and len(host["ranks"]) > 1:
            group = dist.new_group(host["ranks"], timeout=limit)
            team = Team(f"ranks on {host['name']}", len(host["ranks"]))
            teams.append((team, host["ranks"], group))
    for team, members, group in teams:
        note = _set_up(group, team.name, time_out_s) if ranks.me in members else {}
        told = [each for each in ranks.exchange(note) if each]
        problem = next((each["problem"] for each in told if each["problem"]), "")
        refusals = {row.name: _refusal(team, row) for row in STRATEGIES.values()}
        serial = {name: why for name, why in refusals.items() if why}
        memory = "" if team.hosts is not None else "peer memory" if ranks.cuda else "shared memory"
        yield {
            "name": team.name,
            "ranks": members,
            "by": ["nccl" if ranks.cuda else "gloo", *filter(None, [memory])],
            "serve": [each for each in names() if each != "auto" and each not in serial],
            "serial": serial,
            "problem": problem,
        }


def _refusal(team: Team, row: Strategy) -> str:
    """Why a strategy cannot serve any site of a team; empty where it can."""
    if row.peers and team.hosts is not None:
        return f"team {team.name} spans hosts, which share no memory"
    return ""


def _set_up(group: Any, name: str, time_out_s: float) -> Note:
    """Sets a team up, as its first Program would."""
    from interlace.comm import team_of

    try:
        team_of(group, name).setup(time_out_s)
    except InterlaceError as error:
        return {"problem": str(error)}
    return {"problem": ""}


# -- what is shown -------------------------------------------------------------------------------


def show_job(job: Job) -> None:
    """Hosts, links and teams in tables."""
    heads = "host", "ranks", "python", "torch", "interlace", "shared memory", "gloo listens on"
    rows = [
        (
            host["name"],
            ", ".join(map(str, host["ranks"])),
            *(host[what] for what in heads[2:5]),
            next(each["found"] for each in host["checks"] if each["name"] == "shared memory"),
            _places(host),
        )
        for host in job.hosts
    ]
    say("")
    table(heads, rows, title="hosts")
    links = [
        (
            link["link"],
            " - ".join(map(str, link["ranks"])),
            link["backend"],
            f"{link['small_us']:.0f} us",
            f"{link['large_gbs']:.3f} GB/s",
        )
        for link in job.links
    ]
    heads = "host, or from one to the next", "ranks", "by", f"{SMALL} B", f"{LARGE >> 20} MiB"
    if links:
        say("")
        table(heads, links, title="messages, both ranks sending at once")
    teams = [
        (
            team["name"],
            ", ".join(team["by"]),
            ", ".join(team["serve"]),
            team["problem"] or "; ".join(_by_reason(team["serial"])),
        )
        for team in job.teams
    ]
    if teams:
        say("")
        table(("team of", "by", "strategies that serve", "run serially"), teams)


def _by_reason(serial: Mapping[str, str]) -> Iterator[str]:
    for why in dict.fromkeys(serial.values()):
        yield f"{', '.join(name for name, told in serial.items() if told == why)} ({why})"
