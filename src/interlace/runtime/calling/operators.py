"""From the names that a schedule gives to what PyTorch calls so: operators, and words of arguments.

>>> resolve("aten.mm.out")
<OpOverload(op='aten.mm', overload='out')>
>>> decode("@device", torch.device("cpu"))
device(type='cpu')

Note [What a name may reach]
    Names come from files. They are looked up in PyTorch's dispatcher, which holds operators alone;
    an attribute of a Python object is never taken for one. `refusal` says which names and which
    operators no schedule may call; TorchScript's own (aten.save) are not in the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from interlace.errors import ProgramError
from interlace.ir import DType
from interlace.ir.operators import FIX, WORDS, refusal, split
from interlace.ir.text.spelling import did_you_mean
from interlace.kernels import KERNELS
from interlace.runtime.values import DTYPES
from interlace.torch_private import OpOverload, all_op_names, find_operator


def resolve(fn: str) -> Callable[..., Any]:
    """The operator of that name, or a kernel of ours: Note [What a name may reach]."""
    kernel = KERNELS.get(fn)
    if kernel is not None:
        return kernel
    why = refusal(fn)
    if why is not None:
        raise ProgramError(f"{why}: {FIX}")
    parts = split(fn)
    assert parts is not None
    space, name, overload = parts
    try:
        schema = f"{space}::{name}", "" if overload == "default" else overload
        find_operator(*schema)
    except RuntimeError as error:
        raise ProgramError(_unknown(fn, space, name)) from error
    found = getattr(getattr(getattr(torch.ops, space), name), overload)
    assert isinstance(found, OpOverload), fn
    return found


def _unknown(fn: str, space: str, name: str) -> str:
    """Message for an operator that the dispatcher lacks, with the overloads that it has."""
    known = all_op_names()
    names = [_dotted(found) for found in known if found.partition(".")[0] == f"{space}::{name}"]
    if names and fn.count(".") == 1:
        return f"{fn!r} names no overload: write one of {', '.join(sorted(names))}"
    if not names:
        names = [_dotted(found) for found in known if found.startswith(f"{space}::")]
    if not names:
        return (
            f"no operator named {fn!r}, and none at all of {space}: import the library that "
            "registers it before the call is bound"
        )
    hint = did_you_mean(fn, names, f"operators of {space} are")
    return f"no operator named {fn!r}: {hint}"


def _dotted(name: str) -> str:
    operator_name, _, overload = name.partition(".")
    return f"{operator_name.replace('::', '.')}.{overload or 'default'}"


def decode(arg: Any, device: torch.device) -> Any:
    if isinstance(arg, DType):
        return DTYPES[arg]
    if isinstance(arg, str) and arg.startswith("@"):
        if arg not in WORDS:
            raise ProgramError(f"no value named {arg!r} that an operator could take")
        return device if arg == "@device" else getattr(torch, arg[1:])
    return arg
