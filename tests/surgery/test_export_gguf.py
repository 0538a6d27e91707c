"""GGUF: what is refused, what the converter is told, what is compared, and llama.cpp's own answers. The last needs llama.cpp
and its sources (`make serving-llama-cpp` fetches both)."""

import json
import os
from pathlib import Path

import pytest
from transformers import FalconMambaConfig, LlamaConfig, Mamba2Config, MambaConfig

from surgery import UserError, export, load, splice
from surgery.commands.publish import publish
from surgery.exporting.engines import check_engines, engine_of, read_pythons
from surgery.exporting.folder import Exported
from surgery.records.plan import Plan
from surgery.serving import llama_cpp, proving
from surgery.serving.ask_llama_cpp import paired
from surgery.serving.formats import gguf
from surgery.serving.to_gguf import splits_as_gpt2
from tests.models import names
from tests.surgery.test_serving import grouped, own_answers, perturbed

ROOT = Path(__file__).parent.parent.parent
BASE = ROOT / "checkpoints/tiny-mamba2"
TWO = Plan(kind="layer", sites=("L0", "L2"), width=32)
PYTHON = Path(os.environ.get("SURGERY_LLAMA_CPP_PYTHON", ROOT / ".venv-llama-cpp/bin/python"))
SOURCE = Path(os.environ.get("LLAMA_CPP", ROOT / ".venv-llama-cpp/llama.cpp"))


@pytest.fixture(scope="module")
def base():
    return load(BASE)


@pytest.fixture(scope="module")
def hybrid(base):
    return splice(base, TWO)


@pytest.fixture
def converter(monkeypatch):
    """In place of llama.cpp's."""
    monkeypatch.setattr(llama_cpp, "source", lambda: Path("/llama.cpp"))
    monkeypatch.setattr(llama_cpp, "convert", lambda folder, out, dtype, name: out.write_text(f"{name} in {dtype}"))


def test_head_grafts_are_refused_with_the_reason(base, converter, tmp_path):
    with pytest.raises(UserError, match="cannot be exported as gguf: in L0 heads are grafted"):
        export(splice(base, Plan(sites="L0.H2,7")), tmp_path / "out", format="gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Mamba2Config(), None),
        (MambaConfig(), None),
        (FalconMambaConfig(mixer_rms_eps=1e-5), None),
        (LlamaConfig(), "this one is a llama; llama.cpp's own converter"),
        (Mamba2Config(use_bias=True), "projections have biases"),
        (MambaConfig(use_conv_bias=False), "convolutions have no biases"),
        (Mamba2Config(time_step_limit=(0.0, 0.5)), "the time step is bounded"),
        (MambaConfig(expand=3, hidden_size=64), "its mixers are 192 wide"),
        (MambaConfig(hidden_act="gelu"), "activation is gelu"),
        (FalconMambaConfig(), "another epsilon (1e-06)"),
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else str(value)[:24],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(config, reason):
    why = gguf.why_not(config)
    assert why is None if reason is None else reason in why


def test_a_hybrid_whose_embeddings_would_be_filled_up_is_refused(hybrid):
    assert gguf.why_not(hybrid.config) is None
    config = type(hybrid.config)(**hybrid.config.to_dict() | {"vocab_size": 1660})
    assert "wants a multiple of 8" in gguf.why_not(config)


def test_where_the_converter_is_missing_one_line_says_what_to_do(hybrid, tmp_path, monkeypatch):
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    with pytest.raises(UserError, match="set LLAMA_CPP to the folder"):
        export(hybrid, tmp_path / "out", format="gguf")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(UserError, match=r"there is no convert_hf_to_gguf\.py in"):
        llama_cpp.source()
    (tmp_path / "convert_hf_to_gguf.py").touch()
    with pytest.raises(UserError, match="is too old"):
        llama_cpp.source()


def test_what_the_converter_says_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "conversion").mkdir()
    (tmp_path / "convert_hf_to_gguf.py").touch()
    (tmp_path / "conversion/base.py").write_text("raise RuntimeError('it is broken')")
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    with pytest.raises(UserError, match=r"converter cannot write it: it is broken; nothing was written$"):
        llama_cpp.convert(BASE, tmp_path / "model.gguf", "f32", "a name")


def test_only_words_that_are_split_as_gpt2_does_are_said_to_be(tmp_path):
    settings = json.loads((BASE / "tokenizer.json").read_text())
    for changes in (
        {},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}},
        {"pre_tokenizer": None},
        {"model": {"type": "BPE", "byte_fallback": True}},
        {"model": {"type": "Unigram"}},
    ):
        (tmp_path / "tokenizer.json").write_text(json.dumps(settings | changes))
        assert splits_as_gpt2(tmp_path) is (changes == {}), changes


def test_tokens_amid_a_character_have_no_probabilities_and_no_others():
    """Entries are of the tokens that can be told apart."""

    def entry(token):
        return {"id": token, "top_logprobs": [{"id": token, "logprob": -float(token)}]}

    assert paired([5, 6], [entry(5), entry(6)]) == [[5, {"5": -5.0}], [6, {"6": -6.0}]]
    assert paired([5, 9, 6], [entry(5), entry(6)]) == [[5, {"5": -5.0}], [9, {}], [6, {"6": -6.0}]]
    assert paired([9, 9, 6], [entry(9), entry(6)]) == [[9, {}], [9, {}], [6, {"6": -6.0}]]
    assert paired([9], []) == [[9, {}]]


