"""Computing in bfloat16 while weights stay in float32, and a word where the processor makes that slow."""

import torch

from surgery.runtime.progress import say


def autocast(device: torch.device, mixed_precision: str | None) -> torch.autocast:
    """What a forward pass in training runs under."""
    advise_bf16(device, mixed_precision)
    return torch.autocast(device.type, torch.bfloat16, enabled=mixed_precision == "bf16")


def advise_bf16(device: torch.device, mixed_precision: str | None) -> None:
    """Say where bfloat16 costs time instead of saving it."""
    if mixed_precision == "bf16" and device.type == "cpu" and not has_bf16():
        say("advice: this processor has no bfloat16 instructions, so mixed_precision: bf16 makes it slower; leave it out")


def has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 matrices itself. True where torch cannot tell: it can of x86 only, and older
    versions cannot at all."""
    of = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return of.get("architecture") != "x86_64" or bool(of.get("avx512_bf16") or of.get("amx_bf16"))
