"""Questions about FX nodes: arguments by position, what is live, which module and line they are of.

>>> bound(node)           # every argument of the operator, defaults filled in
[x, 0, 2, 4, 1]
>>> module_path("L['self'].layers.0.mlp")
'layers.0.mlp'
"""

from __future__ import annotations

import operator
import re
import traceback
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from interlace.errors import UnsupportedError
from interlace.ir import Loc
from interlace.runtime.calling.effects import effects
from interlace.torch_private import FakeTensor, FakeTensorMode, OpOverload

WAIT = "_c10d_functional.wait_tensor.default"

LAZY = {
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.resolve_conj.default",
    "aten.resolve_neg.default",
    WAIT,
}
"""Operators that import makes views of their argument, beside torch's own views."""

COPIES = {
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.lift_fresh_copy.default",
    "aten._to_copy.default",
    "aten.cat.default",
}
"""Operators that may become views where nobody could tell."""

MODULE_KEY = "interlace_module"
"""Where `interlace.compile` notes a node's module path, in `meta["custom"]`."""
COORDINATE = "device_mesh._runtime_compute_coordinate_on_dim.default"
GROUP_OF_MESH = "_dtensor.mesh_get_process_group.default"

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_LOCAL = re.compile(r"^[LG]\[(?:'args'\]\[0(?=\]\.)|'\w+')\]")  # args[0]: a decorator's self
_MEMBER = re.compile(r"\.(?:__dict__\[')?(_(?:modules|parameters|buffers))(?:'\])?\['([^']+)'\]")
_ITEM = re.compile(r"\[(?:'([^']+)'|(\d+))\]")
_WRAPPER = re.compile(
    r"(?:^|(?<=\.))(?:_checkpoint_wrapped_module|_fsdp_wrapped_module|_orig_mod)(?:\.|$)"
)
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parents[1])


def bound(node: fx.Node) -> list[Any]:
    """A node's arguments by position, with the schema's defaults filled in."""
    schema = getattr(node.target, "_schema", None)
    found: list[Any] = list(node.args)
    for argument in schema.arguments[len(node.args) :] if schema is not None else ():
        default = argument.default_value if argument.has_default_value() else None
        found.append(node.kwargs.get(argument.name, default))
    return found


def made(node: fx.Node, value: object) -> object:
    """The results that a node really makes: those that its `output_mask` leaves out are None."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    if "output_mask" not in names or not isinstance(value, list | tuple):
        return value
    mask = bound(node)[names.index("output_mask")]
    return tuple(item if wanted else None for item, wanted in zip(value, mask, strict=True))


def draws_random_numbers(node: fx.Node) -> bool:
    """Returns True if a node reads and advances the random number generator."""
    target = node.target
    known = isinstance(target, OpOverload)
    return known and effects(target).drawn(node.args, [*node.kwargs.items()])


def is_read_unwritten(node: fx.Node) -> bool:
    """Returns True if a node leaves its result unwritten, and another reads the old contents."""
    if not isinstance(node.target, OpOverload) or not effects(node.target).unwritten:
        return False
    return not all(
        isinstance(user.target, OpOverload)
        and effects(user.target).shape_only
        and user.args[0] is node
        and [*user.all_input_nodes].count(node) == 1
        for user in node.users
    )


def is_mutable(node: fx.Node) -> bool:
    """Returns True if a node writes one of its arguments."""
    target = node.target
    return isinstance(target, OpOverload) and target._schema.is_mutable


def is_view(node: fx.Node) -> bool:
    """Returns True if a node's results are views of its argument, by torch's own schema."""
    target = node.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    return bool(returns) and all(result.alias_info is not None for result in returns)


def aliases(node: fx.Node) -> set[fx.Node]:
    """A node and everything that is a view of it."""
    found, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user not in found and _shows_argument(user, LAZY):
                found.add(user)
                todo.append(user)
    return found


def shown_by(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """These nodes, and all whose memory they may show: as views, or as copies that become views."""
    found, todo = set(nodes), [*nodes]
    while todo:
        node = todo.pop()
        if _shows_argument(node, LAZY | COPIES):
            new = [each for each in node.all_input_nodes if each not in found]
            found.update(new)
            todo += new
    return found


def _shows_argument(node: fx.Node, kinds: Collection[str]) -> bool:
    """Returns True if a node's result is a view of an argument, or its operator one of `kinds`."""
    return node.target is operator.getitem or is_view(node) or str(node.target) in kinds


