"""Closed is closed: up to the first token at which a graft opens, a hybrid's logits are its base's, bit for bit."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from tests.surgery.modeling import stock_bases
from tests.surgery.modeling.bases import BASES, make_hybrid, make_rows

DELTA = ("qwen3_5_text", "kimi_linear")
HYBRIDS: dict[tuple, Any] = {}


def random_hybrid(name: str, dtype: torch.dtype, seed: int, time_step: bool) -> Any:
    """A hybrid whose grafts have random queries, keys and null keys. Without experts: how an expert rounds depends on which
    tokens it is given together."""
    if (name, dtype, seed, time_step) not in HYBRIDS:
        make = {"dense": True} if name in DELTA else {"seed": seed}
        hybrid = (stock_bases.make_hybrid if name in DELTA else make_hybrid)(name, dtype=dtype, **make)
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, parameter in hybrid.graft_parameters().items():
                parameter.add_(torch.randn_like(parameter) * (0.1 if "null" in key else 0.3))
        for entry in hybrid.config.grafts:
            graft = hybrid.mixer_at(entry["layer"]).graft
            graft.time_step = graft.time_step and time_step
        HYBRIDS[name, dtype, seed, time_step] = hybrid
    return HYBRIDS[name, dtype, seed, time_step]


def read(hybrid: Any, ids: Tensor, sizes: list[int] | None, more: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Logits (b, t, v), whole or chunk by chunk with a cache, and the largest m of all grafts' heads (b, t)."""
    shares: dict[Any, list[Tensor]] = {}
    grafts = [hybrid.mixer_at(entry["layer"]).graft for entry in hybrid.config.grafts]
    for graft in grafts:
        graft.watch = lambda graft, m: shares.setdefault(graft, []).append(m.amax(-1).float())
    cache = None if sizes is None else DynamicCache(config=hybrid.config)
    mask, parts, at = more.get("attention_mask"), [], 0
    with torch.no_grad():
        for part in ids.split(sizes or [ids.shape[1]], dim=1):
            at += part.shape[1]
            given = more if mask is None else {"attention_mask": mask[:, :at]}
            parts.append(hybrid(part, use_cache=cache is not None, cache_params=cache, **given).logits)
    for graft in grafts:
        graft.watch = None
    empty = torch.zeros(ids.shape)
    return torch.cat(parts, 1), torch.stack([empty, *(torch.cat(each, 1) for each in shares.values())]).amax(0)


@pytest.mark.parametrize("name", [*BASES, *DELTA])
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_up_to_the_first_open_token_logits_are_the_bases(name: str, data: Any) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    hybrid = random_hybrid(name, dtype, data.draw(st.integers(0, 1)), data.draw(st.booleans()))
    batch, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 40))
    ids, sizes, more = make_rows(batch, length, data.draw(st.integers(0, 99))), None, {}
    starts = torch.zeros(batch, length, dtype=torch.bool)
    kind = data.draw(st.sampled_from(["whole", "chunks", "padding", *["documents"] * (name in BASES)]))
    if kind == "chunks" and length > 1:
        cut = data.draw(st.integers(1, length - 1))
        sizes = [cut, 1, length - cut - 1] if cut + 1 < length else [cut, length - cut]
    if kind == "padding":
        lengths = torch.tensor(data.draw(st.lists(st.integers(1, length), min_size=batch, max_size=batch)))[:, None]
        places = torch.arange(length)
        more["attention_mask"] = ((places < lengths) if data.draw(st.booleans()) else (places >= length - lengths)).long()
    if kind == "documents":
        starts = torch.tensor([data.draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(batch)])
        more["seq_idx"] = starts.long().cumsum(-1)
    grafts = [hybrid.mixer_at(entry["layer"]).graft for entry in hybrid.config.grafts]
    for graft in grafts:
        graft.closed_below = 0.0
    m = read(hybrid, ids, sizes, more)[1]
    threshold = float(torch.quantile(m, data.draw(st.floats(0, 1)))) + 1e-6
    for graft in grafts:
        graft.closed_below = threshold
    logits, m = read(hybrid, ids, sizes, more)
    with hybrid.disable_grafts():
        base = read(hybrid, ids, sizes, more)[0]
    acts = m > 0
    real = torch.ones_like(acts) if "attention_mask" not in more else more["attention_mask"].bool()
    for row in range(batch):
        touched = False  # whether a graft has opened in this document
        for t in range(length):
            touched = (touched and not starts[row, t]) or bool(acts[row, t] & real[row, t])
            if real[row, t] and not touched:
                assert torch.equal(logits[row, t], base[row, t])
    if not (acts & real).any():
        assert torch.equal(logits[real], base[real])


@pytest.mark.parametrize("name", BASES)
def test_nothing_closes_in_training(name: str) -> None:
    hybrid, ids = make_hybrid(name, closed_below=0.999), make_rows()
    m = read(hybrid.train(), ids, None, {})[1]
    assert (m > 0).all()
    assert (m < 0.999).any()
