"""Whether this machine has the device that a recipe names."""

from typing import Any

import torch

from surgery.errors import UserError


def check_device(name: str) -> None:
    """Raise UserError for a name that is no device, and for a device that is not here."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"device must be auto, cpu, cuda, cuda:1, ..., not '{name}'") from None
    if device.type == "meta":
        raise UserError("device must be auto, cpu, cuda, ...: on 'meta' a model has no values")
    if device.type != "cpu" and not _count(device.type):
        build = "" if device.type != "cuda" or torch.backends.cuda.is_built() else "; this torch was built without CUDA"
        raise UserError(f"device is '{name}', and no such device is here{build}: set device=cpu, or leave it at auto")
    if device.index is not None and device.index >= max(1, _count(device.type)):
        raise UserError(f"device is '{name}', and only {max(1, _count(device.type))} of its kind are here, counted from 0")


def same_device(place: torch.device, name: str) -> bool:
    """Whether a tensor's device is the one of a name; "cuda" is the current one."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return device == place


def _count(kind: str) -> int:
    """How many devices of a kind are here."""
    if kind == "cuda":
        return torch.cuda.device_count()
    backend: Any = getattr(torch, kind, None)
    if not (hasattr(backend, "is_available") and backend.is_available()):
        return 0
    return backend.device_count() if hasattr(backend, "device_count") else 1
