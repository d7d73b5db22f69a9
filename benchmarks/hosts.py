"""Strategies on hosts that a slow link joins: what is hidden, and what crosses; and bars.

python benchmarks/hosts.py --check           # 2 hosts of 1, then 2 ranks, 200 Mbit/s out of each
python benchmarks/hosts.py --hosts 4 --ranks 1 --mbit 400
python benchmarks/hosts.py --vanish 20                 # a host vanishes, 20 times in each way
python benchmarks/hosts.py -- -m interlace demo        # any torchrun program on such hosts

The hosts are network namespaces of this machine (as root), slowed down by the kernel's traffic
control. Each round times every strategy once, in another order, from a moment that all ranks agree
on to the end of the last. Of what could be hidden, min(matmul, link), `hidden` is the part that a
strategy saves over serial; the link's time is what serial takes beyond the matmul. `beside` is the
part of its own communication (the bytes that left the first host, headers and all, at the link's
rate) that it hides, or of the matmul where that is shorter: fewer bytes gain nothing there. `auto`
chooses by a machine with this link. `--check` ends with 1 unless the best hides 0.7 at each site.
Where ranks share a core and the link takes no longer than the matmul, nothing hides what the
processor does for the link.

Rows of `hierarchical` (messages between hosts, copies within) favour it by 1.34 to 1.41x over this
throttled link; it went because nobody has run it on a real network.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]
SITES = ("ag_gemm", "gemm_rs", "gemm_ar")
WAYS = ("serial", "pipeline", "ring", "auto")
LEAD_S = 0.02
"""How long before it begins the ranks agree on a moment."""
HIDDEN = 0.7
"""The part of what could be hidden that the best strategy hides at least."""


def sent() -> int:
    """The bytes that have left this host."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (found,) = (line.split(":")[1].split() for line in lines if line.strip().startswith("eth0:"))
    return int(found[8])


def work(given: argparse.Namespace) -> None:
    """A rank: measures every site; rank 0 prints and keeps the rows."""
    import torch
    import torch.distributed as dist

    from interlace.commands.output import say, table
    from interlace.cost import default_machine
    from interlace.cost.machine import Link
    from interlace.options import Options
    from interlace.passes import lower
    from interlace.runtime import Executor
    from interlace.runtime.hosts import on_hosts
    from interlace_bench.rows import append, facts
    from interlace_bench.sites import SiteCase

    dist.init_process_group("gloo")
    me, world = dist.get_rank(), dist.get_world_size()
    groups: Any = {"tp": dist.group.WORLD}
    rows: list[dict[str, Any]] = []
    rate, machine = given.mbit * 125e3, default_machine("cpu")
    if rate:
        link = Link(latency_s=2e-4, bandwidth=rate, shared=True)
        machine = machine.replace(between=(("gloo", link),))
    for op in given.sites:
        case = SiteCase(op, *given.sizes, "f32")
        g = torch.Generator().manual_seed(given.seed + me)
        mine = case.m // world if op == "ag_gemm" else case.m
        x, w = (torch.randn(size, generator=g) for size in ((mine, case.k), (case.k, case.n)))
        whole = torch.randn(case.m, case.k, generator=g)
        program = on_hosts(case.program(world), groups)
        made: dict[str, Any] = {"matmul": lambda whole=whole, w=w: whole @ w}
        chosen: dict[str, str] = {}
        for way in WAYS:
            options = Options(strategy=way, timeout_s=60)
            lowered = lower(program, options, machine)
            site = lowered.sites[0]
            if way in (site.strategy, "auto"):
                chosen[way] = f"{site.strategy} x{site.chunks or 1}"
                executor = Executor(lowered, groups=groups, options=options).prepare()
                made[way] = lambda run=executor.run, x=x, w=w: run([x, w])
        took: dict[str, list[float]] = {way: [] for way in made}
        crossed: dict[str, list[int]] = {way: [] for way in made}
        order = random.Random(given.seed)
        for number in range(given.rounds + 1):
            for way in order.sample(sorted(made), len(made)):
                dist.barrier()
                before = sent()
                begin = torch.tensor(time.perf_counter() + LEAD_S, dtype=torch.float64)
                dist.broadcast(begin, 0)  # hosts of one machine have one clock
                time.sleep(max(0.0, begin.item() - time.perf_counter()))
                made[way]()
                seconds = time.perf_counter() - begin
                dist.barrier()
                after = sent() - before
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if number:  # the first warms up
                    took[way].append(seconds.item())
                    crossed[way].append(after)
        serial, matmul = (statistics.median(took[way]) for way in ("serial", "matmul"))
        for way in made:
            seconds_of = statistics.median(took[way])
            hideable = min(matmul, max(serial - matmul, 1e-9))
            crossing = statistics.median(crossed[way]) / rate if rate else 0.0
            own = (matmul + crossing - seconds_of) / max(min(matmul, crossing), 1e-9)
            rows.append(
                {
                    **{"op": op, "m": case.m, "k": case.k, "n": case.n, "world": world},
                    **{"hosts": given.hosts, "mbit": given.mbit, "strategy": way},
                    "median_us": seconds_of * 1e6,
                    "least_us": min(took[way]) * 1e6,
                    "chosen": chosen.get(way, ""),
                    "hidden": (serial - seconds_of) / hideable if way != "matmul" else "",
                    "beside": own if way != "matmul" and rate else "",
                    "left_host_mb": statistics.median(crossed[way]) / 1e6,
                    "rounds": given.rounds,
                }
            )
    dist.barrier()
    dist.destroy_process_group()
    if me:
        return
    common = facts("cpu", given.commit)
    append(Path(given.out) / "hosts.csv", [row | common for row in rows])
    shown = [
        [
            *(row["op"], row["strategy"], row["chosen"], f"{row['median_us'] / 1e3:.1f} ms"),
            *(f"{row[key]:.0%}" if row[key] != "" else "-" for key in ("hidden", "beside")),
            f"{row['left_host_mb']:.2f} MB",
        ]
        for row in rows
    ]
    heads = ["op", "strategy", "chosen", "median", "hidden", "beside", "left the host"]
    table(heads, shown)
    if given.check:
        missed = list(misses(rows))
        say("\n".join(missed) or "all bars are met")
        Path(given.verdict).write_text("\n".join(missed))


