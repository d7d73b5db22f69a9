"""What a call of a compiled module is known by: remembered, it is what it would be found anew."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.utils import parametrize

import interlace
from interlace.errors import UnsupportedError
from interlace.frontend.calling.call_key import CallKeys


class Net(nn.Module):
    """A parameter, a buffer, children, a shared child, and something that may be None."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=i == 0) for i in range(2)])
        self.again = self.layers[0]
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.drop(self.again(x) * self.scale + self.seen)


class Doubled(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def data(net: Net) -> Any:
    return net.layers[0].weight


def to_end(held: dict[str, Any], name: str) -> None:
    held[name] = held.pop(name)


CHANGES: dict[str, Callable[[Net], object]] = {
    "eval": lambda net: net.drop.eval(),
    "parameter": lambda net: setattr(net, "scale", nn.Parameter(torch.ones(1))),
    "same parameter": lambda net: setattr(net, "scale", nn.Parameter(torch.ones(4))),
    "buffer": lambda net: setattr(net, "seen", torch.zeros(1)),
    "no buffer": lambda net: setattr(net, "seen", None),
    "no bias": lambda net: setattr(net.layers[0], "bias", None),
    "bias": lambda net: setattr(net.layers[1], "bias", nn.Parameter(torch.ones(4))),
    "child": lambda net: net.layers.__setitem__(1, nn.Linear(4, 4)),
    "grandchild": lambda net: net.drop.add_module("more", nn.BatchNorm1d(4)),
    "child without parameters": lambda net: setattr(net, "drop", nn.Tanh()),
    "no child": lambda net: net.layers.pop(1),
    "frozen": lambda net: net.scale.requires_grad_(False),
    "type": lambda net: net.double(),
    "layout": lambda net: setattr(data(net), "data", data(net).data.t()),
    "order": lambda net: (w := net.scale, delattr(net, "scale"), setattr(net, "scale", w)),
    "order of parameters": lambda net: to_end(net.layers[0]._parameters, "weight"),
    "order of children": lambda net: to_end(net._modules, "layers"),
    "size": lambda net: setattr(net.scale, "data", torch.ones(1)),
    "other memory": lambda net: setattr(net.scale, "data", net.scale.data.clone()),
    "shared memory": lambda net: setattr(net.scale, "data", net.seen),
    "tied": lambda net: setattr(net.layers[1], "weight", net.layers[0].weight),
    "parametrized": lambda net: parametrize.register_parametrization(
        net.layers[1], "weight", Doubled()
    ),
}
KEPT = ("same parameter", "other memory", "order")
"""What changes nothing that a compilation rests on."""


@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_in_a_module_is_seen(what: str) -> None:
    net, x = Net(), torch.ones(2, 4)
    keys = CallKeys(net)
    before, again = keys.of((x,), {}), keys.of((x,), {})
    assert before.key == again.key
    assert hash(before.key) == hash(again.key)
    CHANGES[what](net)
    after, anew = keys.of((x,), {}), CallKeys(net).of((x,), {})
    assert after.key == anew.key
    assert [*map(id, after.tensors)] == [*map(id, anew.tensors)]
    assert after.names == anew.names
    assert (after.key == before.key) == (what in KEPT)
    assert keys.of((x,), {}).key == after.key


def test_any_changes_in_a_row(seed: int) -> None:
    chance, x = random.Random(seed), torch.ones(2, 4)
    for _ in range(20):
        net = Net()
        keys = CallKeys(net)
        for what in chance.sample([*CHANGES], 6):
            try:
                CHANGES[what](net)
            except (AttributeError, IndexError, KeyError, RuntimeError, TypeError):
                continue  # what it changes is no longer there
            for _ in range(2):
                found, anew = keys.of((x,), {}), CallKeys(net).of((x,), {})
                assert found.key == anew.key, what
                assert [*map(id, found.tensors)] == [*map(id, anew.tensors)], what


def test_arguments_make_keys() -> None:
    keys = CallKeys(nn.ReLU())
    x, y = torch.ones(2, 4), torch.ones(2, 4)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        *[((x,), {}), ((x, y), {}), ((x, x), {}), ((x, x[1:]), {}), (([x, y],), {})],
        *[((x, 1), {}), ((x, 1.0), {}), ((x, True), {}), ((x, None), {}), ((x, "1"), {})],
        *[((x,), {"y": y}), ((x,), {"z": y}), ((), {"y": y}), (({"y": y},), {})],
        *[((x.double(),), {}), ((x.t(),), {}), ((x[:1],), {}), ((x.clone().requires_grad_(),), {})],
        *[((x.to(torch.device("meta")),), {}), ((nn.Parameter(x),), {})],
    ]
    found = [keys.of(*call).key for call in calls]
    assert len(set(found)) == len(calls), "two calls that differ have one key"
    assert [keys.of(*call).key for call in calls] == found
    with torch.no_grad():
        assert keys.of((x,), {}).key != found[0]
    with torch.autocast("cpu", torch.bfloat16):
        assert keys.of((x,), {}).key != found[0]
    assert keys.of((torch.zeros(2, 4),), {}).key == found[0]


