"""Losses against plain formulas in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from surgery.errors import UserError
from surgery.modeling.graft import NATS
from surgery.records.recipe import Hints, Lora
from surgery.splicing.splice import adopt
from surgery.tuning.examples import dictionary_example, encode_examples
from surgery.tuning.lora import add_adapters
from surgery.tuning.losses import IGNORE, Losses, Part, Weights, as_base, kl_divergence, missed_attention
from tests.surgery.modeling.stock_bases import make_hybrid
from tests.surgery.tuning.small import TOKENIZER, toy_base, toy_hybrid


@pytest.mark.parametrize("rows", [1, 40])
def test_divergence_and_its_gradient(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surgery.tuning.losses.CHUNK", 60)
    student, teacher = torch.randn(2, rows, 17, dtype=torch.float64).unbind(0)
    student.requires_grad_()
    plain = F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")
    ours = kl_divergence(student, teacher)
    assert torch.allclose(ours, plain, atol=1e-12)
    (expected,) = torch.autograd.grad(plain, student)
    (gradient,) = torch.autograd.grad(3 * ours, student)
    assert torch.allclose(gradient, 3 * expected, atol=1e-12)
    half = kl_divergence(student.detach().bfloat16().requires_grad_(), teacher.bfloat16())
    assert abs(half.item() - plain.item()) < 0.02 * rows


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("null", [False, True])
def test_hints_are_the_attention_on_the_evidence(null: bool, documents: bool) -> None:
    torch.manual_seed(0)
    b, pairs, t, width = 2, 3, 9, 4
    q, k, bias = torch.randn(b, pairs, t, width), torch.randn(b, pairs, t, width), torch.randn(b, pairs, t)
    logit = torch.randn(pairs) / NATS if null else None
    evidence = torch.zeros(b, t, 2, dtype=torch.long)
    evidence[0, 5], evidence[0, 8], evidence[1, 7] = torch.tensor([1, 3]), torch.tensor([4, 5]), torch.tensor([0, 2])
    numbers = torch.zeros(b, t, dtype=torch.long)  # of documents
    numbers[0, 1:], numbers[1, 8:] = 1, 1
    missed = torch.zeros(pairs)
    for row, place in ((0, 5), (0, 8), (1, 7)):
        scores = torch.einsum("pw,psw->ps", q[row, :, place], k[row, :, : place + 1]) + bias[row, :, : place + 1]
        if documents:
            scores[:, numbers[row, : place + 1] != numbers[row, place]] = -torch.inf
        scores = scores if logit is None else torch.cat([scores, NATS * logit[:, None]], -1)
        first, stop = evidence[row, place].tolist()
        missed -= scores.softmax(-1)[:, first:stop].sum(-1).log()
    found = missed_attention(q, k, bias, logit, evidence, numbers if documents else None)
    assert torch.allclose(found, missed, atol=1e-5)


def examples() -> Part:
    import random

    return encode_examples(TOKENIZER, [dictionary_example(random.Random(i), 3, 2) for i in range(3)])


def test_each_loss_is_what_plain_forwards_give() -> None:
    hybrid, part = toy_hybrid(), examples()
    base = adopt(toy_base())
    losses = Losses(hybrid, None, Weights(kl=2.0, bigrams=0.5, skills=3.0))
    is_target = part.targets != IGNORE
    log_p = hybrid(input_ids=part.ids).logits.log_softmax(-1)
    log_base = base(input_ids=part.ids).logits.log_softmax(-1)
    counts = (float(is_target.sum()), float(part.ids.numel()))
    loss, terms = losses(part, counts)
    entropy = F.nll_loss(log_p[is_target], part.targets[is_target])
    assert loss.item() == pytest.approx(entropy.item(), abs=1e-9)
    kl = F.kl_div(log_p, log_base, log_target=True, reduction="none").sum(-1)
    _, terms = losses(Part("skills", part.ids, part.targets), counts)
    assert terms["skills"].item() == pytest.approx(kl[is_target].mean().item(), abs=1e-9)
    loss, terms = losses(Part("text", part.ids, part.targets), counts)
    assert terms["kl"].item() == pytest.approx(kl[~is_target].sum().item() / part.ids.numel(), abs=1e-9)
    assert terms["bigrams"].item() == pytest.approx(entropy.item(), abs=1e-9)
    assert loss.item() == pytest.approx(2 * terms["kl"].item() + 0.5 * terms["bigrams"].item(), abs=1e-9)


def test_packed_documents_do_not_see_each_other() -> None:
    hybrid = toy_hybrid()
    ids = torch.randint(1, 200, (1, 20), generator=torch.Generator().manual_seed(0))
    nothing = torch.full_like(ids, IGNORE)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    losses = Losses(hybrid, None, Weights())
    _, packed = losses(Part("text", ids, nothing, positions), (1.0, 1.0))
    alone = [losses(Part("text", ids[:, part], nothing[:, part]), (1.0, 1.0))[1]["kl"] for part in (slice(8), slice(8, 20))]
    assert packed["kl"].item() == pytest.approx(sum(alone).item(), abs=1e-9)


def part_of_text(ids: torch.Tensor, begin: int, end: int, evidence: torch.Tensor) -> Part:
    """Tokens of a row as a row of its own, with what is asked of them there."""
    known = evidence[:, begin:end]
    inside = (known[..., 1] > 0)[..., None]
    targets = torch.where(inside[..., 0], ids[:, begin + 1 : end + 1], IGNORE)
    return Part("text", ids[:, begin:end], targets, None, torch.where(inside, known - begin, 0))


def test_hints_on_packed_documents_are_those_of_each_alone() -> None:
    hybrid, ids = toy_hybrid(), torch.arange(1, 22)[None]
    evidence = torch.zeros(1, 20, 2, dtype=torch.long)
    evidence[0, 6], evidence[0, 15], evidence[0, 17] = torch.tensor([1, 2]), torch.tensor([9, 10]), torch.tensor([8, 9])
    losses = Losses(hybrid, None, Weights(kl=0.0, bigrams=1.0, hints=1.0))
    whole = part_of_text(ids, 0, 20, evidence)
    whole.positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    packed = losses(whole, (1.0, 1.0))[1]["hints"].item()
    alone = [losses(part_of_text(ids, *ends, evidence), (1.0, 1.0))[1]["hints"].item() for ends in ((0, 8), (8, 20))]
    assert packed == pytest.approx(sum(alone), abs=1e-9)


def test_hints_on_packed_documents_are_refused_where_each_is_read_alone() -> None:
    ids = torch.arange(1, 22)[None]
    evidence = torch.zeros(1, 20, 2, dtype=torch.long)
    evidence[0, 6] = torch.tensor([1, 2])
    part = part_of_text(ids, 0, 20, evidence)
    part.positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    with pytest.raises(UserError, match="hints"):
        Losses(make_hybrid("nemotron_h"), None, Weights(kl=0.0, bigrams=1.0, hints=1.0))(part, (1.0, 1.0))


def test_as_base_switches_grafts_and_adapters_off() -> None:
    hybrid: Any = toy_hybrid()
    add_adapters(hybrid, Lora(target_modules=("in_proj",)), seed=0)
    with torch.no_grad():
        for name, p in hybrid.named_parameters():
            if ".lora_" in name:
                p.normal_()
    ids = torch.arange(1, 9)[None]
    with as_base(hybrid):
        said = hybrid(input_ids=ids).logits
    assert torch.allclose(said, adopt(toy_base())(input_ids=ids).logits, atol=1e-12)
    assert not torch.allclose(hybrid(input_ids=ids).logits, said)
    assert all(p.requires_grad for name, p in hybrid.named_parameters() if ".lora_" in name)


def test_hints_reach_queries_and_keys() -> None:
    hybrid, part = toy_hybrid(), examples()
    losses = Losses(hybrid, None, Weights(hints=Hints().weight))
    loss, terms = losses(part, (6.0, 1.0))
    loss.backward()
    without = Losses(toy_hybrid(), None, Weights())(part, (6.0, 1.0))[1]
    assert terms["examples"] == without["examples"]
    assert terms["hints"] > 0
    assert all(
        p.grad is not None and p.grad.abs().max() > 0 for name, p in hybrid.named_parameters() if "k_proj.weight" in name
    )
    losses.close()
    assert "hints" not in losses(part, (6.0, 1.0))[1]
