"""Hints in tuning: where the answers of lessons stand, and what it costs a graft to look elsewhere."""

import random

import pytest
import torch
from transformers import MambaConfig, MambaForCausalLM

from surgery.errors import UserError
from surgery.hybrids.layer_graft import LayerGraft
from surgery.hybrids.mixer import Graft
from surgery.pretraining.lessons import letter_pieces, needle_pieces
from surgery.probes import make, needle
from surgery.probes.hits import NONE
from surgery.records.plan import Plan
from surgery.records.recipe import Data, Hints, Lesson, Tune
from surgery.splicing.splice import adopt, splice, stock
from surgery.tuning.distil import Distillation, counted
from surgery.tuning.hinting import attention_nll, watching
from surgery.tuning.loop import tune
from surgery.tuning.micro_batches import MicroBatches
from surgery.tuning.sequences import (
    IGNORE,
    collate,
    collate_with_evidence,
    kv_pieces,
    probe_pieces,
)
from surgery.tuning.trainable import trainable, training, with_own_mixers
from tests import published_models
from tests.models import SAME, VOCABULARY, random_base, random_llamba, random_selective
from tests.surgery.stock_bases import CONFIGURATIONS, base_of, plan_for

LESSON = Lesson(options={"pairs": (2, 4)}, queries=3)
SHORT = Tune(steps=3, batch_size=4, lessons=(LESSON,), text_batch_size=2, text_tokens=24, warmup_steps=1)
KNOWN = {"L1.H2": 1, "L1.H5": 5}  # where they read
GRAFTED = {
    "mamba2": (random_base, {"sites": ("L1.H2,5", "L2.H0")}),
    "shared pairs": (random_base, {"sites": ("L1.H2,5",), "shared": True, "blend": 0.3}),
    "llamba": (random_llamba, {"sites": ("L2.H1",)}),
    "mamba": (lambda **f: random_selective(MambaConfig, MambaForCausalLM, **f), {"sites": ("L1.H2,5,7",)}),
    "a layer": (random_base, {"kind": "layer", "sites": ("L1",)}),
}


@pytest.mark.parametrize("words", ["the built-in world's", "Llama 2", "no special tokens"])
@pytest.mark.parametrize("name", ["kv", "mqar", "phonebook"])
def test_evidence_is_the_line_that_holds_the_answer(tokenizer, words, name):
    """From behind the key to the token behind the line, also where several questions follow, and beside lessons that do not
    say what their answers are read from."""
    tokenizer = published_models.tokenizer(words) if words in published_models.TOKENIZERS else tokenizer
    if name == "kv":
        lessons = [kv_pieces(random.Random(i), 5, 3) for i in range(3)]
    else:
        lessons = [probe_pieces(make(name, **({"pairs": 5} if name == "mqar" else {"entries": 5})), seed) for seed in range(3)]
    lessons.append(letter_pieces(random.Random(0), 2))
    ids, targets, evidence = collate_with_evidence(tokenizer, lessons)
    plain = collate(tokenizer, lessons)
    assert torch.equal(ids, plain[0])
    assert torch.equal(targets, plain[1])
    known = evidence[..., 1] > evidence[..., 0]
    assert torch.equal(known[:3], targets[:3] != IGNORE)
    for row, pieces in enumerate(lessons[:3]):
        answers, earlier, answer = iter(text for text, flag in pieces if flag), -2, ""
        for place in known[row].nonzero()[:, 0].tolist():
            answer = answer if place == earlier + 1 else next(answers)  # whose tokens follow one another
            earlier = place
            first, behind = evidence[row, place].tolist()
            line, _, rest = tokenizer.decode(ids[row, first:behind]).rpartition("\n")
            assert line.endswith(answer.strip())
            assert "\n" not in line
            assert rest, "the token behind the line"


