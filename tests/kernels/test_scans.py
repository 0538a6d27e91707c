"""The laws of a scan, for all mixers' and every backend: it is the recurrence in float64, with its gradient; states carry it
on; a step is one token of it; nothing but its arguments is read."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MiniMaxConfig, xLSTMConfig
from transformers.models.bailing_hybrid import modeling_bailing_hybrid
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention
from transformers.models.olmo_hybrid import modeling_olmo_hybrid
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.xlstm.modeling_xlstm import xLSTMBackend

from surgery.kernels import delta, native, selective_chunked
from surgery.kernels.delta import CHUNK as DELTA_CHUNK
from surgery.kernels.delta import DELTA_RULE, DELTA_STEP, delta_rule, delta_step, unit
from surgery.kernels.dispatch import KernelError, Operation
from surgery.kernels.lightning import LIGHTNING_SCAN, lightning_scan
from surgery.kernels.mlstm import MLSTM_SCAN, MOST, mlstm_scan, mlstm_step
from surgery.kernels.selective import SELECTIVE_SCAN, SELECTIVE_STEP, selective_scan, selective_step
from surgery.kernels.ssd import SSD_SCAN, SSD_STEP, ssd_scan, ssd_step
from surgery.kernels.ssd_chunked import CHUNK
from tests.kernels.builds import forget
from tests.kernels.inputs import (
    Scan,
    assert_backends_agree,
    assert_near,
    make_scan,
    make_selective,
    scans,
    selective_mixer,
    ssd_mixer,
)  # fmt: skip

few = settings(deadline=None, max_examples=15)
SEGMENT = 4 * CHUNK  # ssd.c keeps the state once in so many tokens
SELECTIVE_CHUNK, SELECTIVE_SEGMENT = 128, selective_chunked.SEGMENT  # the first of selective.c
BLOCK = 8  # of the stock backends of mLSTM and Lightning


def make_delta(
    t: int, *, pairs: int = 2, per_pair: int = 2, state: bool = True, by_channel: bool = False, seed: int = 0
) -> list:
    """The arguments of delta_rule in float32. Some tokens (by channel, some channels of them) forget everything, some write
    nothing, some twice over, as keys of OLMo-Hybrid may (beta up to 2)."""
    g = torch.Generator().manual_seed(seed)
    heads = pairs * per_pair
    q, k = (3 * torch.randn(2, t, pairs, 5, generator=g) for _ in range(2))
    decays = (2, t, heads, 5) if by_channel else (2, t, heads)
    log_decay, beta = -torch.rand(decays, generator=g), 2 * torch.rand(2, t, heads, generator=g)
    log_decay[torch.rand(log_decay.shape, generator=g) < 0.1] = -500.0
    beta[torch.rand(beta.shape, generator=g) < 0.1] = 0.0
    v, entering = (torch.randn(2, *shape, generator=g) for shape in ((t, heads, 3), (heads, 5, 3)))
    return [q, k, v, log_decay, beta, entering if state else None]


def make_mlstm(t: int, *, state: bool = True, seed: int = 0) -> list:
    """The arguments of mlstm_scan in float32, its state as two. Some tokens forget nearly everything; gates are as wide as
    published ones."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, t, 4, n, generator=g) for n in (5, 5, 3))
    write, forgets = 5 * torch.randn(2, t, 4, generator=g), 3 + 2 * torch.randn(2, t, 4, generator=g)
    forgets[torch.rand(forgets.shape, generator=g) < 0.1] = -15.0
    entering = [torch.randn(2, 4, 4, 5, generator=g), torch.rand(2, 4, generator=g)]
    return [q, k, v, write, forgets, *(entering if state else (None, None))]


def make_lightning(t: int, *, state: bool = True, seed: int = 0) -> list:
    """The arguments of lightning_scan in float32; heads forget at very different rates."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, t, 4, 6, generator=g) for _ in range(3))
    return [q, k, v, torch.tensor([2e-5, 0.01, 0.3, 1.5]), torch.randn(2, 4, 6, 6, generator=g) if state else None]


def run_mlstm(*args: Any, **options: Any) -> tuple:
    *given, memory, largest = args
    y, state = mlstm_scan(*given, None if memory is None else (memory, largest), chunk_size=BLOCK, **options)
    return y, *state


class Kernel(NamedTuple):
    """make: (tokens, state, seed) -> the arguments, the states last. scan: of them -> y and the states. borders: lengths around
    its chunks. timed: numbers of the arguments that every token has. narrow: of those that a model in 16 bits has so. states:
    how many there are. step: of the states and a token's arguments -> y. tolerances: by backend, where it is not 1e-5."""

    make: Callable[..., Any]
    scan: Callable[..., tuple]
    operation: Operation
    borders: tuple[int, ...]
    narrow: tuple[int, ...]
    timed: tuple[int, ...]
    states: int = 1
    step: Callable[..., Tensor] | None = None
    steps: Operation | None = None
    tolerances: dict[str, float] = {}
    floor: float = 1e-2


