"""Laws of hybrids whose SSMs stand among a stock model's other layers: however a text is fed, the logits are the same."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache

from surgery.errors import UserError
from surgery.models.digests import fingerprint
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice, unsplice
from tests.surgery.modeling.stock_bases import CONFIGURATIONS, make_base, make_hybrid, make_rows

FAMILIES = pytest.mark.parametrize("name", CONFIGURATIONS)
KINDS = pytest.mark.parametrize("name", ["bamba", "falcon_h1", "jamba", "qwen3_next", "kimi_linear"])  # of mixers and blocks
GENERATE = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 7}
LENGTHS = (9, 1, 7, 20)  # of packed documents


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(ids, **{"use_cache": False, **more}).logits


def assert_same(one: Tensor, other: Tensor, bound: float = 3e-7) -> None:
    """Stock models compute decays and norms in float32 whatever the dtype, so that float64 does not help them further."""
    torch.testing.assert_close(
        one, other, atol=bound, rtol=bound, check_dtype=False
    )  # some logits, and generate's, are float32


@FAMILIES
def test_adopted_is_stock(name: str) -> None:
    base, ids = make_base(name), make_rows()
    adopted = adopt(base)
    assert type(adopted) is not type(base)
    assert_same(logits(adopted, ids), logits(base, ids), 1e-6)
    assert torch.equal(adopted.generate(ids, **GENERATE), base.generate(ids, **GENERATE))
    assert fingerprint(adopted) == fingerprint(base)


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


@FAMILIES
@pytest.mark.parametrize("sizes", [[1] * 5 + [18], [2, 14, 1, 6]], ids=["one by one", "short first"])
def test_cached_is_whole(name: str, sizes: list[int]) -> None:
    hybrid, ids = make_hybrid(name), make_rows()
    cache, parts = DynamicCache(config=hybrid.config), []
    for number, part in enumerate(ids.split(sizes, dim=1)):
        how = {"cache_params": cache} if number % 2 else {"past_key_values": cache}  # either name
        parts.append(logits(hybrid, part, use_cache=True, **how))
    assert_same(torch.cat(parts, 1), logits(hybrid, ids))


@FAMILIES
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_is_alone(name: str, side: str) -> None:
    """The prompt, the tokens that are decoded after it one by one, and a second chunk."""
    hybrid, ids = make_hybrid(name), make_rows(3)
    lengths, after = [23, 9, 2], make_rows(3, 6, seed=5)
    mask = torch.stack([torch.arange(23) < n if side == "right" else torch.arange(23) >= 23 - n for n in lengths]).long()
    padded = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        padded[row, mask[row].bool()] = ids[row, :n]
    cache = DynamicCache(config=hybrid.config)
    parts = [logits(hybrid, padded, attention_mask=mask, past_key_values=cache, use_cache=True)]
    for part in after.split([1, 1, 4], dim=1):
        mask = torch.cat([mask, torch.ones_like(part)], 1)
        parts.append(logits(hybrid, part, attention_mask=mask, past_key_values=cache, use_cache=True))
    together = torch.cat(parts, 1)
    for row, n in enumerate(lengths):
        alone = logits(hybrid, torch.cat([ids[row : row + 1, :n], after[row : row + 1]], 1))
        assert_same(together[row, mask[row].bool()], alone[0])


@KINDS
def test_padding_that_is_read_alone_is_refused(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows(2, 1)
    with pytest.raises(ValueError, match="padding"):
        logits(hybrid, ids, attention_mask=torch.tensor([[0], [1]]), use_cache=True)


@FAMILIES
def test_packed_is_alone(name: str) -> None:
    hybrid = make_hybrid(name)
    documents = [make_rows(1, n, seed=n) for n in LENGTHS]
    row = torch.cat(documents, 1)
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None].int()
    collated = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(
        [{"input_ids": document[0].tolist(), "labels": document[0].tolist()} for document in documents]
    )
    collated = {key: value for key, value in collated.items() if key not in ("input_ids", "labels")}
    alone = torch.cat([logits(hybrid, document) for document in documents], 1)
    for said in (
        {"position_ids": positions},
        {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 30, "max_length_k": 30},
        {"seq_idx": numbers},
        collated,
    ):
        assert_same(logits(hybrid, row, **said), alone)
    with pytest.raises(ValueError, match="packed"):
        logits(hybrid, row, position_ids=positions, use_cache=True)


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
def test_training_mode_and_checkpointing_change_nothing(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows()
    want, gradients = logits(hybrid, ids), []
    hybrid.train()
    for checkpointing in (False, True):
        if checkpointing:
            hybrid.gradient_checkpointing_enable()
        hybrid.zero_grad()
        output = hybrid(ids, labels=ids)
        assert_same(output.logits.detach(), want)
        output.loss.backward()
        gradients.append({key: p.grad.clone() for key, p in hybrid.named_parameters() if p.requires_grad})
    assert set(gradients[0]) == set(hybrid.graft_parameters())
    for key, one in gradients[0].items():
        assert_same(one, gradients[1][key])


@KINDS
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=["greedy", "beams", "static"])
def test_generate_with_a_cache_as_without(name: str, how: dict) -> None:
    hybrid, ids = make_hybrid(name), make_rows()
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    ids[1, :8] = 0
    plain = {key: value for key, value in how.items() if key != "cache_implementation"}
    without = hybrid.generate(ids, attention_mask=mask, use_cache=False, **plain, **GENERATE)
    assert torch.equal(hybrid.generate(ids, attention_mask=mask, **how, **GENERATE), without)


@KINDS
@pytest.mark.parametrize("masked", [False, True])
def test_a_second_turn_goes_on(name: str, masked: bool) -> None:
    """Given the whole conversation and the cache of the first turn, generate reads what is new."""
    hybrid, read = make_hybrid(name), []
    turn = hybrid.generate(make_rows(1), return_dict_in_generate=True, **GENERATE)
    text = torch.cat([turn.sequences, make_rows(1, 4, seed=9)], 1)
    given = {"attention_mask": torch.ones_like(text)} if masked else {}
    hook = hybrid.get_input_embeddings().register_forward_hook(lambda _, inputs, __: read.append(inputs[0].shape[1]))
    given |= {"past_key_values": turn.past_key_values, "return_dict_in_generate": True, "output_logits": True}
    reply = hybrid.generate(text, **GENERATE, **given)
    hook.remove()
    assert read[0] == 5
    assert_same(reply.logits[0], logits(hybrid, text)[:, -1])


@FAMILIES
def test_what_a_forward_does_not_read_is_refused(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows(1)
    for model in (hybrid, hybrid.base_model):
        with pytest.raises(TypeError, match="attention_masks"):
            model(ids, attention_masks=torch.ones_like(ids))
    with hybrid.disable_grafts():
        cache = hybrid(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="cache"):
        hybrid(ids, past_key_values=cache)


@KINDS
def test_embeddings_loss_and_some_logits(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows()
    embedded = hybrid.get_input_embeddings()(ids)
    with torch.no_grad():
        read = hybrid(inputs_embeds=embedded, use_cache=False, logits_to_keep=2)
    assert_same(read.logits, logits(hybrid, ids)[:, -2:])


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
