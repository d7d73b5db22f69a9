"""A compiled module as an `nn.Module`: its parameters, modes and attributes are the model's own.

compiled = interlace.compile(model, x)
compiled.load_state_dict(torch.load("model.pt"))    # names as in the model, no prefix
optimizer = torch.optim.AdamW(compiled.parameters())
compiled.train()
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import nn

_OWN = frozenset(
    "fn options _keys _mesh _entries".split(),
)
"""Attributes of the compiled object itself; every other attribute is the model's."""


class AsModule(nn.Module):
    """Holds nothing: what is read, set or called on it, is read, set or called on `fn`."""

    fn: Any

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # not set yet
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(self.fn, name)
        except AttributeError as error:
            raise AttributeError(
                f"neither interlace's {type(self).__name__} nor the module that it compiled has an "
                f"attribute {name!r} ({error})",
                name=name,
                obj=self,
            ) from error

    def __setattr__(self, name: str, value: object) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self.fn, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.fn, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.fn)})

    def __len__(self) -> int:
        return len(self.fn)

    def __getitem__(self, place: object) -> Any:
        return self.fn[place]

    def __setitem__(self, place: object, part: nn.Module) -> None:
        self.fn[place] = part

    def __delitem__(self, place: object) -> None:
        del self.fn[place]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.fn)

    def __bool__(self) -> bool:  # else asked of __len__, which few modules have
        return bool(self.fn)

    def forward(self, *args: object, **kwargs: object) -> Any:
        """The compiled call."""
        return self(*args, **kwargs)


def _of_model(name: str) -> Callable[..., object]:
    def method(self: AsModule, *args: object, **kwargs: object) -> Any:
        found = getattr(self.fn, name)(*args, **kwargs)
        return self if found is self.fn else found

    method.__name__, method.__doc__ = name, f"The model's `{name}`."
    return method


for _name, _value in vars(nn.Module).items():
    if isinstance(_value, FunctionType) and _name not in vars(AsModule) and _name[:2] != "__":
        setattr(AsModule, _name, _of_model(_name))
