"""What a GPU is asked for, counted without one: launches of a block, a step and a token, variants of the attention's kernels,
and the largest tensors."""

import dataclasses
import inspect
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, Mamba2Config, Mamba2ForCausalLM

import surgery
from surgery.kernels import attention, attention_triton, conv, ssd
from surgery.kernels.attention import ATTEND
from surgery.kernels.attention_triton import attend_triton
from surgery.kernels.conv import CAUSAL_CONV
from surgery.kernels.explain import Sizes, make_calls
from surgery.kernels.ssd import SSD_SCAN, SSD_STEP
from surgery.modeling.packing import Packing
from surgery.modeling.ssm import fused_norm
from surgery.tuning.losses import kl_divergence
from tests.kernels.inputs import distance, randn

META = torch.device("meta")  # tensors without numbers: 2.7b's width costs nothing
SILENT = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "_unsafe_view", "promote_types")  # launch nothing


class Launches(TorchDispatchMode):
    """Counts the operators that launch a kernel. largest: how many numbers any result has."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = operator(*args, **(kwargs or {}))
        if not operator.is_view and operator.overloadpacket.__name__ not in SILENT:
            self.names[operator.name()] += 1
            each = results if isinstance(results, tuple | list) else [results]
            self.largest = max(self.largest, *(m.numel() for m in each if isinstance(m, torch.Tensor)))
        return results


class OneKernel(torch.autograd.Function):
    """In the place of PyTorch's norm, which a GPU computes by a kernel a pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.neg()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return dy.neg()


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On "meta" as on a GPU with all packages: a call of a package is an operator, in each of its two passes."""
    for operation in (SSD_SCAN, SSD_STEP, CAUSAL_CONV, ATTEND):
        name = next(iter(operation.backends))

        def run(*args: Any, operator: Any = operation.operator, name: str = name) -> Any:
            return operator(*args, backend=name)

        def refuses(x: torch.Tensor, *_: Any, name: str = name) -> str | None:
            return "a few queries" if name == "triton" and x.shape[2] < 16 else None

        there = dataclasses.replace(operation.backends[name], run=run, refuses=refuses, device=None, probed=False)
        monkeypatch.setitem(operation.backends, name, there)
    for module in (ssd, conv, attention):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)
    monkeypatch.setattr(F, "rms_norm", lambda x, *_: OneKernel.apply(x))


def make_hybrid(width: int, layers: int, heads: tuple[int, ...], **sizes: int) -> Any:
    torch.manual_seed(0)
    config = Mamba2Config(hidden_size=width, num_hidden_layers=layers, n_groups=1, vocab_size=64, **sizes)
    sites = tuple(surgery.Site(layer, tuple(range(heads[layer]))) for layer in range(layers) if heads[layer])
    base: Any = Mamba2ForCausalLM(config).to(torch.bfloat16)
    return surgery.splice(base, surgery.Plan(sites=sites)).train().to(META)


def documents(b: int, t: int, number: int = 5) -> Packing:
    return Packing.of((torch.arange(t) // (t // number + 1)).expand(b, t), META)


@pytest.mark.parametrize(("grafted", "forward", "backward"), [(False, 25, 45), (True, 50, 70)])
def test_launches_of_a_packed_block_of_mamba2_2_7b(packages, grafted, forward, backward):
    """0.30 had 119 and 311, grafted 230 forward."""
    block = make_hybrid(2560, 1, (3,), num_heads=80, head_dim=64, state_size=128).backbone.layers[0]
    block.mixer.graft_enabled = grafted
    hidden = torch.empty(8, 2048, 2560, dtype=torch.bfloat16, device=META, requires_grad=True)
    packing = documents(8, 2048)
    with Launches() as there:
        out = block(hidden, packing=packing)
    with Launches() as back:
        torch.autograd.backward(out, torch.empty_like(out))
    assert there.names["surgery::ssd_scan"] == back.names["surgery::ssd_scan_backward"] == 1
    assert there.names["surgery::attend"] == int(grafted)
    assert there.names.total() <= forward, there.names
    assert back.names.total() <= backward, back.names


def test_launches_of_a_step_on_text_and_of_a_token(packages):
    """Of eight layers, one of them grafted. A step: teacher, student, their divergence, and backward."""
    hybrid = make_hybrid(512, 8, (0, 0, 0, 0, 3, 0, 0, 0), num_heads=16, head_dim=64, state_size=128)
    ids = torch.zeros(8, 256, dtype=torch.long, device=META)
    with Launches() as step:
        with torch.no_grad(), hybrid.disable_grafts():
            teacher = hybrid(input_ids=ids, use_cache=False).logits
        student = hybrid(input_ids=ids, use_cache=False).logits
        loss = kl_divergence(student.flatten(0, 1), teacher.flatten(0, 1)) / ids.numel()
        torch.autograd.grad(loss, [p for p in hybrid.parameters() if p.requires_grad])
    assert step.names.total() <= 550, step.names
    cache, hybrid = DynamicCache(config=hybrid.config), hybrid.eval()
    with torch.no_grad():
        for length in (40, 1, 1):
            with Launches() as token:
                hybrid(input_ids=torch.zeros(1, length, dtype=torch.long, device=META), past_key_values=cache, use_cache=True)
    assert token.names["surgery::ssd_step"] == 8
    assert token.names.total() <= 260, token.names


def test_a_gpu_takes_large_pieces(monkeypatch):
    """At sizes of mamba2-2.7b: the divergence of 16,384 tokens, and the scan of PyTorch alone of 2 x 2,048."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    logits, scan = torch.empty(16384, 50288, device=META), make_calls(META, torch.bfloat16, Sizes(tokens=2048))
    with Launches() as there:
        kl_divergence(logits, logits)
        SSD_SCAN.backends["chunked"].run(*next(scan)[2])
    assert there.names["aten::_log_softmax"] <= 2 * 8, there.names
    assert there.names["aten::bmm"] <= 8, there.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gated", [False, True])
