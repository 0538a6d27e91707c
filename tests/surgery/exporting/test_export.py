"""Exports: the folder is the live model, or nothing is written."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing

from surgery.errors import UserError
from surgery.exporting import export as module
from surgery.exporting.card import NEEDS
from surgery.exporting.export import Export, export
from surgery.exporting.patch import join_patch
from surgery.exporting.publish import check_folder, publish
from surgery.models.digests import fingerprint
from surgery.models.load import load
from surgery.splicing.splice import changed_since_splice, splice
from tests.surgery.exporting.folders import PLAN, InProcess, hybrid_of, write_base
from tests.surgery.modeling.bases import make_base, make_rows

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("place") / "base")


@pytest.fixture(scope="module")
def hybrid(base):
    return hybrid_of(base)


@pytest.fixture(scope="module")
def exported(hybrid, base, tmp_path_factory):
    """(folder, proof), proved in a real fresh process."""
    folder = tmp_path_factory.mktemp("place") / "hybrid"
    return folder, export(*hybrid, folder, plan=PLAN, base=base)


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr(module, "start_reader", lambda _: InProcess())


def test_a_fresh_process_without_this_package_reads_it_back(exported):
    folder, proof = exported
    assert proof.reader == "transformers"
    assert 0 <= proof.difference <= proof.tolerance < 1e-2
    assert set(proof.laws) == {"cache, continued by chunks", "generate against no cache", "left padding"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "plan.json", "export.json", "README.md"} <= {
        path.name for path in folder.iterdir()
    }


def test_what_is_loaded_is_what_was_live(exported, hybrid):
    reloaded, _ = load(exported[0])
    assert fingerprint(reloaded) == fingerprint(hybrid[0]) == Export.read(exported[0] / "export.json").fingerprint
    ids = make_rows()
    assert torch.equal(reloaded(ids).logits, hybrid[0](ids).logits)


def test_the_exported_code_says_which_versions_it_needs(exported, monkeypatch):
    folder, _ = exported
    entry = json.loads((folder / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"].partition(".")[0]
    text = (folder / f"{entry}.py").read_text()
    assert "transformers" in text.splitlines()[0]
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {package + versions for package, versions in NEEDS.items()} <= set(pinned)
    exec(module.HEAD, {})
    for other in ("4.57.6", "5.22.0", "5.24.0", "6.0.0"):
        monkeypatch.setattr(sys.modules["transformers"], "__version__", other)
        with pytest.raises(ImportError):
            exec(module.HEAD, {})
    assert module.NEEDED in (folder / "README.md").read_text()
    others = {path.stem for path in folder.glob("*.py")} - {entry}
    assert {other for other in others if f"from .{other} import" not in text} == set()


def spoil_weight(folder):
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "in_proj" in name)
    tensors[name][0, 0] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def lose_tensor(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(next(name for name in tensors if "graft" in name))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(name, value):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        entry = config["grafts"][-1] if name in config["grafts"][-1] else config
        entry[name] = value
        (folder / "config.json").write_text(json.dumps(config))

    return change


FAULTS = {
    "weight": spoil_weight,
    "lost": lose_tensor,
    "sign": change_config("signs", [1, 1]),
    "closed": change_config("closed_below", 0.9),
    "epsilon": change_config("layer_norm_epsilon", 0.1),
    "limit": change_config("time_step_limit", [0.0, 0.1]),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_and_nothing_is_written(hybrid, base, tmp_path, monkeypatch, in_process, fault):
    write = module.write_hf

    def write_wrong(hybrid, tokenizer, folder, **options):
        write(hybrid, tokenizer, folder, **options)
        fault(folder)

    monkeypatch.setattr(module, "write_hf", write_wrong)
    with pytest.raises(UserError):
        export(*hybrid, tmp_path / "out", plan=PLAN, base=base)
    assert not (tmp_path / "out").exists()


def test_a_hybrid_that_breaks_a_law_is_not_written(hybrid, base, tmp_path, monkeypatch, in_process):
    forward = type(hybrid[0]).forward

    def sees_other_rows(self, *args, **named):
        output = forward(self, *args, **named)
        output.logits = output.logits + 0.1 * output.logits.mean(0, keepdim=True) * (len(output.logits) > 1)
        return output

    monkeypatch.setattr(type(hybrid[0]), "forward", sees_other_rows)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with pytest.raises(UserError, match="law"):
            export(*hybrid, tmp_path / "out", plan=PLAN, base=base)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(threads)
    assert not (tmp_path / "out").exists()


def test_a_failed_export_leaves_the_earlier_one(hybrid, base, tmp_path, monkeypatch, in_process):
    export(*hybrid, tmp_path / "out", plan=PLAN, base=base)
    before = check_folder(tmp_path / "out")

    def fail(*_, **__):
        raise UserError("no")

    monkeypatch.setattr(module, "write_hf", fail)
    with pytest.raises(UserError):
        export(*hybrid, tmp_path / "out", plan=PLAN, base=base, overwrite=True)
    assert check_folder(tmp_path / "out") == before


@pytest.mark.parametrize(
    ("named", "written"),
    [
        ("PreTrainedTokenizerFast", "PreTrainedTokenizerFast"),
        ("TokenizersBackend", "PreTrainedTokenizerFast"),
        (None, "GPTNeoXTokenizer"),  # which transformers takes for a Mamba-2 that names none; version 4 knows it, too
        ("GPTNeoXTokenizerFast", "GPTNeoXTokenizerFast"),
    ],
)
def test_the_tokenizer_keeps_a_class_that_older_versions_know(tmp_path, in_process, named, written):
    base = write_base(tmp_path / "base")
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("tokenizer_class", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings | ({"tokenizer_class": named} if named else {})))
    export(*hybrid_of(base), tmp_path / "out", plan=PLAN, base=base)
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["tokenizer_class"] == written


def test_a_base_that_adapters_were_merged_into_is_said_to_be_changed(base, tmp_path, in_process):
    live, tokenizer = hybrid_of(base)
    merged = get_peft_model(live, LoraConfig(target_modules=["out_proj"], init_lora_weights=False)).merge_and_unload()
    export(merged, tokenizer, tmp_path / "merged", plan=PLAN, base=base)
    export(load(tmp_path / "merged")[0], tokenizer, tmp_path / "again", plan=PLAN, base=base)
    assert "2 of its tensors (out\\_proj)" in (tmp_path / "again" / "README.md").read_text()


def test_unmerged_adapters_and_unknown_ways_are_refused(hybrid, base, tmp_path):
    adapted = get_peft_model(hybrid_of(base)[0], LoraConfig(r=2, target_modules=["in_proj"]))
    for model in (adapted, splice(get_peft_model(load(base)[0], LoraConfig(r=2, target_modules=["in_proj"])).model, PLAN)):
        with pytest.raises(UserError, match="merge"):
            export(model, hybrid[1], tmp_path / "out", base=base)
    for options in ({"format": "x"}, {"verify": "x"}):
        with pytest.raises(UserError):
            export(*hybrid, tmp_path / "out", base=base, **options)
    assert not (tmp_path / "out").exists()


def test_an_export_of_half_precision(tmp_path, in_process):
    base = write_base(tmp_path / "base", dtype=torch.bfloat16)
    model, tokenizer = load(base, dtype="bfloat16")
    proof = export(splice(model, PLAN), tokenizer, tmp_path / "out", plan=PLAN, base=base)
    assert proof.dtype == "float32"
    assert load(tmp_path / "out", dtype="stored")[0].dtype == torch.bfloat16


def test_what_a_base_brings_for_generating_does_not_matter_and_stays(tmp_path, in_process):
    base = write_base(tmp_path / "base")
    make_base("mamba2", dtype=torch.float32, tie_word_embeddings=True).save_pretrained(base)
    model, tokenizer = load(base)
    model.resize_token_embeddings(len(tokenizer) + 7)  # which are tied
    tokenizer.add_tokens([f"<{number}>" for number in range(9)], special_tokens=True)  # more than there are embeddings
    tokenizer.eos_token = "<1>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        "w1 $A <1>", None, [("w1", 1), ("<1>", tokenizer.eos_token_id)]
    )
    hybrid = splice(model, PLAN)
    hybrid.generation_config.update(stop_strings=["x"], num_beams=4, temperature=0.5, eos_token_id=3)
    for format in ("hf", "patch"):
        export(hybrid, tokenizer, tmp_path / format, plan=PLAN, base=base, format=format)
        found, words = load(tmp_path / format)
        held = found.generation_config
        assert (held.stop_strings, held.num_beams, held.temperature, held.eos_token_id) == (["x"], 4, 0.5, 3)
        assert words.eos_token == "<1>"
        assert words("w2")["input_ids"] == [1, 2, tokenizer.eos_token_id]
    assert not Export.read(tmp_path / "hf" / "export.json").base.hub


CARDS = {
    "licence": ("---\nlicense: mit\n---\n", {"license": "mit"}),
    "none": ("no front matter", {}),
    "open": ("---\nlicense: [\n---\n", {}),
    "list": ("---\n- a\n---\n", {}),
    "bomb": ("---\na: &a [1]\nb: [*a, *a]\n---\n", {}),
    "bytes": (b"\xff\xfe", {}),
    "long": ("---\nlicense: mit\n---\n" + "x" * 2**20, {}),
    "deep": ("---\na: " + "[" * 2000 + "\n---\n", {}),
}


@pytest.mark.parametrize(("card", "licence"), CARDS.values(), ids=CARDS)
def test_the_licence_is_the_bases_as_far_as_its_card_can_be_read(tmp_path, card, licence):
    from surgery.exporting.origin import find_origin

    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    found = find_origin(tmp_path / "base", tmp_path / "out")
    assert found.licence == licence
    assert found.place(tmp_path / "out") == str(tmp_path / "base")


def test_a_hybrid_outlives_its_base(tmp_path, in_process):
    base = write_base(tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: mit\n---\n")
    export(*hybrid_of(base), tmp_path / "first", base=base)
    base.rename(tmp_path / "moved")
    for before, after in (("first", "second"), ("second", "third")):
        place = Export.read(tmp_path / before / "export.json").base.place(tmp_path / before)
        export(*load(tmp_path / before), tmp_path / after, base=place)
        found = Export.read(tmp_path / after / "export.json").base
        assert (found.name, found.licence, found.place(tmp_path / after)) == ("base", {"license": "mit"}, str(base))


def change(folder):
    (folder / "config.json").write_text("{}")


def remove(folder):
    (folder / "plan.json").unlink()


@pytest.mark.parametrize("tamper", [change, remove])
def test_only_what_was_verified_is_published(hybrid, base, tmp_path, in_process, tamper):
    export(*hybrid, tmp_path / "out", plan=PLAN, base=base)
    (tmp_path / "out" / "more.safetensors").write_text("")
    shown = publish(tmp_path / "out", "me/hybrid")
    assert "more.safetensors" not in shown.files
    assert shown.url is None
    assert "me/hybrid" in shown.card
    assert str(tmp_path) not in shown.card
    assert not any(name.startswith(".") for name in shown.files)
    tamper(tmp_path / "out")
    with pytest.raises(UserError):
        publish(tmp_path / "out", "me/hybrid")


def test_a_patch_is_its_hybrid_again(hybrid, base, tmp_path, in_process):
    export(*hybrid, tmp_path / "patch", plan=PLAN, base=base, format="patch")
    joined, _ = join_patch(tmp_path / "patch")
    ids = make_rows()
    assert torch.equal(joined(ids).logits, hybrid[0](ids).logits)
    assert fingerprint(joined) == fingerprint(hybrid[0])
    assert {name for name, p in joined.named_parameters() if p.requires_grad} == set(hybrid[0].graft_parameters())
    assert changed_since_splice(joined) == []
    joined.backbone.layers[0].mixer.out_proj.weight.data *= 2
    assert changed_since_splice(joined) == ["backbone.layers.0.mixer.out_proj.weight"]
    size = sum(path.stat().st_size for path in (tmp_path / "patch").iterdir() if path.suffix == ".safetensors")
    assert size < 0.5 * (base / "model.safetensors").stat().st_size


def test_a_patch_keeps_matrices_that_are_stored_twice(tmp_path, in_process):
    """The configuration says tied, the folder holds two that differ: so does transformers not tie them."""
    make_base("mamba2", dtype=torch.float32, tie_word_embeddings=True).save_pretrained(base := write_base(tmp_path / "base"))
    weights = load_file(base / "model.safetensors")
    weights["lm_head.weight"] = 2 * weights["backbone.embeddings.weight"]
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    model, tokenizer = hybrid_of(base)
    export(model, tokenizer, tmp_path / "patch", base=base, format="patch")
    assert torch.equal(join_patch(tmp_path / "patch")[0](make_rows()).logits, model(make_rows()).logits)


def test_a_patch_of_version_0_30_is_read(hybrid, base, tmp_path, in_process):
    export(*hybrid, tmp_path / "patch", plan=PLAN, base=base, format="patch")
    held = json.loads((tmp_path / "patch" / "patch.json").read_text())
    held |= {"schema_version": 3, "toolkit": "0.30.0", "plan": {"kind": "head", "blend": 0.5}, "base_config": {}}
    held["base"].pop("path")
    (tmp_path / "patch" / "patch.json").write_text(json.dumps(held))
    joined, _ = join_patch(tmp_path / "patch", base)
    assert fingerprint(joined) == fingerprint(hybrid[0])


def test_a_patch_refuses_what_is_not_its_base(hybrid, base, tmp_path, in_process):
    export(*hybrid, tmp_path / "patch", plan=PLAN, base=base, format="patch")
    other = write_base(tmp_path / "other", seed=5)
    with pytest.raises(UserError, match="embeddings"):
        join_patch(tmp_path / "patch", other)
    with pytest.raises(UserError, match="weight matrices"):
        export(*hybrid, tmp_path / "new", plan=PLAN, base=other, format="patch")
    assert not (tmp_path / "new").exists()
    (tmp_path / "patch" / "patch.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="damaged"):
        join_patch(tmp_path / "patch", base)
