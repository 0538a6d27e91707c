"""Laws of every hybrid made of recurrent mixers alone: however a text is fed, the logits are the same."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, DynamicCache, StaticCache

from surgery.checking.law import WideCasts
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice
from tests.surgery.modeling.bases import BASES, STOCK, decode_captured, make_base, make_hybrid, make_rows

FAMILIES = pytest.mark.parametrize("name", BASES)
NULLS = pytest.mark.parametrize("null", [None, 0.5], ids=["without", "null-key"])
GENERATE = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 4}


def logits(model: Any, ids: Tensor, **more: Any) -> Tensor:
    """Of a model in float64 without the casts to float32 of transformers' norms: their rounding differs between processors."""
    with torch.no_grad(), WideCasts() if model.dtype == torch.float64 else nullcontext():
        return model(ids, **{"use_cache": False, **more}).logits


def assert_same(one: Tensor, other: Tensor, bound: float = 1e-9) -> None:
    torch.testing.assert_close(one.double(), other.double(), atol=bound, rtol=bound)


@pytest.mark.parametrize("name", STOCK)
@pytest.mark.parametrize("more", [{}, {"use_bias": True, "use_conv_bias": False}], ids=["plain", "biases"])
def test_adopted_is_stock(name: str, more: dict) -> None:
    base, ids = make_base(name, dtype=torch.float32, **more), make_rows()
    assert_same(logits(adopt(base), ids), logits(base, ids), 2e-5)


@pytest.mark.parametrize("name", STOCK)
def test_adopted_decodes_as_stock(name: str) -> None:
    base, ids = make_base(name, dtype=torch.float32), make_rows()
    assert torch.equal(adopt(base).generate(ids, **GENERATE), base.generate(ids, **GENERATE))


@FAMILIES
def test_grafts_matter_and_can_be_disabled(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows()
    base = logits(make_base(name) if name == "llamba" else adopt(make_base(name)), ids)
    assert (logits(hybrid, ids) - base).abs().max() > 0.1
    with hybrid.disable_grafts():
        assert torch.equal(logits(hybrid, ids), base)
    assert (logits(hybrid, ids) - base).abs().max() > 0.1


@FAMILIES
@NULLS
@pytest.mark.parametrize("sizes", [[1] * 6 + [17], [7, 1, 1, 14], [2, 21]], ids=["one by one", "mixed", "short first"])
def test_cached_is_whole(name: str, null: float | None, sizes: list[int]) -> None:
    hybrid, ids = make_hybrid(name, null), make_rows()
    cache, parts = DynamicCache(config=hybrid.config), []
    for number, part in enumerate(ids.split(sizes, dim=1)):
        how = {"cache_params": cache} if number % 2 else {"past_key_values": cache}  # either name
        parts.append(logits(hybrid, part, use_cache=True, **how))
    assert_same(torch.cat(parts, 1), logits(hybrid, ids))


@FAMILIES
@pytest.mark.parametrize("argument", ["cache_params", "past_key_values"])
def test_a_backbone_reads_a_cache_under_either_name(name: str, argument: str) -> None:
    backbone, ids = make_hybrid(name).base_model, make_rows()
    given = {argument: DynamicCache(config=backbone.config), "use_cache": True}
    with torch.no_grad():
        parts = [backbone(part, **given).last_hidden_state for part in ids.split([9, 14], 1)]
        assert_same(torch.cat(parts, 1), backbone(ids, use_cache=False).last_hidden_state, 1e-5)


@FAMILIES
@NULLS
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padded_is_alone(name: str, null: float | None, side: str) -> None:
    """The prompt, the tokens that are decoded after it one by one, and a second chunk."""
    hybrid, ids = make_hybrid(name, null), make_rows(3)
    lengths, after = [23, 9, 2], make_rows(3, 6, seed=5)
    places = {"left": torch.arange(22, -1, -1), "right": torch.arange(23), "inside": torch.arange(23) * 7 % 23}[side]
    mask = torch.stack([places < n for n in lengths]).long()
    padded = torch.zeros_like(ids)
    for row, n in enumerate(lengths):
        padded[row, mask[row].bool()] = ids[row, :n]
    cache = DynamicCache(config=hybrid.config)
    parts = [logits(hybrid, padded, attention_mask=mask, cache_params=cache, use_cache=True)]
    gap = 3 * (side == "inside")  # as between two turns of a conversation
    behind = torch.cat([after[:, :2], after.new_zeros(3, gap), after[:, 2:]], 1)
    for part, real in zip(behind.split([1, 1, gap + 4], 1), torch.arange(gap + 6).split([1, 1, gap + 4]), strict=True):
        mask = torch.cat([mask, ((real < 2) | (real >= gap + 2)).long().expand(3, -1)], 1)
        parts.append(logits(hybrid, part, attention_mask=mask, cache_params=cache, use_cache=True))
    together = torch.cat(parts, 1)
    for row, n in enumerate(lengths):
        alone = logits(hybrid, torch.cat([ids[row : row + 1, :n], after[row : row + 1]], 1))
        assert_same(together[row, mask[row].bool()], alone[0])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("mamba2", {"use_bias": True, "time_step_limit": (0.05, 0.4), "hidden_act": "gelu"}),
        ("mamba", {"use_bias": True, "use_conv_bias": False, "hidden_act": "gelu"}),
        ("falcon_mamba", {"use_bias": True, "residual_in_fp32": False}),
        ("llamba", {"norm_epsilon": 1e-4}),
    ],
)
def test_what_a_configuration_may_say(name: str, more: dict) -> None:
    """Cached is whole and padded is alone with other fields of the base as well; and adopted is stock."""
    base, ids = make_base(name, **more), make_rows()
    hybrid = splice(base, Plan(sites="L1.H0,3", gate=0.5)).eval()
    mask = (torch.arange(23) >= torch.tensor([[0], [7]])).long()
    whole, cache = logits(hybrid, ids, attention_mask=mask), DynamicCache(config=hybrid.config)
    assert_same(whole[1, 7:], logits(hybrid, ids[1:, 7:])[0])
    parts = []
    for part in ids.split([9, 1, 13], dim=1):
        seen = sum(each.shape[1] for each in parts) + part.shape[1]
        parts.append(logits(hybrid, part, attention_mask=mask[:, :seen], cache_params=cache, use_cache=True))
    assert_same(torch.cat(parts, 1)[0], whole[0])
    assert_same(torch.cat(parts, 1)[1, 7:], whole[1, 7:])
    if name in STOCK:
        assert_same(logits(adopt(make_base(name, **more)), ids), logits(base, ids), 2e-4)


