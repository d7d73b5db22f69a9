"""The page of measurements: every figure comes from a row of benchmarks/results/.

$ python docs/generate/measurements.py    # prints the page

Each table names one run, by the commit that its rows have. After a newer run change the commit
here, and move what the page said of the older one to benchmarks/HISTORY.md.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import geometric_mean

from markdown_table import table

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
SITES = {"ag_gemm": "AG+GEMM", "gemm_rs": "GEMM+RS", "gemm_ar": "GEMM+AR"}
Row = dict[str, str]

HEAD = """\
# Measurements

<!-- Written by docs/generate from benchmarks/results/. Change that, then run `make docs`. -->

```console
$ torchrun --nproc-per-node 4 -m interlace bench overlap --preset bars
$ torchrun --nproc-per-node 4 -m interlace bench transformer --model llama3-70b
$ interlace bench kernels
```

These commands repeat the figures below. All hold for NVIDIA GPUs of one host with NVLink, torch
2.11, NCCL 2.28 and Triton 3.6, without NVLink multicast. Candidates take turns in bursts, in
random order; a figure is the median of the slowest rank (`benchmarks/README.md`). No other GPU,
torch or number of ranks was measured ([Support matrix](../reference/support.md)).

**[R](../reference/glossary.md#r)** is the time over the roof: the best whole matmul, or the bytes
at the best copy's bandwidth, whichever takes longer. Large matmuls run at the GPU's power limit,
so clocks differ between bursts, and R can be a few percent below 1.

## One communication and its matmul

AG+GEMM is an all-gather and then a matmul, GEMM+RS a matmul and then a reduce-scatter, GEMM+AR
one and then an all-reduce. M, K and N are those of one rank's matmul. Four H200s, bf16; the
built-in cost model chose the strategy, without a calibration. The times of async-TP are from an
earlier run on another host.

"""
GRAPHED = """
Small shapes in CUDA graphs, of the same run:

"""
SUMMARY = """
Geometric means over all shapes of a run. *Large* has 2,048 rows and more. "Times NCCL" says how
many times as fast as the NCCL collective and the matmul one after the other:

"""
FP8 = """
FP8 (`--dtype f8e4m3`) on four H200s: rows are gathered in FP8, over one `_scaled_mm` of all rows:

"""
LAYERS = """
In this run `auto` was slower than NCCL for sums after small FP8 matmuls, because the cost model
counted too little of the host's time. It now counts more: in the later run on two H200s no FP8
site of 2,048 rows or more was slower.

## Training a layer

A training step of one Llama-3-sized layer: forward, backward and AdamW, batch 1, 8192 tokens.
*Ideal* is the same computation without communication, compiled by Inductor. *Graphs* are CUDA
graphs, Interlace's with `options={"graph": True, "static_outputs": True}`.

"""
LIMITS_OF_LAYERS = """
On four GPUs the host takes longer than the GPUs for an 8B-sized layer: there Interlace, which
issues more ops, gains only in graphs. The 70B-sized layer runs at the GPUs' power limit: the less
they wait, the lower their clocks. These rows are of one layer.
"""
LIMITS = """
## Without gradients

A layer of an 8B-sized model in CUDA graphs, on hosts that are busy. *Device* is the time if the
host is ahead:

"""
MEMORY = """
## Memory

Forward and backward of layers of Llama-3-8B's and 70B's dimensions, bf16, tensor parallelism of
two, in a fresh process for each figure (`python benchmarks/memory_of_layers.py`). *Peak* is that of
torch's allocator, weights apart; *a layer* is what each further layer adds to it, and *of the
device* to all that the process takes of the GPU: slots, graphs and what torch keeps. Inductor ran
alone, on a process group that moves nothing. Both ranks of Interlace shared one H200; the row of
FP8 is of two.

"""
MEMORY_NOTE = """
Slots are no memory of torch's allocator: the 70B layer at 8192 tokens takes 3.86 GB of the device
beyond its weights, Inductor's 3.01 GB.
In CUDA graphs torch counts Inductor's pools as free, so only the device's memory can be compared.
Where the checkpoint is inside of what is compiled, the temporaries of a backward hold what it
computes again, and stay between steps: 0.57 GB for blocks of 8B's dimensions at 8192 tokens
(Inductor keeps 0.10 GB). Put the checkpoint around the compiled block to avoid that.

"""
DECODES = """
A decode step whose number of rows changes from call to call (`python benchmarks/decode.py`), two
H200s. *Host* is the time that the caller waits, *step* until the GPUs are done. TorchDynamo
compiles nothing after steps of 16 rows and of 1:

"""
TRUSTED = """
In another run, of 16 rows in graphs, the host took {} with Inductor and {} with
`backend="interlace"`; {} and {} where TorchDynamo is told to trust that modules stay as they are,
`options={{"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}}`.
"""
PIECES = """
Small steps are bound by the host: TorchDynamo's guards and AOTAutograd's wrappers take longer
than the GPUs. `interlace.compile` recognises a call by a snapshot of the module and bypasses
both.

## Pieces for training

One H200. *Copy* is the bandwidth of a copy of 1 GiB; Adam updates 1.4 billion parameters:

"""
OWNERS = """
`LayerWise`: four layers of Llama-3-8B's dimensions, 4096 tokens a rank, bf16, a step with forward
and backward:

"""
TAIL = """
[Layer-wise optimizers](../how-to/layer-wise.md#what-it-costs),
[predictions](prediction.md#how-far-to-trust-it), [sizes that change](../how-to/changing-sizes.md)
and [tuning](../how-to/tuning.md) have figures of their own. `benchmarks/HISTORY.md` says how the
figures came about.

## Which rows

"""


def rows(name: str, commit: str, **chosen: str) -> list[Row]:
    """The timed rows of a run."""
    chosen["commit"] = commit
    with (RESULTS / f"{name}.csv").open() as file:
        return [r for r in csv.DictReader(file) if {**r, **chosen} == r and not r["error"]]


def of_site(
    run: list[Row], site: tuple[str, ...], strategy: str, mode: str = "eager"
) -> Row | None:
    """The row of one candidate."""
    for row in run:
        if (*(row[n] for n in ("op", "m", "k", "n")), row["strategy"], row["mode"]) == (
            *site,
            strategy,
            mode,
        ):
            return row
    return None


def us(row: Row | None) -> str:
    return f"{float(row['median_us']):.0f} us" if row else "-"


def ms(row: Row | None) -> str:
    return f"{float(row['median_us']) / 1e3:.1f} ms" if row else "-"


def roof(row: Row | None) -> str:
    return f"{float(row['r']):.2f}" if row else "-"


def sites_of(run: list[Row]) -> list[tuple[str, ...]]:
    """The sites of a run: kinds in the order of SITES, then by size."""
    found = {tuple(row[name] for name in ("op", "m", "k", "n")) for row in run}
    kinds = list(SITES)
    return sorted(found, key=lambda s: (kinds.index(s[0]), *(int(size) for size in s[1:])))


def large(site: tuple[str, ...]) -> bool:
    return int(site[1]) >= 2048


def named(site: tuple[str, ...]) -> str:
    return f"{SITES[site[0]]} {','.join(site[1:])}"


def chosen_by_auto(row: Row | None) -> str:
    return f"`{row['chosen'].replace(' ', '/')}`" if row and row["chosen"] else "-"


def eager_sites(run: list[Row], older: list[Row]) -> str:
    lines = [
        (
            named(site),
            us(of_site(run, site, "sequential")),
            us(of_site(older, site, "async-tp")),
            us(of_site(run, site, "auto")),
            chosen_by_auto(of_site(run, site, "auto")),
            roof(of_site(run, site, "auto")),
        )
        for site in sites_of(run)
        if large(site)
    ]
    return table(("work, M,K,N", "NCCL, then matmul", "async-TP", "`auto`", "chosen", "R"), lines)


def graphed_sites(run: list[Row], *, small: bool) -> str:
    lines = [
        (
            named(site),
            us(of_site(run, site, "sequential", "graph")),
            us(of_site(run, site, "auto", "graph")),
            chosen_by_auto(of_site(run, site, "auto", "graph")),
            roof(of_site(run, site, "auto", "graph")),
        )
        for site in sites_of(run)
        if large(site) is not small
    ]
    return table(("work, M,K,N", "NCCL, then matmul", "`auto`", "chosen", "R"), lines)


def float8_sites(run: list[Row]) -> str:
    lines = [
        (
            named(site),
            us(of_site(run, site, "sequential")),
            us(of_site(run, site, "auto")),
            us(of_site(run, site, "sequential", "graph")),
            us(of_site(run, site, "auto", "graph")),
        )
        for site in sites_of(run)
        if large(site)
    ]
    head = ("work, M,K,N", "NCCL, then matmul", "`auto`", "the same in graphs", "`auto` in graphs")
    return table(head, lines)


def summary(runs: list[tuple[str, list[Row]]]) -> str:
    lines: list[tuple[str, ...]] = []
    for name, run in runs:
        for kind, title in SITES.items():
            for big in (True, False):
                cells: list[str] = []
                count = 0
                for mode in ("eager", "graph"):
                    gains: list[float] = []
                    roofs: list[float] = []
                    for site in sites_of(run):
                        ours = of_site(run, site, "auto", mode)
                        theirs = of_site(run, site, "sequential", mode)
                        if site[0] == kind and large(site) is big and ours and theirs:
                            gains.append(float(theirs["median_us"]) / float(ours["median_us"]))
                            roofs.append(float(ours["r"]))
                    count = max(count, len(gains))
                    cells.append(f"{geometric_mean(gains):.2f}" if gains else "-")
                    cells.append(f"{geometric_mean(roofs):.2f}" if roofs else "-")
                size = "large" if big else "small"
                if count:
                    lines.append((name, f"{title}, {size}", str(count), *cells))
    head = ("GPUs", "work", "shapes", "times NCCL", "R", "times NCCL in graphs", "R in graphs")
    return table(head, lines)


STEPS = [
    ("70B", "4 H200", "llama3-70b", "2b39269"),
    ("8B", "4 H200", "llama3-8b", "2b39269"),
    ("70B", "4 H100", "llama3-70b", "0fb1556"),
    ("8B", "4 H100", "llama3-8b", "0fb1556"),
    ("8B", "2 H200", "llama3-8b", "784924f"),
]
VARIANTS = {
    "Inductor, NCCL": "inductor",
    "Inductor in graphs": "inductor-graph",
    "Interlace": "compile",
    "Interlace in graphs": "compile-graph",
    "FP8": "compile-fp8",
    "FP8 in graphs": "compile-fp8-graph",
    "ideal": "ideal",
}


def layers() -> str:
    runs = [
        (f"{size}, {gpus}", rows("transformer", commit, model=model, how="measured"))
        for size, gpus, model, commit in STEPS
    ]
    lines: list[tuple[str, ...]] = []
    for title, way in VARIANTS.items():
        cells: list[str] = []
        for _, run in runs:
            row = next((row for row in run if row["way"] == way), None)
            cells.append(ms(row))
        lines.append((title, *cells))
    return table(("a step", *(name for name, _ in runs)), lines)


MEMORY_COMMIT, FP8_COMMIT = "c2a89398", "93e12496"
MEMORY_CASES = [
    ("8B, 1 to 8 layers, whole", "llama3-8b", "2048", "whole", "8", ""),
    ("8B, 1 to 8 layers, block by block", "llama3-8b", "2048", "blocks", "8", ""),
    ("8B, 1 to 4 layers, whole, CUDA graphs", "llama3-8b", "2048", "whole", "4", "-graph"),
    ("8B, 1 to 4 layers, block by block, graphs", "llama3-8b", "2048", "blocks", "4", "-graph"),
    ("70B, 1 layer, 2048 tokens", "llama3-70b", "2048", "whole", "1", ""),
    ("70B, 1 layer, 8192 tokens", "llama3-70b", "8192", "whole", "1", ""),
]


def memory() -> str:
    with (RESULTS / "memory_of_layers.csv").open() as file:
        found = list(csv.DictReader(file))

    def cell(commit: str, key: str, way: str, *case: str) -> str:
        wanted = {"commit": commit, "way": way}
        wanted |= dict(zip(("model", "sequence", "form", "layers"), case, strict=True))
        gb = next((row[key] for row in found if {**row, **wanted} == row), "")
        return f"{float(gb) / 1e9:.3f} GB" if gb else "-"

    lines: list[tuple[str, ...]] = []
    for title, *case, graph in MEMORY_CASES:
        cells: list[str] = []
        for key in ("torch_peak_bytes", "torch_peak_growth", "device_growth"):
            for way in ("inductor", "interlace"):
                seen = not graph or key == "device_growth"
                cells.append(cell(MEMORY_COMMIT, key, way + graph, *case) if seen else "-")
        lines.append((title, *cells))
    case = ("llama3-70b", "8192", "whole", "1")
    peak = cell(FP8_COMMIT, "torch_peak_bytes", "fp8", *case)
    lines.append(("the same in FP8", "-", peak, *["-"] * 4))
    head = [f"{what}: {who}" for what in ("peak", "a layer", "of the device")
            for who in ("Inductor", "Interlace")]  # fmt: skip
    return table(("", *head), lines)


def steps_without_gradients() -> str:
    lines: list[tuple[str, ...]] = []
    names = ("inductor-graph", "interlace-graph", "interlace.compile-graph")
    for gpus, commit in (("4 H200", "cef4721"), ("4 H100", "e66a4d7")):
        for step, count in (("prefill", "2048"), ("decode", "16")):
            run = rows("layer", commit, step=step)
            found = [next(row for row in run if row["way"] == name) for name in names]
            device = ", ".join(f"{float(row['device_us']):.0f}" for row in (found[0], found[2]))
            lines.append((f"{step} of {count} rows, {gpus}", *map(us, found), f"{device} us"))
    head = ("step", "Inductor with NCCL", '`backend="interlace"`', "`interlace.compile`")
    return table((*head, "device: Inductor, `interlace.compile`"), lines)


DECODE_COMMIT, TRUSTED_COMMIT = "eb47e5ff", "4f6af54b6465"
DECODE_WAYS = (
    ("Inductor", "inductor"),
    ('`backend="interlace"`', "interlace"),
    ("Inductor, graphs", "inductor-graph"),
    ('`backend="interlace"`, graphs', "interlace-graph"),
    ("`interlace.compile`, graphs", "interlace.compile-graph"),
)


def decode_times(commit: str) -> dict[tuple[str, str, str], str]:
    """Times of a run on two GPUs, by their column, way and number of rows."""
    with (RESULTS / "decode.csv").open() as file:
        found = [r for r in csv.DictReader(file) if (r["commit"], r["gpus"]) == (commit, "2")]
    columns = ("host_us", "step_us")
    return {
        (c, row["way"], row["rows"]): f"{float(row[c]):.0f} us" for row in found for c in columns
    }


def decodes() -> str:
    times = decode_times(DECODE_COMMIT)
    lines = [
        (f"{column[:-3]}, {rows} rows", *(times[column, way, rows] for _, way in DECODE_WAYS))
        for column in ("host_us", "step_us")
        for rows in ("2", "16", "256")
    ]
    return table(("", *(title for title, _ in DECODE_WAYS)), lines)


def trusted() -> str:
    times = decode_times(TRUSTED_COMMIT)
    ways = [f"{name}-graph{how}" for how in ("", "-trusting") for name in ("inductor", "interlace")]
    return TRUSTED.format(*(times["host_us", way, "16"] for way in ways))


ONE_GPU = "46f82d8"
KERNELS = [
    ("cross-entropy 8192 x 128256, forward and backward", "cross-entropy", "8192x128256", "bf16",
     "torch.compile"),
    ("linear and cross-entropy 8192 x 4096 x 128256", "linear-cross-entropy", "8192x4096x128256",
     "bf16", "torch.compile"),
    ("AdamW, all bf16", "adam", "1.40e9 all bf16", "bf16", "torch"),
    ("AdamW, bf16 with exact fp32 masters (remainders)", "adam",
     "1.40e9 bf16, remainders, bf16 moments", "bf16", "torch masters"),
    ("GroupedLinear, 64 experts, 32768 rows", "grouped", "64x32768x2048x1408 even", "bf16",
     "torch"),
    ("Muon, 8 layers of Llama-3-8B's matrices", "muon", "8 layers of llama3-8b", "bf16", "torch"),
    ("Muon, 80 small matrices", "muon", "80 small matrices", "bf16", "torch"),
    ("FP8 linear 8192 x 8192 x 28672, forward and backward", "float8", "8192x8192x28672", "bf16",
     "torch"),
    ("FP8 of a matrix of 8192 x 28672: maximum, cast, transpose", "float8", "8192x28672", "bf16",
     "torch.compile"),
]  # fmt: skip
"""Pieces: op, shape, dtype and the best alternative that is in the same run."""


def pieces() -> str:
    lines: list[tuple[str, ...]] = []
    for title, op, shape, dtype, other in KERNELS:
        found = rows("kernels", ONE_GPU, op=op, shape=shape, dtype=dtype)
        found = [row for row in found if row["does"] != "forward"]
        last = {row["way"]: row for row in found}  # of several runs the last
        cells: list[str] = []
        for way in (other, "interlace"):
            share = last[way]["share"]
            copied = f", {float(share) * 100:.0f} % of copy" if share and way != other else ""
            cells.append(f"{float(last[way]['median_us']) / 1e3:.2f} ms{copied}")
        peaks = [float(last[way]["peak_bytes"]) / 1e9 for way in (other, "interlace")]
        lines.append((title, f"{other}: {cells[0]}", cells[1], "{:.2f}, {:.2f} GB".format(*peaks)))
    return table(("piece", "alternative", "Interlace", "peak: alternative, Interlace"), lines)


def owners() -> str:
    lines: list[tuple[str, ...]] = []
    names = ("no-gather", "overlap", "synchronous", "torch-ddp", "torchtitan")
    for gpus, commit in (("4 H200", "a05769b"), ("2 H200", "ac4be33")):
        run = {row["way"]: row for row in rows("optimizer", commit)}
        lines.append((gpus, *(f"{float(run[name]['step_ms']):.1f} ms" for name in names)))
    head = ("GPUs", "without any gather", "`LayerWise`", "synchronous", "Muon under DDP")
    return table((*head, "torchtitan's DistMuon"), lines)


def measurements_page() -> str:
    """The whole page."""
    four, older = rows("overlap", "eb5699a", dtype="bf16"), rows("overlap", "2b39269", dtype="bf16")
    runs = [
        ("4 H200", four),
        ("4 H100", rows("overlap", "28c5d903", dtype="bf16")),
        ("2 H200", rows("overlap", "c8d54688", dtype="bf16")),
    ]
    sources = [
        ("One communication, four H200s, bf16 and FP8", "`overlap.csv`", "eb5699a"),
        ("async-TP", "`overlap.csv`", "2b39269"),
        ("Four H100s; two H200s", "`overlap.csv`", "28c5d903; c8d54688"),
        ("Training a layer", "`transformer.csv`", "2b39269; 0fb1556 (H100); 784924f (two H200s)"),
        ("A decode step whose rows change", "`decode.csv`", f"{DECODE_COMMIT}; {TRUSTED_COMMIT}"),
        ("Memory", "`memory_of_layers.csv`", f"{MEMORY_COMMIT}; {FP8_COMMIT} (FP8)"),
        ("Without gradients", "`layer.csv`", "cef4721; e66a4d7 (H100)"),
        ("Pieces", "`kernels.csv`", f"{ONE_GPU}, the last run"),
        ("`LayerWise`", "`optimizer.csv`", "a05769b; ac4be33 (two H200s)"),
    ]
    parts = [
        HEAD, eager_sites(four, older),
        GRAPHED, graphed_sites(four, small=True),
        SUMMARY, summary(runs),
        FP8, float8_sites(rows("overlap", "eb5699a", dtype="f8e4m3")),
        LAYERS, layers(),
        LIMITS_OF_LAYERS, MEMORY, memory(), MEMORY_NOTE,
        LIMITS, steps_without_gradients(), DECODES, decodes(), trusted(),
        PIECES, pieces(),
        OWNERS, owners(),
        TAIL, table(("table", "file", "commit of the rows"), sources),
    ]  # fmt: skip
    return "".join(parts)


if __name__ == "__main__":
    print(measurements_page(), end="")
