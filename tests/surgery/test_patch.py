"""Patches: base and patch are the hybrid, bit for bit, and no other base will do."""

import copy
import hashlib
import json
import os
import pickle
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

import surgery as package
from surgery.errors import UserError
from surgery.exporting.folder import digests
from surgery.exporting.formats import patch
from surgery.loading.checkpoint import load_base
from surgery.loading.digests import file_digest
from surgery.models.answers import tensors
from surgery.records.plan import PATCH, Plan
from surgery.records.recipe import Lora
from surgery.splicing.joining import WEIGHTS, Patch, check_tensors, join
from surgery.splicing.splice import graft_parameters, splice, unsplice
from surgery.tuning.lora import adapted, adapters
from surgery.world.tokenizer import build_tokenizer
from tests.models import VOCABULARY, random_base, random_llamba, random_selective

HEADS, LAYER = Plan(sites=("L1.H3", "L2.H0,5")), Plan(kind="layer", sites=("L1",))
FAMILIES = {
    "mamba2": random_base,
    "mamba2-groups-untied": partial(random_base, n_groups=2, tie_word_embeddings=False),
    "mamba": partial(random_selective, MambaConfig, MambaForCausalLM),
    "falcon-mamba": partial(random_selective, FalconMambaConfig, FalconMambaForCausalLM),
    "llamba": random_llamba,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory, tokenizer):
    """A base with its tokenizer and card, a tuned hybrid of it, and its patch."""
    place = tmp_path_factory.mktemp("patch")
    base = random_base(vocab_size=VOCABULARY)
    base.save_pretrained(place / "base")
    tokenizer.save_pretrained(place / "base")
    (place / "base" / "README.md").write_text("---\nlicense: other\nlicense_name: toy\n---\n# base\n")
    hybrid = tuned(splice(base, HEADS))
    for form in ("hf", "patch"):
        package.export(hybrid, place / form, format=form, tokenizer=tokenizer, plan=HEADS, base=str(place / "base"))
    return place


def tuned(hybrid):
    with torch.no_grad():
        for p in graft_parameters(hybrid).values():
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(3)))
    return hybrid


def written(hybrid, plan, folder, tokenizer):
    """The patch of a hybrid on folder/base."""
    (folder / "patch").mkdir()
    patch.write(hybrid, folder / "patch", tokenizer=tokenizer, plan=plan, base=str(folder / "base"))
    return folder / "patch"


def assert_same(first, second):
    assert tensors(first).keys() == tensors(second).keys()
    for name, tensor in tensors(first).items():
        assert tensor.dtype == tensors(second)[name].dtype
        assert torch.equal(tensor, tensors(second)[name]), name


@pytest.mark.parametrize("plan", [HEADS, LAYER], ids=["heads", "layer"])
@pytest.mark.parametrize("family", FAMILIES)
def test_base_and_patch_are_the_exported_hybrid_bit_for_bit(family, plan, tmp_path, tokenizer, tokens):
    base = FAMILIES[family]()
    base.save_pretrained(tmp_path / "base")
    hybrid = tuned(splice(base, plan))
    hybrid.save_pretrained(tmp_path / "hf")
    folder = written(hybrid, plan, tmp_path, tokenizer)
    joined = join(load_base(str(tmp_path / "base")), folder)
    assert_same(joined, hybrid)
    assert_same(joined, AutoModelForCausalLM.from_pretrained(tmp_path / "hf"))
    assert torch.equal(joined(tokens).logits, hybrid(tokens).logits)
    assert_same(unsplice(joined), base)  # also what a layer graft replaced
    record = Patch.read(folder / PATCH)
    assert record.config == {}
    assert bool(record.removed) == (plan is LAYER)
    assert {name for name in tensors(hybrid) if name not in tensors(base)} == set(graft_parameters(hybrid))


def test_what_else_changed_travels_too(place, tokenizer, tmp_path):
    """A tensor of the base that tuning changed, and a hybrid in another precision than its base."""
    shutil.copytree(place / "base", tmp_path / "base")
    hybrid = copy.deepcopy(splice(load_base(str(tmp_path / "base")), HEADS)).to(torch.bfloat16)
    with torch.no_grad():
        hybrid.backbone.layers[0].mixer.D.add_(1)
    folder = written(hybrid, HEADS, tmp_path, tokenizer)
    joined = join(load_base(str(tmp_path / "base")), folder)
    assert_same(joined, hybrid)
    size = (folder / WEIGHTS).stat().st_size
    assert size < 3 * sum(p.numel() for p in graft_parameters(hybrid).values()) + 4096  # no other tensor of the base


def test_adapters_travel_merged(place, tokenizer, tmp_path):
    """LoRA on the base is in the patch as the tensors that it changed, and in no other."""
    shutil.copytree(place / "base", tmp_path / "base")
    hybrid = splice(load_base(str(tmp_path / "base")), HEADS)
    with adapted(hybrid, Lora(target_modules=("in_proj",), r=2)):
        for p in adapters(hybrid).values():
            p.data += 0.02
    folder = written(hybrid, HEADS, tmp_path, tokenizer)
    assert_same(join(load_base(str(tmp_path / "base")), folder), hybrid)
    changed = {f"backbone.layers.{layer}.mixer.in_proj.weight" for layer in range(3)}
    assert load_file(folder / WEIGHTS).keys() == changed | graft_parameters(hybrid).keys()


