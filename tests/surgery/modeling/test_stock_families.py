"""Laws of hybrids whose SSMs stand among a stock model's other layers: however a text is fed, the logits are the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache

from surgery.checking.check import check_laws
from surgery.errors import UserError
from surgery.modeling import FAMILIES as MODELING
from surgery.models.digests import fingerprint
from surgery.models.load import open_folder
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice, unsplice
from tests.surgery.modeling.bases import BASES
from tests.surgery.modeling.stock_bases import CONFIGURATIONS, make_base, make_hybrid, make_rows

FAMILIES = pytest.mark.parametrize("name", CONFIGURATIONS)
KINDS = pytest.mark.parametrize("name", ["bamba", "falcon_h1", "jamba", "qwen3_next", "kimi_linear"])  # of mixers and blocks
GENERATE = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 7}


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **{"use_cache": False, **more}).logits


def assert_same(one: Tensor, other: Tensor, bound: float = 3e-7) -> None:
    """Stock models compute decays and norms in float32 whatever the dtype, so that float64 does not help them further."""
    torch.testing.assert_close(
        one, other, atol=bound, rtol=bound, check_dtype=False
    )  # some logits, and generate's, are float32


def test_every_family_is_asked_the_laws() -> None:
    assert set(MODELING) == {*BASES, *(name.partition(",")[0] for name in CONFIGURATIONS)}


@FAMILIES
def test_adopted_is_stock(name: str) -> None:
    base, ids = make_base(name), make_rows()
    adopted = adopt(base)
    assert type(adopted) is not type(base)
    assert_same(logits(adopted, ids), logits(base, ids), 1e-6)
    assert torch.equal(adopted.generate(ids, **GENERATE), base.generate(ids, **GENERATE))
    assert fingerprint(adopted) == fingerprint(base)


@pytest.mark.parametrize("name", ["granitemoehybrid", "jamba", "kimi_linear"])
def test_a_hybrid_with_experts_and_then_its_base_can_be_loaded(name: str, tmp_path: Path) -> None:
    base, hybrid, ids = make_base(name), make_hybrid(name), make_rows()
    for model, folder in ((base, "base"), (hybrid, "hybrid")):
        model.save_pretrained(tmp_path / folder)
        for kind in type(model).__mro__:  # what transformers has noted of it until now
            if "_can_set_experts_implementation_cached_value" in vars(kind):
                del kind._can_set_experts_implementation_cached_value
    loaded = open_folder(tmp_path / "hybrid", torch.float32, "cpu", False, False)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert loaded.config._experts_implementation == stock.config._experts_implementation
    assert_same(logits(adopt(stock), ids), logits(base, ids), 1e-5)


@KINDS
def test_grafts_can_be_disabled_and_taken_out(name: str) -> None:
    base, ids = make_base(name), make_rows()
    before = {key: tensor.clone() for key, tensor in base.state_dict().items()}
    plain, hybrid = logits(adopt(base), ids), make_hybrid(name)
    assert (logits(hybrid, ids) - plain).abs().max() > 0.01
    with hybrid.disable_grafts():
        assert torch.equal(logits(hybrid, ids), plain)
    restored = unsplice(hybrid)
    assert type(restored) is type(base)
    for key, tensor in restored.state_dict().items():
        assert torch.equal(tensor, before[key]), key


@KINDS
def test_a_closed_graft_leaves_the_base_bit_for_bit(name: str) -> None:
    hybrid, ids = make_hybrid(name, null=1000.0, closed_below=1e-3), make_rows()
    assert torch.equal(logits(hybrid, ids), logits(adopt(make_base(name)), ids))


def assert_laws(hybrid: Any, laws: tuple[str, ...] = (), **how: Any) -> None:
    found, _ = check_laws(hybrid, only=laws, **how)
    wrong = [(finding.law, finding.difference, finding.where) for finding in found if finding.verdict == "wrong"]
    assert not wrong
    assert not laws or all(finding.verdict == "right" for finding in found)


@FAMILIES
def test_laws_of_a_state(name: str) -> None:
    assert_laws(make_hybrid(name), ("cache_chunks", "left_padding", "right_padding", "packed"))


@KINDS
def test_more_laws_of_a_state(name: str) -> None:
    assert_laws(make_hybrid(name), ("generate", "static_cache", "second_turn", "beams", "train_mode", "inputs_embeds"))


@pytest.mark.slow
@FAMILIES
def test_all_laws_of_a_state(name: str) -> None:
    assert_laws(make_hybrid(name))


@KINDS
def test_padding_that_is_read_alone_is_refused(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows(2, 1)
    with pytest.raises(ValueError, match="padding"):
        logits(hybrid, ids, attention_mask=torch.tensor([[0], [1]]), use_cache=True)


@KINDS
def test_packed_gradients_and_hidden_states_are_those_of_documents_alone(name: str) -> None:
    hybrid, documents = make_hybrid(name).train(), [make_rows(1, 9, seed=1), make_rows(1, 14, seed=2)]
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    gradients, states = [], []
    for inputs in ([(torch.cat(documents, 1), {"position_ids": positions})], [(each, {}) for each in documents]):
        hybrid.zero_grad()
        seen = []
        for ids, said in inputs:
            output = hybrid(ids, output_hidden_states=True, **said)
            output.logits.square().sum().backward()
            seen.append(output.hidden_states)
        gradients.append({key: p.grad.clone() for key, p in hybrid.graft_parameters().items()})
        states.append([torch.cat(layer, 1) for layer in zip(*seen, strict=True)])
    assert len(states[0]) > hybrid.config.num_hidden_layers
    for one, other in zip(*states, strict=True):
        assert_same(one, other)
    for key, one in gradients[0].items():
        assert one.abs().max() > 0, key
        assert_same(one, gradients[1][key], 1e-5)


@KINDS
def test_what_a_forward_does_not_read_is_refused(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows(1)
    for model in (hybrid, hybrid.base_model):
        with pytest.raises(TypeError, match="attention_masks"):
            model(ids, attention_masks=torch.ones_like(ids))
    with pytest.raises(ValueError, match="seq_idx"):  # a block for each document, which no state obeys
        hybrid(ids, attention_mask=torch.block_diag(*[torch.ones(n, n).tril() for n in (9, 14)])[None, None].bool())
    with hybrid.disable_grafts():
        cache = hybrid(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cache"):
        hybrid(ids, past_key_values=cache)


@KINDS
@pytest.mark.parametrize("argument", ["cache_params", "past_key_values"])
def test_a_cache_is_read_under_either_name(name: str, argument: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows()
    cache, last = DynamicCache(config=hybrid.config), logits(hybrid, ids)[:, -1:]
    logits(hybrid, ids[:, :9], use_cache=True, **{argument: cache})
    assert_same(logits(hybrid, ids[:, 9:], use_cache=True, **{argument: cache})[:, -1:], last)


@FAMILIES
def test_saved_and_loaded_is_live(name: str, tmp_path: Any) -> None:
    hybrid, ids = make_hybrid(name, dtype=torch.float32), make_rows()
    hybrid.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(hybrid)
    assert fingerprint(loaded) == fingerprint(hybrid)
    assert_same(logits(loaded, ids), logits(hybrid, ids), 2e-6)  # experts are computed in another way
    backbone = AutoModel.from_pretrained(tmp_path)
    with torch.no_grad():
        ours = hybrid.base_model(ids, use_cache=False).last_hidden_state
        assert_same(backbone(ids, use_cache=False).last_hidden_state, ours, 2e-6)


@pytest.mark.parametrize("name", ["qwen3_next", "kimi_linear"])
def test_queries_and_keys_of_length_1_are_as_wide_as_the_base_s(name: str) -> None:
    with pytest.raises(UserError, match="width"):
        splice(make_base(name), Plan(sites=("L1.H0",), width=64))
