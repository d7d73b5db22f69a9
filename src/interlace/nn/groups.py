"""The `group` argument of layers and losses, and tensors that are cut over one.

pg = group_of(mesh["tp"])        # a process group, or None where it has one rank
"""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from interlace.comm.teams import group_of_mesh
from interlace.errors import InputError

GroupLike = dist.ProcessGroup | dist.DeviceMesh | None
"""A process group, or a mesh of one dimension; None: this rank alone."""


def group_of(group: GroupLike) -> dist.ProcessGroup | None:
    """The process group of a group, or of a mesh of one dimension; None where it has one rank."""
    if group is None:
        return None
    if isinstance(group, dist.DeviceMesh):
        if group.ndim != 1:
            raise InputError(
                f"`group` is a mesh of {group.ndim} dimensions: give one of them, mesh[name]"
            )
        if group.get_coordinate() is None:
            raise InputError(f"`group` is {group!r}, which this rank is not in")
        group = group_of_mesh(group)
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(f"`group` is {group!r}: not a process group of this rank, nor a mesh")
    return group if size_of(group) > 1 else None


def size_of(group: dist.ProcessGroup) -> int:
    """Its ranks. The binding lets other threads run before it answers, which can take 50 us."""
    if torch.compiler.is_compiling():  # a checkpoint that is traced must write nothing
        return group.size()
    size = _sizes.get(group)
    if size is None:
        size = _sizes[group] = group.size()
    return size


_sizes: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def is_dtensor(tensor: object) -> bool:
    """Returns true for a DTensor."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "device_mesh")
