"""Programs that are one site, by what measurements know of it."""

from __future__ import annotations

from interlace.cost import SiteKey
from interlace.ir import Program, parse
from interlace.ir.kernels import FLOAT8, TAIL


def plain_program(site: SiteKey) -> Program:
    """A serial Program that is this site alone; of FP8 with packed rows and a result in bf16."""
    m, k, n, t, world = site.m, site.k, site.n, site.dtype, site.world
    part = -(-m // world)
    sizes = ", ".join(str(max(0, min(part, m - i * part))) for i in range(world))
    even = m % world == 0
    mine, table = (f"{part}", "") if even else ("rows[tp.rank]", f"    rows = table(tp, {sizes})\n")
    splits = "" if even else ", splits=rows"
    made, fn, weight, rest = t, "aten.mm.default", f"w: {t}[{k}, {n}]", "w"
    gathers = site.kind.endswith("_matmul")
    if t in FLOAT8:
        k += TAIL
        made, fn, weight = "bf16", "interlace.float8_mm.default", f"w: {t}[{n}, {k}]"
        rest = f"w.permute(1, 0), {world if gathers else 1}, None, True, bf16"
    calls = {
        "all_gather_matmul": f"all_gather(x, full, team=tp{splits})",
        "all_to_all_matmul": "all_to_all(x, full, team=tp)",
        "matmul_reduce_scatter": f'reduce_scatter(y, out, reduce="sum", team=tp{splits})',
        "matmul_all_to_all": "all_to_all(y, out, team=tp)",
        "matmul_all_reduce": 'all_reduce(y, out, reduce="sum", team=tp)',
    }
    given = mine if site.kind == "all_gather_matmul" else m
    kept = mine if site.kind == "matmul_reduce_scatter" else m
    head = f"def site(tp: Team[{world}], x: {t}[{given}, {k}], {weight}):\n{table}"
    moved = f"    main: {calls[site.kind]}\n"
    matmul = f'    main: call("{fn}", {{}}, {rest}, out=(y := {made}[{m}, {n}]))\n'
    if gathers:
        first = f"    full = empty({t}[{m}, {k}])\n{moved}"
        return parse(f"{head}{first}{matmul.format('full')}    return y\n")
    last = f"    out = empty({made}[{kept}, {n}])\n{moved}    return out\n"
    return parse(f"{head}{matmul.format('x')}{last}")
