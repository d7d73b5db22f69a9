"""How far predictions are off: rows in `results/prediction.csv`, tables of prediction.md in docs/.

python -m benchmarks.prediction                        # on this host, and on namespaces as hosts
python -m benchmarks.prediction --mbit 400 --rounds 5  # each of those sends 400 Mbit/s at most

Of each layout (hosts x ranks of a host) the links and matmuls are calibrated by what `interlace
calibrate` runs. Then each schedule runs, and is predicted by that calibration and by the one of the
smaller layout, as one predicts what is not there. Hosts need a user who may make namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.support.hosts import Hosts, HostsPool, NoHosts
from tests.support.pool import Pool

from interlace.cost import Machine, predict
from interlace.ir import Program, Team, parse
from interlace.options import Options
from interlace.passes import lower
from interlace.runtime import Executor
from interlace.trace.figures import text_table
from interlace_bench.calibration.work import calibrate_work
from interlace_bench.links import sample
from interlace_bench.ranks import here
from interlace_bench.rows import append, facts
from interlace_bench.settings import CalibrationSettings, InterconnectSettings

LAYOUTS = ((1, 2), (1, 4), (2, 1), (2, 2))
SMALLER = {(1, 4): (1, 2), (2, 2): (2, 1)}
"""By which layout's calibration another is predicted as well."""
STEP = """
def step(dp: Team[{dp}], tp: Team[{tp}], x: f32[{rows}, 512], w: f32[512, {n}], v: f32[{n}, 512],
         g: f32[1048576]):
    full = empty(f32[512, 512])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(h := f32[512, {n}]))
    main: call("aten.mm.default", h, v, out=(y := f32[512, 512]))
    out = empty(f32[{rows}, 512])
    main: reduce_scatter(y, out, reduce="sum", team=tp)
    main: all_reduce(g, g, reduce="sum", team=dp)
    return out
"""
SITE = """
def site(tp: Team[{ranks}], x: f32[{rows}, 512], w: f32[512, 512]):
    full = empty(f32[1024, 512])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := f32[1024, 512]))
    return y
"""


def programs(hosts: int, each: int) -> dict[str, Program]:
    """The schedules of a layout, serial and overlapped, by name."""
    ranks = hosts * each
    dp, tp = (hosts, each) if min(hosts, each) > 1 else (1, ranks)
    step = parse(STEP.format(dp=dp, tp=tp, rows=512 // tp, n=512 // tp))
    site = placed(parse(SITE.format(ranks=ranks, rows=1024 // ranks)), hosts, each)
    strategies = ["serial", "pipeline", "ring", *(["peer"] if hosts == 1 else [])]
    made = {name: lower(site, Options(strategy=name)) for name in strategies}
    return {f"step, dp {dp} x tp {tp}": placed(step, hosts, each)} | {
        f"gather and matmul, {name}": program for name, program in made.items()
    }


def placed(program: Program, hosts: int, each: int) -> Program:
    """The Program whose teams say their hosts."""
    if hosts == 1:
        return program
    teams: list[Team] = []
    for team in program.teams:
        ranks = program.where(0).member(team.name).ranks
        on = [tuple(i for i, r in enumerate(ranks) if r // each == host) for host in range(hosts)]
        on = tuple(filter(None, on))
        teams.append(dataclasses.replace(team, hosts=on if len(on) > 1 else None))
    return program.replace(teams=tuple(teams))


def calibrated(folder: str, most: int) -> None:
    """On each rank: measures links and matmuls; rank 0 writes the file."""
    ranks = here(torch.device("cpu"))
    links, path = InterconnectSettings(most=str(most)), f"{folder}/machine.json"
    settings = CalibrationSettings(links=links, file=path, dtypes=("f32",))
    calibrate_work(settings, ranks, lambda event: None)


def measured(hosts: int, each: int, rounds: int) -> dict[str, float]:
    """On each rank: seconds of a run of each schedule, the median round, the slowest rank's."""
    ranks = here(torch.device("cpu"))
    groups: dict[tuple[int, ...], Any] = {tuple(range(ranks.size)): dist.group.WORLD}
    found: dict[str, list[float]] = {}
    for name, program in programs(hosts, each).items():
        mine = program.where(ranks.me).members
        for rank in range(ranks.size):  # all ranks make all groups, in one order
            for member in program.where(rank).members.values():
                if member.ranks not in groups:
                    groups[member.ranks] = dist.new_group([*member.ranks])
        teams = {name: groups[member.ranks] for name, member in mine.items()}
        executor = Executor(program, groups=teams, device=ranks.device, options=Options())
        executor.prepare()
        inputs = [torch.randn([int(str(size)) for size in b.shape]) for b in program.params]
        found[name] = [
            sample(ranks, lambda: executor.run(inputs), kind="run").seconds  # noqa: B023
            for _ in range(rounds)
        ]
        executor.close()
    return {name: statistics.median(times) for name, times in found.items()}


@contextlib.contextmanager
def pools(hosts: int, each: int, mbit: int) -> Iterator[Pool]:
    """Ranks on one host, or on so many namespaces."""
    with contextlib.ExitStack() as stack:
        if hosts == 1:
            pool = Pool()
        else:
            made = stack.enter_context(Hosts(hosts))
            if mbit:
                made.slow_down(mbit)
            pool = HostsPool(made, in_a_row=each)
        stack.callback(pool.close)
        yield pool


def main(given: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    common = facts("cpu", given.commit)
    with tempfile.TemporaryDirectory() as folder:
        machines: dict[tuple[int, int], Machine] = {}
        for hosts, each in LAYOUTS:
            try:
                with pools(hosts, each, given.mbit) as pool:
                    ranks = pool(hosts * each)
                    ranks.run(calibrated, folder, given.most, timeout_s=300)
                    took = ranks.run(measured, hosts, each, given.rounds, timeout_s=300)[0]
            except NoHosts as why:
                print(f"{hosts} hosts: {why}")
                continue
            machines[hosts, each] = Machine.load(f"{folder}/machine.json", any_host=True)
            other = machines.get(SMALLER.get((hosts, each), (0, 0)))
            for name, program in programs(hosts, each).items():
                here_s, there_s = (
                    predict([program], m).timeline.makespan_s if m else None
                    for m in (machines[hosts, each], other)
                )
                told = {"hosts": hosts, "ranks": each, "mbit": given.mbit if hosts > 1 else 0}
                told |= {"schedule": name, "measured_ms": took[name] * 1e3}
                told |= {"predicted_ms": (here_s or 0) * 1e3}
                rows.append(told | {"by_smaller_ms": there_s * 1e3 if there_s else ""} | common)
    append(given.out / "prediction.csv", rows)
    print(table(rows))


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("hosts x ranks", "schedule", "measured", "predicted", "off", "by the smaller", "off")
    return text_table(head, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    measured_ms = row["measured_ms"]
    cells = [f"{row['hosts']} x {row['ranks']}", row["schedule"], f"{measured_ms:.1f} ms"]
    for name in ("predicted_ms", "by_smaller_ms"):
        told = row[name]
        cells += [f"{told:.1f} ms", f"{told / measured_ms - 1:+.0%}"] if told else ["", ""]
    return tuple(cells)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mbit", type=int, default=0, help="what a host sends a second; 0: all")
    parser.add_argument("--most", type=int, default=1 << 22, help="largest message in bytes")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--commit", default="")
    main(parser.parse_args())