MAMBA = {"timed": (0, 1, 3, 4), "narrow": (0, 1, 3, 4)}
KERNELS = {
    "ssd": Kernel(
        lambda t, **o: list(make_scan(t, **o)), ssd_scan, SSD_SCAN,
        (1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5, SEGMENT - 1, SEGMENT, SEGMENT + 1, 2 * SEGMENT + CHUNK), **MAMBA,
        step=ssd_step, steps=SSD_STEP, tolerances={"stock": 5e-5},
    ),
    "selective": Kernel(
        lambda t, **o: list(make_selective(t, mixer=True, **o)), selective_scan, SELECTIVE_SCAN,
        (1, 2, SELECTIVE_CHUNK - 1, SELECTIVE_CHUNK, SELECTIVE_CHUNK + 1, SELECTIVE_SEGMENT - 1, SELECTIVE_SEGMENT,
         SELECTIVE_SEGMENT + 1, 2 * SELECTIVE_SEGMENT + 3), **MAMBA,
        step=selective_step, steps=SELECTIVE_STEP,
        floor=1.0,  # all channels share the products of C and B, whose sum over n may cancel
    ),
    "delta": Kernel(
        make_delta, delta_rule, DELTA_RULE, (1, DELTA_CHUNK - 1, DELTA_CHUNK, DELTA_CHUNK + 1, 3 * DELTA_CHUNK + 5),
        timed=(0, 1, 2, 3, 4), narrow=(0, 1, 2), step=delta_step,
        steps=DELTA_STEP, tolerances={"stock": 1e-4},  # it sums up the decay in float32
    ),
    "kda": Kernel(
        lambda t, **o: make_delta(t, pairs=4, per_pair=1, by_channel=True, **o), delta_rule, DELTA_RULE,
        (1, DELTA_CHUNK - 1, DELTA_CHUNK, DELTA_CHUNK + 1, 3 * DELTA_CHUNK + 5), timed=(0, 1, 2, 3, 4), narrow=(0, 1, 2),
        step=delta_step, steps=DELTA_STEP, tolerances={"stock": 1e-4},
    ),
    "mlstm": Kernel(
        make_mlstm, run_mlstm, MLSTM_SCAN, (1, BLOCK - 1, BLOCK, 3 * BLOCK + 5), timed=(0, 1, 2, 3, 4), narrow=(0, 1, 2, 3, 4),
        states=2, step=lambda memory, largest, *args: mlstm_step((memory, largest), *args),
        tolerances={"ssd": 1e-4, "stock": 1e-4, "reference": 1e-4},
    ),
    "lightning": Kernel(
        make_lightning, lambda *args, **o: lightning_scan(*args, block_size=BLOCK, **o), LIGHTNING_SCAN,
        (1, BLOCK - 1, BLOCK, 3 * BLOCK + 5), timed=(0, 1, 2), narrow=(0, 1, 2),
    ),
}  # fmt: skip
OURS = {
    "ssd": ("native", "chunked"), "selective": ("native", "chunked"), "delta": ("chunked",), "kda": ("chunked",),
    "mlstm": ("ssd",), "lightning": ("ssd",),
}  # fmt: skip
OF_MAMBA = [(name, backend) for name in ("ssd", "selective") for backend in OURS[name]]
every = pytest.mark.parametrize(
    ("name", "backend"), [(name, b) for name, kernel in KERNELS.items() for b in kernel.operation.backends if b != "mamba_ssm"]
)
ours = pytest.mark.parametrize(("name", "backend"), [(name, backend) for name, own in OURS.items() for backend in own])
of_mamba = pytest.mark.parametrize(("name", "backend"), OF_MAMBA)
in_c = pytest.mark.parametrize("name", ["ssd", "selective"])
STEPS = [(name, b) for name, kernel in KERNELS.items() if kernel.steps for b in kernel.steps.backends if b != "mamba_ssm"]


