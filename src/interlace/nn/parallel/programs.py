"""The Programs of tensor-parallel linear layers, bound once a class of row counts.

    layer = LinearLayer("reduce_scatter", "bf16", 512, (256,), (False,))
    run = programs(group, layer, options, device)
    (y,) = run(rows, [x, w])

The number of rows is the named size S, so a bound Program serves all row counts of its class. What
is bound is kept by process group, so that the ranks of a group keep and drop alike whatever other
groups they are in, and is freed with the group.

Note [Found by all or by none]
    Ranks may hold uneven shards of a weight, so one rank's shapes do not say whether the others
    have a Program for theirs: of shards of 3 and 2 rows and then of 3 and 3, the first rank would
    find its Program again while the second prepares one. So the ranks tell one another a digest of
    their layers when a weight is first used, through the control block, and Programs are kept by
    the digests of all of them. A weight is known by its storage: one that is made anew for each
    call costs that exchange each time. Where they disagreed all ask anew; after a reset all bind
    anew, too: an interrupt may have left a Program with the peers alone.

Note [A backward carries its forward]
    Layers alike share a Program. Whatever order autograd takes on a rank, a run says which weight
    it is for, and that of a backward pass which run its forward was: ranks that pair one layer's
    with another's get an AgreementError.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import weakref
from collections.abc import Hashable, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.comm import TeamComm, limit_s, team_of
from interlace.comm.teams import check_alive
from interlace.frontend.binding import Bound, bind
from interlace.frontend.caches import Shelf
from interlace.frontend.calling.arguments import Imported
from interlace.frontend.compiled_graph import MOST_CAPTURED
from interlace.nn.parallel.serial import LinearLayer, name_of, serial
from interlace.options import Options
from interlace.runtime.engine import GraphUse
from interlace.runtime.prepare.agreement import numbers_of_ranks


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

    def __call__(self, rows: int, tensors: Sequence[Tensor], origin: str) -> list[Tensor]:
        """The results for these tensors, with S = `rows`; collective. `origin` says whose run it
        is: Note [A backward carries its forward]."""
        last = self._shelf.last
        if last is None or last[0] != rows:
            known = self._shelf.get(rows) or self._shelf.fitting({"S": rows})
            bound = known or self._bind(rows)
            self._shelf.last = last = (rows, bound, None)
        return cast("list[Tensor]", last[1].run(tensors, origin=origin))

    def all(self) -> list[Bound]:
        """The bound Programs, the most recently used last."""
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
        moving = frozenset(b.name for b in program.params if b.name[0] not in "wb")
        imported = Imported(
            *(program, tuple(range(inputs)), (), tuple(range(results))),
            symbols=symbols,
            graph_use=GraphUse(moving),
        )
        kind = "forward" if self._layer.wanted is None else "backward"
        facts = arguments(self._layer, rows)
        try:
            bound = bind(kind, imported, {"tp": group}, options, str(self._device), facts)
        except BaseException:
            _of(group).known.clear()
            raise
        self._shelf.put(rows, bound, [group])
        return bound


class KnownWeight(NamedTuple):
    """The facts of a weight that all ranks know."""

    digests: tuple[int, ...]
    """Digests of the layers of all ranks; none where they are alike."""
    name: str
    """The same on all ranks, and another for each weight."""


@dataclasses.dataclass(slots=True)
class OfGroup:
    """The Programs and weights that are kept for a process group."""

    team: TeamComm
    resets: int
    """The team's resets when the weights were asked for."""
    programs: dict[Hashable, Programs] = dataclasses.field(default_factory=dict[Hashable, Programs])
    known: dict[Hashable, tuple[StorageWeakRef, KnownWeight]] = dataclasses.field(
        default_factory=dict[Hashable, tuple[StorageWeakRef, KnownWeight]]
    )
    """Known weights, by storage and layer."""
    run: int = 0
    calls: int = 0
    """The run that this rank entered last, and the calls of layers since."""
    room: int = 1024
    """The number of known weights beyond which those go whose storage has gone."""


