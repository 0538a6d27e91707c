"""Laws of layer grafts, with everything that one may have: a convolution, norms of q and k, RoPE, fewer key-value heads."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from surgery.errors import UserError
from surgery.models.digests import fingerprint
from surgery.models.load import open_folder
from surgery.records.plan import Plan
from surgery.splicing import splice as splicing
from surgery.splicing.donor import LayerStart, describe_layer
from surgery.splicing.splice import adopt, splice, unsplice
from tests.surgery.modeling import bases, stock_bases

FULL = {"rope": {"dim": 4, "theta": 100.0}, "qk_norm": 1e-6, "conv": 4, "bias": ["k_proj", "qkv_conv"]}
PLACES = pytest.mark.parametrize("name", ["mamba2", "mamba", "llamba", "bamba", "falcon_h1", "zamba2", "kimi_linear"])


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **{"use_cache": False, **more}).logits


def make_base(name: str) -> Any:
    return (bases if name in bases.BASES else stock_bases).make_base(name)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer grafts with all that a donor or a base could bring, at random."""

    def starts(hidden_size: int, plan: Plan, donor: Any) -> dict[int, LayerStart]:
        entry = describe_layer(4, 2, 6, **FULL)
        return {site.layer: LayerStart({**entry, "layer": site.layer}, {}) for site in plan.sites}

    monkeypatch.setattr(splicing, "layer_starts", starts)


def make_hybrid(name: str) -> Any:
    torch.manual_seed(0)
    return splice(make_base(name), Plan(kind="layer", sites=("L1",))).eval()


@PLACES
def test_it_can_be_disabled_and_taken_out(name: str) -> None:
    base, ids = make_base(name), bases.make_rows()
    plain, before, hybrid = logits(adopt(base), ids), fingerprint(base), make_hybrid(name)
    assert (logits(hybrid, ids) - plain).abs().max() > 0.1
    with hybrid.disable_grafts():
        assert torch.equal(logits(hybrid, ids), plain)
    learns = {key for key, p in hybrid.named_parameters() if p.requires_grad}
    assert learns == set(hybrid.graft_parameters())
    assert fingerprint(unsplice(hybrid)) == before


def test_decoding_with_a_static_cache_can_be_captured(full: None) -> None:
    hybrid, ids = make_hybrid("mamba2"), bases.make_rows(length=9)
    torch.testing.assert_close(bases.decode_captured(hybrid, ids), logits(hybrid, ids), atol=1e-5, rtol=1e-5)


@PLACES
def test_cached_padded_and_packed(name: str, full: None) -> None:
    hybrid, ids = make_hybrid(name), bases.make_rows(2)
    whole = logits(hybrid, ids)
    cache = DynamicCache(config=hybrid.config)
    parts = [logits(hybrid, part, past_key_values=cache, use_cache=True) for part in ids.split([2, 1, 14, 6], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-6, rtol=1e-6)
    for side in ("left", "right"):
        n, pad = 9, torch.zeros(1, 14, dtype=torch.long)
        short = torch.cat([pad, ids[1:, :n]] if side == "left" else [ids[1:, :n], pad], 1)
        mask = torch.stack([torch.ones(23, dtype=torch.long), (short[0] > 0).long()])
        cache = DynamicCache(config=hybrid.config)
        both = logits(hybrid, torch.cat([ids[:1], short]), attention_mask=mask, past_key_values=cache, use_cache=True)
        alone = logits(hybrid, torch.cat([ids[1:, :n], ids[:1, :1]], 1))[0]
        torch.testing.assert_close(both[1, mask[1].bool()], alone[:n], atol=1e-6, rtol=1e-6)
        mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        after = logits(hybrid, ids[:1, :1].expand(2, 1), attention_mask=mask, past_key_values=cache, use_cache=True)
        torch.testing.assert_close(after[1, 0], alone[n], atol=1e-6, rtol=1e-6)
    positions = torch.cat([torch.arange(9), torch.arange(14)]).expand(2, -1)
    packed = logits(hybrid, ids, position_ids=positions)
    apart = torch.cat([logits(hybrid, ids[:, :9]), logits(hybrid, ids[:, 9:])], 1)
    torch.testing.assert_close(packed, apart, atol=1e-6, rtol=1e-6)


@PLACES
def test_saved_and_loaded_is_live(name: str, full: None, tmp_path: Any) -> None:
    hybrid, ids = make_hybrid(name).float(), bases.make_rows()
    hybrid.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, ids), logits(hybrid, ids), atol=2e-6, rtol=2e-6)
    with pytest.raises(ValueError, match="load the base"), loaded.disable_grafts():
        pass
    with pytest.raises(UserError, match="load the base"):
        unsplice(loaded)
    assert set(open_folder(tmp_path, None, "cpu", False, False).graft_parameters()) == set(hybrid.graft_parameters())


def test_heads_beside_a_layer_of_the_base() -> None:
    """A base may bring a layer graft; heads in another layer come and go without it."""
    base, ids = make_hybrid("mamba2"), bases.make_rows()
    before = logits(base, ids)
    hybrid = splice(base, Plan(sites=("L0.H1",)))
    assert (logits(hybrid, ids) - before).abs().max() > 1e-3
    assert all(".layers.0." in key for key in hybrid.graft_parameters())
    with hybrid.disable_grafts():
        assert torch.equal(logits(hybrid, ids), before)
        cache = hybrid(ids, use_cache=True).cache_params
    with pytest.raises(ValueError, match="cache"):  # which holds the keys of the layer, and not of the head
        hybrid(ids, cache_params=cache)
    restored = unsplice(hybrid)
    assert torch.equal(logits(restored, ids), before)
    unsplice(restored)  # and the layer graft can still be taken out
    with pytest.raises(UserError, match="L1"):
        splice(base, Plan(sites=("L1.H0",)))
