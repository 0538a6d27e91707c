"""Documents that share a row are computed as if each stood alone: every family, grafted or not, however it is told."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, DynamicCache, LlamaConfig, Trainer, TrainingArguments

from surgery.hybrids.packed import packing
from surgery.splicing.splice import adopt, splice
from surgery.tuning.distil import Distillation
from surgery.tuning.partial_run import PartialRun
from surgery.tuning.sequences import IGNORE
from surgery.tuning.trainable import trainable, training
from tests.kernels.inputs import assert_near, rounding
from tests.models import BASES, SAME, but_slow, random_base
from tests.surgery.test_hybrid import PLANS
from tests.surgery.test_laws import LAYERS, UNTOUCHED, model_of, over

LENGTHS = [[1, 17, 3, 30, 9], [28, 32]]
ADOPTED = {f"{name}: adopted": lambda name=name: adopt(BASES[name]()) for name in ("groups", "mamba", "falcon mamba")}
PACKED = [
    "plain: one head", "dt limit: first layer, half blended", "mamba: one head", "llamba: one head", "llamba: copying",
    "falcon mamba: shared pairs, two layers, one complete", *LAYERS, *UNTOUCHED, *ADOPTED,
]  # fmt: skip
# Of them, one of each class.
QUICK = (
    "dt limit: first layer, half blended", "mamba: one head", "llamba: copying", "mamba2, mlp: layer", "mamba2attn: layer",
    "falcon mamba: shared pairs, two layers, one complete", "llamba, mlp: layer", "llamba: published", "groups: adopted",
)  # fmt: skip
ONE_A_FAMILY = ("plain: one head", "mamba: one head", "falcon mamba: one head", "llamba: one head")


# Three layers, of 64 to 256 products in a row for each projection, 32 tokens of a scan, and sums of norms; there and back.
ERROR = rounding(2 * 3 * 800)


@pytest.fixture
def model(request):
    name = request.param
    model = (ADOPTED[name]() if name in ADOPTED else model_of(name)).to(torch.get_default_dtype())
    return model.requires_grad_(True)  # gradients of everything are compared


@pytest.fixture
def ids():
    return torch.randint(1, 99, (2, 60), generator=torch.Generator().manual_seed(5))


def positions(lengths=LENGTHS, start=0):
    return torch.stack([torch.cat([torch.arange(length) + start for length in row]) for row in lengths])


def apart(model, ids, **named):
    """The logits of every document on its own, put where it stands."""
    rows = [torch.cat([model(part[None], **named).logits[0] for part in r.split(n)]) for r, n in zip(ids, LENGTHS, strict=True)]
    return torch.stack(rows)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@over(but_slow(PACKED, *QUICK))
def test_packed_equals_separate(model, ids, request):
    """Logits and gradients: in float64, and in float32 up to its rounding."""
    weights = torch.randn(2, 60, model.config.vocab_size, generator=torch.Generator().manual_seed(6))
    narrow = model(ids, position_ids=positions()).logits
    narrow_gradients = gradients(model, (narrow * weights).mean())
    request.getfixturevalue("in_float64")
    model = model.double()
    together, alone = model(ids, position_ids=positions()).logits, apart(model, ids)
    torch.testing.assert_close(together, alone, **SAME)
    mine, others = (gradients(model, (logits * weights).mean()) for logits in (together, alone))
    torch.testing.assert_close(mine, others, **SAME)
    assert_near(narrow, alone, ERROR)
    assert narrow_gradients.keys() == others.keys()
    for name, gradient in others.items():
        assert_near(narrow_gradients[name], gradient, ERROR)
    assert (model(ids).logits - alone)[:, 28:].abs().max() > 0.01  # the borders matter


@pytest.mark.usefixtures("in_float64")  # before the model is made
@over(("mamba2, at random: layer", "mamba: one head", "llamba: one head"))
def test_however_it_is_told(model, ids):
    """Positions that restart, anywhere; bounds; numbers; and what the collator gives, with each of its options."""
    told = model(ids, position_ids=positions()).logits
    bounds = torch.tensor([0, 1, 18, 21, 51, 60, 88, 120], dtype=torch.int32)
    numbers = (positions() == 0).cumsum(-1)
    for given in (
        {"position_ids": positions(start=2)},
        {"position_ids": torch.arange(60)[None], "seq_idx": numbers},
        {"seq_idx": numbers.int(), "position_ids": positions()},
        {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 32, "max_length_k": 32},
        {"cu_seq_lens_q": bounds.tolist()},
        {"position_ids": positions(), "attention_mask": torch.ones_like(ids)},
    ):
        torch.testing.assert_close(model(ids, **given).logits, told, **SAME)
    documents = [{"input_ids": part} for part in ids[0].split(LENGTHS[0])]
    options = ({}, {"return_position_ids": False, "return_flash_attn_kwargs": True}, {"return_seq_idx": True})
    for named in (*options, {"return_position_ids": False, "return_seq_idx": True}):
        batch = DataCollatorWithFlattening(**named)(documents)
        output = model(**batch)
        torch.testing.assert_close(output.logits, told[:1], **SAME)
        targets = torch.where(positions()[:1] == 0, -100, ids[:1])
        loss = torch.nn.functional.cross_entropy(told[0, :-1], targets[0, 1:])
        torch.testing.assert_close(output.loss, loss, **SAME)


@pytest.mark.usefixtures("in_float64")
@over(("mamba2, at random: layer", *ONE_A_FAMILY))
def test_padding_belongs_to_no_document(model, ids):
    """Between documents, before and behind them, with whatever positions."""
    batch, mask, places = torch.zeros(2, 70, dtype=torch.long), torch.zeros(2, 70, dtype=torch.long), torch.ones(2, 70)
    batch[0, 4:55], mask[0, 4:55], places[0, 4:55] = ids[0, :51], 1, positions()[0, :51]
    batch[0, 58:67], mask[0, 58:67], places[0, 58:67] = ids[0, 51:], 1, positions()[0, 51:]
    batch[1, 10:], mask[1, 10:], places[1, 10:] = ids[1], 1, positions()[1]
    logits = model(batch, attention_mask=mask, position_ids=places.long()).logits
    torch.testing.assert_close(logits[mask.bool()], apart(model, ids).flatten(0, 1), **SAME)


@over(ONE_A_FAMILY)
def test_rows_of_one_document_take_the_way_that_they_took(model, ids):
    """Left-padded rows as generate numbers them, holes, tokens from a cache, positions that begin anywhere."""
    mask = torch.ones_like(ids)
    mask[0, :7] = mask[1, 20:23] = 0
    hidden = torch.zeros(2, 60, 1)
    for places in ((mask.cumsum(-1) - 1).masked_fill(mask == 0, 1), torch.arange(60)[None] + 9, (mask.cumsum(-1) - 1).clamp(0)):
        assert packing(hidden, mask, places, None, None, {}) is None
        assert torch.equal(*(model(ids, attention_mask=mask, position_ids=p).logits for p in (places, None)))
    assert packing(hidden, None, torch.arange(60), DynamicCache(), True, {"cu_seq_lens_q": torch.tensor([0, 60, 120])}) is None
    assert packing(hidden[:, :1], None, torch.tensor([[3], [0]]), None, None, {"seq_idx": torch.tensor([[0], [1]])}) is None


def test_a_mask_may_reach_back_to_what_the_cache_holds():
    """Its last columns are those of the tokens given; documents among these cannot go on from a cache, padded or not."""
    hidden, mask = torch.zeros(1, 8, 1), torch.ones(1, 18, dtype=torch.long)
    mask[:, :8] = 0
    one, two = torch.arange(8)[None] + 2, torch.arange(8)[None] % 4
    assert packing(hidden, mask, one, DynamicCache(), True, {}) is None
    with pytest.raises(ValueError, match="cannot be continued from a cache"):
        packing(hidden, mask, two, DynamicCache(), True, {})


@over(("mamba2, mlp: layer", "mamba: shared pairs, two layers, one complete", *ONE_A_FAMILY))
def test_nan_stays_in_its_document(model, ids):
    states = model.get_input_embeddings()(ids).detach()
    bad = states.clone()
    bad[0, 21:51] = torch.nan
    others = torch.ones(2, 60, dtype=torch.bool)
    others[0, 21:51] = False
    found = []
    for given in (states, bad):
        given.requires_grad_()
        logits = model(inputs_embeds=given, position_ids=positions()).logits
        found.append((logits[others], torch.autograd.grad(logits[others].square().sum(), given)[0][others]))
    assert found[0][1].abs().min() > 0
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


@over(("mamba2, at random: layer", *ONE_A_FAMILY))
def test_in_training(model, ids):
    """Checkpointing changes no bit of a gradient; half precision comes near."""
    exact = copy.deepcopy(model).double()(ids, position_ids=positions()).logits
    wanted = gradients(model, model(ids, position_ids=positions(), labels=ids).loss)
    model.train().activation_checkpointing_enable()
    again = gradients(model, model(ids, position_ids=positions(), labels=ids).loss)
    torch.testing.assert_close(again, wanted, rtol=0, atol=0)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids, position_ids=positions(), labels=ids)
    assert_near(output.logits, exact, 0.05)
    some = gradients(model, output.loss)
    assert all(grad.isfinite().all() for grad in some.values())


@pytest.mark.usefixtures("in_float64")
@over(("mamba2, at random: layer", *ONE_A_FAMILY))
def test_chosen_positions_are_those_of_all(model, ids):
    whole = model(ids, position_ids=positions())
    torch.testing.assert_close(model(ids, position_ids=positions(), logits_to_keep=3).logits, whole.logits[:, -3:], **SAME)
    kept = torch.tensor([119, 0, 7, 52])
    states = model.base_model(ids, position_ids=positions(), use_cache=False).last_hidden_state
    part = PartialRun(model)
    some = part(ids, list(part.blocks), 0, len(part.blocks), positions=kept, norm=True, position_ids=positions())
    torch.testing.assert_close(some, states.flatten(0, 1)[kept], **SAME)


@over(ONE_A_FAMILY)
def test_nothing_is_cached_and_what_cannot_be_is_said(model, ids):
    assert model(ids, position_ids=positions()).cache_params is None
    assert model(ids).cache_params is not None
    cache = model(ids, use_cache=True).cache_params
    for given in ({"use_cache": True}, {"cache_params": cache}, {"cache_params": cache, "use_cache": False}):
        with pytest.raises(ValueError, match="cannot be continued from a cache: leave out use_cache and cache_params"):
            model(ids, position_ids=positions(), **given)
    for bounds in ([0, 60], [1, 60, 120], [0, 60, 30, 120], []):
        with pytest.raises(ValueError, match="cu_seq_lens_q has to rise from 0 to the number of tokens, 120, not"):
            model(ids, cu_seq_lens_q=torch.tensor(bounds))
    with pytest.raises(ValueError, match="seq_idx holds 60 numbers for 2 x 60 tokens"):
        model(ids, seq_idx=torch.zeros(60))
    pairs = torch.ones(2, 1, 60, 60, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="not one of pairs of tokens"):
        model(ids, position_ids=positions(), attention_mask=pairs)
    mask = torch.ones_like(ids)
    mask[0, 30] = 0
    with pytest.raises(ValueError, match="padding within a packed document"):
        model(ids, position_ids=positions(), attention_mask=mask)


@pytest.mark.usefixtures("in_float64")
@over(("plain: one head", "mamba2, mlp: layer", "falcon mamba: adopted"))
def test_the_trainer_learns_the_same_from_flattened_documents(model, ids, tmp_path):
    """One step of SGD by transformers' Trainer, beside one on the documents alone."""
    documents = [{"input_ids": part.tolist()} for part in ids[0].split(LENGTHS[0])[1:]]
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    arguments = TrainingArguments(
        tmp_path, max_steps=1, per_device_train_batch_size=4, learning_rate=0.1, lr_scheduler_type="constant", optim="sgd",
        max_grad_norm=0, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=documents, data_collator=DataCollatorWithFlattening())
    trainer.train()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.load_state_dict(start, strict=False)
    parts = [torch.tensor([document["input_ids"]]) for document in documents]
    total = sum(model(part, labels=part).loss * (part.numel() - 1) for part in parts)
    alone = gradients(model, total / sum(part.numel() - 1 for part in parts))
    with torch.no_grad():
        stepped = {name: p - 0.1 * alone[name] for name, p in start.items() if name in alone}
        torch.testing.assert_close(after, stepped, **SAME)
    assert any(not torch.equal(after[name], start[name]) for name in start)