def test_numbers_told_in_text(tokenizer):
    """Each answer is the number of the word that is asked for, and its evidence the sentence that tells it; what the probe asks
    is a document of the same form."""
    rng = random.Random(3)
    for needles, queries in ((1, 2), (5, 3), (8, 8)):
        pieces = needle_pieces(rng, tokenizer.eos_token, 4, needles, queries)
        head = pieces[0][0]
        assert head.count("The secret number of") == needles + 1  # and the first question
        asked = [(text, *answer) for (text, _), answer in zip(pieces[::2], pieces[1::2], strict=True)]
        assert len(asked) == min(needles, queries)
        for question, number, evidence in asked:
            word = question.split()[-2]
            assert head[evidence.begin : evidence.stop] == f"{needle.ask(word)}{number}."
        assert len({question.split()[-2] for question, *_ in asked}) == len(asked)
    ids, targets, evidence = collate_with_evidence(tokenizer, [pieces])
    assert torch.equal(evidence[..., 1] > evidence[..., 0], targets != IGNORE)
    numbers = {tokenizer.decode(token) for token in targets[targets != IGNORE].tolist()} - {" "}
    assert numbers == {number.strip() for _, number, _ in asked}
    (question,) = make("needle", length=ids.shape[1], needles=8, tokenizer=tokenizer).questions(1, 0)
    last = question.prompt.rpartition("\n")[2]
    assert last == needle.ask(last.split()[-2])


def watched(name, **fields):
    """(hybrid, its grafts' queries and keys) after a forward in float64."""
    made, plan = GRAFTED[name]
    hybrid = splice(made(**fields).double(), Plan.model_validate(plan)).double().eval()
    return hybrid


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", [name for name in GRAFTED if name != "mamba"])
def test_what_is_missed_is_attention(name):
    """Minus the logarithm of what a graft's mixing matrix holds at the evidence, written out."""
    hybrid = watched(name)
    ids = torch.randint(1, 99, (2, 20), generator=torch.Generator().manual_seed(0))
    evidence = torch.zeros(2, 20, 2, dtype=torch.long)
    for row, place, first, behind in ((0, 9, 2, 5), (0, 19, 7, 8), (1, 12, 0, 13)):
        evidence[row, place] = torch.tensor([first, behind])
    entering = {}
    mixers = [block.mixer for block in hybrid.base_model.layers if getattr(block.mixer, "graft", None) is not None]
    hooks = [m.register_forward_hook(lambda m, args, kw, _: entering.update({m: args[0]}), with_kwargs=True) for m in mixers]
    with torch.no_grad(), watching(hybrid) as seen:
        hybrid(ids)
    known = {"L1.H2": 1, "L2.H1": -1} if name in ("mamba2", "llamba") else {"L1.H2": 1, "L1.H5": 1}
    with torch.no_grad(), watching(hybrid, known) as placed:
        hybrid(ids)
    for hook in hooks:
        hook.remove()
    expected, at_places = [], []
    for mixer in mixers:
        gate, mixer.graft.gate = getattr(mixer.graft, "gate", None), None  # attention alone, without the SSM beside it
        heads = getattr(mixer.graft, "heads", None)
        matrices = torch.stack([mixer.matrices(entering[mixer][row : row + 1], heads=heads).abs() for row in range(2)])
        mixer.graft.gate = gate
        parts = (matrices[0, :, 9, 2:5], matrices[0, :, 19, 7:8], matrices[1, :, 12, 0:13])
        expected.append(-sum(part.sum(-1).log() for part in parts))
        at_places.append(expected[-1].clone())
        for number, head in enumerate(heads or []):
            if (place := known.get(f"L{mixer.layer_idx}.H{head}")) is not None:
                # A summary ends with the token behind the span; none lies after the one that asks.
                at = [(0, 9, 4 - place), (0, 19, 7 - place), (1, 12, min(12, 12 - place))]
                at_places[-1][number] = -sum(matrices[row, number, last, where].log() for row, last, where in at)
    torch.testing.assert_close(attention_nll(seen, evidence), torch.cat(expected).mean().detach(), **SAME)
    torch.testing.assert_close(attention_nll(placed, evidence), torch.cat(at_places).mean().detach(), **SAME)
    assert (attention_nll(placed, evidence) == attention_nll(seen, evidence)) == (name == "a layer")
    assert attention_nll(seen, torch.zeros_like(evidence)) == attention_nll(placed, torch.zeros_like(evidence)) == 0
    assert not any("attend" in vars(m) for m in hybrid.modules() if isinstance(m, Graft | LayerGraft))


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", GRAFTED)
def test_the_loss_of_hints_reaches_queries_and_keys(name, tokenizer):
    hybrid = watched(name, vocab_size=VOCABULARY)
    teacher = adopt(stock(hybrid)) if name != "a layer" else adopt(GRAFTED[name][0](vocab_size=VOCABULARY).double())
    ids, targets, evidence = collate_with_evidence(tokenizer, [kv_pieces(random.Random(i), 4, 2) for i in range(2)])
    losses, gradients = {}, {}
    with training(hybrid, trainable(hybrid, None), teacher) as trained:
        chosen = {n: p for n, p in trained.items() if "q_proj" in n or "k_proj" in n}
        for weight in (0.0, 0.5):
            distillation = Distillation(hybrid, teacher, hint_weight=weight).train()
            losses[weight] = distillation(ids, targets, None, None, None, evidence)
            gradients[weight] = torch.autograd.grad(losses[weight]["loss"], list(chosen.values()))
    assert "hints" not in losses[0.0]
    assert losses[0.5]["hints"] > 0.1
    torch.testing.assert_close(losses[0.5]["loss"], losses[0.0]["loss"] + 0.5 * losses[0.5]["hints"], **SAME)
    assert all((a - b).abs().max() > 1e-9 for a, b in zip(*gradients.values(), strict=True)), [*chosen]


