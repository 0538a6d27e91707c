"""Builds of the C kernels for other processors than this one's, and what all of them have to compute right.

`building` makes this process use kernels that were compiled with other flags. `remote` makes it call them in a program of their
own (driver.c): one for another machine, that an emulator runs, or one with a sanitizer in it.
"""

import ctypes
import platform
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surgery.kernels import native, probing, selective_native
from surgery.kernels.attention import graft_attention
from surgery.kernels.conv import causal_conv
from surgery.kernels.divergence import kl_divergence
from surgery.kernels.norm import rms_norm
from surgery.kernels.selective import selective_scan, selective_step
from surgery.kernels.ssd import ssd_scan, ssd_step
from tests.kernels import test_attention
from tests.kernels.inputs import Scan, assert_near, make_scan, make_selective, ssd_mixer

KERNELS = {
    "ssd": ("scan", "scan_forward scan_backward scan_step kept_floats"),
    "selective": ("scan", "scan_forward scan_backward scan_step"),
    "conv_norm": ("conv_norm", "convolve convolve_backward normalise normalise_backward"),
    "divergence": ("divergence", "diverge"),
    "attention": ("attention", "attend_forward attend_backward"),
}
CONSTANTS = {"chunk_tokens": 128, "group_channels": 128}  # of selective.c


def forget() -> None:
    """All that is known of the kernels' libraries, and of who serves."""
    for cached in (native.load, native.function, native.constant):
        cached.cache_clear()
    probing.forget()


@contextmanager
def building(monkeypatch: pytest.MonkeyPatch, folder: Path, flags: Sequence[str]) -> Iterator[None]:
    """Kernels that are compiled with `flags` and not for this processor, in an empty cache."""
    with monkeypatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(native, "FLAGS", [*native.FLAGS, *flags])
        patch.setattr(native, "TARGETS", ("",))
        forget()
        yield
    forget()


class Remote:
    """Stands where the library of a kernel is expected; every call of a function runs the program."""

    def __init__(self, command: Sequence[str], threads: int):
        self.command, self.threads = command, threads

    def __getattr__(self, name: str) -> Any:
        return RemoteFunction(self, name)


class RemoteFunction:
    def __init__(self, library: Remote, name: str):
        self.library, self.name = library, name

    def __call__(self, pointer: Any) -> int:
        work = pointer._obj
        offsets = native._offsets(type(work))
        regions = [(offsets[name][0], m.data_ptr(), extent(m)) for name, m in work.tensors.items() if m is not None]
        numbers = struct.pack("=32s3q", self.name.encode(), self.library.threads, ctypes.sizeof(work), len(regions))
        sent = [numbers, bytes(work)]
        for offset, address, size in regions:
            sent += [struct.pack("=2q", offset, size), ctypes.string_at(address, size)]
        done = subprocess.run(self.library.command, input=b"".join(sent), capture_output=True, check=False, timeout=300)
        assert done.returncode == 0, f"{self.name}: status {done.returncode}\n{done.stderr.decode()[-4000:]}"
        assert not done.stderr, done.stderr.decode()[-4000:]
        (result,) = struct.unpack_from("=q", done.stdout)
        start = 8 + ctypes.sizeof(work)
        for _, address, size in regions:
            ctypes.memmove(address, done.stdout[start : start + size], size)
            start += size
        return result


def extent(m: Tensor) -> int:
    """Bytes from the first number of a tensor to the end of its last."""
    return m.element_size() * (1 + sum((size - 1) * stride for size, stride in zip(m.shape, m.stride(), strict=True)))