def test_the_norm_of_a_gpu_is_the_models(dtype, gated):
    config = Mamba2Config(hidden_size=32, num_hidden_layers=1, num_heads=4, head_dim=16, n_groups=1, vocab_size=8)
    block: Any = Mamba2ForCausalLM(config).backbone.layers[0]
    norm = block.mixer.norm if gated else block.norm
    norm.weight.data.copy_(1 + randn(*norm.weight.shape))
    norm.to(dtype)
    args = [randn(3, 7, *norm.weight.shape, seed=seed).to(dtype) for seed in range(1 + gated)]
    own, models = fused_norm(norm, *args), norm(*args)
    truth = norm.double()(*(m.double() for m in args))  # but for its own rounding to float32
    assert own.dtype == dtype
    assert distance(own, truth) < max(distance(models, truth), 1e-6)


class Variants:
    """In the place of a Triton kernel: notes for which kinds of arguments Triton would compile it. It compiles anew for other
    dtypes and constants, for arguments that are None, and for integers that are 1 or are multiples of 16 and were not."""

    def __init__(self, kernel: Any) -> None:
        self.names = getattr(kernel, "arg_names", None) or [*inspect.signature(kernel).parameters]  # with and without Triton
        self.seen: set[tuple] = set()

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            kinds = [
                m.dtype if isinstance(m, torch.Tensor) else m is None or (m == 1, m % 16 == 0)
                for name, m in zip(self.names, args, strict=False)
                if name not in attention_triton.UNSPECIFIC
            ]
            self.seen.add((*kinds, *sorted(constants.items())))

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Variants]:
    """In the place of the attention's kernels."""
    names = ("_forward_kernel", "_key_kernel", "_query_kernel")
    kernels = {name: Variants(getattr(attention_triton, name)) for name in names}
    for name, kernel in kernels.items():
        monkeypatch.setattr(attention_triton, name, kernel)
    tools = {"next_power_of_2": lambda n: 1 << (n - 1).bit_length(), "cdiv": lambda n, by: -(-n // by)}
    monkeypatch.setattr(attention_triton, "triton", SimpleNamespace(**tools))
    return kernels


def test_kernels_run_on_the_device_of_their_tensors_without_a_mask_of_all_queries_and_keys(kernels, monkeypatch):
    """The current device is another one where a model lies on several, or on the second."""
    entered: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: entered.append(device) or nullcontext())
    monkeypatch.setattr(attention_triton, "on_gpu", lambda _: True)
    monkeypatch.setattr(attention_triton, "_shared_memory", lambda _: attention_triton.SHARED)
    q = torch.empty(2, 3, 8192, 128, dtype=torch.bfloat16, device=META, requires_grad=True)
    mask, seq_idx = torch.empty(2, 8192, dtype=torch.bool, device=META), documents(2, 8192).seq_idx
    for more in ((mask, None), (None, seq_idx)):
        with Launches() as there:
            y, m = attend_triton(q, q, q, None, None, *more)
            torch.autograd.grad([y, m], q, [torch.empty_like(y), torch.empty_like(m)])
        assert there.largest == q.numel() < 8192**2
    assert entered == 2 * 3 * [META]


def test_a_run_compiles_few_variants_of_the_attention(kernels, monkeypatch):
    """The calls of a `surgery run`: layers with one to four heads, examples and texts of any length, packed and not, tuned and
    asked."""
    there = {"run": attend_triton, "refuses": lambda *_: None, "device": None, "probed": False}
    monkeypatch.setitem(ATTEND.backends, "triton", dataclasses.replace(ATTEND.backends["triton"], **there))
    for module in (ssd, conv, attention):
        monkeypatch.setattr(module, "on_gpu", lambda _: True)
    hybrid = make_hybrid(256, 4, (1, 2, 3, 4), num_heads=8, head_dim=64, state_size=128)
    calls = [(16, 57), (16, 64), (16, 391), (16, 512), (3, 112), (1, 77), (4, 192)]
    for b, t in calls:
        for packing in (None, documents(b, t, 3)):
            hidden = torch.empty(b, t, 256, dtype=torch.bfloat16, device=META, requires_grad=True)
            for block in hybrid.backbone.layers:
                with torch.no_grad():
                    block(hidden, packing=packing)
                out = block(hidden, packing=packing)
                torch.autograd.backward(out, torch.empty_like(out))
    assert {name: len(kernel.seen) for name, kernel in kernels.items() if not 0 < len(kernel.seen) <= 6} == {}