@over(("plain: one head", "mamba2, mlp: layer", *ONE_A_FAMILY[1:]))
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_no_tokens_give_no_logits(model, shape):
    nothing = torch.zeros(shape, dtype=torch.long)
    assert model(nothing).logits.shape == (*shape, model.config.vocab_size)
    model.train()(nothing).logits.sum().backward()


def in_rows(ids):
    """Text as tuning has it, packed, and a document to a row: (ids, real, position_ids) each."""
    parts = [part for row, lengths in zip(ids, LENGTHS, strict=True) for part in row.split(lengths)]
    alone, real = (torch.nn.utils.rnn.pad_sequence(m, batch_first=True) for m in (parts, [torch.ones_like(p) for p in parts]))
    return (ids, torch.ones_like(ids).bool(), positions()), (alone, real.bool(), torch.arange(alone.shape[1]).expand_as(alone))


def other_teacher(kind):
    if kind == "the base":
        return adopt(random_base())
    torch.manual_seed(3)
    if kind == "another of ours":
        return adopt(random_base(num_hidden_layers=2))
    if kind == "transformers' own":
        return random_base()
    config = LlamaConfig(
        vocab_size=99, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", ["the base", "another of ours", "transformers' own", "a transformer"])
def test_tuning_on_packed_text_is_tuning_on_its_documents(kind, ids):
    """The losses and their gradients, whatever the teacher: none sees two documents at once."""
    hybrid, teacher = splice(random_base(), PLANS["one head"]).double(), other_teacher(kind).double()
    with training(hybrid, trainable(hybrid, None), teacher) as trained:
        distillation = Distillation(hybrid, teacher)
        targets = torch.where(torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.1, ids, IGNORE)
        found = [distillation(ids, targets, text) for text in in_rows(ids)]
        mine, others = (torch.autograd.grad(losses["kl"], list(trained.values())) for losses in found)
    assert found[0]["kl"] > 1e-6
    torch.testing.assert_close(found[0], found[1], **SAME)
    torch.testing.assert_close(mine, others, **SAME)
    shared = distillation(ids, targets, (*in_rows(ids)[0][:2], torch.arange(60).expand(2, 60)))
    assert abs(shared["kl"] - found[0]["kl"]) > 1e-3 * found[0]["kl"]


def test_a_step_looks_once_where_documents_begin(ids, monkeypatch):
    """For student and teacher, below the first graft and above it: on a GPU, to look is to wait."""
    seen = []

    def look(hidden, mask, places, *more):
        seen.append(places is not None)
        return packing(hidden, mask, places, *more)

    for module in ("surgery.tuning.distil", "surgery.hybrids.ssm_model"):
        monkeypatch.setattr(f"{module}.packing", look)
    hybrid = splice(random_base(), PLANS["one head"])
    with training(hybrid, trainable(hybrid, None)):
        distillation = Distillation(hybrid, adopt(random_base()))
        assert distillation.first > 0
        for steps in (1, 2):
            distillation(ids, ids, in_rows(ids)[0])
            assert seen.count(True) == steps


def test_where_documents_begin_is_looked_up_on_the_host_whatever_device_is_the_default(ids):
    hidden, bounds = ids[..., None], [0, 1, 18, 21, 51, 60, 88, 120]
    for given in ({"position_ids": positions()}, {"cu_seq_lens_q": torch.tensor(bounds)}, {"cu_seq_lens_q": bounds}):
        places = given.get("position_ids")
        plain = packing(hidden, torch.ones_like(ids), places, None, None, given)
        with torch.device("meta"):
            other = packing(hidden, torch.ones_like(ids, device="cpu"), places, None, None, given)
        assert torch.equal(plain.places, other.places)
        assert torch.equal(plain.starts, other.starts)
