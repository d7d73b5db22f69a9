"""`python -m interlace.bench.rank SETTINGS`: a rank that `interlace bench` started itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from interlace.demo.rank import Connect, Tell, serve

if TYPE_CHECKING:
    from interlace.bench.ranks import Ranks


def main() -> None:
    """Works as one rank, by the settings on the command line."""
    serve(_work)


def _work(settings: dict[str, Any], connect: Connect, tell: Tell) -> dict[str, Any] | None:
    import torch

    from interlace.bench.ranks import join

    torch.set_num_threads(settings["threads"])
    where = {"rank": settings["rank"], "world": settings["world"], "connect": connect}
    with join(settings["device"], settings["time_out_s"], **where) as ranks:
        return measure(settings["bench"], settings["given"], ranks, tell)


def measure(bench: str, given: dict[str, Any], ranks: Ranks, tell: Tell) -> dict[str, Any] | None:
    """Runs one of the benchmarks on this rank."""
    from interlace.bench.ranks import register_in_graphs

    if bench in ("overlap", "layer"):  # and not where `auto` learns what users' runs take
        register_in_graphs()
    match bench:
        case "overlap":
            from interlace.bench import overlap

            return overlap.work(overlap.Settings.from_json(given), ranks, tell)
        case "interconnect":
            from interlace.bench import interconnect

            return interconnect.work(interconnect.Settings.from_json(given), ranks, tell)
        case "calibrate":
            from interlace.bench import calibrate

            return calibrate.work(given, ranks, tell)
        case "host":
            from interlace.bench.kernels import host

            return {"rows": host.team_work(given["commit"], ranks)}
        case _:
            from interlace.bench import layer

            return layer.work(layer.Settings.from_json(given), ranks, tell)


if __name__ == "__main__":
    main()