def selective_scans() -> st.SearchStrategy[Scan]:
    """Sizes around vectors, groups of channels and chunks."""
    return st.builds(
        make_selective, st.sampled_from(KERNELS["selective"].borders) | st.integers(1, 2 * SELECTIVE_CHUNK),
        batch=st.integers(1, 3), channels=st.sampled_from([1, 3, 16, 33, 130]), size=st.sampled_from([1, 2, 5, 16, 33]),
        forgetting=st.sampled_from((0.1, 1.0, 30.0)), skip=st.booleans(), state=st.booleans(), mixer=st.booleans(),
        seed=st.integers(0, 2**16),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def _skips_what_cannot_serve(request):
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    operation = KERNELS[params["name"]].operation if "name" in params else None
    if operation and "native" in operation.backends and params.get("backend", "native") == "native":
        example = operation.example(torch.device("cpu"), torch.float32)
        if reason := operation.why_not(operation.backends["native"], *example):
            pytest.skip(f"native cannot serve here: {reason}")


def change(args: Any, to: Callable[[Tensor], Tensor], which: Any = None) -> list:
    return [to(m) if m is not None and (which is None or i in which) else m for i, m in enumerate(args)]


def double(args: Any) -> list:
    return change(args, Tensor.double)


def truth(name: str, args: Any) -> tuple[Tensor, ...]:
    return KERNELS[name].scan(*double(args), backend="reference")


def gradients(name: str, args: Any, backend: str | None, outputs: tuple[bool, bool] = (True, True)) -> list[Tensor]:
    """Of a random linear function of the outputs and the final state, by every input that is there."""
    args = change(args, lambda m: m.detach().requires_grad_())
    results = KERNELS[name].scan(*args, backend=backend)
    g = torch.Generator().manual_seed(0)
    losses = [(m * torch.randn(m.shape, generator=g).to(m.dtype)).sum() for m in results]
    losses = [loss for loss, counts in zip(losses, outputs, strict=True) if counts]
    return list(torch.autograd.grad(losses, [m for m in args if m is not None], materialize_grads=True))


def assert_all_near(actual, exact, tolerance=1e-5, floor=1.0):
    for a, e in zip(actual, exact, strict=True):
        assert_near(a, e, tolerance, floor)


def assert_right(name: str, results, args, tolerance: float = 1e-5):
    """As the recurrence in float64. Where what is summed cancels to less than a hundredth of it, its rounding remains."""
    exact, floor = truth(name, args), KERNELS[name].floor
    if name != "selective":
        return assert_all_near(results, exact, tolerance, floor)
    summed = truth(name, [m if m is None or i == 2 else m.abs() for i, m in enumerate(args)])
    for actual, expected, size in zip(results, exact, summed, strict=True):
        assert_near(actual, expected, tolerance, max(floor, size.norm().item() / 100))


@every
@pytest.mark.parametrize("state", [True, False])
def test_the_scan_equals_the_recurrence(name, backend, state):
    """Whatever hypothesis happens to draw, every backend sees these lengths."""
    kernel = KERNELS[name]
    for t in kernel.borders:
        args = kernel.make(t, state=state)
        if reason := kernel.operation.backends[backend].refuses(*kernel_call(name, args)):
            pytest.skip(reason)
        results = kernel.scan(*args, backend=backend)
        assert {m.dtype for m in results} == {torch.float32}
        assert_all_near(results, truth(name, args), kernel.tolerances.get(backend, 1e-5), kernel.floor)


def kernel_call(name: str, args: list) -> list:
    """The arguments as the operation has them, as far as a backend's refusal looks at them."""
    return [*args, 256] if name == "ssd" else args if name == "selective" else [args[2], args[0], args[1], *args[3:], BLOCK]


@of_mamba
@few
@given(data=st.data())
def test_any_sizes(name, backend, data):
    args = data.draw(scans() if name == "ssd" else selective_scans())
    outputs = data.draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    assert_right(name, KERNELS[name].scan(*args, backend=backend), args)
    exact = gradients(name, double(args), "reference", outputs)
    assert_all_near(gradients(name, args, backend, outputs), exact)


@pytest.mark.parametrize(("width", "size"), [(16, 16), (17, 33), (33, 130), (64, 128), (130, 3)])
@pytest.mark.parametrize("name", ["ssd"])
def test_more_heads_than_a_unit_of_work_has(name, width, size):
    """And, in the gradients, more than one segment."""
    args = make_scan(SEGMENT + CHUNK + 3, batch=1, groups=1, per_group=5, width=width, size=size)
    exact = truth(name, args)
    of_y, of_state = (gradients(name, double(args), "reference", outputs) for outputs in ((True, False), (False, True)))
    for backend in OURS[name]:
        assert_all_near(ssd_scan(*args, backend=backend), exact, floor=KERNELS[name].floor)
        assert_all_near(gradients(name, args, backend, (True, False)), of_y)
        assert_all_near(gradients(name, args, backend, (False, True)), of_state)
        assert_all_near(gradients(name, args, backend), [a + b for a, b in zip(of_y, of_state, strict=True)])


@ours
def test_gradients_in_float64(name, backend):
    """Of the native ones in float32, the precision that they have."""
    for t in KERNELS[name].borders[-2:]:
        args = KERNELS[name].make(t)
        if backend == "native":
            assert_all_near(gradients(name, args, backend), gradients(name, double(args), "reference"))
            continue
        run = KERNELS[name].scan
        assert_backends_agree(lambda leaves, b: run(*leaves, backend=b), double(args), (backend, "reference"), 1e-9)  # noqa: B023


@ours
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits(name, backend, dtype):
    """Only the outputs are rounded: errors in the state would add up over a generation."""
    kernel = KERNELS[name]
    args = change(kernel.make(2 * CHUNK + 3, state=name != "mlstm"), lambda m: m.to(dtype), kernel.narrow)
    y, *states = kernel.scan(*args, backend=backend)
    exact, *exact_states = truth(name, args)
    assert y.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert_near(y, exact, 1e-2 if dtype == torch.bfloat16 else 2e-3, floor=1)
    for state, expected in zip(states, exact_states, strict=True):
        assert state.dtype == torch.float32
        assert_near(state, expected, 1e-4 if name == "mlstm" else 1e-5, floor=1)
    if name in ("ssd", "selective"):
        actual = gradients(name, args, backend)
        assert [m.dtype for m in actual] == [m.dtype for m in args]
        assert_all_near(actual, gradients(name, double(args), "reference"), 1e-2)


@of_mamba
def test_gradients_of_what_is_trained_alone(name, backend):
    args = KERNELS[name].make(CHUNK + 5)
    together = gradients(name, args, backend)
    for i, m in enumerate(args):
        leaf = m.detach().clone().requires_grad_()
        y, state = KERNELS[name].scan(*args[:i], leaf, *args[i + 1 :], backend=backend)
        g = torch.Generator().manual_seed(0)
        sum((m * torch.randn(m.shape, generator=g)).sum() for m in (y, state)).backward()
        assert torch.equal(leaf.grad, together[i])


SMALL = {"ssd": {"batch": 1}, "selective": {"batch": 1, "channels": 4, "size": 2}}


@in_c
def test_long(name):
    args = KERNELS[name].make(3001, forgetting=0.1, **SMALL[name])
    exact = gradients(name, double(args), "reference") if name == "ssd" else None
    for backend in OURS[name]:
        assert_right(name, KERNELS[name].scan(*args, backend=backend), args)
        if exact is not None:
            assert_all_near(gradients(name, args, backend), exact)


@of_mamba
def test_a_constant_time_step_adds_up_no_error(name, backend):
    """Rounded the same way in every chunk, a decay close to 1 is wrong in the same direction each time."""
    x, dt, A, B, C, D, _ = KERNELS[name].make(2000, **SMALL[name])
    constant = torch.full_like(dt, 1e-3 if name == "ssd" else 1e-2)
    args = [torch.ones_like(x), constant, A, torch.ones_like(B), C, D, None]
    assert_right(name, KERNELS[name].scan(*args, backend=backend), args)


@of_mamba
@few
@given(data=st.data(), strength=st.sampled_from([1e2, 1e4, 1e6]), everywhere=st.booleans())
def test_strong_decay(name, backend, data, strength, everywhere):
    """exp(-A dt), the reciprocal of a decay, overflows here; no NaN may come of it, forwards or backwards."""
    args = KERNELS[name].make(data.draw(st.sampled_from(KERNELS[name].borders[:6])), forgetting=strength)
    if everywhere:
        args[1] = strength * (0.5 + args[1])
    assert_right(name, KERNELS[name].scan(*args, backend=backend), args)
    assert_all_near(gradients(name, args, backend), gradients(name, double(args), "reference"))


@ours
def test_a_state_carries_a_sequence_on(name, backend):
    kernel = KERNELS[name]
    args = kernel.make(2 * CHUNK + 9)
    args = args if backend == "native" else double(args)
    inputs, states, parts = args[: -kernel.states], args[-kernel.states :], []
    for part in (slice(0, 19), slice(19, 20), slice(20, CHUNK), slice(CHUNK, None)):
        y, *states = kernel.scan(*change(inputs, lambda m: m[:, part], kernel.timed), *states, backend=backend)  # noqa: B023
        parts.append(y)
    tolerance = 1e-5 if backend == "native" else 1e-11
    assert_all_near((torch.cat(parts, 1), *states), truth(name, args), tolerance, kernel.floor)


@pytest.mark.parametrize(("name", "backend"), [*STEPS, ("mlstm", None)])
def test_steps_equal_the_scan(name, backend):
    kernel = KERNELS[name]
    to = torch.double if backend == "reference" and name in ("delta", "kda") else torch.float32
    for seed in range(5):
        args = kernel.make(7, seed=seed)
        exact = truth(name, args)
        args = change(args, lambda m: m.to(to, copy=True))
        args, states = args[: -kernel.states], args[-kernel.states :]
        options = {} if backend is None else {"backend": backend}
        y = [kernel.step(*states, *change(args, lambda m: m[:, i], kernel.timed), **options) for i in range(7)]  # noqa: B023
        assert_all_near((torch.stack(y, 1), *states), exact, 1e-5, max(kernel.floor, 0.1))  # the states, in place


@pytest.mark.parametrize(("name", "backend"), [step for step in STEPS if step[0] not in ("delta", "kda")])
def test_a_step_in_bfloat16_keeps_the_state_in_float32(name, backend):
    args = change(KERNELS[name].make(1), Tensor.bfloat16, KERNELS[name].narrow)
    exact, exact_state = truth(name, args)
    *inputs, state = args
    y = KERNELS[name].step(state, *change(inputs, lambda m: m[:, 0], KERNELS[name].timed), backend=backend)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    assert_near(y[:, None], exact, 1e-2, floor=1)
    # stock forms dt B in bfloat16
    assert_near(state, exact_state, 1e-2 if name == "ssd" and backend in ("stock", "reference") else 1e-5, floor=1)


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_gives_nothing(name):
    kernel = KERNELS[name]
    args = kernel.make(4)
    y, *states = kernel.scan(*change(args, lambda m: m[:, :0], kernel.timed))
    assert y.shape == kernel.scan(*args)[0][:, :0].shape
    assert all(a is b for a, b in zip(states, args[-kernel.states :], strict=True))
    shapes = [m.shape[1:] for m in states]
    nobody = change(args, lambda m: m[:0], kernel.timed)[: -kernel.states]
    assert [m.shape for m in kernel.scan(*nobody, *[None] * kernel.states)[1:]] == [(0, *shape) for shape in shapes]


LAYOUTS = {
    "sliced": lambda m: torch.stack([m, m.flip(0)], -1)[..., 0],
    "expanded": lambda m: m[:1].expand_as(m),
    "transposed": lambda m: m.mT.contiguous().mT if m.ndim > 1 else m,
}


@of_mamba
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(name, backend, layout):
    """The mixer hands over slices of one projection: no backend may rely on contiguous memory."""
    args = change(KERNELS[name].make(CHUNK + 3), LAYOUTS[layout])
    plain = change(args, Tensor.contiguous)
    assert_right(name, KERNELS[name].scan(*args, backend=backend), plain)
    assert_all_near(gradients(name, args, backend), gradients(name, double(plain), "reference"))


MIXERS = {"ssd": (make_scan, ssd_mixer), "selective": (make_selective, selective_mixer)}


@of_mamba
def test_nothing_around_the_inputs_is_read_nor_anything_changed(name, backend):
    make, mixer = MIXERS[name]
    for t in (*KERNELS[name].borders[:5], SEGMENT + 1):
        args = mixer(make(t))
        before = args.map(Tensor.clone)
        assert_right(name, KERNELS[name].scan(*args, backend=backend), make(t))
        assert_all_near(gradients(name, args, backend), gradients(name, double(before), "reference"))
        assert all(map(torch.equal, args, before))


class Recorder(TorchDispatchMode):
    """The names of the operators that ran, and the size of the largest tensor that one made."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.names.add(function.overloadpacket.__name__)
        made = [m for m in (result if isinstance(result, tuple | list) else [result]) if isinstance(m, Tensor)]
        self.largest = max([self.largest, *(m.numel() for m in made)])
        return result


@in_c
def test_the_mixer_s_layout_is_read_where_it_is(name):
    make, mixer = MIXERS[name]
    args = mixer(make(CHUNK + 3))
    with Recorder() as recorder:
        y, _ = KERNELS[name].scan(*args, backend="native")
    assert not {n for n in recorder.names if "copy" in n or "clone" in n or "contiguous" in n}
    assert name == "ssd" or y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("name", "backend"), [("selective", "native"), ("selective", "chunked")])
def test_nothing_of_the_size_of_all_states(name, backend, monkeypatch):
    monkeypatch.setattr(selective_chunked, "CPU_BLOCK", 2**16)
    args = change(make_selective(2 * SELECTIVE_SEGMENT, batch=1, channels=256, size=16), lambda m: m.detach().requires_grad_())
    with Recorder() as recorder:
        y, state = selective_scan(*args, backend=backend)
        (y.sum() + state.sum()).backward()
    assert recorder.largest <= 256 * 16 * 2 * SELECTIVE_SEGMENT / 8


@in_c
@pytest.mark.parametrize("batch", [1, 2])
def test_threads_change_nothing(name, batch):
    sizes = {"per_group": 9} if name == "ssd" else {"channels": 300}
    args = KERNELS[name].make(SEGMENT + CHUNK + 3, batch=batch, **sizes)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([*KERNELS[name].scan(*args, backend="native"), *gradients(name, args, "native")])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@of_mamba
@pytest.mark.parametrize("field", Scan._fields)
def test_nan_propagates(name, backend, field):
    """To whatever it reaches, and to no other sequence. Within a chunk of the SSD scan it may reach earlier tokens."""
    args = change(KERNELS[name].make(CHUNK + 9), Tensor.clone)
    shared, at = field in ("A", "D"), Scan._fields.index(field)
    args[at][1 if shared else (1, 2, 0)] = torch.nan
    actual, exact = ([*KERNELS[name].scan(*args, backend=b), *gradients(name, args, b)] for b in (backend, "reference"))
    for a, e in zip(actual, exact, strict=True):
        assert not (e.isnan() & ~a.isnan()).any()
        assert name == "ssd" or torch.equal(a.isnan(), e.isnan())
    assert shared or (actual[0][0].isfinite().all() and actual[1][0].isfinite().all())


@in_c
def test_nan_leaves_nothing_behind(name):
    """A worker's space serves one unit of work after the other."""
    args = change(KERNELS[name].make(CHUNK + 9), Tensor.clone)
    expected = [*KERNELS[name].scan(*args, backend="native"), *gradients(name, args, "native")[:2]]
    for m in args[:2]:
        m[0] = torch.nan
    for actual, m in zip(
        [*KERNELS[name].scan(*args, backend="native"), *gradients(name, args, "native")[:2]], expected, strict=True
    ):
        assert torch.equal(actual[1], m[1])


def test_chunked_selective_passes_gradcheck(monkeypatch):
    monkeypatch.setattr(selective_chunked, "SEGMENT", 9)
    monkeypatch.setattr(selective_chunked, "CPU_BLOCK", 9 * 2 * 2)
    scan = make_selective(23, channels=2, size=2).double().map(Tensor.requires_grad_)
    assert torch.autograd.gradcheck(lambda *args: selective_scan(*args, backend="chunked"), tuple(scan), fast_mode=True)


@in_c
def test_who_serves(name):
    kernel = KERNELS[name]
    *inputs, state = args = kernel.make(3)
    call, step = kernel_call(name, args), (state, *change(inputs, lambda m: m[:, 0], kernel.timed))
    assert kernel.operation.choose(*double(call[:7]), *call[7:]).name == "chunked"
    assert kernel.steps.choose(step[0].double(), *step[1:]).name == "torch"
    assert kernel.steps.choose(step[0].mT.contiguous().mT, *step[1:]).name == "torch"
    with pytest.raises(KernelError, match="'native' was asked for and cannot serve: it computes in float32"):
        kernel.scan(*double(args), backend="native")
    for operation, of in ((kernel.operation, call), (kernel.steps, step)):
        elsewhere = [m.to("meta") if isinstance(m, Tensor) else m for m in of]
        assert operation.backends["native"].refuses(*elsewhere) == "it runs on a CPU"
        assert operation.why_not(operation.backends["mamba_ssm"], *of) == "it runs on CUDA devices"
    assert kernel.steps.backends["native"].refuses(step[0], step[1].clone().requires_grad_(), *step[2:]) == "it has no gradient"
    if name == "ssd":
        empty = kernel_call(name, kernel.make(0))
        assert kernel.operation.backends["native"].refuses(*empty) == "there is nothing to compute"


def test_shapes_that_do_not_fit_are_refused():
    x, dt, A, B, C, D, state = make_scan(5)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 2, 5\) where \(2, 5, 2, 5\) belongs"):
        ssd_scan(x, dt, A, B[:, :4], C, D, state, backend="native")
    with pytest.raises(ValueError, match="3 heads in 2 groups"):
        ssd_scan(x[:, :, :3], dt[..., :3], A[:3], B, C, D[:3], state[:, :3], backend="native")
    with pytest.raises(ValueError, match=r"shape \(2, 3\) where \(2, 4\) belongs"):
        ssd_step(state, x[:, 0], dt[:, 0, :3], A, B[:, 0], C[:, 0], D, backend="native")
    scan = make_selective(5)
    with pytest.raises(ValueError, match=r"shape \(2, 4, 5\) where \(2, 5, 5\) belongs"):
        selective_scan(*scan._replace(B=scan.B[:, :4]), backend="native")


