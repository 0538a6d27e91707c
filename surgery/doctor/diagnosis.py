"""Diagnosis: which backend serves which operation on this machine, and why the others do not."""

import torch
from torch import Tensor

from surgery.kernels.dispatch import Operation
from surgery.kernels.operations import operations
from surgery.records.record import KERNEL_PACKAGES, PACKAGES, Environment, Marked, Record, environment

DTYPES = (torch.float32, torch.bfloat16)


class Verdict(Record):
    """Who serves a small call of an operation, with its gradient where it has one.

    serves: the backend that is chosen. idle: backends that could serve the call -> why they are not chosen, or "" where another
    one is merely preferred. refused: backends that cannot serve the call -> the reason."""

    operation: str
    device: str
    dtype: str
    serves: str
    idle: dict[str, str]
    refused: dict[str, str]


class Diagnosis(Marked):
    environment: Environment
    verdicts: tuple[Verdict, ...]


def diagnose() -> Diagnosis:
    """Ask every backend whether it serves; those that depend on software which may be broken are really called."""
    devices = [torch.device("cpu"), *([torch.device("cuda", 0)] if torch.cuda.is_available() else [])]
    return Diagnosis(
        environment=environment((*PACKAGES, *KERNEL_PACKAGES)),
        verdicts=tuple(
            _verdict(operation, device, dtype) for operation in operations().values() for device in devices for dtype in DTYPES
        ),
    )


def _verdict(operation: Operation, device: torch.device, dtype: torch.dtype) -> Verdict:
    args = operation.example(device, dtype)
    if operation.differentiable:
        args = tuple(m.requires_grad_() if isinstance(m, Tensor) and m.is_floating_point() else m for m in args)
    reasons = {name: operation.why_not(backend, *args) for name, backend in operation.backends.items()}
    serves = operation.choose(*args).name
    return Verdict(
        operation=operation.name,
        device=str(device),
        dtype=str(dtype).removeprefix("torch."),
        serves=serves,
        idle={
            name: backend.declines(*args) or ""
            for name, backend in operation.backends.items()
            if not reasons[name] and name != serves
        },
        refused={name: reason for name, reason in reasons.items() if reason},
    )


def describe(environment: Environment) -> str:
    """One line on the machine and the software."""
    packages = ", ".join(f"{name} {version}" for name, version in environment.packages.items())
    return f"{environment.created[:10]}, {environment.machine}, {environment.threads} threads; {packages}"


def verdict_rows(diagnosis: Diagnosis) -> tuple[list[str], list[list[str]]]:
    """One row for each operation, device and dtype."""
    body = []
    for verdict in diagnosis.verdicts:
        others = [f"{name}: {reason}" for name, reason in verdict.refused.items()]
        others += [f"{name}, not preferred: {reason}" for name, reason in verdict.idle.items() if reason]
        if ready := [name for name, reason in verdict.idle.items() if not reason]:
            others.append(f"ready: {', '.join(ready)}")
        body.append([verdict.operation, verdict.device, verdict.dtype, verdict.serves, "\n".join(others)])
    return ["operation", "device", "dtype", "served by", "not by"], body