@FAMILIES
@NULLS
def test_packed_is_alone(name: str, null: float | None) -> None:
    hybrid, lengths = make_hybrid(name, null), (9, 1, 7, 30)
    documents = [make_rows(1, n, seed=n) for n in lengths]
    row = torch.cat(documents, 1)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].int()
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


@FAMILIES
def test_packed_gradients_are_those_of_documents_alone(name: str) -> None:
    hybrid, documents = make_hybrid(name).train(), [make_rows(1, 9, seed=1), make_rows(1, 14, seed=2)]
    positions = torch.cat([torch.arange(9), torch.arange(14)])[None]
    gradients = []
    for inputs in ([(torch.cat(documents, 1), {"position_ids": positions})], [(each, {}) for each in documents]):
        hybrid.zero_grad()
        for ids, said in inputs:
            with WideCasts():
                hybrid(ids, use_cache=False, **said).logits.square().sum().backward()
        gradients.append({key: p.grad.clone() for key, p in hybrid.graft_parameters().items()})
    for key, one in gradients[0].items():
        assert_same(one, gradients[1][key], 1e-7)


@FAMILIES
def test_packed_with_a_cache_is_refused(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows(1, 6)
    with pytest.raises(ValueError, match="packed"):
        logits(hybrid, ids, use_cache=True, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))


@FAMILIES
@NULLS
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=["greedy", "beams", "static"])
def test_generate_with_a_cache_as_without(name: str, null: float | None, how: dict) -> None:
    hybrid, ids = make_hybrid(name, null), make_rows()
    mask = torch.ones_like(ids)
    mask[1, :8] = 0
    ids[1, :8] = 0
    plain = {key: value for key, value in how.items() if key != "cache_implementation"}
    without = hybrid.generate(ids, attention_mask=mask, use_cache=False, **plain, **GENERATE)
    assert torch.equal(hybrid.generate(ids, attention_mask=mask, **how, **GENERATE), without)