def test_a_python_for_each_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(llama_cpp, "source", lambda: tmp_path)
    true = Path("/bin/true")
    assert read_pythons(None) is None
    assert read_pythons("a=b/bin/python") == "a=b/bin/python"
    own = read_pythons("vllm=/bin/true, llama_cpp=/bin/cat")
    assert own == {"vllm": "/bin/true", "llama_cpp": "/bin/cat"}
    assert check_engines(["vllm", "llama_cpp"], "nemotron_h", own) == {"vllm": true, "llama_cpp": Path("/bin/cat")}
    assert check_engines(["llama_cpp"], "gguf", "/bin/true") == {"llama_cpp": true}
    for engine, form, pythons, message in (
        (["llama_cpp"], "hf", true, "llama_cpp reads gguf and nemotron_h, not 'hf'"),
        (["vllm"], "nemotron_h", own, "a Python for 'llama_cpp', which --prove does not name"),
        (["vllm", "llama_cpp"], "nemotron_h", {"vllm": true}, "which Python has llama_cpp installed"),
    ):
        with pytest.raises(UserError, match=message):
            check_engines(engine, form, pythons)
    with pytest.raises(UserError, match="'llama_cpp' is not ENGINE=PYTHON"):
        read_pythons("vllm=/bin/true,llama_cpp")


@pytest.mark.parametrize(("verify", "way"), [("full", "full"), ("layers", "layers"), ("tensors", "layers")])
def test_an_engines_proof_takes_the_memory_that_verify_says(verify, way, hybrid, monkeypatch, tmp_path):
    monkeypatch.setattr(proving, "LENGTHS", (3,))
    monkeypatch.setattr(proving, "NEW", 2)
    monkeypatch.setattr(proving, "_ask", lambda engine, python, job: own_answers(hybrid, job))
    ways = []
    monkeypatch.setattr(proving, "in_float32", lambda model, way: ways.append(way) or model)
    engine_of("vllm").prove(Path("/bin/true"), hybrid, tmp_path, verify=verify)
    assert ways == [way]


def llama_cpp_says(model, tokenizer, job):
    """What a llama.cpp that computes what the model does would say, and with flash attention one other token."""
    said = own_answers(model, job)
    other = json.loads(json.dumps(said["alone"]))
    other[-1][-1][0] = (other[-1][-1][0] + 1) % 100
    texts = [tokenizer(text).input_ids for text in job["texts"]]
    return said | {"setting": "without it", "otherwise": {"with it": other}, "texts": texts}


@pytest.mark.parametrize("what", ["hybrid", "base"])
def test_a_file_its_proof_and_its_card(what, base, hybrid, converter, monkeypatch, tmp_path):
    model = hybrid if what == "hybrid" else base.model
    monkeypatch.setattr(proving, "LENGTHS", (1, 9))
    monkeypatch.setattr(proving, "NEW", 6)
    monkeypatch.setattr(proving, "_ask", lambda engine, python, job: llama_cpp_says(model, base.tokenizer, job))
    out = tmp_path / "out"
    engine = {"engines": ["llama_cpp"], "engine_python": "/bin/true"}
    export(hybrid if what == "hybrid" else base, out, format="gguf", verify="tensors", **engine)
    papers = {"plan.json", "sites.png"} if what == "hybrid" else set()
    assert {*names(out)} == {"model.gguf", "export.json", "README.md", *papers}
    assert (out / "model.gguf").read_text() == "tiny-mamba2 in f32"
    (proof,) = Exported.read(out / "export.json", unsealed="refuse").engines
    assert (proof.engine, proof.tokens, proof.texts) == ("llama_cpp", 2 * (6 + 3), len(proving.TEXTS))
    assert (proof.otherwise[0].same, proof.otherwise[0].tokens) == (8, 9)
    card = (out / "README.md").read_text()
    assert "served by llama_cpp 1.0 in float32, without it: all 18 greedy tokens" in card
    assert "with it, 8 of 9 tokens are the live model's" in card
    assert ("A hybrid of" in card) == (what == "hybrid")
    assert "model.gguf" in publish(out, "someone/something", dry_run=True).files


def test_an_engine_that_tells_no_probabilities_proves_nothing(hybrid, monkeypatch, tmp_path):
    monkeypatch.setattr(proving, "LENGTHS", (3,))
    monkeypatch.setattr(proving, "NEW", 4)

    def ask(engine, python, job):
        said = own_answers(hybrid, job)
        for step in said["alone"][0][:3] + said["together"][0][:2]:
            step[1] = {}
        return said

    monkeypatch.setattr(proving, "_ask", ask)
    with pytest.raises(UserError, match="tells probabilities of 3 of its 8 tokens only"):
        engine_of("vllm").prove(Path("/bin/true"), hybrid, tmp_path)


