"""A model with a NaN gives no number: every reader of logits ends in one line that names what is broken."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.errors import UserError
from surgery.evaluation.bench import measure
from surgery.evaluation.suites.language import sliding_losses
from surgery.locating.locate import locate
from surgery.locating.subject import Subject
from surgery.models.finite import NotFinite, broken_weight, checked, explained, watching_logits, within
from surgery.probes import make
from surgery.probes.perplexity import TextWindows
from surgery.probes.scoring import answer, complete
from surgery.records.plan import Plan
from surgery.records.recipe import Bench, Data, EarlyStopping, Lesson, Locate, Tune
from surgery.splicing.splice import splice
from surgery.studies.prune import Pruner
from surgery.tuning.loop import tune
from tests.models import random_base

LAYERS = 2
WEIGHT = "backbone.layers.1.mixer.D"
NAMED = rf"the weight '{WEIGHT}' holds a NaN"
PADDING = 7  # ids of the embedding that the tokenizer has no token for


@pytest.fixture
def base(tokenizer):
    return random_base(vocab_size=len(tokenizer) + PADDING, num_hidden_layers=LAYERS)


@pytest.fixture
def broken(base):
    spoil(base, WEIGHT)
    return base


def spoil(model, name, value=math.nan):
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] = value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_probes(base, tokenizer, value):
    """The last is finite for most of the vocabulary, and for every candidate but those of a broken row."""
    questions, completions = make("kv", pairs=4).questions(4, 0), make("copying", length=4).completions(4, 0)
    windows = TextWindows(windows=2, window=32).token_windows(tokenizer, 0)
    readers = {
        "answer": lambda: answer(base, tokenizer, questions),
        "complete": lambda: complete(base, tokenizer, completions),
        "perplexity": lambda: TextWindows().losses(base, windows),
        "sliding": lambda: sliding_losses(base, windows),
    }
    for reader in readers.values():
        reader()
    spoil(base, WEIGHT, value)
    for reader in readers.values():
        with pytest.raises(NotFinite, match="are not finite: "):
            reader()


def masking(model, value):
    """A model whose padding ids have this logit; `undo`."""

    def mask(_, __, returned):
        returned.logits[..., -PADDING:] = value

    return model.register_forward_hook(mask)


def test_padding_ids_may_be_masked(base, tokenizer):
    questions, completions = make("kv", pairs=4).questions(6, 0), make("copying", length=3).completions(4, 0)
    masking(base, -1e30)
    expected = answer(base, tokenizer, questions), complete(base, tokenizer, completions)
    masking(base, -math.inf)
    got = answer(base, tokenizer, questions), complete(base, tokenizer, completions)
    for one, other in zip(expected, got, strict=True):
        assert one.correct.tolist() == other.correct.tolist()
        assert one.loss.tolist() == other.loss.tolist()
    for value in (math.nan, math.inf):
        hook = masking(base, value)
        for ask, asked in ((answer, questions), (complete, completions)):
            with pytest.raises(NotFinite, match="the logits are not finite"):
                ask(base, tokenizer, asked)
        hook.remove()


def test_a_candidate_that_is_masked_has_no_score(base, tokenizer):
    (question,) = make("kv", pairs=3).questions(1, 0)
    masked = tokenizer(question.choices[1])["input_ids"]

    def mask(_, __, returned):
        returned.logits[..., masked] = -math.inf

    base.register_forward_hook(mask)
    with pytest.raises(NotFinite, match="the logits are not finite"):
        answer(base, tokenizer, [question])


def test_without_a_broken_weight_the_first_module_is_named(base, tokenizer):
    """Finite weights that overflow on the way."""
    with torch.no_grad():
        base.backbone.layers[1].mixer.in_proj.weight.mul_(1e38)
        base.backbone.layers[1].norm.weight.mul_(1e38)
    with pytest.raises(NotFinite, match=r"first in what 'backbone\.layers\.1\.[a-z_.]+' puts out, in float32"):
        answer(base, tokenizer, make("kv", pairs=4).questions(2, 0))


@pytest.mark.parametrize(("layer", "exact"), [(0, True), (1, False)])
def test_locate(base, tokenizer, layer, exact):
    """Not "cannot ablate heads of this model", and no ranking."""
    spoil(base, f"backbone.layers.{layer}.mixer.D")
    with pytest.raises(NotFinite, match=rf"the weight 'backbone\.layers\.{layer}\.mixer\.D' holds a NaN"):
        locate(base, tokenizer, options={"pairs": 4}, examples=2, exact=exact)


def test_locate_in_a_family_without_grafts(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).eval()
    name = "model.layers.1.self_attn.o_proj.weight"
    spoil(model, name)
    with pytest.raises(NotFinite, match=f"the weight '{name}' holds a NaN"):
        locate(model, tokenizer, options={"pairs": 4}, examples=2)


def test_locate_says_which_head_is_broken(base, tokenizer, monkeypatch):
    """A head whose splice overflows, in a model that is well."""
    from surgery.locating import walk

    variants = walk.variants

    def overflowing(*args, **kwargs):
        for variant in variants(*args, **kwargs):
            broken = str(variant.site) == "L1.H3" and variant.kind == "splice"
            yield replace(variant, logits=variant.logits * math.nan) if broken else variant

    monkeypatch.setattr(walk, "variants", overflowing)
    with pytest.raises(NotFinite, match=r"^splice L1\.H3: the logits are not finite$"):
        locate(base, tokenizer, options={"pairs": 4}, examples=2)


def test_prune(base, tokenizer):
    pruner = Pruner(Subject.of(base, tokenizer), Locate(options={"pairs": 4}, examples=2), make("knowledge"))
    spoil(base, WEIGHT)
    for last_only in (False, True):
        with pytest.raises(NotFinite, match=NAMED):
            pruner.cut("heads", silent=[], last_only=last_only)


def test_bench_names_model_and_task(broken, base, tokenizer, tmp_path):
    options = Bench(suites=("quick",), pairs=(4,), limit=2, windows=2, window=16, contexts=())
    whole = random_base(vocab_size=base.config.vocab_size, num_hidden_layers=LAYERS)
    with pytest.raises(UserError, match=rf"^ruined, kv\.4: the logits are not finite: {NAMED}$"):
        measure({"base": whole, "ruined": broken}, tokenizer, options, cells=tmp_path)


def test_standard_tasks(broken, tokenizer):
    pytest.importorskip("lm_eval", reason="needs the extra 'eval' (lm-evaluation-harness)")
    from surgery.more import harness

    for name in ("surgery_kv_4", "surgery_copying_8"):
        (task,) = harness.load([name])[name]
        with pytest.raises(NotFinite, match=NAMED):
            harness.evaluate(broken, tokenizer, task, 4, 2)


LESSON = Lesson(options={"pairs": (2, 4)}, queries=3)
SHORT = Tune(steps=2, batch_size=4, lessons=(LESSON,), text_batch_size=2, text_tokens=16, warmup_steps=1)


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("backbone.layers.0.mixer.D", EarlyStopping(eval_steps=1, examples=4, windows=2)),
        ("backbone.layers.1.mixer.graft.q_proj.weight", None),
    ],
)
def test_tuning_does_not_blame_the_learning_rate(base, tokenizer, name, keep):
    """Neither for a weight of the base nor for one of the graft, before a step is taken."""
    hybrid = splice(base, Plan(sites=("L1.H2,3",), blend=0.3))
    spoil(hybrid, name)
    with pytest.raises(UserError, match=f"the weight '{name}' holds a NaN"):
        tune(hybrid, tokenizer, SHORT.model_copy(update={"early_stopping": keep}), data=Data())


def test_tuning_still_blames_the_learning_rate(base, tokenizer):
    hybrid = splice(base, Plan(sites=("L1.H2,3",)))
    with pytest.raises(UserError, match=r"at step [2-9]; lower tune\.learning_rate"):
        tune(hybrid, tokenizer, SHORT.model_copy(update={"steps": 9, "warmup_steps": 0, "learning_rate": 1e30}), data=Data())


@torch.no_grad()
def test_logits_are_watched_as_long_as_was_asked(base):
    """-inf beside others is a mask. Afterwards the model is the caller's again."""
    ids = torch.arange(5)[None]
    for value in (-math.inf, math.nan):
        hook = masking(base, value)
        if value == -math.inf:
            with watching_logits(base):
                base(ids)
        else:
            with pytest.raises(NotFinite, match=r"^the logits are not finite$"), watching_logits(base):
                base(ids)
        assert not base(ids).logits.isfinite().all()
        hook.remove()


def test_what_is_said():
    with (
        pytest.raises(NotFinite, match=r"^the model, layer 3: the losses are not finite$"),
        within("the model"),
        within("layer 3"),
    ):
        checked(torch.tensor([1.0, math.nan]), "the losses")
    values = torch.tensor([1.0, -2.0])
    assert checked(values, "the losses") is values
    module = torch.nn.Linear(2, 2)
    with pytest.raises(NotFinite, match=r"^the losses are not finite$"), explained(module):
        checked(torch.tensor(math.inf), "the losses")
    module.register_buffer("mask", torch.tensor([0.0, -math.inf]))  # a mask breaks nothing
    assert broken_weight(module) == ""
    spoil(module, "bias", math.inf)
    assert broken_weight(module) == "the weight 'bias' holds an infinity"
    assert broken_weight(module, ["bias"]) == ""