@contextmanager
def remote(monkeypatch: pytest.MonkeyPatch, folder: Path, compiler: Sequence[str], runner: Sequence[str] = (), threads=1):
    """Kernels that `compiler`, with its flags, makes into programs, which `runner` runs."""
    libraries = {}
    for name, (structure, functions) in KERNELS.items():
        program = folder / name
        calls = "".join(f"F({function})" for function in functions.split())
        defined = [f'-DKERNEL="{native.FOLDER / name}.c"', f"-DSTRUCTURE={structure}", f"-DFUNCTIONS={calls}"]
        flags = [flag for flag in native.FLAGS if flag not in ("-fPIC", "-shared")]
        driver = Path(__file__).parent / "driver.c"
        own = [compiler[0], *flags, *compiler[1:], *defined]  # what the test says of optimising comes last, and holds
        subprocess.run([*own, "-w", str(driver), "-o", str(program), "-pthread", "-lm"], check=True)
        libraries[name] = Remote([*runner, str(program)], threads)

    fill = native.Workspace.fill

    def fill_and_note(work: Any, **tensors: Tensor | None) -> None:
        fill(work, **tensors)
        work.tensors = {**getattr(work, "tensors", {}), **tensors}

    before = torch.get_num_threads()
    with monkeypatch.context() as patch:
        forget()
        patch.setattr(native, "load", libraries.__getitem__)
        patch.setattr(native.Workspace, "fill", fill_and_note)
        patch.setattr(selective_native, "constant", lambda _, name: CONSTANTS[name])
        torch.set_num_threads(1)  # the program has threads of its own
        try:
            yield
        finally:
            torch.set_num_threads(before)
    forget()


def macros(*target: str) -> str:
    """What a compiler predefines for a target, "" where it does not know it."""
    try:
        return native._call(["cc", *target, "-dM", "-E", "-x", "c", "/dev/null"]).decode()
    except RuntimeError:
        return ""


def runs_here(*target: str) -> bool:
    """Whether this processor can do all that the compiler uses for a target of x86."""
    if platform.machine() != "x86_64":
        return False
    wide = [line.split()[1] for line in macros(*target).splitlines() if line.startswith(("#define __AVX", "#define __FMA"))]
    here = macros("-march=native")
    return bool(macros(*target)) and all(f"#define {name} " in here for name in wide)


# ---- what has to be right: forward and gradients, against float64 ----


def compare(run: Callable[..., Any], args: Sequence[Any], *, differentiable: bool = True, **bounds: float) -> None:
    """`run` by "native" in float32 beside "reference" in float64, and their gradients of a random linear function."""
    results = {}
    for backend in ("native", "reference"):
        to = torch.float32 if backend == "native" else torch.float64
        # In float32 where they are, with their strides; but a step changes its state.
        own = [m.detach().to(to, copy=not differentiable) if isinstance(m, Tensor) else m for m in args]
        leaves = [m.requires_grad_(differentiable) for m in own if isinstance(m, Tensor)]
        outputs = run(*own, backend=backend)
        outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        if differentiable:
            g = torch.Generator().manual_seed(0)
            weights = [torch.randn(m.shape, generator=g).to(m.dtype) for m in outputs]
            outputs += torch.autograd.grad(outputs, leaves, weights)
        results[backend] = outputs
    for actual, exact in zip(*results.values(), strict=True):
        assert_near(actual.detach(), exact.detach(), **{"floor": 1.0, **bounds})


def check_ssd(some: bool = False) -> None:
    """Lengths around a chunk of 32 and a segment of 128; widths and sizes around 4, 8, 16, 32."""
    sizes = [(17, 33), (3, 5), (64, 16), (1, 1), (8, 9), (33, 130)]
    shapes = [(n, *sizes[i % len(sizes)]) for i, n in enumerate((70, 1, 33, 133, 32, 31, 64, 129, 165, 9, 18, 260))]
    for seed, (length, width, size) in enumerate(shapes[: 4 if some else None]):
        for forgetting in (1.0,) if some else (1.0, 1e4):
            kwargs = {"per_group": 1 + seed % 5, "groups": 1 + seed % 2, "skip": seed % 3 > 0, "state": seed % 2 > 0}
            scan = make_scan(length, width=width, size=size, forgetting=forgetting, seed=seed, **kwargs)
            compare(ssd_scan, ssd_mixer(scan) if seed % 2 else scan)
    for width, size in sizes:
        check_steps(ssd_step, make_scan(1, width=width, size=size))


