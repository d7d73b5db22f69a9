"""The machine that `auto` asks: the calibration named, the one of this host, or the built-in model.

    machine = machine_for(Options(), "cuda")        # what `interlace calibrate` wrote, if it did

Every rank of a host finds the same file. Where hosts have different ones, binding raises: ranks
choose by one (frontend/binding.py).
"""

from __future__ import annotations

import warnings

import torch

from interlace.cost import Machine, default_machine, default_path
from interlace.errors import CalibrationError
from interlace.kernels.gemm.support import refuse_device, refuse_packed
from interlace.options import Options


def gpus_of(device: str) -> str:
    """The GPUs of this host as calibration files name them; empty for the CPU."""
    if torch.device(device).type != "cuda":
        return ""
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def machine_for(options: Options, device: str) -> Machine:
    """The machine to choose by. With `graph=True` it is one whose host issues nothing."""
    gpus = gpus_of(device)
    if options.calibration is not None:
        machine = Machine.load(options.calibration, gpus=gpus)
    else:
        machine = _calibrated(device, gpus) or default_machine(device)
    place = torch.device(device)
    kernels = place.type != "cuda" or refuse_device(place) is None
    packed = kernels and (place.type != "cuda" or refuse_packed() is None)
    return _replayed(machine.replace(kernels=kernels, packed_kernels=packed), options)


def shared_machine(options: Options, device: str) -> Machine:
    """The machine that is the same on all hosts unless the options name a file."""
    if options.calibration is not None:
        return machine_for(options, device)
    return _replayed(default_machine(device), options)


def _replayed(machine: Machine, options: Options) -> Machine:
    return machine.replayed if options.graph else machine


def _calibrated(device: str, gpus: str) -> Machine | None:
    """Machine that `interlace calibrate` measured on this host; None without one for the device."""
    path = default_path(gpus)
    if not path.exists():
        return None
    try:
        machine = Machine.load(path, gpus=gpus)
    except CalibrationError as error:
        warnings.warn(f"the built-in model chooses strategies: {error}", stacklevel=2)
        return None
    return machine if machine.device == torch.device(device).type else None