def misses(rows: list[dict[str, Any]]) -> Any:
    """The bars that rows miss."""
    ops = {row["op"] for row in rows}
    yield from (f"{op}: not measured" for op in SITES if op not in ops)
    for op in sorted(ops):
        of = {row["strategy"]: row for row in rows if row["op"] == op}
        best = max((row["hidden"], way) for way, row in of.items() if row["hidden"] != "")
        if best[0] < HIDDEN:
            yield f"{op}: the best, {best[1]}, hides {best[0]:.0%} of what could be hidden"


def launch(given: argparse.Namespace, ranks: int, command: list[str]) -> int:
    """Makes the hosts, and starts torchrun with so many ranks on each."""
    from tests.support.hosts import Hosts

    with Hosts(given.hosts) as hosts:
        if given.mbit:
            hosts.slow_down(given.mbit)
        running: list[Any] = []
        for number, pid in enumerate(hosts.pids):
            nodes = ["--nnodes", str(given.hosts), "--node-rank", str(number)]
            store = ["--master-addr", hosts.address(0), "--master-port", "29500"]
            torchrun = [sys.executable, "-m", "torch.distributed.run", *nodes, *store]
            torchrun += ["--nproc-per-node", str(ranks), *command]
            here = f"--wd={Path.cwd()}"
            inside = ["nsenter", "-t", str(pid), "-n", "-u", "-m", "-p", here, *torchrun]
            path = f"{ROOT / 'src'}:{ROOT}"
            environ = {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
            environ |= {"HOSTS": str(given.hosts), "MBIT": str(given.mbit)}
            away = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
            quiet: dict[str, Any] = away if number else {}
            running.append(subprocess.Popen(inside, env=os.environ | environ, **quiet))
        try:
            codes = [each.wait(given.time_out) for each in running]
            return next((code for code in codes if code), 0)
        except subprocess.TimeoutExpired:
            print(f"not over after {given.time_out:g} s (--time-out)", file=sys.stderr)
            return 1
        finally:
            for each in running:
                each.kill()


def vanishing(given: argparse.Namespace) -> int:
    """Has the second of two hosts vanish in runs, as often as asked and in each way; how often all
    others got the error that names it, in time."""
    from tests.e2e.test_hierarchy import VANISH, vanish
    from tests.support.hosts import Hosts, HostsPool

    missed = 0
    with tempfile.TemporaryDirectory() as folder, Hosts() as hosts:
        pool = HostsPool(hosts, in_a_row=2)
        for how in VANISH:
            slowest = list[float]()
            for number in range(given.vanish):
                mark = Path(folder) / f"{how} {number}"
                wrong, seconds = vanish(hosts, pool, how, mark, given.seed + number)
                print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
                slowest += [] if wrong else [seconds]
            missed += given.vanish - len(slowest)
            last = max(slowest, default=0.0)
            told = f"{len(slowest)} of {given.vanish}, the last after {last:.1f} s"
            print(f"{how}: {told}", flush=True)
        pool.close()
    return bool(missed)


def main() -> int:
    """Parses the command line; launches, or works as a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Plain)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="on each host")
    parser.add_argument("--mbit", type=int, default=200, help="out of each host; 0: not slowed")
    parser.add_argument("--sizes", type=int, nargs=3, default=[2048, 1024, 1024], help="M K N")
    parser.add_argument("--sites", nargs="+", choices=SITES, default=SITES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    parser.add_argument("--time-out", type=float, default=500)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--vanish", type=int, default=0)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--verdict", help=argparse.SUPPRESS)
    parser.add_argument("command", nargs="*", help="after --: what torchrun runs instead")
    given = parser.parse_args()
    if "RANK" in os.environ:
        work(given)
        return 0
    print(f"seed {given.seed}", file=sys.stderr)
    if given.vanish:
        return vanishing(given)
    code = 0
    for ranks in given.ranks[-1:] if given.command else given.ranks:
        with tempfile.TemporaryDirectory() as folder:
            verdict = Path(folder) / "verdict"
            own = [str(Path(__file__)), *sys.argv[1:], "--seed", str(given.seed)]
            own += ["--ranks", str(ranks), "--verdict", str(verdict)]
            code |= launch(given, ranks, given.command or own)
            code |= given.check and (not verdict.exists() or bool(verdict.read_text()))
    return int(code)


class Plain(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the description."""


if __name__ == "__main__":
    sys.exit(main())