@in_c
def test_an_exported_checkpoint_is_served_without_the_c_file(name, monkeypatch, tmp_path):
    kernel = KERNELS[name]
    args = kernel.make(3)
    with monkeypatch.context() as patch:
        patch.setattr(native, "FOLDER", tmp_path)
        forget()
        assert kernel.operation.choose(*kernel_call(name, args)).name == "chunked"
        with pytest.raises(KernelError, match=rf"'native' .* cannot serve: RuntimeError: {name}\.c is not here"):
            kernel.scan(*args, backend="native")
    forget()


def test_how_mamba_ssm_is_called(monkeypatch):
    """By a stand-in with its signature: the tensors' order and layout, and its gradient that forgets the final state."""

    def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False):
        u, delta, B, C = (m.transpose(1, 2) for m in (u, delta, B, C))
        y, state = selective_scan(u, delta, A, B, C, D, backend="chunked")
        return y.transpose(1, 2), state.detach().requires_grad_()

    interface = SimpleNamespace(selective_scan_fn=selective_scan_fn)
    monkeypatch.setitem(sys.modules, "mamba_ssm.ops.selective_scan_interface", interface)
    run = SELECTIVE_SCAN.backends["mamba_ssm"].run
    scan = make_selective(9, state=False)
    y, state = run(*scan._replace(x=scan.x.detach().requires_grad_()))
    assert_all_near((y, state), truth("selective", scan))
    y.sum().backward()
    with pytest.raises(NotImplementedError, match="no gradient through the final state"):
        state.sum().backward()