@pytest.mark.parametrize("name", ["mamba2", "mamba"])
def test_blocks_that_are_computed_again_give_the_same_gradients(name, tokenizer):
    made, plan = GRAFTED[name]
    hybrid = splice(made(vocab_size=VOCABULARY), Plan.model_validate(plan))
    teacher, gradients = adopt(stock(hybrid)), []
    ids, targets, evidence = collate_with_evidence(tokenizer, [kv_pieces(random.Random(i), 4, 2) for i in range(2)])
    with training(hybrid, trainable(hybrid, None), teacher) as trained:
        for checkpointing in (False, True):
            distillation = Distillation(hybrid, teacher, hint_weight=0.5, checkpointing=checkpointing).train()
            loss = distillation(ids, targets, None, None, None, evidence)["loss"]
            gradients.append(torch.autograd.grad(loss, list(trained.values())))
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_tuning_with_hints(tiny):
    """They are in the log, and a few steps move attention where it is told."""
    options = SHORT.model_copy(update={"steps": 12, "text_batch_size": 0, "hints": Hints(weight=1.0)})
    log = tune(splice(tiny.model, Plan(sites=("L2.H1",))), tiny.tokenizer, options)
    first = log[0]  # in which no other skill has changed yet
    assert first["loss"] == pytest.approx(first["retrieval"] + first["kl"] + first["hints"], rel=1e-5)
    losses = [record["hints"] for record in log]
    assert sum(losses[-3:]) < 0.85 * sum(losses[:3]), losses


@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(
    ("name", "documents", "known"),
    [
        ("mamba2", (17, 13), KNOWN), ("mamba2", (30,), {}), ("mamba", (30,), KNOWN), ("mamba", (17, 13), {}),
        ("granitemoehybrid", (17, 13), KNOWN), ("granitemoehybrid", (30,), {}),
    ],
)  # fmt: skip
def test_hits_of_text_tell_where_to_look(name, documents, known):
    """Documents that share a row are hinted at as each would be alone: from the token before a hit at the one that stood there
    before, and at the one behind it."""
    base = base_of(name) if name in CONFIGURATIONS else GRAFTED[name][0]()
    hybrid = splice(base.double(), plan_for(base) if name in CONFIGURATIONS else Plan(sites=("L1.H2,5",))).double()
    ids = torch.randint(1, 99, (2, 30), generator=torch.Generator().manual_seed(0))
    places = torch.cat([torch.arange(length) for length in documents]).expand_as(ids)
    before = torch.full_like(ids, NONE)
    for row, hit, seen_at in ((0, 11, 2), (0, 29, 3), (1, 9, 0)):
        before[row, hit] = seen_at
    text = (ids, torch.ones_like(ids, dtype=torch.bool), places, before)
    nothing = torch.zeros(1, 1, dtype=torch.long), torch.full((1, 1), IGNORE)
    distillation = Distillation(hybrid, stock(hybrid), hit_weight=1.0, hint_weight=0.5, read_at=known)
    losses = distillation(*nothing, text)
    expected = 0.0
    for row in range(2):
        for part, found in zip(ids[row : row + 1].split(documents, 1), before[row].split(documents), strict=True):
            evidence = torch.zeros(1, len(found), 2, dtype=torch.long)
            for hit in (found != NONE).nonzero()[:, 0].tolist():
                evidence[0, hit - 1] = found[hit] + torch.tensor([0, 2])
            with watching(hybrid, known) as seen:
                hybrid(part)
            expected += attention_nll(seen, evidence)
    torch.testing.assert_close(losses["hints"], expected / 3, **SAME)
    torch.testing.assert_close(losses["loss"], losses["kl"] + losses["hits"] + 0.5 * losses["hints"], **SAME)
    assert "hints" not in Distillation(hybrid, stock(hybrid), hit_weight=1.0)(*nothing, text)


