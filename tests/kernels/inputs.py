"""Random inputs of the scans of Mamba-2 and Mamba-1, and the error that all kernels are held to."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from surgery.kernels.ssd_chunked import CHUNK


class Scan(NamedTuple):
    """The tensors of ssd_scan and of selective_scan, in the order of their arguments."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Any  # a tensor or None, like the next
    initial_state: Any

    def map(self, change: Callable[[Tensor], Tensor]) -> "Scan":
        return Scan._make(None if m is None else change(m) for m in self)

    def bfloat16(self) -> "Scan":
        """As in a bfloat16 model: activations in bfloat16, A and the state in float32."""
        x, dt, B, C = (m.bfloat16() for m in (self.x, self.dt, self.B, self.C))
        return self._replace(x=x, dt=dt, B=B, C=C)

    def double(self) -> "Scan":
        return self.map(Tensor.double)


def time_steps(g: torch.Generator, forgetting: float, *shape: int) -> Tensor:
    """Most are small; the others, with probability 0.2, are up to `forgetting`."""
    dt = 0.001 + 0.1 * torch.rand(*shape, generator=g)
    return torch.where(torch.rand(shape, generator=g) < 0.2, forgetting * torch.rand(shape, generator=g), dt)


def make_scan(
    length: int,
    *,
    batch: int = 2,
    groups: int = 2,
    per_group: int = 2,
    width: int = 3,
    size: int = 5,
    forgetting: float = 1.0,
    skip: bool = True,
    state: bool = True,
    seed: int = 0,
) -> Scan:
    """Of Mamba-2, in float32."""
    g = torch.Generator().manual_seed(seed)
    heads = groups * per_group
    dt = time_steps(g, forgetting, batch, length, heads)
    return Scan(
        x=torch.randn(batch, length, heads, width, generator=g),
        dt=dt,
        A=-1 - 15 * torch.rand(heads, generator=g),  # the range of Mamba-2's initialisation
        B=torch.randn(batch, length, groups, size, generator=g),
        C=torch.randn(batch, length, groups, size, generator=g),
        D=torch.randn(heads, generator=g) if skip else None,
        initial_state=torch.randn(batch, heads, width, size, generator=g) if state else None,
    )


def make_selective(
    length: int, *, batch=2, channels=7, size=5, forgetting=1.0, skip=True, state=True, mixer=False, seed=0
) -> Scan:
    """Of Mamba-1, in float32. mixer: laid out as the model's mixer has them."""
    g = torch.Generator().manual_seed(seed)
    dt = time_steps(g, forgetting, batch, length, channels)
    x, B, C = (torch.randn(batch, length, width, generator=g) for width in (channels, size, size))
    made = Scan(
        x, dt, -0.5 - 15 * torch.rand(channels, size, generator=g), B, C,
        torch.randn(channels, generator=g) if skip else None,
        torch.randn(batch, channels, size, generator=g) if state else None,
    )  # fmt: skip
    return selective_mixer(made) if mixer else made


def inside(m: Tensor, margin: tuple[int, ...]) -> Tensor:
    """Equal to m; a part of a tensor that is larger by `margin` at the end, where it is NaN."""
    around = torch.full([size + more for size, more in zip(m.shape, margin, strict=True)], torch.nan, dtype=m.dtype)
    part = around[tuple(slice(size) for size in m.shape)]
    return part.copy_(m)


def ssd_mixer(scan: Scan) -> Scan:
    """As Mamba-2's mixer hands them over: parts of larger tensors, whose other parts are NaN here."""
    (b, t, h, p), (g, n) = scan.x.shape, scan.B.shape[2:]
    together = torch.cat([m.flatten(2) for m in (scan.x, scan.B, scan.C)], 2)
    x, B, C = inside(together, (0, 5, 3)).split([h * p, g * n, g * n], 2)
    dt = inside(scan.dt, (0, 2, 7))
    return scan._replace(x=x.view(b, t, h, p), dt=dt, B=B.view(b, t, g, n), C=C.view(b, t, g, n))


def selective_mixer(scan: Scan) -> Scan:
    """As Mamba-1's mixer hands them over."""
    x, dt = (inside(m.transpose(1, 2), (0, 0, 3)).transpose(1, 2) for m in (scan.x, scan.dt))
    B, C = inside(torch.cat([scan.B, scan.C], -1), (0, 0, 2)).split(scan.B.shape[-1], -1)
    return scan._replace(x=x, dt=dt, B=B, C=C)


# The lengths at which a chunk begins or ends come first: hypothesis shrinks towards them.
lengths = st.sampled_from([1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 1, 3 * CHUNK - 1]) | st.integers(
    1, 4 * CHUNK
)


def scans(
    lengths: st.SearchStrategy[int] = lengths, forgetting: tuple[float, ...] = (0.1, 1.0, 30.0)
) -> st.SearchStrategy[Scan]:
    return st.builds(
        make_scan,
        lengths,
        batch=st.integers(1, 2),
        groups=st.integers(1, 3),
        per_group=st.integers(1, 3),
        width=st.integers(1, 5),
        size=st.integers(1, 6),
        forgetting=st.sampled_from(forgetting),
        skip=st.booleans(),
        state=st.booleans(),
        seed=st.integers(0, 2**16),
    )


def rounding(operations: int) -> float:
    """How far float32 may be from float64, relative to the norm, after so many operations in a row. Each is off by 2**-24 of
    its result at most, to either side, and n of them together by 8 sqrt(n) times that, but with a probability of 1e-13 (Higham
    and Mary, A new approach to probabilistic rounding error analysis, 2019)."""
    return 8 * operations**0.5 * 2**-24


def assert_near(actual: Tensor, truth: Tensor, tolerance: float = 1e-5, floor: float = 1e-2) -> None:
    """The error's norm is at most `tolerance` times the truth's. Truths smaller than `floor` are differences of larger numbers,
    whose error remains (outputs and inputs are of order 1)."""
    assert actual.shape == truth.shape
    assert actual.isfinite().all()
    error, size = (actual.double() - truth.double()).norm().item(), truth.double().norm().item()
    assert error <= tolerance * max(size, floor), f"relative error {error / (size + 1e-30):.1e} of a tensor of norm {size:.1e}"


def assert_backends_agree(
    run: Callable[[list[Tensor], str], Sequence[Tensor]], given: Sequence[Tensor], backends: tuple[str, str], tolerance: float
) -> None:
    """Results of run(leaves, backend) in float64, and the gradients of their random sum by all leaves, are those of the second
    backend."""
    outcomes = []
    for backend in backends:
        leaves = [m.clone().requires_grad_() for m in given]
        results = tuple(run(leaves, backend))
        g = torch.Generator().manual_seed(1)
        loss = sum((m * torch.randn(m.shape, generator=g, dtype=m.dtype)).sum() for m in results)
        outcomes.append(results + torch.autograd.grad(loss, leaves))
    for actual, exact in zip(*outcomes, strict=True):
        assert_near(actual, exact, tolerance, floor=1)
