"""Bases in 8 and 4 bits (bitsandbytes): located, spliced, tuned, exported and read back as they are."""

import copy
import json

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

import surgery as package
from surgery.errors import UserError
from surgery.exporting.export import export
from surgery.hybrids.patching import replaced
from surgery.loading.digests import dtypes, fingerprint, model_digest
from surgery.locating.replay import Replay
from surgery.models.anatomy import anatomy
from surgery.models.quantised import dense, exact
from surgery.records.plan import Plan
from surgery.records.recipe import Lora, Tune
from surgery.records.record import provenance
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.tuning.loop import tune
from surgery.tuning.lora import matches
from surgery.tuning.trainable import with_own_mixers
from surgery.world.tokenizer import build_tokenizer
from tests.models import VOCABULARY, random_base, random_llamba, random_selective, subject

pytest.importorskip("bitsandbytes", reason="quantised bases need bitsandbytes")
BITS = {8: {"load_in_8bit": True}, 4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}
FAMILIES = {
    "mamba2": lambda: random_base(vocab_size=VOCABULARY, num_hidden_layers=2, use_bias=True),
    "mamba": lambda: random_selective(MambaConfig, MambaForCausalLM, vocab_size=VOCABULARY, num_hidden_layers=2),
    "falcon": lambda: random_selective(FalconMambaConfig, FalconMambaForCausalLM, vocab_size=VOCABULARY, num_hidden_layers=2),
    "llamba": lambda: random_llamba(vocab_size=VOCABULARY, n_layer=2),
}
HEADS, LAYER = Plan(sites=("L1.H3,5",)), Plan(kind="layer", sites=("L1",), width=16)
IDS = torch.randint(1, 99, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of every family the folder of a base in float32."""
    place = tmp_path_factory.mktemp("bases")
    for family, make in FAMILIES.items():
        make().save_pretrained(place / family)
        build_tokenizer().save_pretrained(place / family)
    return place


def quantised(folder, bits, dtype="auto"):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=BitsAndBytesConfig(**BITS[bits]))
    exact(model)
    return model.eval()


def stored(folders, place, bits, family="mamba2"):
    """The folder of a base that is stored in so many bits."""
    quantised(folders / family, bits).save_pretrained(place)
    build_tokenizer().save_pretrained(place)
    return place


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", ["mamba2", "falcon"])  # transformers' own Mamba-1 reads dt_proj's integers and fails
def test_adopted_computes_what_stock_computes(folders, family, bits):
    base = quantised(folders / family, bits)
    difference = (logits(adopt(base)) - logits(base)).abs().max()
    assert difference < 0.02, difference  # a rounding of 8-bit activations may fall to the other side


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("family", FAMILIES)
def test_spliced_and_back(folders, tmp_path, family, bits):
    base = quantised(folders / family, bits)
    mark = fingerprint(base)
    floating = copy.deepcopy(base).dequantize(torch.float32)
    for plan in (HEADS, LAYER):
        hybrid = splice(base, plan)
        # The graft starts from what the integers stand for, and the rest is the base's.
        expected = graft_parameters(splice(floating, plan))
        assert all(torch.equal(p, expected[name]) for name, p in graft_parameters(hybrid).items())
        assert hybrid.backbone.layers[0].mixer.in_proj is base.backbone.layers[0].mixer.in_proj
        before = logits(hybrid)
        hybrid.save_pretrained(tmp_path / plan.kind)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / plan.kind).eval()
        exact(again)
        assert torch.equal(logits(again), before)
        again.save_pretrained(tmp_path / "again")  # what was read as integers can be written again
        assert torch.equal(logits(adopt(unsplice(hybrid))), logits(adopt(base)))
        assert fingerprint(unsplice(hybrid)) == fingerprint(base) == mark  # no forward has changed it
        if plan is HEADS:
            assert fingerprint(again) == mark


@pytest.mark.parametrize("bits", BITS)
def test_a_base_has_one_digest_adopted_and_after_a_forward(folders, bits):
    """bitsandbytes turns biases into the dtype of what it was given last: a report would be of another model."""
    base = quantised(folders / "mamba2", bits, torch.bfloat16)
    before, kept, adopted = model_digest(base), dtypes(base), adopt(base)
    logits(adopted)
    with torch.autocast("cpu", torch.bfloat16):
        logits(adopted)
    with torch.no_grad():
        base.backbone.layers[0].mixer.in_proj(torch.ones(1, 64))
    assert base.backbone.layers[0].mixer.in_proj.bias.dtype == torch.float32
    assert model_digest(adopted) == model_digest(base) == before != model_digest(splice(base, HEADS))
    assert dtypes(base) == kept


def test_packed_in_float16_under_autocast_to_bfloat16(folders):
    """What integers give has the dtype of what they are given: float16 among bfloat16."""
    hybrid = splice(quantised(folders / "mamba", 8, torch.float16), HEADS)
    documents = torch.tensor([[*range(40), *range(5)]])
    ids = torch.arange(1, 46)[None]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        together = hybrid(ids, position_ids=documents).logits
        alone = hybrid(ids[:, 40:]).logits
    assert (together[:, 40:] - alone).abs().max() < 0.05


def test_fingerprints_tell_scales_apart(folders):
    base = quantised(folders / "mamba2", 8)
    other = copy.deepcopy(base)
    other.backbone.layers[0].mixer.in_proj.weight.SCB[0] *= 2
    assert fingerprint(other) != fingerprint(base)


def test_ablation_is_exact(folders):
    """8-bit modules round what they read: the output without a head is no sum of parts."""
    base = adopt(quantised(folders / "mamba2", 8))
    found, last = anatomy(base), torch.tensor([8, 8])
    mixer = found.mixers_of(0)[0]
    own = mixer.out.forward

    def without(columns):
        columns = columns.clone()
        columns[..., mixer.columns(2)] = 0
        return own(columns)

    with replaced({mixer.out: without}):
        expected = logits(base)[:, -1]
    layer = next(iter(Replay(subject(base), IDS, last).layers()))
    # bitsandbytes computes in no float64; where a last bit tips a rounding to 8 bits, far less changes than by the head.
    effect = (layer.base - expected).abs().max()
    assert (layer.logits(layer.ablation([2])) - expected).abs().max() < effect / 20
    assert effect > 1e-3


def test_tuned_and_exported(folders, tmp_path, monkeypatch):
    """Grafts learn, integers stay; folder and patch are read back, and other precision is refused in one line."""
    monkeypatch.chdir(tmp_path)
    base = package.load(stored(folders, tmp_path / "base", 8))
    plan = HEADS.model_copy(update={"provenance": provenance("base", base.fingerprint, 0)})
    hybrid = splice(base.model, plan)
    before = {name: p.clone() for name, p in hybrid.named_parameters()}
    options = Tune(steps=2, batch_size=2, text_batch_size=1, text_tokens=16, lessons=({"options": {"pairs": 2}},))
    tune(hybrid, base.tokenizer, options, teacher=adopt(base.model))
    changed = {name for name, p in hybrid.named_parameters() if not torch.equal(p, before[name])}
    assert changed == set(graft_parameters(hybrid))
    for form in ("hf", "patch"):
        export(hybrid, tmp_path / form, format=form, tokenizer=base.tokenizer, plan=plan, base="base")
        record = json.loads((tmp_path / form / "export.json").read_text())
        assert (record["base_unchanged"], record["base"]["name"]) == (True, "base")
        # Equal tensors at another place in memory may be summed in another order (surgery/exporting/verify.py).
        torch.testing.assert_close(logits(package.load(tmp_path / form).model), logits(hybrid), rtol=0, atol=1e-4)
    weights = (tmp_path / "patch" / "patch.safetensors").stat().st_size
    assert weights < 1.2 * sum(p.numel() * p.element_size() for p in graft_parameters(hybrid).values()) + 4096
    with pytest.raises(UserError, match=r"is quantised and computes in torch\.float32"):
        package.load(tmp_path / "patch", dtype="bfloat16")
    with pytest.raises(UserError, match=r"cannot be written as 'nemotron_h'.*the base as it was before"):
        export(hybrid, tmp_path / "x", format="nemotron_h", tokenizer=base.tokenizer, plan=plan, base="base")
    with pytest.raises(UserError, match="is not quantised, and the hybrid's base is"):
        export(hybrid, tmp_path / "x", format="patch", tokenizer=base.tokenizer, plan=plan, base=str(folders / "mamba2"))
    with pytest.raises(UserError, match=r"in_proj, which is quantised.*leave out tune\.lora"):
        matches(hybrid, Lora(target_modules=("in_proj",)))
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("family", ["mamba2", "falcon"])
def test_8_bits_in_float16_are_tuned(folders, family):
    """The most usual of all: a graft in the first layer, and the control, whose quantised modules learn nothing."""
    base = quantised(folders / family, 8, torch.float16)
    options = Tune(steps=2, batch_size=2, text_batch_size=1, text_tokens=16, lessons=({"options": {"pairs": 2}},))
    for hybrid, layers in ((splice(base, Plan(sites=("L0.H3",))), None), (with_own_mixers(base, [0]), [0])):
        assert {p.dtype for p in graft_parameters(hybrid).values()} <= {torch.float16}
        before = {name: p.clone() for name, p in hybrid.named_parameters()}
        log = tune(hybrid, build_tokenizer(), options, layers=layers, teacher=adopt(base))
        assert len(log) == 2
        changed = {name for name, p in hybrid.named_parameters() if not torch.equal(p, before[name])}
        assert changed
        assert not [name for name in changed if "_proj." in name and ".graft." not in name]


def test_step_by_step_without_a_word_about_precision(surgery, folders, tmp_path):
    """The folder's configuration says how it is quantised; the command line needs to know nothing."""
    base = stored(folders, tmp_path / "base", 4)
    quick = ("--set", "locate.examples=2", "--set", "locate.options.pairs=2", "--set", "locate.exact=0.1")
    for arguments in (("locate", base, *quick, "--out", "located"), ("plan", "located/ranking.json")):
        status, _, err = surgery(*arguments)
        assert status == 0, err
    status, _, err = surgery("splice", base, "located/plan.json", "--out", "hybrid")
    assert status == 0, err
    assert json.loads((tmp_path / "hybrid" / "export.json").read_text())["base_unchanged"]


def test_a_4_bit_model_that_lost_its_scales_is_refused(folders):
    """bitsandbytes rounds them in a forward on some CPUs; what it leaves behind is set by hand here."""
    base = quantised(folders / "mamba2", 4)
    assert dense(base.backbone.layers[0].mixer.in_proj).shape == base.backbone.layers[0].mixer.in_proj.weight.quant_state.shape
    base.backbone.layers[0].mixer.in_proj.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UserError, match="changed its scales; load it once more"):
        splice(base, HEADS)
