"""The laws of a mixer, of whatever kind (surgery/hybrids/mixer.py). A new one is one more line in MIXERS."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from surgery.families import families
from surgery.hybrids.mixer import GraftedMixer, Mixer
from surgery.hybrids.stock_hybrid import GraftCache
from surgery.kernels.packing import packed
from surgery.records.plan import Plan
from surgery.splicing.splice import splice
from tests.kernels.inputs import assert_near
from tests.models import BASES, SAME, but_slow
from tests.surgery import test_gated_delta as delta
from tests.surgery import test_linear_mixers as linear
from tests.surgery.stock_bases import base_of

# By what it is called: a model that has it, and the layer of it.
MIXERS: dict[str, tuple[Callable[[], PreTrainedModel], int]] = {
    "Mamba-2": (BASES["groups"], 1),
    "Mamba-1": (BASES["mamba"], 1),
    "Falcon-Mamba": (BASES["falcon mamba"], 1),
    "Llamba": (BASES["llamba"], 1),
    "Mamba-2 in a stock block": (lambda: base_of("bamba"), 1),
    "Falcon-H1": (lambda: base_of("falcon_h1"), 1),
    "Jamba": (lambda: base_of("jamba"), 1),
    "Gated DeltaNet, fused": (lambda: delta.base_of("qwen3_next"), 0),
    "Gated DeltaNet, split": (lambda: delta.base_of("qwen3_5_text"), 0),
    "Gated DeltaNet, separate": (lambda: delta.base_of("olmo_hybrid"), 0),
    "Kimi Delta Attention": (lambda: base_of("kimi_linear"), 1),
    "Kimi Delta Attention of Ling 3": (lambda: base_of("bailing_hybrid"), 1),
    "mLSTM": (lambda: linear.base_of("xlstm"), 0),
    "mLSTM, fused": (lambda: linear.base_of("xlstm", weight_mode="fused", use_bias=True), 0),
    "Lightning": (lambda: linear.base_of("minimax"), 0),
}
PLANS = {
    "replaced": {},
    "blended": {"blend": 0.3, "starts": {"L{}.H2": {"sign": -1, "tau": 2.0}}},
    "no time step": {"time_step": False},
}
T = 24


@dataclass
class Case:
    """A hybrid of a base, and the mixer of it that holds a graft."""

    base: PreTrainedModel
    hybrid: Any
    mixer: Any

    def inputs(self, rows: int = 2) -> torch.Tensor:
        """u (rows, T, d)."""
        generator = torch.Generator().manual_seed(3)
        weight = self.mixer.out_proj.weight if hasattr(self.mixer, "out_proj") else self.mixer.o_proj.weight
        return torch.randn(rows, T, self.hybrid.config.hidden_size, generator=generator, dtype=torch.float64).to(weight.dtype)

    def cache(self) -> Any:
        return GraftCache(self.hybrid.with_room(self.hybrid.new_cache()), self.mixer.cache_place)


@cache
def case_of(name: str, dtype: torch.dtype, plan: str = "replaced") -> Case:
    make, layer = MIXERS[name]
    base = make().to(dtype).eval()
    fields = copy.deepcopy(PLANS[plan])
    if "starts" in fields:
        fields["starts"] = {site.format(layer): start for site, start in fields["starts"].items()}
    hybrid = splice(base, Plan.model_validate({"sites": (f"L{layer}.H0,2",), **fields})).eval()
    return Case(base, hybrid, hybrid.mixer_at(layer))


def run(mixer: Any, u: torch.Tensor, cache: Any = None, exist: torch.Tensor | None = None, packing: Any = None) -> torch.Tensor:
    """exist (b, all tokens so far): which of them are no padding."""
    mask = None if exist is None else exist[:, -u.shape[1] :]
    return GraftedMixer.forward(mixer, u, cache, mask, exist, packing=packing)


every_mixer = pytest.mark.parametrize("name", MIXERS)
every_plan = pytest.mark.parametrize("plan", PLANS)
in_float64 = pytest.mark.usefixtures("in_float64")


def kinds(kind: type) -> set[type]:
    """Of the classes below one, those of mixers, each by the first of ours that it is."""
    if not issubclass(kind, nn.Module):
        return set().union(*map(kinds, kind.__subclasses__()))
    ours = (each for each in kind.__mro__ if issubclass(each, GraftedMixer))
    return {next(each for each in ours if ".hybrids." in each.__module__)}


def test_every_mixer_is_here():
    families()
    assert all(isinstance(case_of(name, torch.float32).mixer, Mixer) for name in MIXERS)
    assert kinds(GraftedMixer) == set().union(*(kinds(type(case_of(name, torch.float32).mixer)) for name in MIXERS))


@in_float64
@every_mixer
@every_plan
@torch.no_grad()
def test_the_matrices_times_the_values_are_what_is_mixed(name, plan):
    case = case_of(name, torch.float64, plan)
    mixer, u = case.mixer, case.inputs(1)
    projected, matrices = mixer.project(u), mixer.matrices(u)
    mixed, D = torch.einsum("hts,shp->thp", matrices, projected.values[0]), getattr(mixer, "D", None)
    wanted = mixed if D is None else mixed + D[:, None] * projected.values[0]
    assert_near(mixer.mix(projected)[0], wanted, 1e-6)  # some convolutions of transformers are in float32
    rows, heads = torch.tensor([T - 1, 3]), [2, 1, 0]
    assert_near(mixer.matrices(u, rows=rows, heads=heads), matrices[heads][:, rows], 1e-12)
    assert_near(run(mixer, u), mixer.finish(mixer.mix(projected), projected.gate), 1e-12)


@in_float64
@every_mixer
@pytest.mark.parametrize("plan", ["blended", "no time step"])  # replaced heads come from a cache in test_laws.py
@torch.no_grad()
def test_cached_is_uncached(name, plan):
    """A prompt, single tokens, and several that follow."""
    case = case_of(name, torch.float64, plan)
    u, cache = case.inputs(), case.cache()
    pieces = [run(case.mixer, piece, cache) for piece in u.split([11, 1, 1, 1, T - 14], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), run(case.mixer, u), **SAME)


@in_float64
@every_mixer
@torch.no_grad()
def test_padded_is_single(name):
    """At once and in steps; row 0 has 5 pads. Blended, in which a scan and attention meet; replaced heads are padded in
    test_laws.py."""
    case = case_of(name, torch.float64, "blended")
    u, cache, exist = case.inputs(), case.cache(), torch.ones(2, T, dtype=torch.bool)
    exist[0, :5] = False
    alone, other = run(case.mixer, u[:1, 5:])[0], run(case.mixer, u)[1]
    steps = [run(case.mixer, u[:, i:j], cache, exist[:, :j]) for i, j in ((0, 11), (11, 12), (12, 13), (13, T))]
    for padded in (run(case.mixer, u, exist=exist), torch.cat(steps, 1)):
        torch.testing.assert_close(padded[0, 5:], alone, **SAME)
        torch.testing.assert_close(padded[1], other, **SAME)


@in_float64
@every_mixer
@torch.no_grad()
def test_packed_is_apart(name):
    case = case_of(name, torch.float64, "blended")
    u, lengths = case.inputs(), ([7, 17], [2, 10, 12])
    numbers = torch.stack([torch.arange(len(each)).repeat_interleave(torch.tensor(each)) for each in lengths])
    together = run(case.mixer, u, packing=packed(numbers))
    for row, each in enumerate(lengths):
        apart = [run(case.mixer, part[None])[0] for part in u[row].split(each)]
        torch.testing.assert_close(together[row], torch.cat(apart), **SAME)


# Of mixers that differ in their projections alone, one: Llamba's and Falcon-H1's scan is Mamba-2's, Jamba's is Mamba-1's.
TRACED = ("Mamba-2", "Mamba-1", "Gated DeltaNet, split", "Kimi Delta Attention", "mLSTM, fused", "Lightning")


@pytest.mark.parametrize("name", but_slow(MIXERS, *TRACED))
@torch.no_grad()
def test_compiled_is_eager(name):
    """Traced, without a compiler, in one graph."""
    case = case_of(name, torch.float32, "blended")
    torch._dynamo.reset()
    compiled = torch.compile(lambda u: run(case.mixer, u), fullgraph=True, backend="eager")
    assert_near(compiled(case.inputs()), run(case.mixer, case.inputs()), 1e-5)


@every_mixer
@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str)
@torch.no_grad()
def test_half_precision_is_near(name, dtype, bound):
    case = case_of(name, torch.float32)
    exact = run(case.mixer, case.inputs())
    half = run(copy.deepcopy(case.mixer).to(dtype), case.inputs().to(dtype)).float()
    assert (half - exact).norm() < bound * exact.norm()


@every_mixer
def test_every_parameter_of_a_graft_learns(name):
    case = case_of(name, torch.float32, "blended")
    case.mixer.zero_grad()
    run(case.mixer, case.inputs()).square().sum().backward()
    grads = {name: p.grad for name, p in case.mixer.graft.named_parameters()}
    assert all(grad is not None and (grad.abs().sum() > 0 or "k_proj.bias" in name) for name, grad in grads.items())
    assert {name for name, p in case.mixer.named_parameters() if p.grad is not None} == {f"graft.{name}" for name in grads}