def test_an_argument_that_shares_memory_with_the_module() -> None:
    net = Net()
    keys = CallKeys(net)
    apart = keys.of((torch.zeros(4),), {}).key
    assert keys.of((net.get_buffer("seen")[:],), {}).key != apart
    assert keys.of((torch.ones(4),), {}).key == apart


def test_what_was_replaced_is_freed() -> None:
    net = Net()
    keys = CallKeys(net)
    keys.of((torch.ones(2, 4),), {})
    gone = [weakref.ref(net.scale), weakref.ref(net.layers[1])]
    net.scale = nn.Parameter(torch.ones(4))
    net.layers[1] = nn.Linear(4, 4)
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def shards() -> list[bool]:
    """DTensor parameters: other layouts, other shards of one size, other sizes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    net = nn.Linear(8, 8, bias=False)

    def put(rows: int, placement: Any) -> None:
        net.weight = nn.Parameter(distribute_tensor(torch.ones(rows, 8), mesh, [placement]))

    keys, x = CallKeys(net), torch.ones(2, 8)
    found: list[Any] = []
    for rows, placement in ((8, Shard(0)), (8, Shard(0)), (8, Replicate()), (16, Shard(0))):
        put(rows, placement)
        found.append(keys.of((x,), {}).key)
        assert keys.of((x,), {}).key == found[-1]
        assert CallKeys(net).of((x,), {}).key == found[-1]
    net.weight.requires_grad_(False)
    found.append(keys.of((x,), {}).key)
    return [key == found[0] for key in found]


def test_shards_make_keys(pool: Pool) -> None:
    assert pool(2).run(shards) == [[True, True, False, False, False]] * 2


def test_a_compiled_module_follows_its_changes(seed: int) -> None:
    torch.manual_seed(seed)
    net, x = Net().eval(), torch.randn(3, 4)
    compiled = interlace.compile(net)
    with torch.no_grad():
        for change in (None, "same parameter", "other memory", "no bias", "child", "tied", "size"):
            if change:
                CHANGES[change](net)
            net.get_buffer("seen").add_(1)
            for _ in range(3):  # two go through AOTAutograd, unless they are known from before
                torch.testing.assert_close(compiled(x), net(x))
            assert compiled._entries.all()[-1].direct is not None


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_uses_modules_of_its_own(copied: Callable[[Any], Any]) -> None:
    net, x = nn.Linear(4, 4), torch.ones(2, 4)
    compiled = interlace.compile(net, x)
    compiled.close()
    other = copied(compiled)
    with torch.no_grad():
        for parameter in other.fn.parameters():
            parameter.zero_()
        for _ in range(3):
            assert not other(x).any()
            assert torch.equal(compiled(x), net(x))


def test_tensors_can_be_swapped() -> None:
    """Which torch refuses of tensors that somebody refers to weakly."""
    net, other = nn.Linear(4, 4), nn.Parameter(torch.ones(4, 4))
    CallKeys(net).of((torch.ones(2, 4),), {})
    torch.utils.swap_tensors(net.weight, other)
    assert torch.equal(net.weight, torch.ones(4, 4))


class Mine(nn.Parameter):
    """A parameter of a type of its own, of which nothing is known."""


def test_tensors_that_are_not_like_most_are_looked_at_anew() -> None:
    net, x = nn.Linear(4, 4), torch.ones(2, 4)
    net.weight = Mine(torch.ones(4, 4))
    keys = CallKeys(net)
    found = keys.of((x,), {})
    assert [keys.of((x,), {}).key for _ in range(2)] == [found.key] * 2
    assert found.tensors[0] is net.weight
    net.weight = nn.Parameter(torch.ones(4, 4))
    assert keys.of((x,), {}).key != found.key
    waiting = AsyncCollectiveTensor(torch.ones(2, 4))  # whose storage cannot be read
    assert keys.of((waiting,), {}).key == keys.of((waiting,), {}).key
    assert keys.of((waiting,), {}).key != keys.of((x,), {}).key


def test_memory_by_another_storage_is_the_modules_too() -> None:
    """An argument lies in a buffer's memory, which has come to be of another storage."""
    net = nn.Module()
    net.register_buffer("seen", torch.ones(4))
    keys = CallKeys(net)
    apart = keys.of((torch.zeros(4),), {}).key
    seen: Any = net.seen
    seen.data = torch.from_numpy(seen.numpy())
    assert keys.of((seen.view(4),), {}).key != apart


class Scaled(nn.Module):
    """Holds a tensor that is neither a parameter nor a buffer, and reads or writes it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seen = how, {"w": torch.ones(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "written":
            self.seen["w"].add_(1)
        return x * 2 if self.how == "written" else x * self.seen["w"]


@pytest.mark.parametrize("net", [Scaled("read"), Scaled("written")], ids=str)
def test_a_tensor_that_a_module_hides_is_a_typed_error(net: Scaled) -> None:
    told = r" at .*test_call_key.py:\d+ uses a tensor that is not among its.*register_buffer"
    with pytest.raises(UnsupportedError, match=told):
        interlace.compile(net, torch.ones(2, 4))
    assert torch.equal(net.seen["w"], torch.ones(4)), "it is as it was"