def test_every_altered_tensor_of_the_base_is_refused_by_its_name(place):
    record, base = Patch.read(place / "patch" / PATCH), load_base(str(place / "base"))
    check_tensors(record, base)
    every = tensors(base)
    assert len(every) == len(record.base_tensors) > 20
    for name, tensor in every.items():
        number = tensor.data.view(-1)[-1:]
        before = number.clone()
        number.copy_(torch.nextafter(before, before + 1))  # the last number, by its last bit
        with pytest.raises(UserError, match=f"not the base that the patch was made for .*: the tensor '{name}' differs$"):
            check_tensors(record, base)
        number.copy_(before)
    check_tensors(record, base)


def test_a_base_of_another_build_is_refused(place):
    record = Patch.read(place / "patch" / PATCH)
    half = load_base(str(place / "base")).to(torch.bfloat16)
    with pytest.raises(UserError, match="is bfloat16, not float32; a copy in another precision will not do"):
        check_tensors(record, half)
    other = load_base(str(place / "base"))
    mixer = other.backbone.layers[1].mixer
    mixer.D = torch.nn.Parameter(torch.ones(9))
    with pytest.raises(UserError, match=r"'backbone\.layers\.1\.mixer\.D' differs: 9, not 8"):
        check_tensors(record, other)
    mixer.D = torch.nn.Parameter(torch.ones(8))
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach().clone())
    with pytest.raises(UserError, match=r"it has a tensor 'lm_head\.weight'"):
        check_tensors(record, other)
    del other.backbone.layers[2]
    with pytest.raises(UserError, match=r"'backbone\.layers\.2\.norm\.weight' is missing"):
        check_tensors(record, other)


def test_load_joins_and_says_where_it_comes_from(place):
    loaded = package.load(place / "patch")
    assert_same(loaded.model, package.load(place / "hf").model)
    assert loaded.fingerprint == package.load(place / "base").fingerprint
    assert loaded.tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert package.load(place / "patch", dtype="bfloat16").model.dtype == torch.bfloat16
    record = Patch.read(place / "patch" / PATCH)
    assert record.base.licence == {"license": "other", "license_name": "toy"}
    assert (record.base.name, record.base.hub, record.dtype) == ("base", False, "float32")
    assert record.plan == HEADS
    with pytest.raises(UserError, match="is not a patch, and takes no base"):
        package.load(place / "hf", base=str(place / "base"))
    with pytest.raises(UserError, match="is a patch; the base of a patch is a whole model"):
        package.load(place / "patch", base=str(place / "patch"))


def test_the_command_puts_both_together_wherever_the_base_is(place, surgery, tmp_path):
    """Of the patch only its two files were mailed, and the base lies elsewhere."""
    (tmp_path / "mailed").mkdir()
    record = json.loads((place / "patch" / PATCH).read_text())
    record["base"]["name"] = "./gone"
    (tmp_path / "mailed" / PATCH).write_text(json.dumps(record))
    shutil.copy(place / "patch" / WEIGHTS, tmp_path / "mailed")
    shutil.copytree(place / "base", tmp_path / "elsewhere")
    status, out, err = surgery("export", "mailed", "--format", "hf", "--out", "whole")
    assert (status, out) == (2, "")
    assert "mailed is a patch on ./gone, which is not here: say where its base is (--base)" in err
    assert not (tmp_path / "whole").exists()
    status, out, err = surgery("export", "mailed", "--format", "hf", "--base", "elsewhere", "--out", "whole")
    assert status == 0, err
    assert_same(package.load("whole").model, package.load(place / "hf").model)
    status, _, err = surgery("export", "whole", "--format", "patch", "--base", "elsewhere", "--out", "again")
    assert status == 0, err
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (place / "patch" / WEIGHTS).read_bytes()
    for base, more, complaint in (
        ("whole", (), "whole holds grafts: it is no base that a patch could be made for"),
        ("elsewhere", ("--max-shard-size", "1GB"), "an export as 'patch' has no option 'max_shard_size'"),
    ):
        status, _, err = surgery("export", "whole", "--format", "patch", "--base", base, *more, "--out", "wrong")
        assert (status, complaint in err, (tmp_path / "wrong").exists()) == (2, True, False), err


@pytest.fixture
def changed(place, tmp_path):
    """A copy of the patch with other fields in its record, or with other weights; its base lies beside it as it did."""
    (tmp_path / "base").symlink_to(place / "base")

    def change(content=None, **fields):
        folder = tmp_path / "changed"
        shutil.copytree(place / "patch", folder, dirs_exist_ok=True)
        if content is not None:
            (folder / WEIGHTS).write_bytes(content)
        record = json.loads((folder / PATCH).read_text()) | fields
        record["base"]["name"] = os.path.relpath(place / "base", folder)
        (folder / PATCH).write_text(json.dumps(record))
        return folder

    return change


