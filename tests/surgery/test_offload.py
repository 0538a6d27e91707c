"""Models whose weights accelerate keeps on the CPU or the disk and fetches for every call: the same bits as before."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from transformers import AutoModelForCausalLM

import surgery
from surgery.families.mamba2 import Mamba2HybridConfig, Mamba2HybridForCausalLM
from surgery.hybrids.layer_graft import layer_spec
from surgery.loading.digests import fingerprint, model_digest
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.world.tokenizer import build_tokenizer
from tests.models import BASES, VOCABULARY, but_slow

IDS = torch.randint(1, 99, (2, 9), generator=torch.Generator().manual_seed(1))
KINDS = {
    "adopted": None,
    "heads": Plan(sites=("L0.H1", "L1.H3,5")),
    "gated": Plan(sites=("L1.H3,5",), blend=0.5),
    "copying": Plan(sites=("L1.H3,5",), blend=0.5, init="copy"),
    "layer": Plan(kind="layer", sites=("L1",)),
}
FAMILIES = ("plain", "mamba", "falcon mamba", "llamba")
# Every layer on another place than the one before it; what follows the last block stays.
SPREAD = {"backbone.embeddings": "cpu", "backbone.layers.0": "disk", "backbone.layers.1": "cpu", "backbone.layers.2": "disk",
          "backbone.norm_f": "cpu", "lm_head": "cpu"}  # fmt: skip


@torch.no_grad()
def answers(model):
    """Logits, and tokens from a cache."""
    return model(IDS).logits, model.generate(IDS, max_new_tokens=3, do_sample=False)


def offloaded(model, place, how):
    if how == "cpu":
        cpu_offload(model, execution_device="cpu", offload_buffers=True)
    else:
        disk_offload(model, str(place), execution_device="cpu", offload_buffers=True)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    return model


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("family", "how"), [*zip(FAMILIES, ("cpu", "disk") * 2, strict=True)])
def test_offloaded_is_the_same_model(family, how, tmp_path):
    for kind, plan in KINDS.items():
        if kind == "copying" and family in ("mamba", "falcon mamba"):
            continue  # whose grafts have no convolution of their own
        model = adopt(BASES[family]()) if plan is None else splice(BASES[family](), plan)
        before = answers(model)
        assert same(before, answers(offloaded(model, tmp_path / kind, how))), kind
        assert {p.device.type for p in model.parameters()} == {"meta"}  # what was fetched is put away again


def test_a_layer_graft_with_a_convolution():
    torch.manual_seed(0)
    spec = layer_spec(1, 4, 16, conv=4, bias=["qkv_conv"])
    config = Mamba2HybridConfig(**BASES["plain"]().config.to_dict() | {"grafts": [spec]})
    model = Mamba2HybridForCausalLM(config).eval()
    before = answers(model)
    assert same(before, answers(offloaded(model, None, "cpu")))


def test_mixing_matrices_and_halves_of_an_offloaded_model():
    """What locate calls beside forward reads the mixer's own tensors, too."""
    hidden = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(0))
    model = splice(BASES["plain"](), KINDS["gated"])
    mixer = model.backbone.layers[1].mixer
    with torch.no_grad():
        before = (mixer.matrices(hidden), *mixer.halves(hidden))
        offloaded(model, None, "cpu")
        assert same(before, (mixer.matrices(hidden), *mixer.halves(hidden)))


def spread(folder):
    """A model of a folder, its layers on the CPU and the disk."""
    return AutoModelForCausalLM.from_pretrained(folder, device_map=SPREAD, offload_folder=f"{folder}-away")


def gradients(hybrid):
    hybrid(IDS, labels=IDS).loss.backward()
    return [p.grad for p in graft_parameters(hybrid).values()]


