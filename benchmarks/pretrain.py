"""Runs `examples/pretrain.py` in several variants, one after the other, and compares their losses.

python benchmarks/pretrain.py --out benchmarks/results                 # two GPUs
python benchmarks/pretrain.py --device cpu --ranks 4 --out benchmarks/results

Each variant trains from the same weights on the same text. `pretrain.csv` gets a row for each, with
its tokens/s (the median of the steps after the first tenth) and its memory; `pretrain/DEVICE.csv`
gets a column of losses in full digits. Each rank has its
GPU; `interlace` needs the package to be installed there, for its name as a backend.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlace_bench.rows import append, facts

VARIANTS: dict[str, list[str]] = {
    "eager": ["--compile", "eager"],
    "interlace": ["--compile", "interlace"],
    "inductor": ["--compile", "inductor"],
    "torch": ["--compile", "eager", "--parts", "torch"],
    "inductor-torch": ["--compile", "inductor", "--parts", "torch"],
    "fp8": ["--compile", "interlace", "--fp8"],
}
"""By name, options of the example. In all but the two of torch the loss and AdamW are Interlace's;
`eager` is what the others are compared with."""
SIZES = {
    "cuda": "--dim 512 --layers 4 --head 64 --batch 8 --accumulate 2 --lengths 256",
    "cpu": "--dim 64 --layers 2 --head 32 --batch 4 --accumulate 2 --lengths 64",
}
"""Of one length, since Inductor fails with a second one: torch 2.13 takes a graph of DTensors for
another length than it is of."""
EXAMPLE = Path(__file__).parents[1] / "examples/pretrain.py"
STRICT = {"MKL_CBWR": "AVX512,STRICT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def trained(variant: str, given: argparse.Namespace) -> list[dict[str, str]] | None:
    """The rows that a run leaves, one for each step; None where it fails, which stderr explains."""
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        dtype = given.dtype or ("bfloat16" if given.device == "cuda" else "float32")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(given.ranks), str(EXAMPLE), "--device", given.device),
            *("--folder", folder, "--steps", str(given.steps), "--tp", str(given.tp)),
            *("--save-every", str(given.steps), "--evaluate-every", str(given.steps)),
            *("--dtype", dtype, *SIZES[given.device].split(), *given.options.split()),
            *VARIANTS[variant],
        ]
        process = subprocess.Popen(command, env={**STRICT, **os.environ})
        try:
            code = process.wait(given.limit_s)
        except BaseException as error:
            process.terminate()  # torchrun ends its ranks
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = f"no end in {given.limit_s} s"
        if code != 0:
            print(f"{variant}: failed ({code})", file=sys.stderr)
            return None
        with (Path(folder) / "losses.csv").open() as file:
            return list(csv.DictReader(file, ["step", "loss", "tokens_per_s", "memory_mb"]))


def keep(path: Path, variant: str, losses: Sequence[str]) -> dict[str, list[str]]:
    """Writes the losses of a variant beside those of others that have as many steps; gives all."""
    columns: dict[str, list[str]] = {}
    if path.exists():
        with path.open() as file:
            head, *rows = csv.reader(file)
        if len(rows) == len(losses):
            columns = {n: [row[i] for row in rows] for i, n in enumerate(head) if n != "step"}
    columns[variant] = [*losses]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", *columns])
        rows = zip(*columns.values(), strict=True)
        writer.writerows([step, *row] for step, row in enumerate(rows, 1))
    return columns


def main(arguments: Sequence[str] | None = None) -> int:
    """Trains, prints a table last, and with --out keeps the rows; 1 if a variant failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=[*VARIANTS][:3])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2, help="the others are FSDP2's")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--options", default="", help="more options of the example, in one string")
    parser.add_argument("--limit-s", type=float, default=3600, help="of one variant")
    parser.add_argument("--commit", default="", help="where git cannot tell")
    parser.add_argument("--out", type=Path, help="folder of the rows; else they are printed alone")
    given = parser.parse_args(arguments)
    where, failed = facts(given.device, given.commit), 0
    lines = [f"{'variant':<16}{'last loss':>11}{'tokens/s':>10}{'MB':>8}  against eager"]
    with tempfile.TemporaryDirectory() as folder:
        out = given.out or Path(folder)
        for variant in given.variants:
            began = time.perf_counter()
            rows = trained(variant, given)
            if rows is None:
                failed += 1
                lines.append(f"{variant:<16}failed")
                continue
            warm = rows[len(rows) // 10 :]
            figures: dict[str, Any] = {
                "tokens_per_s": statistics.median(float(row["tokens_per_s"]) for row in warm),
                "memory_mb": max(float(row["memory_mb"]) for row in rows),
                "last_loss": float(rows[-1]["loss"]),
            }
            path = out / "pretrain" / f"{given.device}.csv"
            columns = keep(path, variant, [row["loss"] for row in rows])
            if "eager" in columns:
                pairs = [*zip(columns["eager"], columns[variant], strict=True)]
                figures["equal_steps"] = sum(a == b for a, b in pairs)
                figures["off"] = max(abs(float(b) / float(a) - 1) for a, b in pairs)
            shape = {"ranks": given.ranks, "tp": given.tp, "steps": given.steps}
            how = {"options": f"{SIZES[given.device]} {given.options}".strip()}
            row = {"variant": variant, "device": given.device, **shape, **how, **figures, **where}
            row["whole_s"] = time.perf_counter() - began
            append(out / "pretrain.csv", [row])
            line = f"{variant:<16}{row['last_loss']:>11.6f}{row['tokens_per_s']:>10.0f}"
            line += f"{row['memory_mb']:>8.0f}"
            if "off" in row:
                line += f"  {row['equal_steps']} steps equal, at most {row['off']:.1e} off"
            lines.append(line)
    print("\n".join(lines))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