# ---- what is particular to one of them ----


@pytest.mark.parametrize("by_channel", [False, True])
def test_value_heads_that_share_a_pair(by_channel):
    args = double(make_delta(3 * DELTA_CHUNK + 5, per_pair=3, by_channel=by_channel))
    assert_backends_agree(lambda leaves, b: delta_rule(*leaves, backend=b), args, ("chunked", "reference"), 1e-11)


def test_at_rate_one_the_last_value_of_a_key_replaces_the_others():
    """What the delta rule is for, and what linear attention without it does not do."""
    g = torch.Generator().manual_seed(0)
    k, v = torch.randn(1, 1, 1, 4, generator=g, dtype=torch.double), torch.randn(1, 5, 1, 3, generator=g, dtype=torch.double)
    k, rates = k.expand(1, 5, 1, 4), torch.ones(1, 5, 1, dtype=torch.double)
    y, _ = delta_rule(k, k, v, 0 * rates, rates)
    assert_near(y * 4**0.5, v, 1e-5)  # length 1 but for the constant that keeps a key of 0 from dividing by 0


def test_gates_of_mlstm_at_their_bounds_in_float32():
    """As far as a family takes them, over a long context. With weights of both signs, denominators would be rounding alone."""
    q, k, v, write, forgets, *_ = make_mlstm(300, state=False)
    for write_at, forget_at in ((MOST, MOST), (-MOST, MOST), (MOST, -MOST)):
        args = [q.abs(), k.abs(), v, torch.full_like(write, write_at), torch.full_like(forgets, forget_at), None, None]
        assert_near(run_mlstm(*args)[0], truth("mlstm", args)[0], 1e-4)


