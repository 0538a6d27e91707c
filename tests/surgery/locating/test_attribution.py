"""Slopes are derivatives: of the loss by the gates of real grafts, at gate 0."""

import gc

import pytest
import torch

from surgery.locating import attribution
from surgery.locating.attribution import STARTS, attention_logits, attribute, graft_mixers
from surgery.locating.nulls import null_logits
from surgery.probes.encoded import Encoded
from surgery.probes.scoring import logits_at_points
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.splicing.splice import adopt, splice
from tests.surgery.modeling import bases, stock_bases
from tests.surgery.tuning.test_waits import META, Copies

NUMBER = 6  # of the start that is tried: sign -1, tau 1
FAMILIES = [*bases.BASES, *stock_bases.CONFIGURATIONS]


def ask_tokens(rows: torch.Tensor, vocabulary: int, choices: int = 4, seed: int = 0) -> Encoded:
    """A question a row, about its last token but one: which of some tokens follows. Its spans are three stretches of tokens."""
    rng, (count, length) = torch.Generator().manual_seed(seed), rows.shape
    tokens = torch.stack([torch.randperm(vocabulary, generator=rng)[:choices] for _ in range(count)])
    query = length - 2
    terms = [(q, c, q, int(tokens[q, c])) for q in range(count) for c in range(choices)]
    return Encoded(
        rows=rows.tolist(),
        points=torch.tensor([(q, query) for q in range(count)]),
        terms=torch.tensor(terms),
        choices=torch.full((count,), choices),
        answers=torch.randint(choices, (count,), generator=rng),
        owners=torch.arange(count),
        query=torch.full((count,), query),
        ends=[[[3, 4, 5], [7, 8], [10, 11, 12]] for _ in range(count)],
        evidence=[q % 3 for q in range(count)],
    )


def make(family: str):
    """A random base in float64, and questions for it."""
    module = bases if family in bases.BASES else stock_bases
    return module.make_base(family), ask_tokens(module.make_rows(3, 19), module.VOCABULARY)


def slopes_by_autograd(base, encoded, start) -> dict[int, torch.Tensor]:
    """Minus the gradient of the summed loss by each head's gate, with grafts at all heads, and all gates 0."""
    mixers = graft_mixers(adopt(base))
    heads = {f"L{layer}.H{head}": start for layer, mixer in mixers.items() for head in range(mixer.num_heads)}
    sites = tuple(Site(layer, tuple(range(mixer.num_heads))) for layer, mixer in mixers.items())
    hybrid = splice(base, Plan(sites=sites, starts=heads, gate=0.0)).eval()
    encoded.loss(logits_at_points(hybrid, encoded)).sum().backward()
    return {layer: -hybrid.mixer_at(layer).graft.gate.grad for layer in mixers}


@pytest.mark.parametrize(("family", "null"), [*((family, 0.3) for family in FAMILIES), ("mamba2", None), ("mamba", None)])
def test_slopes_are_the_gradients_by_gates(family, null):
    base, encoded = make(family)
    nulls = None
    if null is not None:
        nulls = {layer: torch.full((len(STARTS), mixer.num_heads), null) for layer, mixer in graft_mixers(adopt(base)).items()}
    found = attribute(adopt(base), encoded, batch_size=2, nulls=nulls)
    expected = slopes_by_autograd(base, encoded, STARTS[NUMBER].model_copy(update={"null": null}))
    assert found.slopes.keys() == expected.keys()
    for layer, slopes in expected.items():
        torch.testing.assert_close(found.slopes[layer][NUMBER] * len(encoded), slopes, rtol=1e-7, atol=1e-9)


def test_the_base_is_asked_in_the_same_pass():
    base, encoded = make("mamba2")
    found = attribute(adopt(base), encoded)
    logits = logits_at_points(base, encoded)
    torch.testing.assert_close(torch.from_numpy(found.loss).float(), encoded.loss(logits).detach().float())
    assert (torch.from_numpy(found.correct) == encoded.correct(logits)).all()


def test_nothing_of_a_pass_stays():
    base, encoded = make("mamba2")
    model, counts = adopt(base), []
    for _ in range(3):
        attribute(model, encoded)
        counts.append(sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()))
    assert counts[1] == counts[2]


def test_weights_keep_whether_they_learn():
    base, encoded = make("mamba2")
    base.lm_head.weight.requires_grad_(False)
    before = {name: p.requires_grad for name, p in base.named_parameters()}
    attribute(adopt(base), encoded)
    assert {name: p.requires_grad for name, p in base.named_parameters()} == before
    assert all(p.grad is None for p in base.parameters())


@pytest.mark.parametrize("family", ["mamba2", "mamba"])
def test_a_batch_waits_for_a_gpu_for_its_answers_alone(family, monkeypatch):
    """On "meta" there are no numbers to wait for, and whatever asks for one fails. Slopes are read once a layer, at the end."""
    base, encoded = make(family)
    model, read = adopt(base).to(META), list[torch.Size]()
    monkeypatch.setattr(attribution, "on_gpu", lambda _: True)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda m: read.append(m.shape) or torch.zeros(m.shape, dtype=m.dtype))
    mixers = graft_mixers(model)
    nulls = {layer: torch.zeros(len(STARTS), mixer.num_heads) for layer, mixer in mixers.items()}
    monkeypatch.setattr(attribution, "logits_at_points", lambda model, part: model(part.padded(META)).logits[:, -2])
    monkeypatch.setattr(Encoded, "loss", lambda _, logits: logits.sum(-1))
    monkeypatch.setattr(Encoded, "correct", lambda _, logits: logits[:, 0] > 0)
    with Copies() as copies:
        attribute(model, encoded, batch_size=1, nulls=nulls)
    assert len(read) == 2 * len(encoded) + len(mixers)
    assert copies.slow == []


def test_null_keys_are_read_once_a_layer(monkeypatch):
    model, read = adopt(make("mamba2")[0]).to(META), list[torch.Size]()
    monkeypatch.setattr(torch.Tensor, "cpu", lambda m: read.append(m.shape) or torch.zeros(m.shape, dtype=m.dtype))
    null_logits(model, torch.zeros(2, 19, dtype=torch.long), 0.1)
    assert len(read) == len(graft_mixers(model))


@pytest.mark.parametrize(("gpu", "at_once"), [(False, 1), (True, 4)])
def test_a_gpu_takes_larger_pieces(gpu, at_once, monkeypatch):
    base, _ = make("mamba2")
    mixer = graft_mixers(adopt(base).to(META))[0]
    monkeypatch.setattr(attribution, "on_gpu", lambda _: gpu)
    streams = mixer.project(torch.empty(1, 2000, base.config.hidden_size, dtype=torch.float64, device=META), None, None, None)
    pieces = [*attention_logits(mixer, streams, torch.arange(2000, device=META))]
    assert len(pieces) == len(STARTS) * -(-mixer.num_heads // at_once)


def test_half_precision_is_close():
    base, encoded = make("mamba2")
    exact = attribute(adopt(base), encoded).slopes
    half = attribute(adopt(base.to(torch.bfloat16)), encoded).slopes
    for layer, slopes in exact.items():
        torch.testing.assert_close(half[layer], slopes, rtol=0.2, atol=0.2 * float(slopes.abs().max()))