def test_a_damaged_patch_is_refused(place, changed):
    data = bytearray((place / "patch" / WEIGHTS).read_bytes())
    data[-1] ^= 1
    with pytest.raises(UserError, match="is damaged"):
        package.load(changed(data))
    with pytest.raises(UserError, match="unknown key 'extra'"):
        package.load(changed(extra=1))
    grafts = Patch.read(place / "patch" / PATCH).grafts
    with pytest.raises(UserError, match=r"holds a tensor that the hybrid has no place for, 'backbone\.layers\.2"):
        package.load(changed(grafts=grafts[:1]))
    with pytest.raises(UserError, match=r"lacks the tensor 'backbone\.layers\.0\.mixer\.graft"):
        package.load(changed(grafts=[*grafts, {**grafts[0], "layer": 0}]))
    folder = changed()
    (folder / WEIGHTS).unlink()
    with pytest.raises(UserError, match="No such file"):
        package.load(folder)


def test_a_patch_that_is_longer_than_it_says_is_not_read(place, changed, monkeypatch):
    folder = changed()
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + 1)
    monkeypatch.setattr("surgery.loading.digests.hashlib.file_digest", None)
    with pytest.raises(UserError, match="is damaged"):
        package.load(folder)
    for content in (b"", b"12345678", b"\x05" + bytes(7) + b"[1,2]", b"\x02" + bytes(7) + b"{}x", b"\xff" * 30):
        with pytest.raises(UserError, match="is damaged"):
            package.load(changed(content))


def test_what_is_no_file_is_not_read(tmp_path):
    assert file_digest(Path("/dev/zero")) == file_digest(tmp_path) == ""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_bytes(b"")
    assert digests(tmp_path) == {"loop": "", "file": hashlib.sha256().hexdigest()}
    with pytest.raises(OSError, match="No such file"):
        file_digest(tmp_path / "none")


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_patch_cannot_run_code(changed, tmp_path):
    """Neither by a pickle in the place of its weights nor by what its record says of the configuration."""
    torch.save({"x": Bomb(tmp_path / "ran")}, tmp_path / "x.bin")
    for content in (pickle.dumps(Bomb(tmp_path / "ran")), (tmp_path / "x.bin").read_bytes()):
        with pytest.raises(UserError, match="is damaged: it is not the file that"):
            package.load(changed(content, weights=hashlib.sha256(content).hexdigest()))
    for field in ("auto_map", "_attn_implementation", "architectures"):
        with pytest.raises(UserError, match=f"changes '{field}' of the configuration"):
            package.load(changed(config={field: "x"}))
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()  # it would have been


def test_a_one_head_patch_of_mamba2_130m_fits_in_a_mail(tmp_path, monkeypatch, tokenizer):
    """The size depends on shapes alone. README.md states it."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    fields = {"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "state_size": 128, "n_groups": 1}
    with torch.device("meta"):
        base = Mamba2ForCausalLM(Mamba2Config(vocab_size=50288, tie_word_embeddings=True, **fields))
    zeros = {name: torch.zeros(1).expand(p.shape) for name, p in base.named_parameters()}  # 4 bytes each
    base.load_state_dict(zeros, strict=False, assign=True)
    base.tie_weights()
    assert 128e6 < sum(p.numel() for p in base.parameters()) < 130e6
    monkeypatch.setattr(patch, "load_base", lambda *_, **__: base)
    monkeypatch.setattr(patch, "brings_tokenizer", lambda base, tokenizer: True)  # as the Hub's does
    plan = Plan(sites=("L12.H5",))
    patch.write(splice(base, plan), tmp_path, tokenizer=tokenizer, plan=plan, base="state-spaces/mamba2-130m")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes.keys() == {PATCH, WEIGHTS, "config.json"}
    print(f"a one-head patch of the mamba2-130m shape: {sizes}")
    assert sizes[WEIGHTS] == 792_140
    assert sizes[PATCH] < 32_000  # versions and names of machines have no fixed length


@pytest.mark.parametrize(
    ("field", "value"),
    [("layer_norm_epsilon", 1e-3), ("time_step_limit", [0.0, 0.05])],
)
def test_a_base_whose_configuration_was_altered_is_another(place, tmp_path, field, value):
    """Its tensors are the same, and compute something else."""
    shutil.copytree(place / "base", tmp_path / "base")
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(UserError, match=field):
        package.load(place / "patch", base=str(tmp_path / "base"))
    package.load(place / "patch", base=str(place / "base"))


def test_a_patch_of_before_0_9_says_nothing_of_the_configuration(place, tmp_path):
    shutil.copytree(place / "patch", tmp_path / "patch")
    path = tmp_path / "patch" / PATCH
    content = json.loads(path.read_text())
    assert content.pop("base_config")["layer_norm_epsilon"] == "1e-05"
    path.write_text(json.dumps(content | {"schema_version": 1}))
    package.load(tmp_path / "patch", base=str(place / "base"))