@pytest.mark.parametrize("backend", MLSTM_SCAN.backends)
def test_a_token_of_mlstm_that_is_not_there_changes_nothing(backend):
    """With gates of -inf and inf."""
    *inputs, memory, largest = make_mlstm(20)
    inputs[3][:, 5:9], inputs[4][:, 5:9] = -torch.inf, torch.inf
    y, held, _ = run_mlstm(*inputs, memory, largest, backend=backend)
    there = [i for i in range(20) if not 5 <= i < 9]
    alone, expected, _ = run_mlstm(*(m[:, there] for m in inputs), memory, largest, backend=backend)
    assert y.isfinite().all()
    assert_all_near((y[:, there], held), (alone, expected), floor=1e-2)


@pytest.mark.parametrize("model", [modeling_qwen3_next, modeling_olmo_hybrid])
def test_stock_delta_is_what_transformers_computes_bit_for_bit(model):
    q, k, v, log_decay, beta, state = make_delta(50)
    theirs = model.torch_chunk_gated_delta_rule(
        q, k, v, g=log_decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert all(map(torch.equal, delta_rule(q, k, v, log_decay, beta, state, backend="stock"), theirs))
    assert torch.equal(unit(q), model.l2norm(q))


@pytest.mark.parametrize("model", [modeling_kimi_linear, modeling_bailing_hybrid, modeling_glm5_next])
def test_stock_kda_is_what_transformers_computes_bit_for_bit(model):
    q, k, v, log_decay, beta, state = KERNELS["kda"].make(50)
    options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    theirs = model.chunk_kimi_delta_attention(q, k, v, g=log_decay, beta=beta, **options)
    assert all(map(torch.equal, delta_rule(q, k, v, log_decay, beta, state, backend="stock"), theirs))


def test_channels_that_decay_alike_decay_as_a_head_does(monkeypatch):
    """Also where few chunks fit in memory at once."""
    monkeypatch.setattr(delta, "MOST", 1)
    q, k, v, log_decay, beta, state = double(make_delta(3 * DELTA_CHUNK + 5, pairs=4, per_pair=1))
    alike = log_decay[..., None].expand(*log_decay.shape, k.shape[-1])
    assert_all_near(delta_rule(q, k, v, alike, beta, state), delta_rule(q, k, v, log_decay, beta, state), 1e-12)


@pytest.mark.parametrize("t", [1, 2 * BLOCK + 5])
def test_stock_mlstm_is_what_transformers_computes_bit_for_bit(t):
    *inputs, _, _ = make_mlstm(t)
    theirs, _ = xLSTMBackend(xLSTMConfig(hidden_size=64, num_heads=4, chunk_size=BLOCK))(*(m.transpose(1, 2) for m in inputs))
    assert torch.equal(run_mlstm(*inputs, None, None, backend="stock")[0], theirs.transpose(1, 2))


@pytest.mark.parametrize("t", [1, 2 * BLOCK + 5])
def test_stock_lightning_is_what_transformers_computes_bit_for_bit(t):
    """The whole module, around whose scan there is nothing here."""
    torch.manual_seed(0)
    config = MiniMaxConfig(hidden_size=24, num_attention_heads=4, head_dim=6, num_hidden_layers=4, block_size=BLOCK)
    module = MiniMaxLightningAttention(config, layer_idx=1)
    u = torch.randn(2, t, 24)
    with torch.no_grad():
        theirs, _ = module(u, None, None)
        qkv = module.act_fn(module.qkv_proj(u)).view(2, t, 4, 18).split(6, -1)
        y, _ = lightning_scan(*qkv, module.slope_rate.flatten(), block_size=BLOCK, backend="stock")
        assert torch.equal(module.out_proj(torch.sigmoid(module.output_gate(u)) * module.norm(y.flatten(2))), theirs)
