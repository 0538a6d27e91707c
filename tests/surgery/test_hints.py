"""Attention hints, on attention made by hand."""

import math
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from surgery.errors import UserError
from surgery.pretraining.hints import hint_loss, looks
from surgery.pretraining.mixer_starts import start_mixers
from surgery.records.site import Site
from surgery.splicing.splice import adopt
from surgery.tuning.sequences import IGNORE, collate, kv_pieces
from surgery.world.tokenizer import build_tokenizer


@pytest.fixture(scope="module")
def batch():
    """ids and targets of dictionaries, and the positions that the hints are about, found from the text."""
    tokenizer, rng = build_tokenizer(), random.Random(0)
    ids, targets = collate(tokenizer, [kv_pieces(rng, 3, 2) for _ in range(4)])
    places = []
    for row in range(len(ids)):
        words = tokenizer.convert_ids_to_tokens(ids[row].tolist())
        for asked in (targets[row] != IGNORE).nonzero()[:, 0].tolist():
            value = ids[row].tolist().index(int(targets[row, asked]))
            assert words[asked - 2] == words[value - 2]  # the key asked for is the key of the pair
            places.append((row, asked, value))
    return ids, targets, places


def test_attention_as_hinted_costs_nothing(batch):
    ids, targets, places = batch
    gather, aggregate = (torch.zeros(len(ids), ids.shape[1], ids.shape[1], requires_grad=True) for _ in range(2))
    with torch.no_grad():
        for row, asked, value in places:
            gather[row, asked, asked - 2] = gather[row, value, value - 2] = aggregate[row, asked, value] = 1
    loss = hint_loss(gather, aggregate, ids, targets)
    assert loss.item() == 0
    loss.backward()
    assert gather.grad.count_nonzero() > 0
    assert aggregate.grad.count_nonzero() == len(places)


def test_attention_that_knows_nothing_costs_what_chance_does(batch):
    ids, targets, _ = batch
    quarter, nothing = (torch.full((len(ids), ids.shape[1], ids.shape[1]), weight) for weight in (0.25, 0.0))
    assert hint_loss(quarter, quarter, ids, targets).item() == pytest.approx(3 * math.log(4), rel=1e-6)
    assert hint_loss(quarter, nothing, ids, targets).item() > 50


def fresh(kind: str):
    """Of two layers of two heads."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 99,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    own = {"num_heads": 2} if kind == "xlstm" else {"num_attention_heads": 2, "intermediate_size": 16}
    if kind == "minimax":
        own |= {"layer_types": ["linear_attention"] * 2, "num_local_experts": 1, "num_experts_per_tok": 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **own), attn_implementation="eager")
    start_mixers(model)
    return adopt(model)


@pytest.mark.usefixtures("in_float64")
def test_a_mixer_looks_where_its_matrix_has_weight():
    model = fresh("xlstm")
    ids = torch.randint(1, 99, (2, 12), generator=torch.Generator().manual_seed(0))
    hidden, gather, aggregate = looks(model, ids, Site(0, (1,)), Site(1, (0,)))
    torch.testing.assert_close(hidden, model.base_model(ids, use_cache=False).last_hidden_state)
    first = model.base_model.layers[0]
    entering = first.norm_mlstm(model.get_input_embeddings()(ids))
    for row in range(2):
        matrix = next(m for m in first.modules() if hasattr(m, "matrices")).matrices(entering[row : row + 1])[1]
        shares = 2 * gather[row] - 1
        torch.testing.assert_close(shares * matrix.abs().sum(-1, keepdim=True), matrix)
        torch.testing.assert_close(shares.abs().sum(-1), torch.ones(12))
    for looking in (gather, aggregate):
        assert looking.min() >= 0
        assert looking.max() <= 1
        assert looking.requires_grad
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(("kind", "site"), [("xlstm", "L1.H99"), ("xlstm", "L99.H0"), ("llama", "L0.H99")])
def test_a_head_that_is_not_there_is_refused(kind, site):
    model = fresh(kind)
    with pytest.raises(UserError, match=f"hints: {site} is"):
        looks(model, torch.ones(1, 4, dtype=torch.long), Site(0, (0,)), Site.parse(site))


def test_a_layer_that_shows_no_weights_is_refused():
    with pytest.raises(UserError, match="hints: L1 shows no weights of its heads; attention does, and xLSTM"):
        looks(fresh("minimax"), torch.ones(1, 4, dtype=torch.long), Site(1, (0,)), Site(1, (1,)))
