"""`interlace.explain` and `interlace.report`: what became of the communication of a model.

    model = torch.compile(model, backend="interlace")
    model(x).sum().backward()
    print(interlace.explain(model))             # every graph, forward and backward
    print(interlace.explain(model, why=True))   # what stays serial, and why
    interlace.report(model, "step.html")        # the timelines, predicted and measured

Nothing is wrapped and nothing is compiled again: the backend knows in whose calls it compiled what
torch still keeps. With `options={"trace": True}` the last run of each graph is shown too.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend, innermost_fn

from interlace.cost import simulate
from interlace.errors import ExecutorError
from interlace.frontend.backend import backend
from interlace.frontend.binding import Bound
from interlace.frontend.compile import Compiled
from interlace.frontend.compiled_graph import CompiledGraph
from interlace.frontend.explain import explain_graphs, explain_program
from interlace.frontend.importing.exchanges import communications
from interlace.frontend.origin import name_of
from interlace.ir import Program
from interlace.passes import lower
from interlace.trace import Run, write_page


def explain(model: Callable[..., Any] | Program, *, why: bool = False) -> str:
    """Each communication of a compiled model with its strategy, the reason, the predicted time and
    the measured one where a run was recorded.

    `model` is a module or a function that `torch.compile` made or compiled in place, a module with
    such parts, what `interlace.compile` gave, or a Program. `why=True` leaves only what stays
    serial, and says what keeps a model from being overlapped where nothing is. Without graphs the
    text says what usually causes that; nothing is raised.
    """
    if isinstance(model, Program):
        return explain_program(model, why)
    graphs, texts = graphs_of(model), list[str]()
    if graphs and _compiles_ddp(model):
        texts.append(DDP)
    if not graphs:
        texts.append(none_of(model))
        graphs = _of_another(model)
    if not graphs:
        return texts[0]
    groups = [list(found) for _, found in itertools.groupby(graphs, key=_origin)]
    for number, group in enumerate(groups, 1):
        origin = group[0].setting.origin
        if origin is not None and not isinstance(model, Compiled):
            texts.append(f"graph {number} of {len(groups)}: {origin.name}")
        texts.append(explain_graphs(group, why))
    return "\n\n".join([*texts, *(_hints(graphs) if why else ())])


def report(model: Callable[..., Any], path: str | Path) -> Path:
    """Writes one HTML page with the timelines of a compiled model: predicted, and measured where a
    run was recorded. It takes what `explain` takes, except a Program, and returns the path.

    What was measured is of the rank that calls it; predictions are of all ranks. On several ranks,
    call it on one, or give each a path of its own.

    Raises ExecutorError where there is no schedule to show.
    """
    if isinstance(model, Program):
        raise ExecutorError(
            "report shows compiled models, and this is a Program: `interlace simulate FILE --html "
            "PAGE` draws it as predicted, `interlace run FILE --html PAGE` as measured"
        )
    graphs = graphs_of(model)
    bound = [each for graph in graphs for each in graph.bound[-1:]]
    if not bound:
        raise ExecutorError(f"there is no schedule to show. {none_of(model)}")
    runs = [_run(each) for each in bound]
    sound = all(each.report.sound for each in bound)
    facts = [("verifier", "sound" if sound else "unsound"), ("machine", bound[0].machine.name)]
    return write_page(runs, path, name_of(_plain(model)), facts)


DDP = (
    "DistributedDataParallel is what torch.compile was given: TorchDynamo leaves DDP's own forward "
    "to Python, traces the forward of the module within where that is no class of torch's own "
    "(such as nn.Sequential), and cuts its graph at DDP's buckets of gradients. The all-reduces of "
    "gradients run outside of graphs, under backward. fix: compile the module and wrap what that "
    'gives, DistributedDataParallel(torch.compile(module, backend="interlace"))'
)


def _compiles_ddp(model: Any) -> bool:
    """Returns True if torch.compile was given a DistributedDataParallel for this backend."""
    ddp = isinstance(_plain(model), nn.parallel.DistributedDataParallel)
    return ddp and _backend_of(model) == backend.__name__


def _run(bound: Bound) -> Run:
    """A bound Program for the page, beside its serial schedule, as predicted; where the ranks'
    Programs differ, this one has only its own, and nothing is compared."""
    before = None
    if len(bound.programs) == 1:
        options = dataclasses.replace(bound.executor.options, overlap=False)
        serial = lower(bound.serial, options, bound.machine)
        before = Run((serial,), simulate(serial, bound.machine), label="serial")
    predicted = simulate(bound.programs, bound.machine)
    return Run(bound.programs, predicted, bound.measured, bound.kind, before=before)


def graphs_of(model: Any) -> list[CompiledGraph]:
    """The graphs that were compiled in calls of a model or of its parts, in that order."""
    if isinstance(model, Compiled):
        return [*model.graphs]
    plain = _plain(model)
    parts = plain.modules() if isinstance(plain, nn.Module) else [plain]
    wanted = {id(getattr(part, "__self__", part)) for part in parts}
    known = [(graph, graph.setting.origin) for graph in backend.graphs]
    return [graph for graph, origin in known if origin is not None and origin.is_of(wanted)]


def _of_another(model: Any) -> list[CompiledGraph]:
    """Graphs of a module like this one: torch runs them for both where their guards pass."""
    plain = _plain(model)
    if _backend_of(model) != backend.__name__ or not isinstance(plain, nn.Module):
        return []
    known, kind = [(graph, graph.setting.origin) for graph in backend.graphs], _kind(plain)
    return [graph for graph, origin in known if origin and _kind(origin.first) == kind]


def _kind(module: Any) -> Any:
    """Traits that modules must have in common to share a graph: their parts and parameters."""
    if not isinstance(module, nn.Module):
        return None
    parts = [(name, type(part)) for name, part in module.named_modules()]
    return parts, [(name, x.shape, x.dtype) for name, x in module.named_parameters()]


def _origin(graph: CompiledGraph) -> int:
    return id(graph.setting.origin)


def _plain(model: Any) -> Any:
    """Model or function that torch.compile or interlace.compile was given."""
    if isinstance(model, Compiled):
        return model.fn
    return model._orig_mod if isinstance(model, OptimizedModule) else innermost_fn(model)


def _backend_of(model: Any) -> str | None:
    """The name of the backend that torch.compile was given; None: it did not make this."""
    call = getattr(model, "_compiled_call_impl", None) or model
    if isinstance(model, OptimizedModule):
        found: Any = getattr(model.dynamo_ctx, "callback", None)
    elif inspect.isfunction(call) and hasattr(call, "_torchdynamo_orig_callable"):
        found = inspect.getclosurevars(call).nonlocals.get("callback")
    else:
        return None
    found = innermost_backend(found)
    return getattr(found, "compiler_name", None) or getattr(found, "__name__", str(found))


def none_of(model: Any) -> str:
    """Why there are no graphs of a model."""
    name, by = name_of(_plain(model)), _backend_of(model)
    parts = model.modules() if isinstance(model, nn.Module) else ()
    inside = next((found for part in parts if (found := _backend_of(part))), None)
    by = by or inside
    if isinstance(model, Compiled):
        return f"{name}: nothing is compiled yet: call it, or give interlace.compile its arguments"
    if by is None:
        return (
            f'{name} is not compiled: use torch.compile(model, backend="interlace") and call what '
            "that gives, or give this function the model or function that was compiled"
        )
    if by != backend.__name__:
        return f'{name} is compiled by backend={by!r}: use torch.compile(..., backend="interlace")'
    if torch._dynamo.config.disable:
        return f"{name}: TorchDynamo is off (TORCH_COMPILE_DISABLE or torch._dynamo.config.disable)"
    if _compiles_ddp(model):
        return f"{name} has no graph. {DDP}"
    if _of_another(model):
        return (
            f"{name} has no graph of its own. torch keeps graphs of another {name} with the same "
            "parts, and runs them for this one if their guards pass. They are what explain shows; "
            "give report and export the other one"
        )
    return (
        f"{name} has no graph now: it was not called yet, torch.compiler.reset() freed it, or "
        "TorchDynamo found no tensor operators in it (TORCH_LOGS=graph_breaks says what it skips)"
    )


def _hints(graphs: Sequence[CompiledGraph]) -> Iterator[str]:
    """Yields reasons why these graphs are not overlapped, beyond the reason of each site."""
    options = graphs[0].setting.options
    if not options.overlap or options.strategy == "serial":
        yield 'everything is serial by option: leave out overlap=False and strategy="serial"'
    if not any(any(communications(graph.graph)) for graph in graphs):
        yield (
            "no graph communicates. Interlace overlaps collectives that are in the graph: those of "
            "DTensors (parallelize_module, redistribute) and functional ones "
            "(torch.distributed._functional_collectives). What DDP, fully_shard and hooks do runs "
            "outside of it, and so does what comes after a graph break; in a world of one rank "
            "there is nothing to send"
        )
    origins = [graph.setting.origin for graph in graphs]
    breaks = dict.fromkeys(origin.ended for origin in origins if origin and origin.ended)
    if breaks:
        listed = "".join(f"\n  {ended}" for ended in breaks)
        yield (
            "a communication overlaps only with computation of its own graph, and a graph ends at "
            f"each of these graph breaks:{listed}"
        )
