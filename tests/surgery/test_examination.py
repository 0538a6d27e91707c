"""`surgery doctor MODEL`: what it says is what splice, locate and export do; and it says something of every model."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from surgery.doctor.examination import Examination, Layers, examine
from surgery.doctor.examination_text import lines
from surgery.exporting.export import export
from surgery.exporting.formats import format_of, names, patch
from surgery.families import families
from surgery.locating.subject import is_graftable
from surgery.models.anatomy import anatomy
from surgery.records.plan import PATCH, Plan
from surgery.records.site import Site
from surgery.runtime.ownership.folder import RECORD as OWN
from surgery.splicing.joining import Patch
from surgery.splicing.splice import splice
from tests.models import BASES, ROOT, TINY
from tests.surgery.test_anatomy import ARCHITECTURES
from tools.published import published

SIZES = {"hidden_size": 32, "vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5, "intermediate_size": 48}
# Type -> what its line says. Of those that no layer is known of, the reason.
REFUSED = {
    "t5": "it has an encoder", "bert": "encoder.layer (5 x BertLayer)", "vit": "no causal language model of the type vit",
    "wav2vec2": "no causal language model", "gpt2": "layer 0's GPT2Attention has no",
}  # fmt: skip
KINDS = {
    "minimax": {"ssm", "attention"}, "kimi_linear": {"ssm", "attention"}, "qwen3_5_text": {"ssm", "attention"},
    "opt": {"attention"}, "gemma": {"attention"}, "mixtral": {"attention"}, "deepseek_v3": {"attention"},
}  # fmt: skip


def written(folder, content: dict) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def configured(folder, name: str, **fields) -> str:
    return written(folder, AutoConfig.for_model(name, **SIZES | fields).to_dict())


def of_layer(found: Examination, layer: int) -> Layers:
    (group,) = (group for group in found.layers if layer in group.layers)
    return group


@pytest.mark.parametrize("name", [*ARCHITECTURES, *KINDS])
def test_every_layer_is_in_one_run_with_its_mixers(name, tmp_path):
    """Where anatomy finds mixers: what is said of each layer is what anatomy says; without a family nothing can be grafted."""
    found = examine(configured(tmp_path / name, name, **ARCHITECTURES.get(name, PLAIN)))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / name))
    parts = anatomy(model)
    assert sorted(layer for group in found.layers for layer in group.layers) == list(range(len(parts.blocks)))
    for layer in range(len(parts.blocks)):
        group = of_layer(found, layer)
        assert [(m.kind, m.heads, m.width) for m in group.mixers] == [
            (m.kind, m.heads, m.width) for m in parts.mixers_of(layer)
        ]
        assert ("ablation" in group.located) == bool(group.mixers)
        assert ("splice attribution" in group.located) == group.heads.possible
        assert group.heads.possible <= is_graftable(model)
        for answer in (group.heads, group.layer, group.donor_layer):
            assert answer.possible != bool(answer.why_not)
    if name in KINDS:
        assert {mixer.kind for group in found.layers for mixer in group.mixers} == KINDS[name]
    if found.model_type not in families():
        assert found.kind == "other"
        reasons = {group.heads.why_not for group in found.layers if {m.kind for m in group.mixers} == {"attention"}}
        assert reasons <= {"it is attention already"}
    assert all("\n" not in line for line in lines(found))


@pytest.mark.parametrize("name", REFUSED)
def test_of_a_model_that_cannot_be_analysed_the_reason_is_said(name, tmp_path):
    found = examine(configured(tmp_path / name, name, **PLAIN if name != "wav2vec2" else {}))
    if REFUSED[name] or not found.layers:  # a family of today or of tomorrow may know it
        assert found.kind == "other"
        assert REFUSED[name] in found.why_not
        assert found.layers == ()
        assert found.why_not in list(lines(found))[1]


@pytest.mark.parametrize("base", ["plain", "mamba", "falcon mamba", "llamba"])
def test_splice_and_export_do_what_is_said(base, tmp_path, tokenizer):
    """For every family: a splice of a head, and of a layer; then what each format says of the hybrid itself."""
    model = BASES[base]()
    model.config.save_pretrained(tmp_path)
    found = examine(str(tmp_path))
    group = of_layer(found, 0)
    for answer, site in ((group.heads, Site(0, (0,))), (group.layer, Site(0))):
        hybrid = splice(BASES[base](), Plan(kind="head" if site.heads else "layer", sites=(site,)))
        assert answer.possible
        assert {*answer.exports.possible} | {*answer.exports.refused} == {*names(), "vllm"}
        for name in names():
            form = format_of(name)
            reason = form.why_not(hybrid.config) if hasattr(form, "why_not") else None
            assert answer.exports.refused.get(name) == reason
    assert ("gguf" in found.exports.possible) != ("gguf" in found.exports.refused)


def test_a_hybrid_and_a_patch_are_examined_as_they_are(tiny, tmp_path):
    hybrid = splice(tiny, Plan(sites="L0.H3,5"))
    export(hybrid, tmp_path / "hf", verify="tensors")
    export(hybrid, tmp_path / "patch", format="patch", verify="tensors")
    one, two = examine(str(tmp_path / "hf")), examine(str(tmp_path / "patch"))
    assert (one.kind, two.kind, two.of) == ("hybrid", "patch", "tiny-mamba2")
    assert one.layers == two.layers
    assert one.exports == two.exports
    assert one.exports.possible == ("hf", "patch", "vllm")
    assert all(group.located == ("ablation",) and "unsplice it first" in group.heads.why_not for group in one.layers)
    (tmp_path / "patch" / patch.WEIGHTS).unlink()
    (tmp_path / "patch" / "tokenizer.json").unlink(missing_ok=True)
    assert examine(str(tmp_path / "patch")) == two, "no weight is read"
    record = Patch.read(tmp_path / "patch" / PATCH)
    away = record.model_copy(update={"base": record.base.model_copy(update={"name": "gone", "hub": False})})
    (tmp_path / "patch" / PATCH).write_text(away.text())
    (tmp_path / "patch" / OWN).unlink()  # which says where the base is
    assert examine(str(tmp_path / "patch")) == two.model_copy(update={"of": "gone"}), "nor the base"


def test_published_configurations_and_an_original_folder(tmp_path):
    for name, types in {
        "codestral-mamba-7b": "mamba2", "llamba-8b": "llamba", "mamba-130m": "mamba"
    }.items():  # fmt: skip
        found = examine(written(tmp_path / name, published(name).config))
        assert (found.kind, found.model_type) == ("base", types)
        assert len(found.layers) == 1
        assert found.layers[0].located == ("splice attribution", "ablation")
    original = {"d_model": 32, "n_layer": 5, "vocab_size": 48, "ssm_cfg": {"layer": "Mamba2", "headdim": 16, "d_state": 8}}
    found = examine(written(tmp_path / "original", original))
    assert (found.kind, found.model_type, found.layers[0].layers) == ("base", "mamba2", (0, 1, 2, 3, 4))
    attention = original | {
        "attn_layer_idx": [2], "attn_cfg": {"num_heads": 4, "causal": True, "qkv_proj_bias": False, "out_proj_bias": False}
    }  # fmt: skip
    found = examine(written(tmp_path / "attention", attention))
    assert found.kind == "hybrid"
    assert [group.name() for group in found.layers] == ["0-1,3-4", "2"]


def test_a_transformer_is_a_donor_where_its_layers_fit(tmp_path):
    fields = ARCHITECTURES["qwen3"] | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    found = examine(configured(tmp_path / "qwen3", "qwen3", **fields))
    assert of_layer(found, 0).donor_layer.possible
    assert "sliding window" in of_layer(found, 1).donor_layer.why_not


def test_a_base_that_load_refuses_and_a_quantised_one(tmp_path):
    content = json.loads((TINY / "config.json").read_text())
    found = examine(written(tmp_path / "strange", content | {"swallowed": 3}))
    assert found.kind == "other"
    assert found.why_not == "the configuration's field 'swallowed' (3) is not handled by the mamba2 family"
    quantised = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    found = examine(written(tmp_path / "integers", content | {"quantization_config": quantised}))
    heads = found.layers[0].heads.exports
    assert {"hf", "patch"} <= {*heads.possible}
    assert "a quantised base cannot be written as 'gguf'" in heads.refused["gguf"]


NO_MODELS = {
    "": "is not a model folder: it holds no config.json",
    "[]": "it holds no keys",
    "{": "config.json",
    '{"model_type": 7}': "names no model_type",
    '{"model_type": "transmogrifier"}': "knows no model of the type 'transmogrifier'",
    '{"model_type": "ours", "auto_map": {"AutoConfig": "x.Y"}}': "runs only with --trust-remote-code",
    '{"model_type": "mamba2", "num_hidden_layers": 5000}': "at most 4,096 are made",
    '{"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 5000}}': "at most 4,096 are made",
    '{"model_type": "mamba2", "num_heads": 7}': "cannot",
    '{"model_type": "llama", "hidden_size": "wide"}': "cannot read",
    '{"d_model": 8, "n_layer": 2}': "vocab_size is missing",
}


def test_what_is_no_model_is_said_in_one_line(tmp_path, surgery):
    for content, words in NO_MODELS.items():
        if content:
            (tmp_path / "config.json").write_text(content)
        status, out, err = surgery("doctor", tmp_path)
        assert (status, out, err.count("\n")) == (2, "", 1), content
        assert words in err, content


def test_the_command_prints_lines_and_json(surgery, tmp_path):
    status, out, _ = surgery("doctor", TINY)
    assert status == 0
    assert out.splitlines() == list(lines(examine(str(TINY))))
    status, out, _ = surgery("doctor", ROOT / "checkpoints" / "tiny-llama", "--json", "--out", tmp_path / "llama.json")
    assert status == 0
    assert Examination.model_validate(json.loads(out)) == Examination.read(tmp_path / "llama.json")
    assert str(ROOT) not in out


def test_nothing_is_computed_and_no_weight_is_made(monkeypatch, tmp_path):
    """Every tensor of a model that is made is on the meta device; a folder needs no other file than its configuration."""
    made = []
    register = torch.nn.Module.register_parameter
    monkeypatch.setattr(torch.nn.Module, "register_parameter", lambda self, name, p: (made.append(p), register(self, name, p)))
    found = examine(written(tmp_path / "alone", json.loads((TINY / "config.json").read_text())))
    assert found.layers[0].heads.possible
    assert made
    assert all(p is None or p.is_meta for p in made)