def origin(node: Any) -> fx.Node:
    """The node that makes the memory which a view shows."""
    while is_view(node) or str(node.target) in LAZY or node.target is operator.getitem:
        node = node.args[0]
    return node


def written_inputs(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The nodes that write an input as the graph ends, and the inputs."""
    found = {n: n.args[0] for n in graph.nodes if str(n.target) == "aten.copy_.default"}
    return {n: x for n, x in found.items() if isinstance(x, fx.Node) and x.op == "placeholder"}


def counted_in_storage(graph: fx.Graph) -> list[int]:
    """Positions of the arguments whose offset in their storage counts: an `as_strided` gives one
    in that storage, or in that of what the argument becomes as it is written."""
    strided = [n for n in graph.nodes if str(n.target).startswith("aten.as_strided")]
    origins = {origin(n.args[0]) for n in strided if bound(n)[-1] is not None}
    if any(made.op != "placeholder" for made in origins):
        origins.update(written_inputs(graph).values())
    return [i for i, n in enumerate(graph.find_nodes(op="placeholder")) if n in origins]


def awaited(graph: fx.Graph) -> list[int]:
    """Positions of the arguments that the graph waits for: a caller's collective may be at them.

    It need not have a type of its own that says so: a DTensor is taken apart to what it holds.
    """
    places = graph.find_nodes(op="placeholder")
    return [i for i, n in enumerate(places) if any(str(a.target) == WAIT for a in aliases(n))]


def live_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the output needs, and those with an effect of their own."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        effect = node.op in ("output", "placeholder") or is_mutable(node)
        if effect or draws_random_numbers(node) or not live.isdisjoint(node.users):
            live.add(node)
    return live


def output_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that the graph returns."""
    return [item for item in flatten(graph.output_node().args[0]) if isinstance(item, fx.Node)]


def flatten(value: object) -> Iterator[object]:
    """The items of nested lists and tuples."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from flatten(item)
    else:
        yield value


# -- where a node comes from ----------------------------------------------------------------------


def location(node: fx.Node) -> Loc:
    """The module path, file and line of a node; backward nodes take their forward node's."""
    if not node.meta:  # one that the partitioner made around another
        noted = [user for user in node.users if user.meta]
        return location(noted[0]) if noted else Loc()
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    innermost = list(stack.values())[-1] if stack else ""
    module = module_path(str(innermost[0] if isinstance(innermost, tuple) else innermost))
    module = module or unwrapped((node.meta.get("custom") or {}).get(MODULE_KEY, ""))
    return Loc(module, *_users_frame(node.meta.get("stack_trace") or ""))


@lru_cache(1024)
def _users_frame(trace: str) -> tuple[str, int]:
    """The innermost file and line of a recorded trace that are not torch's; equal layers have the
    same."""
    frames = _FRAME.findall(trace)
    outside = [frame for frame in frames if not frame[0].startswith((_TORCH, "<"))]
    return (outside[-1][0], int(outside[-1][1])) if outside else ("", 0)


def users_line(error: BaseException | None = None) -> str:
    """The innermost line that is neither torch's nor ours, as `file:line`; else nothing: of what
    led to an error, or to this call."""
    frames = traceback.extract_tb(error.__traceback__) if error else traceback.extract_stack()
    lines = [(frame.filename, frame.lineno) for frame in frames]
    outside = [line for line in lines if not line[0].startswith((_TORCH, _OWN, "<"))]
    return "{}:{}".format(*outside[-1]) if outside else ""


@lru_cache(1024)
def module_path(path: str) -> str:
    """A module path as `named_modules` spells it, from what the tracer recorded.

    What `checkpoint_wrapper` and others put around a module has no part in it.
    """
    path = _MEMBER.sub(r".\2", _LOCAL.sub("", path))
    path = _ITEM.sub(lambda found: "." + next(filter(None, found.groups())), path)
    return unwrapped(path.lstrip("."))


def unwrapped(path: str) -> str:
    """A module's or parameter's path without the modules that torch wraps around the user's."""
    return _WRAPPER.sub("", path).rstrip(".")


def parameter_name(node: fx.Node, labels: Sequence[str]) -> str:
    """A name for an argument: the user's own where the tracer says which it is, else the node's.

    `labels` are the names of the arguments that the graph had before AOTAutograd took it apart,
    which says of a placeholder what position it had there, or which parameter it was.
    """
    desc = argument_of(node)
    if hasattr(desc, "target"):
        return str(desc.target).replace(".", "_")
    index = getattr(desc, "idx", None) if type(desc).__name__ == "PlainAOTInput" else None
    if isinstance(index, int) and index < len(labels):
        return labels[index] or node.name
    return node.name


def argument_of(node: fx.Node) -> Any:
    """AOTAutograd's description of the argument that a placeholder is, or is a part of; None where
    forward saves it for backward."""
    desc: Any = node.meta.get("desc")
    while hasattr(desc, "base"):
        desc = desc.base
    return desc


def comes_anywhere(node: fx.Node, state: Collection[int]) -> bool:
    """True if an argument has other memory in each call: no parameter, none of the arguments
    `state` before AOTAutograd, and nothing that forward saves."""
    desc = argument_of(node)
    return not (desc is None or hasattr(desc, "target") or getattr(desc, "idx", None) in state)


def is_state(source: str) -> bool:
    """True if the tracer's name of an argument is that of a module's parameter or buffer."""
    return any(found[1] != "_modules" for found in _MEMBER.finditer(source))


def label(source: str) -> str:
    """An identifier for an argument, from the tracer's name of where it comes from."""
    return re.sub(r"\W+", "_", module_path(source).replace("local_tensor", "")).strip("_")


def group_of(node: fx.Node) -> Any:
    """The process group (or its name) that a node communicates in; None: it does not."""
    schema = getattr(node.target, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "group_name":
            group = bound(node)[place]
            value = group.meta.get("val") if isinstance(group, fx.Node) else group
            return getattr(value, "real_obj", value)
    return None


def name_groups(graph: fx.Graph) -> None:
    """Has collectives name their groups, as they do without torch's `compile_on_one_rank`: with it
    the graph looks each group up in a mesh, so that it is the same on all ranks."""
    for node in graph.nodes:
        if str(node.target) == COORDINATE:
            raise UnsupportedError(
                f"{describe(node)}: sizes or offsets depend on the rank, as those of a "
                "vocabulary's shard do, and torch's compile_on_one_rank has no numbers for them. "
                "fix: leave that part out of the compiled function (torch.compiler.disable), or "
                "compile on each rank"
            )
    for node in [node for node in graph.nodes if str(node.target) == GROUP_OF_MESH]:
        name = node.meta["val"].group_name

        def named(item: Any, node: fx.Node = node, name: str = name) -> Any:
            return name if item is node else item

        for user in list(node.users):
            user.args, user.kwargs = (map_aggregate(x, named) for x in (user.args, user.kwargs))
        mesh = node.args[0]
        graph.erase_node(node)
        while isinstance(mesh, fx.Node) and mesh.op != "placeholder" and not mesh.users:
            above = mesh.args[0] if mesh.args else None
            graph.erase_node(mesh)
            mesh = above


def describe(node: fx.Node) -> str:
    """A node as errors name it: operator, module and line."""
    place = str(location(node))
    return f"{node.target} in {place}" if place else f"{node.target} (node {node.name})"


# -- the values of all nodes ----------------------------------------------------------------------


Values = dict[fx.Node, Any]
"""Every node's (fake) value, as tracing recorded it."""


class _Recorder(fx.Interpreter):
    """Runs a graph and keeps every node's value."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.recorded: Values = {}

    def run_node(self, n: fx.Node) -> object:
        """The node's value, noted."""
        value = self.recorded[n] = super().run_node(n)
        return value


def complete(gm: fx.GraphModule) -> Values | None:
    """Every node's value as it was traced, where some have none noted; None where all have."""
    if all("val" in n.meta for n in gm.graph.nodes if n.op == "call_function"):
        return None
    fakes = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    modes = [value.fake_mode for value in fakes if isinstance(value, FakeTensor)]
    return _recorded(gm, modes[0] if modes else FakeTensorMode(), fakes)


def propagate(gm: fx.GraphModule, args: Sequence[object]) -> Values:
    """Every node's fake value for these arguments; nothing is computed."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
    return _recorded(gm, mode, fakes)


def _recorded(gm: fx.GraphModule, mode: FakeTensorMode, fakes: Sequence[object]) -> Values:
    recorder = _Recorder(gm)
    with mode, torch.no_grad():
        recorder.run(*fakes, enable_io_processing=False)
    return recorder.recorded
