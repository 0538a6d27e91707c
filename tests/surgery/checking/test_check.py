"""surgery check: small models of any architecture, the report, adapters, bytes, and engines."""

import copy
import importlib.util
import json
import stat
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoConfig, DynamicCache

from surgery.checking import adapters
from surgery.checking.adapters import check_adapters
from surgery.checking.bytes import LENGTHS, CacheBytes, LayerBytes, count_cache_bytes
from surgery.checking.check import check, read_sizes
from surgery.checking.engines import compare_engine
from surgery.checking.law import subject_of
from surgery.checking.shrink import random_model, read_config, shrink
from surgery.cli import app
from surgery.errors import UserError
from surgery.evaluation.costs import cache_bytes
from surgery.models.anatomy import find_cache
from tests.surgery.modeling import bases, stock_bases, test_layer_graft

TYPES = (
    "mamba falcon_mamba mamba2 jamba bamba falcon_h1 nemotron_h granitemoehybrid zamba zamba2 qwen3_next qwen3_5_text "
    "qwen3_5_moe_text olmo_hybrid kimi_linear bailing_hybrid minimax recurrent_gemma xlstm rwkv lfm2 lfm2_moe lfm3 zaya "
    "inkling_text inkling2_text"
).split()


@pytest.mark.parametrize("name", TYPES)
def test_a_small_model_of_every_architecture_runs_in_float64(name):
    config = shrink(read_config(name))
    model = random_model(config)
    assert sum(p.numel() for p in model.parameters()) < 1_000_000
    assert subject_of(model).exact
    again = random_model(config)
    assert all(p.equal(q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_what_a_configuration_chooses_stays(tmp_path):
    fields = {"model_type": "mamba2", "hidden_size": 2560, "num_heads": 80, "num_hidden_layers": 64, "use_bias": True}
    fields |= {"n_groups": 1, "tie_word_embeddings": True, "conv_kernel": 3, "time_step_limit": [0.01, 0.2]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    small = shrink(read_config(tmp_path / "config.json"))
    assert (small.use_bias, small.n_groups, small.conv_kernel) == (True, 1, 3)
    assert tuple(small.time_step_limit) == (0.01, 0.2)
    assert small.hidden_size * small.expand == small.num_heads * small.head_dim
    report = check(architecture=tmp_path / "config.json", only=("cache_tokens", "batch"))
    assert {finding.law for finding in report.findings} == {"cache, token by token", "batch of 1 against 4"}


def test_every_wrong_cell_of_the_table_has_a_script():
    place = Path(__file__).parents[3] / "recipes" / "evidence" / "check" / "architectures.py"
    spec = importlib.util.spec_from_file_location("architectures", place)
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    asked = json.loads(table.RECORD.read_text())["architectures"]
    wrong = {(name, law) for name, found in asked.items() for law, cell in found["laws"].items() if cell["verdict"] == "wrong"}
    assert wrong == table.find_scripts().keys()


@pytest.mark.parametrize("hidden", [48, 96])
@pytest.mark.parametrize("width", [8, "auto"])
def test_sizes_that_are_no_multiple_of_the_small_ones(hidden, width):
    heads = 2 * hidden // (8 if width == 8 else 16)
    options = {"mamba_n_heads": heads, "mamba_d_head": width, "num_attention_heads": 8, "num_key_value_heads": 2}
    config = AutoConfig.for_model("bamba", hidden_size=hidden, mamba_n_groups=2, attn_layer_indices=[2], **options)
    ids = torch.arange(20)[None]
    assert random_model(shrink(config))(input_ids=ids).logits.isfinite().all()


def test_a_folder_that_lacks_a_weight_is_refused(tmp_path):
    model = random_model(shrink(read_config("mamba2")))
    model.config.save_pretrained(tmp_path)
    with pytest.raises(UserError):
        check(tmp_path, only=("batch",))
    weights = model.state_dict()
    del weights["backbone.layers.1.mixer.in_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError):
        check(tmp_path, only=("batch",))


@pytest.mark.parametrize("source", ["mamab2", "config.json", "checkpoints/tiny-mamba3"])
def test_what_is_no_architecture_is_refused(source):
    with pytest.raises(UserError):
        read_config(source)


def test_foreign_code_does_not_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "stranger", "auto_map": {"AutoConfig": "code.Config"}}))
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')")
    for source in (tmp_path / "config.json", tmp_path):
        with pytest.raises(UserError):
            check(architecture=source)


@pytest.mark.parametrize("options", [{}, {"model": "a", "architecture": "b"}, {"architecture": "mamba", "only": ("no",)}])
def test_what_is_asked_wrongly_is_refused(options):
    with pytest.raises(UserError):
        check(**options)


def test_the_report_is_worst_first_and_json():
    report = check(architecture="mamba", only=("packed", "prefill_chunks", "batch", "longer"))
    assert [finding.verdict for finding in report.findings] == ["wrong", "refused", "right", "not applicable"]
    read = json.loads(report.to_json())
    assert read["findings"][1]["difference"] is None
    assert report.wrong[0].law in report.table()
    assert {"torch", "transformers"} <= set(read["versions"])


@pytest.mark.parametrize(("law", "status"), [("packed", 1), ("batch", 0)])
def test_the_command_exits_with_1_where_something_is_wrong(monkeypatch, capsys, law, status):
    monkeypatch.setattr(sys, "argv", ["surgery", "check", "--architecture", "mamba2", "--law", law, "--json"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == status
    assert json.loads(capsys.readouterr().out)["architecture"] == "mamba2"


def test_the_sizes_of_a_models_mixers(tmp_path):
    sizes, dtype = read_sizes("mamba2")
    assert (sizes.heads, sizes.head_dim, sizes.state, sizes.groups, sizes.channels) == (128, 64, 128, 8, 0)
    assert dtype == torch.float32
    sizes, _ = read_sizes("jamba")
    assert (sizes.heads, sizes.channels, sizes.channel_state) == (0, 8192, 16)
    sizes, _ = read_sizes("qwen3_next")
    assert (sizes.delta, sizes.heads, sizes.head_dim, sizes.state, sizes.groups) == (True, 32, 128, 128, 16)
    for name in ("rwkv", "mamab2", str(tmp_path)):
        with pytest.raises(UserError):
            read_sizes(name)


def test_doctor_says_who_serves_what(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["surgery", "doctor", "checkpoints/tiny-mamba2", "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert {"ssd_scan", "ssd_step", "causal_conv"} <= {line.partition(" ")[0] for line in out.splitlines()}
    assert "selective_scan" not in out


def test_adapters_that_train_nothing_are_named():
    rows = {row.target: row for row in check_adapters(read_config("mamba"), "in_proj,x_proj,dt_proj,q_proj,out_proj")}
    assert not rows["in_proj"].is_wrong
    assert (rows["in_proj"].modules, rows["in_proj"].layers, rows["in_proj"].depth) == (32, 32, 32)
    assert not rows["x_proj"].is_wrong
    assert rows["dt_proj"].bypassed == ("backbone.layers.*.mixer.dt_proj",)  # its weight is read without calling the module
    assert rows["q_proj"].modules == 0
    assert rows["out_proj"].refused
    assert all(rows[name].is_wrong for name in ("dt_proj", "q_proj", "out_proj"))


def test_an_adapter_of_grafts(monkeypatch):
    monkeypatch.setattr(adapters, "SMALL", 0)
    (row,) = check_adapters(bases.make_hybrid("mamba2"), "q_proj")
    assert (row.modules, row.is_wrong) == (2, False)


def test_an_adapter_that_covers_few_layers_and_one_of_experts():
    (row,) = check_adapters(read_config("jamba"), "q_proj")
    assert (row.layers, row.depth, row.is_wrong) == (4, 32, False)
    rows = check_adapters(read_config("qwen3_next"), "in_proj_qkvz,gate_proj,up_proj")
    assert not any(row.is_wrong for row in rows)


def test_the_folder_of_an_adapter(tmp_path):
    LoraConfig(target_modules=["in_proj", "x_proj"], r=8).save_pretrained(tmp_path)
    rows = check_adapters(shrink(read_config("mamba")), tmp_path)
    assert [(row.target, row.is_wrong) for row in rows] == [("in_proj", False), ("x_proj", False)]
    with pytest.raises(UserError):
        check_adapters(shrink(read_config("mamba")), tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError):
        check_adapters(shrink(read_config("mamba")), tmp_path / "empty")


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["in_proj", "dt_proj"], "layers_to_transform": [20, 21]},
        {"target_modules": [f"backbone.layers.{layer}.mixer.{name}" for name in ("in_proj", "dt_proj") for layer in (20, 21)]},
    ],
)
def test_an_adapter_of_layers_that_the_small_model_lacks(tmp_path, options):
    LoraConfig(**options).save_pretrained(tmp_path)
    rows = check_adapters(AutoConfig.for_model("mamba", hidden_size=2048), tmp_path)
    assert sum(row.modules for row in rows if not row.is_wrong) == 2
    assert all(row.bypassed for row in rows if "dt_proj" in row.target)


def held_in_modules(model):
    """Tensors that modules keep between calls: neither parameters nor buffers."""
    return sum(value.nbytes for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in TYPES), *((name, torch.bfloat16) for name in ("bamba", "recurrent_gemma", "xlstm"))],
)
def test_bytes_are_those_of_the_cache(name, dtype):
    config = shrink(read_config(name))
    sizes = count_cache_bytes(config, str(dtype).removeprefix("torch."))
    for length in (30, 75):
        model = random_model(config).to(dtype)
        cache = DynamicCache(config=config) if name == "recurrent_gemma" else None  # what it does not return
        with torch.no_grad():
            named = {} if cache is None else {"past_key_values": cache}
            output = model(input_ids=torch.zeros(2, length, dtype=torch.long), use_cache=True, **named)
        cache = cache or find_cache(output)[1]
        assert sizes.transformers(length, 2) == cache_bytes(cache) + held_in_modules(model)