def test_a_text_that_is_split_otherwise_is_refused(base, hybrid, monkeypatch, tmp_path):
    monkeypatch.setattr(proving, "LENGTHS", (3,))
    monkeypatch.setattr(proving, "NEW", 2)
    (tmp_path / "model.gguf").touch()

    def ask(engine, python, job):
        said = llama_cpp_says(hybrid, base.tokenizer, job)
        return said | {"texts": [*said["texts"][:-1], [1, 2]]}

    monkeypatch.setattr(proving, "_ask", ask)
    with pytest.raises(UserError, match=r"llama_cpp splits ' leading .* into other tokens, \[1, 2\]"):
        engine_of("llama_cpp").prove(Path("/bin/true"), hybrid, tmp_path, tokenizer=base.tokenizer)


served = pytest.mark.skipif(
    not PYTHON.exists() or not SOURCE.exists(), reason="no llama.cpp with its sources: `make serving-llama-cpp` fetches them"
)
SIXTEEN = Plan(kind="layer", sites=("L1",), width=16)  # whose scale is exact in 16 bits
CASES = {
    "two layers": lambda base: splice(base, TWO),
    "a layer in bfloat16": lambda base: splice(load(BASE, dtype="bfloat16"), SIXTEEN),
    "a layer in float16": lambda base: splice(load(BASE, dtype="float16"), SIXTEEN),
    # Of random weights, which choose tokens amid characters.
    "two groups": lambda base: perturbed(splice(without_bias(grouped()), Plan(kind="layer", sites=("L1",)))),
    "a Mamba-2": lambda base: load(BASE).model,
    "a Mamba-1": lambda base: load(ROOT / "checkpoints/tiny-mamba").model,
}


def without_bias(model):
    """The same without the biases of projections."""
    config = type(model.config)(**model.config.to_dict() | {"use_bias": False})
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), strict=False)
    return plain


@pytest.mark.llama_cpp
@served
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_gives_the_same_answers(case, base, tmp_path, monkeypatch):
    """All greedy tokens and log-probabilities are the live model's, without flash attention, of requests alone and of those
    that join and leave; and the file says which architecture it is."""
    monkeypatch.setenv("LLAMA_CPP", str(SOURCE))
    model = CASES[case](base)
    out = tmp_path / "out"
    export(
        model, out, format="gguf", tokenizer=base.tokenizer, base=str(BASE), engines=["llama_cpp"], engine_python=PYTHON
    )  # fmt: skip
    (proof,) = Exported.read(out / "export.json", unsealed="refuse").engines
    print(f"\n{case}: {proof.line()}")
    assert proof.tokens == 2 * sum(proving.NEW - 3 * i for i in range(len(proving.LENGTHS)))
    assert proof.difference <= proof.tolerance
    assert proof.texts == len(proving.TEXTS)
    head = (out / "model.gguf").read_bytes()[:4096]
    grafted = "nemotron_h" if getattr(model.config, "grafts", None) else model.config.model_type
    assert f"{grafted}.block_count".encode() in head
    assert b"nemotron_h_moe" not in head


@pytest.mark.llama_cpp
@served
def test_a_nemotron_h_folder_is_proved_in_llama_cpp_too(hybrid, tmp_path, monkeypatch):
    """As its converter writes it."""
    monkeypatch.setenv("LLAMA_CPP", str(SOURCE))
    out = tmp_path / "out"
    export(hybrid, out, format="nemotron_h", engines=["llama_cpp"], engine_python={"llama_cpp": PYTHON})
    (proof,) = Exported.read(out / "export.json", unsealed="refuse").engines
    assert proof.difference <= proof.tolerance
    assert not list(out.rglob("*.gguf"))


@pytest.mark.llama_cpp
@served
def test_a_file_with_another_tensor_is_refused(hybrid, base, tmp_path, monkeypatch):
    """The file is compared with the folder, whatever wrote it."""
    from safetensors.torch import load_file, save_file

    monkeypatch.setenv("LLAMA_CPP", str(SOURCE))
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf.nemotron_h.write(hybrid, folder, tokenizer=base.tokenizer, plan=TWO, base="a base")
    converter = SOURCE / "convert_hf_to_gguf.py"
    other = tmp_path / "llama.cpp"
    other.mkdir()
    for name in ("conversion", "gguf-py"):
        (other / name).symlink_to(SOURCE / name)
    weights = folder / "model.safetensors"
    changed = load_file(weights)
    changed["backbone.layers.1.mixer.A_log"] += 1e-3
    save_file(changed, tmp_path / "changed.safetensors", metadata={"format": "pt"})
    swap = f"import shutil\nshutil.copy({str(tmp_path / 'changed.safetensors')!r}, {str(weights)!r})\n"
    (other / "convert_hf_to_gguf.py").write_text(
        f"import runpy\nrunpy.run_path({str(converter)!r}, run_name='__main__')\n{swap}"
    )
    monkeypatch.setenv("LLAMA_CPP", str(other))
    with pytest.raises(UserError, match=r"layers\.1\.mixer\.A_log' has other values in the file"):
        llama_cpp.convert(folder, tmp_path / "model.gguf", "f32", "a name")
