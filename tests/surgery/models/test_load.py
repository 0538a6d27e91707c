"""load: every kind of folder, and one line for everything that is wrong with one."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from surgery.errors import UserError
from surgery.modeling import FAMILIES
from surgery.models import load as loading
from surgery.models.load import choose_dtype, load
from surgery.records.plan import Plan
from surgery.splicing.splice import splice, unsplice
from tests.surgery.modeling.bases import make_base, make_hybrid, make_rows

TOKENIZER = Path(__file__).parents[3] / "checkpoints" / "tiny-mamba2"


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(30)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save(make_base("mamba2", dtype=torch.float32), tmp_path / "base")


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_base_comes_adopted_and_may_be_given_back(base: Path) -> None:
    model, tokenizer = load(base)
    assert isinstance(model, FAMILIES["mamba2"].hybrid)
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer("the bell").input_ids
    stock, live = unsplice(model), make_base("mamba2", dtype=torch.float32)
    assert type(stock) is type(live)
    assert torch.equal(stock(make_rows(), use_cache=False).logits, live(make_rows(), use_cache=False).logits)


def test_a_hybrid_comes_with_grafts_that_learn(tmp_path: Path) -> None:
    live = make_hybrid("mamba2", dtype=torch.float32)
    model, _ = load(save(live, tmp_path / "hybrid"))
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(live.graft_parameters())
    assert torch.equal(model(make_rows(), use_cache=False).logits, live(make_rows(), use_cache=False).logits)


def test_attention_that_came_with_a_base_is_no_graft(tmp_path: Path) -> None:
    live = splice(make_base("mamba2", dtype=torch.float32), Plan(kind="layer", sites=("L1",)))
    assert set(load(save(live, tmp_path / "hybrid")).model.graft_parameters()) == set(live.graft_parameters())
    live.config.grafts[0]["of_base"] = True
    model, _ = load(save(live, tmp_path / "base"))
    assert not model.graft_parameters()
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_tokenizer_of_another_model_is_refused(base: Path) -> None:
    with pytest.raises(UserError, match="is it another model's"):
        load(base, tokenizer=str(TOKENIZER))


def test_a_folder_that_was_saved_twice_and_a_token_that_was_added(base: Path, capsys: Any) -> None:
    """Shards that one file has replaced leave their index behind."""
    index = {"metadata": {}, "weight_map": {"backbone.embeddings.weight": "model-00001-of-00002.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    words = load(base).tokenizer
    words.add_tokens([f"<{number}>" for number in range(60)])
    words.save_pretrained(base)
    load(base)
    assert "have no embedding" in capsys.readouterr().err


def test_a_model_of_no_family_comes_as_transformers_has_it(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model, _ = load(save(GPT2LMHeadModel(config), tmp_path / "gpt2"))
    assert type(model) is GPT2LMHeadModel


def test_pickles_of_tensors_are_read_and_others_are_not(base: Path) -> None:
    weights = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    torch.save(weights, base / "pytorch_model.bin")
    load(base)
    torch.save({"x": Path("/")}, base / "pytorch_model.bin")
    with pytest.raises(UserError):
        load(base)


def test_dtype_by_name_and_by_what_the_processor_can(base: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert load(base, dtype="bfloat16").model.dtype == torch.bfloat16
    assert load(base, dtype="float64").model.dtype == torch.float64
    save(load(base, dtype="bfloat16").model, base)
    loading.say_slow.cache_clear()
    monkeypatch.setattr(loading, "processor_flags", lambda: frozenset({"avx2"}))
    assert [load(base).model.dtype for _ in range(2)] == [torch.float32] * 2
    assert capsys.readouterr().err.count("bfloat16 instructions") == 1
    assert load(base, dtype="stored").model.dtype == torch.bfloat16
    monkeypatch.setattr(loading, "processor_flags", lambda: frozenset({"amx_bf16"}))
    assert load(base).model.dtype == torch.bfloat16
    assert choose_dtype("auto", torch.float16, "cuda") == torch.float16
    assert choose_dtype("auto", torch.float32, "cpu") == torch.float32


def test_harmless_fields_and_a_malformed_card_do_not_matter(base: Path) -> None:
    edit(base, rms_norm=True, ssm_cfg={}, attn_layer_idx=[], d_intermediate=0, resid_dropout=0.0, quantization_config=None)
    edit(base, unsloth_version="2026.1", return_dict=False, torch_dtype="float32", use_mambapy=False, pruned_heads={})
    (base / "README.md").write_bytes(b"---\nlicense: [\n\xff")
    model, _ = load(base)
    assert splice(model, Plan(sites=("L1.H1",)))(make_rows()).logits.isfinite().all()


def remove(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names]  # type: ignore[func-returns-value, return-value]


def change(name: str) -> Callable[[Path], None]:
    """One value of the weights becomes what `name` says."""

    def do(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["backbone.layers.1.mixer.D"][2] = float(name)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return do


def drop(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["backbone.layers.1.mixer.D"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def index(shard: str) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "w.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": shard}}))

    return do


def edit_tokenizer(**fields: Any) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return do


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content)  # type: ignore[return-value]


def grafted(**entry: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder, model_type="mamba2_hybrid", grafts=[{"layer": 1, "heads": [0], "signs": [1], **entry}])


HEAD = {"width": 8, "time_step": True, "blend": None}
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no configuration": (remove("config.json"), "config.json"),
    "gguf alone": (lambda folder: (remove("config.json")(folder), write("m.gguf", b"")(folder)), "GGUF"),
    "damaged configuration": (write("config.json", b"{"), "config.json"),
    "no keys": (write("config.json", b"[]"), "config.json"),
    "no model type": (lambda folder: edit(folder, model_type=None), "model_type"),
    "unknown model type": (lambda folder: edit(folder, model_type="no_such"), "no_such"),
    "own code": (
        lambda folder: edit(folder, model_type="no_such", auto_map={"AutoConfig": "x.C"}),
        "trust-remote-code",
    ),
    "a kernel of the Hub": (lambda folder: edit(folder, attn_implementation="evil/kernel"), "attn_implementation"),
    "chunk size": (lambda folder: edit(folder, chunk_size=0), "chunk_size"),
    "no words": (lambda folder: edit(folder, vocab_size=-5), "vocab_size is -5"),
    "a share that is none": (grafted(closed_below="x", **HEAD), "closed_below"),
    "depth": (lambda folder: edit(folder, num_hidden_layers=10**9), "layers"),
    "depth beside an empty part": (lambda folder: edit(folder, num_hidden_layers=10**9, text_config={}), "layers"),
    "depth by another name": (lambda folder: edit(folder, model_type="mpt", n_layers=10**9), "layers"),
    "another size": (lambda folder: edit(folder, vocab_size=77), "embedding"),
    "adapter": (write("adapter_config.json", b"{}"), "peft"),
    "no weights": (remove("model.safetensors"), "cannot load"),
    "cut weights": (lambda folder: os.truncate(folder / "model.safetensors", 999), "cannot load"),
    "NaN": (change("nan"), "layers.1.mixer.D"),
    "infinity": (change("-inf"), "layers.1.mixer.D"),
    "missing tensor": (drop, "layers.1.mixer.D"),
    "index out of the folder": (index("../x.safetensors"), "same folder"),
    "index of a device": (index("/dev/zero"), "same folder"),
    "index of a pipe": (lambda folder: (os.mkfifo(folder / "p.safetensors"), index("p.safetensors")(folder)), "p.safetensors"),
    "a pipe": (lambda folder: os.mkfifo(folder / "extra.txt"), "plain file"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    "damaged tokenizer": (write("tokenizer.json", b"{}"), "tokenizer"),
    "a tokenizer that panics": (edit_tokenizer(pre_tokenizer={"type": "FixedLength", "length": 0}), "PanicException"),
    "windows": (grafted(kind="window", **HEAD), "0.30.0"),
    "shared pairs": (grafted(shared=True, **HEAD), "0.30.0"),
    "own values": (grafted(own_values=True, **HEAD), "0.30.0"),
    "a smaller state": (grafted(whole_state=8, **HEAD), "0.30.0"),
    "a donor's MLP": (grafted(kind="layer", mlp={"intermediate_size": 8}), "0.30.0"),
    "a graft nowhere": (grafted(**HEAD | {"layer": 9}), "layer 9"),
    "grafts that are none": (lambda folder: edit(folder, model_type="mamba2_hybrid", grafts={"L1": 1}), "grafts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said_in_one_line(base: Path, case: str) -> None:
    break_it, word = WRONG[case]
    break_it(base)
    with pytest.raises(UserError) as caught:
        load(base)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_may_not_be_read_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name != "model.safetensors")  # root may read everything
    with pytest.raises(UserError, match=r"model\.safetensors: permission denied"):
        load(base)


@pytest.mark.parametrize(
    ("name", "word"),
    [("bse", "did you mean"), ("no/such/folder", "no such folder"), ("base/config.json", "folder"), (7, "int")],
)
def test_names_that_are_no_models(base: Path, monkeypatch: pytest.MonkeyPatch, name: Any, word: str) -> None:
    monkeypatch.chdir(base.parent)
    with pytest.raises(UserError, match=word):
        load(f"{base.parent}/{name}" if name == "bse" else name)


@pytest.mark.parametrize("wrong", [{"dtype": "int8"}, {"device": "moon"}, {"device": "cuda:99"}, {"device": "meta"}])
def test_dtypes_and_devices_that_are_none(base: Path, wrong: dict) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        load(base, **wrong)