def test_a_control_without_grafts_has_no_hints(tokenizer):
    base = random_base(vocab_size=VOCABULARY)
    options = SHORT.model_copy(update={"steps": 1, "hints": Hints()})
    log = tune(with_own_mixers(base, [1]), tokenizer, options, layers=[1], teacher=adopt(base))
    assert "hints" not in log[0]
    assert log == tune(
        with_own_mixers(base, [1]), tokenizer, SHORT.model_copy(update={"steps": 1}), layers=[1], teacher=adopt(base)
    )


def test_lessons_that_do_not_say_where_answers_stand_are_refused(tokenizer):
    options = SHORT.model_copy(update={"lessons": (Lesson(probe="copying", options={"length": 4}),), "hints": Hints()})
    with pytest.raises(UserError, match=r"tune\.hints: no probe of tune\.lessons says where its answers are"):
        tune(splice(random_base(vocab_size=VOCABULARY), Plan(sites=("L1.H3",))), tokenizer, options)


class OneOfTwo:
    """What several processes would find together: `reduce` gives the mean of what each of them has."""

    def __init__(self, counts):
        self.counts = counts

    def reduce(self, tensor, how):
        assert how == "mean"
        return torch.stack([torch.as_tensor(each, dtype=tensor.dtype) for each in self.counts]).mean(0)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("lacking", ["hits", "text", "answers", "nothing"])
def test_two_processes_have_the_losses_and_gradients_of_one(lacking):
    """Also where one of them has no hit, no text, or no answer."""
    hybrid = splice(random_base().double(), Plan(sites=("L1.H2,5",))).double()
    generator = torch.Generator().manual_seed(0)
    ids, lesson = (torch.randint(1, 99, (2, 30), generator=generator) for _ in range(2))
    before, targets, real = torch.full_like(ids, NONE), torch.full_like(lesson, IGNORE), torch.ones_like(ids, dtype=torch.bool)
    before[0, 11] = 2
    targets[0, 9], targets[0, 20] = 5, 7
    evidence = torch.zeros(2, 30, 2, dtype=torch.long)
    evidence[0, 9], evidence[0, 20] = torch.tensor([3, 5]), torch.tensor([4, 6])
    if lacking != "hits":
        before[1, 9] = 0
    if lacking != "answers":
        targets[1, 7] = 8
    if lacking == "text":
        real[1], before[1] = False, NONE
    text = (ids, real, torch.arange(30).expand_as(ids), before)
    distillation = Distillation(hybrid, stock(hybrid), kl_weight=2.0, hit_weight=1.0, hint_weight=0.5)
    grafts = [p for name, p in hybrid.named_parameters() if ".graft." in name]

    def losses(parts):
        results = [distillation(*part) for part in parts]
        means = {name: torch.stack([each[name] for each in results]).mean() for name in results[0]}
        return means, torch.autograd.grad(means["loss"], grafts, allow_unused=True)

    def of(row):
        batch = tuple(part[row] for part in (lesson, targets, evidence)), tuple(part[row] for part in text)
        return (*batch, None), counted(batch[0][1], batch[1])

    whole, counts = of(slice(None))
    mine, own = zip(of(slice(0, 1)), of(slice(1, 2)), strict=True)
    options = Tune(gradient_accumulation_steps=1)
    alone = MicroBatches(None, options, Data(), OneOfTwo([counts])).split(None, whole)
    together = [part for batch in mine for part in MicroBatches(None, options, Data(), OneOfTwo(own)).split(None, batch)]
    (one, slopes), (two, others) = losses(alone), losses(together)
    assert {"retrieval", "kl", "hits", "hints"} < {*one}
    for name, value in one.items():
        assert abs(value - two[name]) < 1e-12, name
    assert any(slope is not None and slope.abs().max() > 0 for slope in slopes)
    for slope, other in zip(slopes, others, strict=True):
        assert (slope is None) == (other is None)
        assert slope is None or (slope - other).abs().max() < 1e-12
