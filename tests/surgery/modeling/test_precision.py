"""Half precision against float64, torch.compile in one graph, autocast."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.surgery.modeling.bases import BASES, make_hybrid, make_rows

FAMILIES = pytest.mark.parametrize("name", BASES)


def logits_of(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **{"use_cache": False, **more}).logits.double()


@FAMILIES
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15), (torch.float16, 0.03)])
def test_lower_precision_is_near_float64(name: str, dtype: torch.dtype, bound: float) -> None:
    """Relative to the spread of the logits, of the same rounded weights."""
    hybrid, ids = make_hybrid(name, dtype=dtype), make_rows()
    exact = make_hybrid(name)
    exact.load_state_dict({key: value.double() for key, value in hybrid.state_dict().items()})
    right, low = logits_of(exact, ids), logits_of(hybrid, ids)
    assert torch.isfinite(low).all()
    assert (low - right).square().mean().sqrt() < bound * right.std()
    cache = hybrid(ids[:, :9], use_cache=True).cache_params
    parts = [logits_of(hybrid, part, cache_params=cache, use_cache=True) for part in ids[:, 9:].split([1, 1, 12], 1)]
    assert (torch.cat(parts, 1) - right[:, 9:]).square().mean().sqrt() < bound * right.std()


@FAMILIES
def test_float16_keeps_what_is_beyond_its_range(name: str) -> None:
    """A stream of the size of 1e5, which float16 cannot hold."""
    hybrid, ids = make_hybrid(name, dtype=torch.float16), make_rows()
    with torch.no_grad():
        hybrid.get_input_embeddings().weight.mul_(500)
        for layer in range(2):
            hybrid.mixer_at(layer).out_proj.weight.mul_(30)
        low = hybrid(ids, use_cache=False, output_hidden_states=True)
    assert torch.isfinite(low.logits).all()


@FAMILIES
def test_gradients_flow_in_bfloat16_and_under_autocast(name: str) -> None:
    hybrid, ids = make_hybrid(name, dtype=torch.bfloat16).train(), make_rows()
    hybrid(ids, labels=ids).loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in hybrid.graft_parameters().values())
    hybrid = make_hybrid(name, dtype=torch.float32).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = hybrid(ids, labels=ids).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in hybrid.graft_parameters().values())


@FAMILIES
def test_a_graft_may_learn_in_float32_beside_a_base_in_bfloat16(name: str) -> None:
    hybrid, ids = make_hybrid(name, dtype=torch.bfloat16), make_rows()
    before = logits_of(hybrid, ids)
    for layer in range(2):
        hybrid.mixer_at(layer).graft.float()
    assert (logits_of(hybrid, ids) - before).abs().max() < 0.1 * before.std() + 0.1
    hybrid.train()(ids, labels=ids).loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in hybrid.graft_parameters().values())


@pytest.mark.parametrize(("name", "padded"), [("mamba2", True), *((name, False) for name in BASES)])
def test_compiles_in_one_graph(name: str, padded: bool) -> None:
    hybrid, ids = make_hybrid(name, dtype=torch.float32, closed_below=0.1), make_rows()
    more = {"attention_mask": (torch.arange(23) >= torch.tensor([[0], [5]])).long()} if padded else {}
    torch._dynamo.reset()
    compiled = torch.compile(hybrid, fullgraph=True, backend="eager")
    torch.testing.assert_close(logits_of(compiled, ids, **more), logits_of(hybrid, ids, **more), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@FAMILIES
def test_decodes_and_learns_in_one_graph(name: str) -> None:
    hybrid = make_hybrid(name, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(hybrid, fullgraph=True, backend="aot_eager")
    caches = [DynamicCache(config=hybrid.config) for _ in range(2)]
    for cache in caches:
        logits_of(hybrid, make_rows(length=9), cache_params=cache, use_cache=True)
    for step in range(3):
        token = make_rows(length=1, seed=step)
        one, other = (
            logits_of(m, token, cache_params=c, use_cache=True) for m, c in zip((compiled, hybrid), caches, strict=True)
        )
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    gradients = []
    for model in (compiled, hybrid.train()):
        hybrid.zero_grad()
        model(make_rows(), labels=make_rows(), use_cache=False).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in hybrid.graft_parameters().values()]))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)
