"""What every strategy is expected to take for the sites of a serial Program; for `explain`.

    found = candidates(program, Options(), machine)
    [(e.label, e.predicted_ms, e.measured_ms) for e in found[1]]
    [('serial', 2.94, 2.95), ('peer/get', 2.61, None), ...]

Sites are numbered as lowering numbers them, since the same passes find them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from interlace.cost import Machine, SiteKey, SiteTime
from interlace.errors import CalibrationError
from interlace.ir import Program, parse
from interlace.options import Options
from interlace.passes.choosing.choose import Chooser
from interlace.passes.choosing.estimate import Estimate
from interlace.passes.order.overlaps import representatives
from interlace.passes.pipeline import run_pipeline
from interlace.passes.sites.analysis import analyse
from interlace.passes.sites.values import Values


def candidates(
    program: Program, options: Options, machine: Machine
) -> dict[int, tuple[Estimate, ...]]:
    """The estimates of each site that can be overlapped, serial first."""
    place = f"place_resharding{{position={options.resharding}}}"
    marked = run_pipeline(program, f"find_sites,{place}" if options.overlap else "find_sites")
    values = Values(marked, representatives(marked)[0])
    chooser = Chooser(machine, options.protocol, options.chunks)
    found: dict[int, tuple[Estimate, ...]] = {}
    for item in analyse(marked, []):
        number = marked.ops[item.collective].site
        if number is not None and item.site is not None:
            found[number] = chooser.candidates(values, item.site)
    return found


def with_sites(machine: Machine, times: Iterable[SiteTime]) -> Machine:
    """The machine with these measured sites, beside what it predicts for them.

    Of several times of one site and strategy the last counts; those that the machine has already
    stay, with new predictions.
    """
    found = {(time.site, time.strategy): time for time in (*machine.sites, *times)}
    bare = machine.replace(sites=())
    known: dict[SiteKey, dict[str, float]] = {}
    made: list[SiteTime] = []
    for time in found.values():
        if time.site not in known:
            known[time.site] = predictions(bare, time.site)
        told = known[time.site].get(time.strategy, 0.0)
        made.append(
            SiteTime(site=time.site, strategy=time.strategy, seconds=time.seconds, predicted_s=told)
        )
    return machine.replace(sites=tuple(made))


def keeping_sites(machine: Machine, path: Path) -> Machine:
    """The machine with the sites that its calibration file had: they took what they took."""
    try:
        before = Machine.load(path, any_host=True)
    except CalibrationError:
        return machine  # there was none, or none that can be read
    same = (before.device, before.host) == (machine.device, machine.host)
    return with_sites(machine, before.sites) if same else machine


def predictions(machine: Machine, site: SiteKey) -> dict[str, float]:
    """What the machine predicts for a site in its plain form, by strategy, in seconds."""
    model = machine.replayed if site.graph else machine
    program = plain_program(site)
    told: dict[str, float] = {}
    for protocol in ("get", "put") if machine.device == "cpu" else ("get",):
        found = candidates(program, Options(resharding="after", protocol=protocol), model)
        for estimate in (e for estimates in found.values() for e in estimates):
            told.setdefault(estimate.label, estimate.predicted_ms / 1e3)
    return told


def plain_program(site: SiteKey) -> Program:
    """A serial Program that is this site alone."""
    m, k, n, t, world = site.m, site.k, site.n, site.dtype, site.world
    part = -(-m // world)
    sizes = ", ".join(str(max(0, min(part, m - i * part))) for i in range(world))
    even = m % world == 0
    mine, table = (f"{part}", "") if even else ("rows[tp.rank]", f"    rows = table(tp, {sizes})\n")
    splits = "" if even else ", splits=rows"
    head = f"def site(tp: Team[{world}], x: {t}[{{}}, {k}], w: {t}[{k}, {n}]):\n{table}"
    matmul = f'    main: call("aten.mm.default", {{}}, w, out=(y := {t}[{m}, {n}]))\n'
    match site.kind:
        case "all_gather_matmul":
            text = (
                f"{head.format(mine)}    full = empty({t}[{m}, {k}])\n"
                f"    main: all_gather(x, full, team=tp{splits})\n{matmul.format('full')}"
                "    return y\n"
            )
        case "matmul_reduce_scatter":
            text = (
                f"{head.format(m)}{matmul.format('x')}    out = empty({t}[{mine}, {n}])\n"
                f'    main: reduce_scatter(y, out, reduce="sum", team=tp{splits})\n    return out\n'
            )
        case "all_to_all_matmul":
            text = (
                f"{head.format(m)}    got = empty({t}[{m}, {k}])\n"
                f"    main: all_to_all(x, got, team=tp)\n{matmul.format('got')}    return y\n"
            )
        case "matmul_all_to_all":
            text = (
                f"{head.format(m)}{matmul.format('x')}    out = empty({t}[{m}, {n}])\n"
                "    main: all_to_all(y, out, team=tp)\n    return out\n"
            )
        case _:
            text = (
                f"{head.format(m)}{matmul.format('x')}    out = empty({t}[{m}, {n}])\n"
                '    main: all_reduce(y, out, reduce="sum", team=tp)\n    return out\n'
            )
    return parse(text)
