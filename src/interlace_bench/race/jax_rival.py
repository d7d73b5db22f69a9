"""JAX's collective matmul, where JAX is installed: a rival in a process of its own.

    rows = jax_rows(cases, ranks, rows)          # on every rank; rank 0 gets the rows

    $ python -m interlace_bench.race.jax_rival '{"cases": [["ag_gemm", 8, 4, 8, "f32"]], "world":2}'

One process drives all devices, as JAX does by default, so it cannot be interleaved with the others:
it runs after them, while their ranks wait. The matmul is `shard_map`'s textbook one: a loop of
`ppermute` and a matmul of one chunk, which XLA overlaps.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from interlace_bench.race.ways import Opened, Way, prepare, time_ways
from interlace_bench.ranks import WAIT_S, Alone, Ranks
from interlace_bench.rows import Row, number
from interlace_bench.sites import SiteCase
from interlace_bench.timing import race

TIME_OUT_S = 240.0
ROUNDS, LAUNCHES = 7, 10
ALLOWED = 0.05
"""How far off a result may be, of the largest element."""


def jax_rows(cases: Sequence[SiteCase], ranks: Ranks, rows: Sequence[Row]) -> list[Row]:
    """JAX's rows beside those that are there; on rank 0 alone."""
    cases = [case for case in cases if case.op != "gemm_ar"]  # which has no loop of chunks
    found = _run(cases, ranks) if ranks.me == 0 else {}
    ranks.exchange({}, TIME_OUT_S + WAIT_S)
    made: list[Row] = []
    for case in cases if ranks.me == 0 else ():
        key = (case.op, case.m, case.k, case.n, case.dtype)
        beside = [r for r in rows if tuple(r[c] for c in ("op", "m", "k", "n", "dtype")) == key]
        if not beside:
            continue
        base = {r["mode"]: number(r["median_us"]) for r in beside if r["strategy"] == "sequential"}
        median, error = found.get(str(case), (float("nan"), "JAX gave no time"))
        limit = max(beside[0]["gemm_us"], beside[0]["link_us"])
        row = {**beside[0], **dict.fromkeys(("p90_us", "host_us", "deviation"), float("nan"))}
        row |= {"strategy": "jax", "mode": "eager", "median_us": median, "error": error}
        row |= {"r": median / limit, "host_runs": 0, "sm_mhz": float("nan")}
        row |= {f"speedup_{m}": base.get(m, float("nan")) / median for m in ("eager", "graph")}
        made.append(row)
    return made


def _run(cases: Sequence[SiteCase], ranks: Ranks) -> dict[str, tuple[float, str]]:
    """Median microseconds and errors by case."""
    if importlib.util.find_spec("jax") is None:
        return {str(case): (float("nan"), "JAX is not installed") for case in cases}
    asked = {"cases": [[c.op, c.m, c.k, c.n, c.dtype] for c in cases], "world": ranks.size}
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if not ranks.cuda:
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={ranks.size}",
        }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "interlace_bench.race.jax_rival", json.dumps(asked)],
            capture_output=True,
            text=True,
            timeout=TIME_OUT_S,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {str(case): (float("nan"), f"JAX took over {TIME_OUT_S:g} s") for case in cases}
    found: dict[str, tuple[float, str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            told = json.loads(line)
            found[told["case"]] = (told["us"], told["error"])
    last = (done.stderr.strip().splitlines() or ["no word"])[-1][:300]
    for case in cases:
        found.setdefault(str(case), (float("nan"), f"JAX ended with {done.returncode}: {last}"))
    return found


def main() -> None:
    """Times every case that the command line asks for, and prints a line of JSON each."""
    asked = json.loads(sys.argv[1])
    alone = Alone(torch.device("cpu"))  # JAX's devices are its own
    once = {"seconds": 0.0, "rounds": (ROUNDS, ROUNDS), "launches": (1, 1)}
    for sizes in asked["cases"]:
        case = SiteCase(*sizes)
        way = Way("jax", functools.partial(opened, case, asked["world"]))
        racer = prepare(alone, way, [()])
        time_ways([racer], lambda runs, sets: race(alone, runs, sets, **once))
        us, error = racer.median * 1e6 / LAUNCHES, racer.problem or ""
        print(json.dumps({"case": str(case), "us": us, "error": error}), flush=True)


def opened(case: SiteCase, world: int) -> Opened:
    """A collective matmul, launched so many times by each run."""
    jax: Any = importlib.import_module("jax")
    jnp: Any = importlib.import_module("jax.numpy")
    sharding: Any = importlib.import_module("jax.sharding")
    spec = sharding.PartitionSpec
    mesh = sharding.Mesh(jax.devices()[:world], ("tp",))
    kind = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}[case.dtype]
    gathers = case.op == "ag_gemm"
    # The global arrays: rows of x over the ranks and columns of w, or the inner dimension of both.
    over = (spec("tp", None), spec(None, "tp")) if gathers else (spec(None, "tp"), spec("tp", None))
    k, n = (case.k, case.n * world) if gathers else (case.k * world, case.n)
    out = spec(None, "tp") if gathers else spec("tp", None)
    body = {"ag_gemm": _gather, "gemm_rs": _scatter}[case.op](jax, jnp, case, world)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=over, out_specs=out, check_vma=False)
    function = jax.jit(mapped)
    keys = jax.random.split(jax.random.key(0), 4)
    places = [sharding.NamedSharding(mesh, one) for one in over]

    def random(key: Any, shape: tuple[int, int], place: Any) -> Any:
        made = jax.jit(lambda: jax.random.normal(key, shape, kind), out_shardings=place)
        return made()

    sets = [
        (random(keys[2 * i], (case.m, k), places[0]), random(keys[2 * i + 1], (k, n), places[1]))
        for i in range(2)
    ]
    want = (sets[0][0].astype(jnp.float32) @ sets[0][1].astype(jnp.float32)).astype(kind)

    def off() -> float:
        far = jnp.abs(function(*sets[0]).astype(jnp.float32) - want.astype(jnp.float32)).max()
        return float(far) / (ALLOWED * float(jnp.abs(want).max()))

    def run() -> None:
        for i in range(LAUNCHES):
            result = function(*sets[i % 2])
        result.block_until_ready()

    return Opened(run, off)


def _gather(jax: Any, jnp: Any, case: SiteCase, world: int) -> Callable[[Any, Any], Any]:
    """Rows come round from the next rank while those that are here are multiplied."""
    back = [(rank, (rank - 1) % world) for rank in range(world)]

    def body(x: Any, w: Any) -> Any:
        me, rows = jax.lax.axis_index("tp"), case.m // world
        y = jnp.zeros((case.m, case.n), x.dtype)
        for step in range(world):
            coming = jax.lax.ppermute(x, "tp", back) if step < world - 1 else x
            place = (me + step) % world * rows
            y = jax.lax.dynamic_update_slice(y, x @ w, (place, 0))
            x = coming
        return y

    return body


def _scatter(jax: Any, jnp: Any, case: SiteCase, world: int) -> Callable[[Any, Any], Any]:
    """Sums go round; each rank adds its part while the next part is multiplied."""
    onward = [(rank, (rank + 1) % world) for rank in range(world)]

    def body(x: Any, w: Any) -> Any:
        me, rows = jax.lax.axis_index("tp"), case.m // world
        total = None
        for step in range(world):
            chunk = (me - step - 1) % world
            part = jax.lax.dynamic_slice(x, (chunk * rows, 0), (rows, case.k)) @ w
            total = part if total is None else jax.lax.ppermute(total, "tp", onward) + part
        return total

    return body


if __name__ == "__main__":
    main()
