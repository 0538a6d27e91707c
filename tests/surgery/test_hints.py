"""Attention hints, on attention made by hand."""

import math
import random

import pytest
import torch

from surgery.pretraining.hints import hint_loss
from surgery.records.site import Site
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
    gather, aggregate = (torch.zeros(len(ids), 1, ids.shape[1], ids.shape[1], requires_grad=True) for _ in range(2))
    with torch.no_grad():
        for row, asked, value in places:
            gather[row, 0, asked, asked - 2] = gather[row, 0, value, value - 2] = aggregate[row, 0, asked, value] = 1
    loss = hint_loss((gather, aggregate), ids, targets, Site(0, (0,)), Site(1, (0,)))
    assert loss.item() == 0
    loss.backward()
    assert gather.grad.count_nonzero() > 0
    assert aggregate.grad.count_nonzero() == len(places)


def test_attention_that_knows_nothing_costs_what_chance_does(batch):
    """Of four heads the one that is hinted counts; a fourth of its weight in every place costs the logarithm of four."""
    ids, targets, _ = batch
    heads = torch.zeros(len(ids), 4, ids.shape[1], ids.shape[1])
    heads[:, 2] = 0.25
    loss = hint_loss((heads, heads), ids, targets, Site(0, (2,)), Site(1, (2,)))
    assert loss.item() == pytest.approx(3 * math.log(4), rel=1e-6)
    assert hint_loss((heads, heads), ids, targets, Site(0, (2,)), Site(1, (1,))).item() > 50
