"""Parameters whose values are on their way: a class that they have until they are read.

    param.__class__ = arriving(type(param), wait)     # torch's lazy Parameters change theirs too
    param.norm()                                      # calls wait(), which gives it its class back
    param.grad, param.shape                           # do not

So whatever reads a weight waits for it: a module, an average of weights, a copy, pickling, a loop
over `parameters()`. An alias that was taken before (`param.data`, a view) is another tensor, of
which this knows nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor

from interlace.torch_private import DisableTorchFunctionSubclass

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "is_leaf"),
    *("requires_grad", "grad", "grad_dtype", "grad_fn", "_grad", "_backward_hooks"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *("size", "stride", "dim", "ndimension", "numel", "nelement", "element_size", "get_device"),
    *("is_contiguous", "is_floating_point", "is_complex", "requires_grad_", "register_hook"),
    *("register_post_accumulate_grad_hook", "is_same_size"),
)
_known: dict[str, Any] = {name: getattr(Tensor, name, None) for name in (*_METHODS, *_PROPERTIES)}
FACTS: frozenset[Any] = frozenset(
    {_known[name] for name in _METHODS}
    | {_known[name].__get__ for name in _PROPERTIES if _known[name] is not None}
    | {_known[name].__set__ for name in ("requires_grad", "grad", "grad_dtype")}
)
"""Methods and accessors of tensors that read no values."""


def arriving(kind: type[Tensor], wait: Callable[[], None]) -> type[Tensor]:
    """The class of a Parameter of class `kind` for which `wait` is called before it is read.

    `wait` gives it its own class back, or raises.
    """

    def torch_function(
        _: type[Tensor], func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in FACTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for each in types:
            getattr(each, "_arrive", int)()
        return func(*args, **(kwargs or {}))

    def reduced(param: Tensor, protocol: Any) -> Any:
        wait()
        return param.__reduce_ex__(protocol)

    def copied(param: Tensor, memo: dict[int, Any]) -> Tensor:
        wait()
        return copy.deepcopy(param, memo)

    def local_tensor(param: Any) -> Tensor:
        wait()
        return param._local_tensor

    members: dict[str, Any] = {
        "__slots__": (),
        "__new__": lambda _, *args, **kwargs: kind(*args, **kwargs),  # another has its values
        "__torch_function__": classmethod(torch_function),
        "__reduce_ex__": reduced,
        "__deepcopy__": copied,
        "_arrive": staticmethod(wait),
    }
    if hasattr(kind, "_local_tensor"):  # a DTensor, which has methods that no function is told of
        members["_local_tensor"] = property(local_tensor)
    return type(kind)(f"Arriving{kind.__name__}", (kind,), members)