@pytest.mark.parametrize(
    ("family", "how"),
    but_slow(
        [("plain", "cpu"), ("plain", "disk"), ("plain", "map"), ("mamba", "cpu"), ("mamba", "disk")],
        ("plain", "cpu"), ("plain", "map"), ("mamba", "disk"),
    ),
)  # fmt: skip
def test_an_offloaded_base_is_spliced_as_a_whole_one(family, how, tmp_path):
    whole = BASES[family]()
    if how == "map":
        whole.save_pretrained(tmp_path / "base")
        base = spread(tmp_path / "base")
    else:
        base = offloaded(BASES[family](), tmp_path / "away", how)
    away = {name for name, p in base.named_parameters() if p.is_meta}
    assert away
    assert same(answers(adopt(whole)), answers(adopt(base)))
    for plan in (KINDS["heads"], KINDS["layer"]):
        expected, hybrid = splice(whole, plan), splice(base, plan)
        assert same(answers(expected), answers(hybrid))
        assert same(gradients(expected), gradients(hybrid))
        assert {name for name, p in hybrid.named_parameters() if p.requires_grad} == set(graft_parameters(hybrid))
        with hybrid.disable_grafts():
            assert same(answers(adopt(whole)), answers(hybrid))
        assert same(answers(expected), answers(hybrid))
        assert {name for name, p in hybrid.named_parameters() if p.is_meta} == away & {n for n, _ in hybrid.named_parameters()}
        assert (fingerprint(hybrid), model_digest(hybrid)) == (fingerprint(expected), model_digest(expected))
        assert same(answers(unsplice(expected)), answers(unsplice(hybrid)))
    assert same(answers(whole), answers(base))


def test_no_weight_is_held_twice(tmp_path):
    base = offloaded(BASES["plain"](), tmp_path, "disk")
    hybrid = splice(base, KINDS["heads"])
    ours, theirs = (model.backbone.layers[0].mixer.in_proj._hf_hook for model in (hybrid, base))
    assert ours.weights_map is theirs.weights_map


@pytest.mark.slow
def test_an_offloaded_base_is_located_tuned_measured_and_exported(tmp_path, capsys):
    """With the numbers of the same model loaded whole."""
    words = build_tokenizer()
    BASES["plain"](vocab_size=VOCABULARY).save_pretrained(tmp_path / "base")
    options = surgery.Recipe(
        model="x",
        tune={
            "steps": 2, "batch_size": 2, "text_batch_size": 1, "text_tokens": 16, "skill_batch_size": 2,
            "lessons": [{"options": {"pairs": 2}}],
        },
        bench={"pairs": [4], "limit": 10, "windows": 2, "window": 32, "contexts": []},
    )  # fmt: skip
    results = []
    for base in (AutoModelForCausalLM.from_pretrained(tmp_path / "base"), spread(tmp_path / "base")):
        ranking = surgery.locate(base, words, options={"pairs": 4}, examples=4)
        hybrid = splice(base, KINDS["heads"])
        log = surgery.tune(hybrid, words, options.tune)
        report = surgery.bench(base, hybrid, words, options.bench)
        out = tmp_path / ("whole" if not results else "offloaded")
        surgery.export(hybrid, out, tokenizer=words)
        surgery.export(hybrid, out.with_suffix(".patch"), tokenizer=words, format="patch")
        results.append((ranking.heads, log, {name: model.results() for name, model in report.models.items()}))
    assert results[0] == results[1]
    for suffix in ("", ".patch"):
        whole, away = (surgery.load(tmp_path / f"{name}{suffix}").model for name in ("whole", "offloaded"))
        assert model_digest(whole) == model_digest(away)


def test_an_exported_folder_on_a_device_map(tmp_path):
    """That names CPU and disk. Where this package is not installed a folder is read so in test_export_proof.py."""
    hybrid = splice(BASES["plain"](), KINDS["heads"])
    hybrid.save_pretrained(tmp_path / "hybrid")
    places = {"device_map": SPREAD, "offload_folder": str(tmp_path / "offload")}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid", **places)
    assert loaded.backbone.layers[0].mixer.conv1d.weight.is_meta
    assert same(answers(hybrid), answers(loaded))


def test_what_was_fetched_is_put_away_when_something_is_raised():
    model = offloaded(splice(BASES["plain"](), KINDS["gated"]), None, "cpu")
    mixer = model.backbone.layers[1].mixer
    with pytest.raises(IndexError), torch.no_grad():
        mixer.matrices(torch.randn(1, 7, 64), rows=torch.tensor([9]))
    assert {p.device.type for p in model.parameters()} == {"meta"}
