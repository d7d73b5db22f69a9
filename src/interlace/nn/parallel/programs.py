"""The Programs of tensor-parallel linear layers, bound once a class of row counts.

    layer = LinearLayer("reduce_scatter", "bf16", 512, (256,), (False,))
    run = programs(group, layer, options, device)
    (y,) = run(rows, [x, w])

The number of rows is the named size S, so a bound Program serves all row counts of its class. What
is bound is kept by process group, so that the ranks of a group keep and drop alike whatever other
groups they are in, and is freed with the group.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.teams import check_alive
from interlace.errors import AgreementError
from interlace.frontend.binding import Bound, bind
from interlace.frontend.compiled_graph import MOST_CAPTURED, Shelf
from interlace.frontend.importing.importer import Imported
from interlace.nn.parallel.text import LinearLayer, name_of, serial
from interlace.options import Options


class Programs:
    """The bound Programs of one layer and direction: one for each class of row counts."""

    def __init__(
        self, group: dist.ProcessGroup, layer: LinearLayer, options: Options, device: torch.device
    ) -> None:
        self._group = weakref.ref(group)
        self._layer, self._options, self._device = layer, options, device
        self._shelf = Shelf(name_of(layer), options.cache_size)
        self._captured = 0
        """Row counts that were given CUDA graphs, with the option `graph`; more run without."""

    def __call__(self, rows: int, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The results for these tensors, with S = `rows`; collective."""
        last = self._shelf.last
        if last is None or last[0] != rows:
            known = self._shelf.get(rows) or self._shelf.fitting({"S": rows})
            bound = known or self._bind(rows)
            self._shelf.last = last = (rows, bound)
        return last[1].run(tensors)

    def all(self) -> list[Bound]:
        """What is bound, the most recently used last."""
        return self._shelf.all()

    def close(self) -> None:
        """Frees what is bound."""
        self._shelf.clear()

    def _bind(self, rows: int) -> Bound:
        group = self._group()
        assert group is not None  # the caller holds it
        program = serial(self._layer, tuple(dist.get_process_group_ranks(group)), rows)
        symbols, options = {"S": "S"}, self._options
        if options.graph and self._captured < MOST_CAPTURED:  # a graph is of one size
            self._captured += 1
            program, symbols = program.at({"S": rows}), {}
        elif options.graph:
            options = dataclasses.replace(options, graph=False, static_outputs=False)
        assert program.results is not None
        inputs, results = len(program.params), len(program.results)
        imported = Imported(
            program, tuple(range(inputs)), (), tuple(range(results)), symbols=symbols
        )
        kind = "forward" if self._layer.wanted is None else "backward"
        try:
            bound = bind(kind, imported, {"tp": group}, options, str(self._device))
        except AgreementError as error:
            raise AgreementError(
                f"{program.name} has S = {rows} rows on rank {dist.get_rank()}; all ranks of the "
                "group call it together, with as many rows each (pad a shorter shard), weights of "
                f"one shape and dtype, and the same that needs gradients: {error}"
            ) from error
        self._shelf.put(rows, bound, [group])
        return bound


_programs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Programs]] = (
    weakref.WeakKeyDictionary()
)


def programs(
    group: dist.ProcessGroup, layer: LinearLayer, options: Options, device: torch.device
) -> Programs:
    """Those of a layer; the least recently used layers of a group go beyond `MOST_LAYERS`."""
    check_alive(group, "tp")
    kept = _programs.setdefault(group, {})
    key = layer, options, device
    found = kept.pop(key, None) or Programs(group, *key)
    kept[key] = found
    if len(kept) > MOST_LAYERS:
        kept.pop(next(iter(kept))).close()
    return found


def kept(group: dist.ProcessGroup) -> list[Bound]:
    """What is bound for the layers of a group."""
    return [bound for each in _programs.get(group, {}).values() for bound in each.all()]


MOST_LAYERS = 256
"""Layers (shapes, dtypes, options and directions) of a group whose Programs are kept."""