@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_decoding_with_a_static_cache_can_be_captured(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows(length=9)
    assert_same(decode_captured(hybrid, ids), logits(hybrid, ids), 1e-5)  # float32 within norms


@FAMILIES
@pytest.mark.parametrize("argument", ["cache_params", "past_key_values"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_second_turn_goes_on(name: str, argument: str, masked: bool) -> None:
    """Given the whole conversation and the cache of the first turn, generate reads what is new."""
    hybrid, read = make_hybrid(name), []
    turn = hybrid.generate(make_rows(1), return_dict_in_generate=True, **GENERATE)
    cache = next(turn[key] for key in ("cache_params", "past_key_values") if turn.get(key) is not None)
    text = torch.cat([turn.sequences, make_rows(1, 4, seed=9)], 1)
    given = {"attention_mask": torch.ones_like(text)} if masked else {}
    hook = hybrid.get_input_embeddings().register_forward_hook(lambda _, inputs, __: read.append(inputs[0].shape[1]))
    reply = hybrid.generate(text, return_dict_in_generate=True, output_logits=True, **GENERATE, **{argument: cache}, **given)
    hook.remove()
    assert read[0] == 5
    assert_same(reply.logits[0], logits(hybrid, text)[:, -1], 1e-5)  # generate gives them in float32


def test_a_second_turn_without_grafts_goes_on() -> None:
    hybrid = make_hybrid("mamba2")
    with hybrid.disable_grafts():
        turn = hybrid.generate(make_rows(1), return_dict_in_generate=True, **GENERATE)
        text = torch.cat([turn.sequences, make_rows(1, 4, seed=9)], 1)
        given = {"attention_mask": torch.ones_like(text), **GENERATE}
        again = hybrid.generate(text, past_key_values=turn.past_key_values, **given)
        assert torch.equal(again, hybrid.generate(text, **given))
        cache = DynamicCache(config=hybrid.config)
        logits(hybrid, make_rows(1), cache_params=cache, use_cache=True)  # a forward counts what it reads, too
        assert torch.equal(hybrid.generate(text, past_key_values=cache, **given), hybrid.generate(text, **given))


def test_a_static_cache_outlives_a_turn_and_guidance_is_refused() -> None:
    hybrid, text = make_hybrid("mamba2"), make_rows(1)
    cache = StaticCache(config=hybrid.config, max_cache_len=99)
    for _ in range(2):
        given = {"attention_mask": torch.ones_like(text), **GENERATE}
        turn = hybrid.generate(text, past_key_values=cache, **given)
        assert torch.equal(turn, hybrid.generate(text, **given))
        text = torch.cat([turn, make_rows(1, 4, seed=9)], 1)
    with pytest.raises(ValueError, match="use_cache=False"):
        hybrid.generate(text, guidance_scale=1.5, **GENERATE)


@FAMILIES
def test_only_new_tokens_with_a_cache(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows(1)
    cache = DynamicCache(config=hybrid.config)
    logits(hybrid, ids, cache_params=cache, use_cache=True)
    new = make_rows(1, 3, seed=9)
    reply = hybrid.generate(new, cache_params=cache, return_dict_in_generate=True, output_logits=True, **GENERATE)
    assert_same(reply.logits[0], logits(hybrid, torch.cat([ids, new], 1))[:, -1], 1e-5)


@FAMILIES
def test_what_a_forward_does_not_read_is_refused(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows(1)
    for model in (hybrid, hybrid.base_model):
        with pytest.raises(TypeError, match="attention_masks"):
            model(ids, attention_masks=torch.ones_like(ids))
    with pytest.raises(ValueError, match="attention_mask"):
        hybrid(ids, attention_mask=torch.ones(1, 1, 23, 23))
    one, other = DynamicCache(config=hybrid.config), DynamicCache(config=hybrid.config)
    with pytest.raises(ValueError, match="cache_params"):
        hybrid(ids, cache_params=one, past_key_values=other)


@FAMILIES
def test_a_cache_without_the_keys_is_refused(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows(1)
    with hybrid.disable_grafts():
        cache = hybrid(ids, use_cache=True).cache_params
    with pytest.raises(ValueError, match="cache"):
        hybrid(ids, cache_params=cache)


@FAMILIES
def test_a_cache_cannot_be_cropped(name: str) -> None:
    hybrid = make_hybrid(name)
    cache = hybrid(make_rows(1), use_cache=True).cache_params
    with pytest.raises(RuntimeError, match="crop"):
        cache.crop(-2)


@FAMILIES
def test_inputs_as_embeddings_and_hidden_states(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows()
    embedded = hybrid.get_input_embeddings()(ids)
    with torch.no_grad(), WideCasts():
        read = hybrid(inputs_embeds=embedded, use_cache=False, output_hidden_states=True, logits_to_keep=2)
    assert_same(read.logits, logits(hybrid, ids)[:, -2:])
    assert len(read.hidden_states) == 3
    assert torch.equal(hybrid.generate(inputs_embeds=embedded, **GENERATE), hybrid.generate(ids, **GENERATE)[:, 23:])


@FAMILIES
def test_a_pad_that_is_read_alone_changes_nothing(name: str) -> None:
    hybrid, ids, mask = make_hybrid(name), make_rows(), torch.ones(2, 24, dtype=torch.long)
    cache = DynamicCache(config=hybrid.config)
    mask[0, 22] = 0
    for part, end in ((ids[:, :22], 22), (ids[:, :1], 23), (ids[:, 22:], 24)):  # the second one is padding
        last = logits(hybrid, part, attention_mask=mask[:, :end], cache_params=cache, use_cache=True)
    assert_same(last[:1], logits(hybrid, ids[:1])[:, -1:])


@FAMILIES
def test_gradients_are_the_same_with_checkpointing(name: str) -> None:
    hybrid, ids = make_hybrid(name).train(), make_rows()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            hybrid.gradient_checkpointing_enable()
        hybrid.zero_grad()
        hybrid(ids, labels=ids).loss.backward()
        gradients.append({key: p.grad.clone() for key, p in hybrid.named_parameters() if p.requires_grad})
    assert set(gradients[0]) == set(hybrid.graft_parameters())
    for key, one in gradients[0].items():
        assert one.abs().max() > 0, key
        assert_same(one, gradients[1][key])
