"""torch.compile, torch.export and other traces of whole models: one graph, the same logits."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice
from tests.kernels.inputs import assert_near, rounding
from tests.models import but_slow, random_base, random_llamba, random_selective
from tools import bench_compile
from tools.bench_compile import Decoder, errors, rounding_bound

BASES = {
    "mamba2": partial(random_base, num_hidden_layers=2),
    "mamba": partial(random_selective, MambaConfig, MambaForCausalLM, num_hidden_layers=2),
    "falcon_mamba": partial(random_selective, FalconMambaConfig, FalconMambaForCausalLM, num_hidden_layers=2),
    "llamba": partial(random_llamba, n_layer=2),
}
SITES = {"mamba2": "L1.H1", "mamba": "L1.H0,3,4", "falcon_mamba": "L1.H0,3,4", "llamba": "L1.H1"}


def model(family: str, kind: str) -> Any:
    base = BASES[family]().eval()
    return adopt(base) if kind == "base" else splice(base, Plan(sites=(SITES[family],)))


def ids(tokens: int, rows: int = 2) -> torch.Tensor:
    return torch.arange(rows * tokens).view(rows, tokens) * 7 % 29


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


# Two layers, of 64 to 256 products in a row for each projection, 30 tokens of a scan, and sums of norms; there and back.
ERROR = rounding(2 * 2 * 800)


def check_prefill(compiled, eager, graphs: int = 2) -> None:
    """In one graph for every length: a first one for the first length, and one for all others."""
    exact = copy.deepcopy(eager).double()
    for tokens in (11, 17, 23, 29):
        found, truth = (m(input_ids=ids(tokens), use_cache=False).logits for m in (compiled, exact))
        assert_near(found, truth, ERROR)
    assert counters["stats"]["unique_graphs"] <= graphs


def check_decoding(compiled, eager, graphs: int = 2) -> None:
    before = counters["stats"]["unique_graphs"]
    exact, caches = copy.deepcopy(eager).double(), [DynamicCache(config=eager.config) for _ in range(2)]
    for m, cache in zip((eager, exact), caches, strict=True):
        m(input_ids=ids(9), cache_params=cache, use_cache=True)
    for step in range(5):
        token = ids(1) + step
        logits = [
            m(input_ids=token, cache_params=c, use_cache=True).logits for m, c in zip((compiled, exact), caches, strict=True)
        ]
        assert_near(*logits, ERROR)
    assert counters["stats"]["unique_graphs"] - before <= graphs


def check_training(compiled, eager, graphs: int = 2) -> None:
    before = counters["stats"]["unique_graphs"]
    eager.train().requires_grad_(True)
    exact = copy.deepcopy(eager).double()
    for tokens in (11, 17, 23):
        gradients = []
        for run, m in ((compiled, eager), (exact, exact)):
            m.zero_grad()
            run(input_ids=ids(tokens), labels=ids(tokens), use_cache=False).loss.backward()
            gradients.append(torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]))
        assert_near(*gradients, ERROR)
    assert counters["stats"]["unique_graphs"] - before <= graphs


def test_a_hybrid_is_one_graph():
    """Prompts of any length, and decoding; traced alone, without a compiler."""
    hybrid = model("mamba2", "hybrid")
    compiled = torch.compile(hybrid, fullgraph=True, backend="eager")
    with torch.no_grad():
        check_prefill(compiled, hybrid)
        check_decoding(compiled, hybrid)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["base", "hybrid"])
@pytest.mark.parametrize("family", BASES)
def test_every_family_is_one_graph(family, kind):
    """Base and hybrid, for prompts, decoding and training, with gradients."""
    eager = model(family, kind)
    compiled = torch.compile(eager, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        check_prefill(compiled, eager)
        check_decoding(compiled, eager)
    check_training(compiled, eager)


@pytest.mark.slow
def test_inductor_computes_the_same():
    hybrid = model("mamba2", "hybrid")
    compiled = torch.compile(hybrid, fullgraph=True)
    with torch.no_grad():
        check_prefill(compiled, hybrid)
        check_decoding(compiled, hybrid)


@pytest.fixture(scope="module")
def demo():
    """The demo's hybrid, with the logits of its decoding in float64."""
    base = AutoModelForCausalLM.from_pretrained(bench_compile.CHECKPOINT).eval()
    hybrid = splice(base, Plan.model_validate({"sites": bench_compile.SITES, "blend": 0.1}))
    return hybrid, bench_compile.in_double(hybrid)


def test_decoding_in_float32_is_as_exact_as_its_roundings_allow(demo):
    """Against float64, within a bound of their number. What rounds to 16 bits on the way is beyond it."""
    hybrid, exact = demo
    bound = rounding_bound(hybrid)
    assert errors(Decoder(hybrid).logits(), exact) <= bound < 1e-2 * exact.abs().max()
    leaking = copy.deepcopy(hybrid)
    leaking.lm_head.register_forward_pre_hook(lambda _, given: (given[0].bfloat16().float(),))
    assert errors(Decoder(leaking).logits(), exact) > bound


@pytest.mark.slow
def test_compiled_decoding_is_as_exact(demo):
    hybrid, exact = demo
    compiled, eager = (errors(Decoder(hybrid, compiled=which).logits(), exact) for which in (True, False))
    assert compiled <= rounding_bound(hybrid)
    assert compiled <= 1e-5 * max(1.0, exact.abs().max())
    assert eager <= 1e-5 * max(1.0, exact.abs().max())


@pytest.mark.parametrize("family", but_slow(BASES, "mamba2"))
def test_a_hybrid_runs_without_values(family):
    """FakeTensorMode: forward, backward and decoding know their shapes, and nothing reads a value."""
    hybrid = copy.deepcopy(model(family, "hybrid")).requires_grad_(True)
    mode = FakeTensorMode()
    for module in hybrid.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(mode.from_tensor(parameter.detach()))
    tokens, one = mode.from_tensor(ids(11)), mode.from_tensor(ids(1))
    with mode:
        hybrid(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        assert all(p.grad is not None and p.grad.shape == p.shape for p in hybrid.parameters() if p.requires_grad)
        cache = DynamicCache(config=hybrid.config)
        hybrid(input_ids=tokens, cache_params=cache, use_cache=True)
        mask = torch.ones(2, 12, dtype=torch.long)
        assert hybrid(input_ids=one, cache_params=cache, use_cache=True, attention_mask=mask).logits.shape[:2] == (2, 1)


def test_a_hybrid_is_exported():
    hybrid = model("mamba2", "hybrid")
    exact = copy.deepcopy(hybrid).double()
    lengths = {"input_ids": {1: torch.export.Dim.AUTO}, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(hybrid, (ids(11),), {"use_cache": False}, dynamic_shapes=lengths)
        for tokens in (11, 18):
            found, truth = (m(ids(tokens), use_cache=False).logits for m in (program.module(), exact))
            assert_near(found, truth, ERROR)


def test_a_compiled_hybrid_obeys_autocast():
    hybrid = model("mamba2", "hybrid")
    compiled = torch.compile(hybrid, fullgraph=True, backend="eager")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(compiled(ids(11), use_cache=False).logits, hybrid(ids(11), use_cache=False).logits)
