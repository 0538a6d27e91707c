"""Roles of models made by hand are found, and nothing else is."""

from dataclasses import replace

import matplotlib.figure
import pytest
import torch

from surgery.locating.ablation import Unit, convolutions
from surgery.locating.circuit import draw_circuit
from surgery.locating.locate import locate
from surgery.models.anatomy import anatomy
from surgery.records.ranking import Circuit, Edge, Estimate, GroupScore, Ranking, Roles
from surgery.records.recipe import Locate
from surgery.splicing.splice import adopt
from tests.surgery.locating.planted import KINDS, ask, plant, tokenizer

LAYOUTS = 20


def find(
    kind: str, seed: int, dtype: torch.dtype = torch.float32, **options
) -> tuple[Ranking, tuple[str, ...], tuple[str, ...]]:
    """The ranking of a planted model, and what is true of it."""
    planted = plant(kind, seed, dtype)
    return locate(planted.model, tokenizer(), ask(kind, 24, seed), Locate(**options)), planted.gather, planted.aggregate


@pytest.fixture(scope="module")
def found() -> tuple[Ranking, tuple[str, ...], tuple[str, ...]]:
    return find("head", 0)


def check(kind: str, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """The units that are named are the planted ones; a pair may be named in either order."""
    ranking, gather, aggregate = find(kind, seed, dtype)
    assert ranking.circuit is not None
    assert ranking.circuit.gather == gather
    assert (ranking.circuit.aggregate or ("",))[0] in (aggregate or ("",))
    assert len(ranking.circuit.aggregate) == min(len(aggregate), 1)
    named = {each.name: each.roles.role for each in (*ranking.groups, *(h for h in ranking.heads if h.roles))}
    assert {name for name, role in named.items() if role != "none"} == {*ranking.circuit.gather, *ranking.circuit.aggregate}


@pytest.mark.parametrize("kind", KINDS)
def test_planted_roles_are_found(kind):
    check(kind, seed=1)


@pytest.mark.parametrize("kind", ["convolution"])
def test_planted_roles_are_found_in_bfloat16(kind):
    check(kind, 2, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_planted_roles_are_found_in_every_layout(kind, dtype):
    for seed in range(LAYOUTS):
        check(kind, seed, dtype)


def test_the_share_of_a_gather_head_passes_through_its_aggregate_head(found):
    ranking, (gather,), (aggregate,) = found
    (edge,) = ranking.circuit.edges
    assert (edge.source, edge.target) == (gather, aggregate)
    assert edge.share == pytest.approx(1, abs=0.05)
    assert gather in ranking.circuit.sentence
    assert aggregate in ranking.circuit.sentence


@pytest.mark.parametrize("kind", ["head", "layers"])
def test_few_questions_tell_first_what_a_deep_model_may_need(kind, monkeypatch):
    monkeypatch.setattr("surgery.locating.roles.DEEP", 0)
    check(kind, seed=1)


def test_a_head_that_gathers_at_the_ends_of_other_records_is_found():
    # as a head of tiny-options does, from some seeds, which marks the options that are not asked for
    planted, questions = plant("head", 0), ask("head", 24, 0)
    questions = [replace(each, evidence=(each.evidence + 1) % len(each.spans)) for each in questions]
    circuit = locate(planted.model, tokenizer(), questions, Locate(roles=2)).circuit
    assert (circuit.gather, circuit.aggregate) == (planted.gather, planted.aggregate)


def test_roles_are_left_out_where_nobody_asks():
    ranking, _, _ = find("head", 0, roles=0)
    assert ranking.circuit is None
    assert all(each.roles is None for each in ranking.heads)


def test_a_circuit_is_drawn(found):
    ranking, _, _ = found
    figure = draw_circuit(Ranking.model_validate_json(ranking.text()))
    assert isinstance(figure, matplotlib.figure.Figure)
    texts = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert all(name in texts for name in (*ranking.circuit.gather, *ranking.circuit.aggregate))
    assert draw_circuit(find("nothing", 0)[0]) is None


@pytest.mark.parametrize("units", [(0, 1), (1, 2), (4, 4), (7, 7)])
def test_nothing_of_a_drawn_circuit_touches(units):
    gather, aggregate = ([f"L{layer}.H{head}" for head in range(count)] for layer, count in enumerate(units))
    one = Estimate(mean=1, low=1, high=1, n=9)
    roles = Roles(everywhere=one, query=one, evidence=one, spans=one, elsewhere=one, role="both")
    edges = tuple(Edge(source=a, target=b, share=1) for a in gather for b in aggregate)
    ranking = Ranking(
        heads=(),
        groups=tuple(GroupScore(name=name, sites=(), roles=roles) for name in gather + aggregate),
        circuit=Circuit(gather=tuple(gather), aggregate=tuple(aggregate), edges=edges, sentence="They retrieve. " * 20),
        probe="kv",
        accuracy=one,
        chance=0.1,
        loss=1,
        questions=9,
    )
    figure = draw_circuit(ranking)
    figure.set_dpi(150)  # as it is saved, not as it was drawn
    figure.draw_without_rendering()
    (axis,) = figure.axes
    texts = [text.get_window_extent() for text in axis.texts if text.get_text()]
    boxes = [patch.get_window_extent() for patch in axis.patches]
    arrows = [text.arrow_patch.get_window_extent() for text in axis.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == min(4, units[0]) * min(4, units[1])
    assert not any(a.overlaps(b) for i, a in enumerate(texts) for b in texts[:i])
    assert not any(arrow.overlaps(box) for arrow in arrows for box in boxes)
    assert all(figure.bbox.contains(*corner) for each in (*texts, *boxes) for corner in each.corners())


def test_names_of_units_are_distinct():
    places = anatomy(adopt(plant("head", 0).model))
    units = [Unit(place, (head,)) for place in places.mixers for head in range(place.heads)]
    units += [*convolutions(places), *(Unit(place, tuple(range(place.heads))) for place in places.mixers)]
    assert len({unit.name for unit in units}) == len(units)