@pytest.mark.parametrize(("make", "name"), [(stock_bases.make_hybrid, "zamba2"), (test_layer_graft.make_hybrid, "mamba2")])
def test_bytes_of_a_hybrid_are_those_of_its_cache(make, name):
    hybrid = make(name).float()
    output = hybrid(torch.ones(2, 75, dtype=torch.long), use_cache=True)
    _, cache = find_cache(output)
    assert count_cache_bytes(hybrid).transformers(75, 2) == cache_bytes(cache)


def write_adapter(folder, config, **options):
    """The folder of an adapter with weights, on in_proj."""
    get_peft_model(random_model(config), LoraConfig(target_modules=["in_proj"], r=2, **options)).save_pretrained(folder)


@pytest.mark.parametrize("change", ["none", "type", "width", "depth", "names", "base"])
def test_an_adapter_of_another_model_is_refused(tmp_path, change):
    config = shrink(read_config("mamba"))
    other = {"width": {"hidden_size": 32, "intermediate_size": 64}, "depth": {"num_hidden_layers": 5}}.get(change, {})
    kind = "mamba2" if change == "type" else "mamba"
    write_adapter(tmp_path, shrink(read_config(kind)) if kind == "mamba2" else AutoConfig.for_model(**config.to_dict() | other))
    saved = json.loads((tmp_path / "adapter_config.json").read_text())
    if change == "names":
        saved["target_modules"] = ["q_proj", "v_proj"]
        (tmp_path / "adapter_model.safetensors").unlink()
    if change == "base":
        saved["base_model_name_or_path"] = "checkpoints/tiny-mamba2"
        (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    if change == "none":
        assert [row.is_wrong for row in check_adapters(config, tmp_path)] == [False]
        return
    with pytest.raises(UserError, match="another model"):
        check_adapters(config, tmp_path)


@pytest.mark.parametrize(("lora", "status"), [("q_proj", 1), ("folder", 2)])
def test_the_status_of_names_and_adapters_that_fit_nothing(tmp_path, monkeypatch, capsys, lora, status):
    write_adapter(tmp_path, shrink(read_config("mamba2")))
    given = str(tmp_path) if lora == "folder" else lora
    monkeypatch.setattr(sys, "argv", ["surgery", "check", "--architecture", "mamba", "--lora", given])
    with pytest.raises(SystemExit) as ended:
        app.main()
    assert ended.value.code == status
    assert len(capsys.readouterr().err.splitlines()) == (status == 2)


def test_bytes_of_a_published_size_take_no_weights():
    sizes = count_cache_bytes(AutoConfig.for_model("mamba2"), "bfloat16")  # Codestral-Mamba's shape: 7B
    state, convolution = 128 * 64 * 128, 4 * (8192 + 2 * 8 * 128)
    assert sizes.transformers(LENGTHS[-1]) == 64 * (4 * state + 2 * convolution)
    assert sizes.llama_cpp(1000) == 64 * 4 * (state + convolution * 3 // 4)
    assert sizes.vllm(1000, batch=3) == 3 * 64 * 2 * (state + convolution * 3 // 4)


def test_bytes_are_those_that_engines_allocated(monkeypatch):
    """tiny-mamba2 with two layers of attention, as a Nemotron-H: vLLM 0.32 on a CPU, with blocks of 128 tokens, took 9 and 17
    blocks of 2 pages of 262144 bytes; llama.cpp of October 2026 2 MiB and 0.04 MiB."""
    layers = [LayerBytes(token=2048), LayerBytes(state=16384, numbers=4096, convolution=4608, taps=4)] * 2
    sizes = CacheBytes("nemotron_h", torch.float32, layers)
    assert sizes.llama_cpp(1024) == 2 * 2**20 + 2 * (16384 + 4608 * 3 // 4)
    monkeypatch.setattr("surgery.checking.bytes.BLOCK", 128)
    assert [sizes.vllm(length) for length in (1000, 1024, 2000)] == [blocks * 2 * 262144 for blocks in (9, 9, 17)]


def test_an_engine_without_code_for_a_model_has_no_bytes():
    row = count_cache_bytes(shrink(read_config("bamba")), "float32").rows()[0]
    assert row["llama_cpp"]
    assert row["vllm"] is None
    assert all(count_cache_bytes(shrink(read_config("llama")), "float32").rows()[0].values())


def test_vllm_fills_a_page_with_attention():
    sizes = count_cache_bytes(shrink(read_config("bamba")), "float32")
    (state,) = {layer.fixed(4) for layer in sizes.layers if layer.state}
    (token,) = {layer.token for layer in sizes.layers if layer.token}
    block = -(-state // (16 * token)) * 16
    assert sizes.vllm(block) == 3 * block * token  # two states, and a block of the one attention layer
    assert sizes.vllm(block + 1) - sizes.vllm(block) == block * token


def answer(model, prompt, count):
    """Greedy tokens, each with its log-probability, as the script of an engine tells them."""
    made = []
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + [token for token, _ in made]])).logits[0, -1].double().log_softmax(-1)
        made.append([int(logits.argmax()), {str(int(logits.argmax())): logits.max().item()}])
    return made


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A model, what an engine says of it, and what is found when that stands in a file."""
    monkeypatch.setattr("surgery.checking.engines.LENGTHS", (3, 21))
    monkeypatch.setattr("surgery.checking.engines.NEW", 4)
    model, generator = random_model(shrink(read_config("mamba2"))), torch.Generator().manual_seed(0)
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in (3, 21)]
    answers = [answer(model, prompt, count) for prompt, count in zip(prompts, (4, 1), strict=True)]
    longer = [*prompts[0], *(token for token, _ in answers[0]), *prompts[1]]
    said = {"version": "0", "alone": answers, "together": copy.deepcopy(answers), "failed": ""}
    said["cached"] = [[longer, 7, answer(model, longer, 2)]]

    def ask():
        (tmp_path / "said.json").write_text(json.dumps(said))
        python = tmp_path / "python"  # says what stands here, whatever script it is to run
        python.write_text(f"#!/bin/sh\ncat {tmp_path}/said.json\n")
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        return compare_engine(model, tmp_path, "vllm", python)

    return said, ask


@pytest.mark.parametrize("way", ["alone", "together", "cached"])
@pytest.mark.parametrize("fault", ["", "token", "probability"])
def test_an_engine_that_computes_another_model_is_found(engine, way, fault):
    said, ask = engine
    steps = said["cached"][0][2] if way == "cached" else said[way][0]
    if fault == "token":
        steps[-1][0] -= 1
    elif fault:
        steps[1][1] = {token: value + 0.01 for token, value in steps[1][1].items()}
    found = ask()
    assert found.holds == (not fault)
    assert found.others == (fault == "token")
    assert (found.tokens, found.kept) == (12, 7)
    assert not fault or {"cached": "7 of them cached"}.get(way, way) in found.where


@pytest.mark.parametrize(("failed", "holds"), [("IndexError: index 1 is out of bounds", False), ("it is not supported", True)])
def test_an_engine_may_refuse_cached_prefixes_but_not_crash(engine, failed, holds):
    said, ask = engine
    said |= {"cached": [], "failed": failed}
    found = ask()
    assert found.holds == holds
    assert failed in str(found)


def test_a_python_without_the_engine_is_told(tmp_path):
    model = random_model(shrink(read_config("mamba2")))
    for python in (Path(sys.executable), tmp_path / "none"):
        with pytest.raises(UserError):
            compare_engine(model, tmp_path, "vllm", python)