def check_selective(some: bool = False) -> None:
    """Lengths around a chunk of 128; channels around a vector and a group of 128."""
    shapes = [(130, 33, 5), (1, 1, 1), (17, 130, 3), (129, 7, 16), (128, 16, 2), (300, 3, 33), (5, 128, 4), (127, 257, 2)]
    for seed, (length, channels, size) in enumerate(shapes[: 3 if some else None]):
        scan = make_selective(
            length, channels=channels, size=size, forgetting=(1.0, 1e3)[seed % 2], skip=seed % 3 > 0, state=seed % 2 > 0,
            mixer=seed % 4 > 0, seed=seed,
        )  # fmt: skip
        compare(selective_scan, scan)
        check_steps(selective_step, make_selective(1, channels=channels, size=size))


def check_steps(step: Callable[..., Tensor], scan: Scan) -> None:
    """A step also changes its state."""
    x, dt, A, B, C, D, state = scan

    def run(*args: Any, backend: str) -> tuple[Tensor, Tensor]:
        return step(*args, backend=backend), args[0]

    compare(run, [state.clone(), x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D], differentiable=False)


def check_conv_norm(some: bool = False) -> None:
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 70, 37, 4, 70), (1, 1, 1, 1, 1), (2, 33, 16, 3, 20), (1, 40, 5, 16, 31), (2, 65, 130, 4, 2), (1, 3, 8, 5, 3)]
    for i, (b, s, c, k, t) in enumerate(shapes[: 3 if some else None]):
        x, weight, bias = torch.randn(b, s, 2 * c + 1, generator=g)[..., 1 : 1 + c], torch.randn(c, 1, k, generator=g), None
        if i % 2 == 0:
            bias = torch.randn(c, generator=g)
        for silu in (False, True):
            compare(lambda *args, t=t, silu=silu, backend: causal_conv(*args, t, silu, backend=backend), (x, weight, bias))
    for i, (b, t, groups, group) in enumerate([(2, 40, 2, 37), (1, 1, 1, 1), (2, 33, 3, 16), (1, 65, 1, 130)]):
        c = groups * group
        x, gate = torch.randn(b, t, c, generator=g), torch.randn(b, t, 2 * c, generator=g)[..., c:] if i % 2 == 0 else None
        weight = torch.randn(c, generator=g)

        def run(x, weight, gate, group=group, *, backend):
            return rms_norm(x, weight, 1e-5, gate, group, backend=backend)

        compare(run, (x, weight, gate))


def check_divergence(some: bool = False) -> None:
    g = torch.Generator().manual_seed(0)
    for tokens, words in [(3, 37), (1, 1), (2, 256), (5, 257), (1, 1664)][: 3 if some else None]:
        teacher = 5 * torch.randn(tokens, words, generator=g)
        student = teacher + torch.randn(tokens, words, generator=g)
        compare(kl_divergence, (student, teacher), differentiable=False, floor=tokens)


def check_attention(some: bool = False) -> None:
    """Lengths around blocks of 64 queries and 64 keys and around panels of 8, 16 and 32; few units of work, and many."""
    shapes = [
        (130, 20, 17, 33, 1), (70, 0, 3, 5, 3), (1, 9, 8, 16, 2), (64, 64, 33, 1, 1), (9, 130, 5, 8, 5), (65, 0, 1, 40, 9),
        (33, 31, 16, 32, 1), (260, 3, 7, 4, 1),
    ]  # fmt: skip
    for seed, (t, past, w, p, pairs) in enumerate(shapes[: 3 if some else None]):
        args = test_attention.make(b=1 + seed % 2, pairs=pairs, per_pair=1, t=t, past=past, w=w, p=p, seed=seed)
        exists = torch.rand(len(args[0]), t + past, generator=torch.Generator().manual_seed(seed)) < 0.8
        exists[0, : past + t // 2] = False
        for mask in (None, exists):
            compare(lambda *args, mask=mask, backend: graft_attention(*args, mask, backend=backend), args, floor=5.0)


CHECKS = {
    "attention": check_attention,
    "ssd": check_ssd,
    "selective": check_selective,
    "conv_norm": check_conv_norm,
    "divergence": check_divergence,
}