_programs: weakref.WeakKeyDictionary[dist.ProcessGroup, OfGroup] = weakref.WeakKeyDictionary()


def known(
    group: dist.ProcessGroup, layer: LinearLayer, options: Options, weight: Tensor
) -> KnownWeight:
    """Facts of a weight that all ranks know; the first time, all ask: Note [Found by all or by
    none]."""
    own = _of(group)
    storage = weight.untyped_storage()
    key = storage._cdata, weight.storage_offset(), layer, options
    found = own.known.get(key)
    if found is not None and not found[0].expired():
        return found[1]
    limit, team = limit_s(options.timeout_s, [group]), own.team
    given = ", ".join(f"bias[{i}]" for i, biased in enumerate(layer.biased) if biased)
    what = f"{name_of(layer)} with {given or 'no bias'}"
    asked = numbers_of_ranks(team, _digest(layer, options), what, limit)
    name = f"of weight {team.control.asked}" if team.is_set_up else "of the first weight"
    now = KnownWeight(asked if len({*asked}) > 1 else (), name)
    if len(own.known) >= own.room:
        own.known = {key: item for key, item in own.known.items() if not item[0].expired()}
        own.room = max(1024, 2 * len(own.known))
    own.known[key] = StorageWeakRef(storage), now
    return now


def call_of(group: dist.ProcessGroup) -> str:
    """The name of a forward pass that was just done, the same on all ranks."""
    own = _of(group)
    run = own.team.control.run if own.team.is_set_up else 0
    own.run, own.calls = run, own.calls + 1 if run == own.run else 0
    return f"of forward {run}.{own.calls}"


def _of(group: dist.ProcessGroup) -> OfGroup:
    own = _programs.get(group)
    if own is None:
        team = team_of(group, "tp")
        own = _programs[group] = OfGroup(team, team.resets)
    team = own.team if own.team.is_set_up else team_of(group, "tp")
    if team is not own.team or team.resets != own.resets:
        own.team, own.resets = team, team.resets
        own.known.clear()
        own.programs.clear()
    return own


@functools.lru_cache(1024)
def _digest(layer: LinearLayer, options: Options) -> int:
    return int(hashlib.sha256(repr((layer, options)).encode()).hexdigest()[:15], 16)


def arguments(layer: LinearLayer, rows: int) -> dict[str, object]:
    """Arguments that all ranks must give a layer alike, for messages; shards may be uneven."""
    count = len(layer.outer)
    told: dict[str, object] = {"rows": rows, "dtype": layer.dtype, "weights": count}
    for i, biased in enumerate(layer.biased):
        told[f"bias[{i}]"] = "a tensor" if biased else None
    if layer.collective in ("all_gather", "copy"):
        told["columns of x"] = layer.inner
    else:
        told["rows of the weight"] = layer.outer[0]
    if layer.wanted is not None:
        names = [
            "x",
            *(f"weight[{i}]" for i in range(count)),
            *(f"bias[{i}]" for i in range(count)),
        ]
        pairs = zip(names, layer.wanted, strict=True)
        told |= {f"gradient of {name}": want for name, want in pairs}
    return {**told, "recipe": str(layer.recipe), "keeps x": layer.keeps}


def programs(
    group: dist.ProcessGroup,
    layer: LinearLayer,
    options: Options,
    device: torch.device,
    digests: tuple[int, ...],
) -> Programs:
    """The Programs of a layer; beyond `MOST_LAYERS` a group's least recently used layers go."""
    check_alive(group, "tp")
    kept = _of(group).programs
    key = digests, layer, options, device
    found = kept.pop(key, None) or Programs(group, layer, options, device)
    kept[key] = found
    if len(kept) > MOST_LAYERS:
        kept.pop(next(iter(kept))).close()
    return found


def kept(group: dist.ProcessGroup) -> list[Bound]:
    """The bound Programs of a group's layers."""
    own = _programs.get(group)
    return [] if own is None else [b for each in own.programs.values() for b in each.all()]


MOST_LAYERS = 256
"""Layers (shapes, dtypes, options and directions) of a group whose Programs are kept."""
