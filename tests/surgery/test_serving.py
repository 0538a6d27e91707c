"""Exports in serving engines: an engine's answers are compared with the live model's, and vLLM serves every kind of hybrid. The
first runs everywhere, with answers that stand in for an engine's; the second where vLLM is installed (`make serving`)."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from surgery import UserError, export, load, splice
from surgery.exporting.engines import check_engines, engine_of
from surgery.exporting.folder import Exported
from surgery.models.answers import held
from surgery.records.plan import Plan
from surgery.serving import ask_vllm, proving
from surgery.serving.limits import head_size, kv_heads, refusal
from surgery.serving.patches import FROM_BASE, Patched

ROOT = Path(__file__).parent.parent.parent
BASE = str(ROOT / "checkpoints/tiny-mamba2")
PYTHON = Path(os.environ.get("SURGERY_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
vllm = pytest.mark.vllm
served = pytest.mark.skipif(not PYTHON.exists(), reason="no environment with vLLM: `make serving` makes one")


def plan(**fields) -> Plan:
    return Plan.model_validate(fields)


def perturbed(hybrid, scale=0.3):
    """With grafts that are no longer what they start as, the gates and temperatures among them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in hybrid.named_parameters():
            if ".graft." in name:
                size = parameter.std() if parameter.numel() > 8 else 0.3
                parameter.add_(scale * size * torch.randn(parameter.shape, generator=generator))
    return hybrid


@pytest.fixture(scope="module")
def base():
    return load(BASE)


def own_answers(model, job):
    """What an engine that computes exactly what the live model does would say."""
    answers = []
    for prompt, count in zip(job["prompts"], job["new"], strict=True):
        tokens, steps = list(prompt), []
        with torch.no_grad():
            for _ in range(count):
                logs = model(torch.tensor([tokens])).logits[0, -1].double().log_softmax(-1)
                best = logs.topk(5)
                steps.append(
                    [int(best.indices[0]), dict(zip(map(str, best.indices.tolist()), best.values.tolist(), strict=True))]
                )
                tokens.append(steps[-1][0])
        answers.append(steps)
    return {"version": "1.0", "alone": answers, "together": json.loads(json.dumps(answers))}


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(proving, "LENGTHS", (1, 9))
    monkeypatch.setattr(proving, "NEW", 6)


def test_an_engine_with_the_live_models_answers_is_a_proof(base, short, monkeypatch, tmp_path):
    hybrid = perturbed(splice(base, plan(sites="L0.H2,7", blend=0.4)))
    monkeypatch.setattr(proving, "_ask", lambda engine, python, job: own_answers(hybrid, job))
    export(hybrid, tmp_path / "out", base=BASE, engines=["vllm"], engine_python=Path("/bin/true"))
    record = Exported.read(tmp_path / "out/export.json", unsealed="refuse")
    (proof,) = record.engines
    assert (proof.engine, proof.prompts, proof.tokens) == ("vllm", (1, 9), 2 * (6 + 3))
    assert proof.difference < 1e-5
    assert "served by vllm 1.0 in float32" in (tmp_path / "out/README.md").read_text()


def test_another_token_or_another_probability_is_refused(base, short, monkeypatch, tmp_path):
    """And nothing is written."""
    hybrid = perturbed(splice(base, plan(sites="L0.H2,7", blend=0.4)))

    def other_token(engine, python, job):
        said = own_answers(hybrid, job)
        said["together"][1][2][0] = (said["together"][1][2][0] + 1) % 100
        return said

    def other_probability(engine, python, job):
        said = own_answers(hybrid, job)
        step = said["alone"][0][1][1]
        step[next(iter(step))] += 1e-3
        return said

    for ask, message in ((other_token, "its token 3 is not the live model's"), (other_probability, "differ by 0.001")):
        monkeypatch.setattr(proving, "_ask", ask)
        with pytest.raises(UserError, match=message):
            export(hybrid, tmp_path / "out", base=BASE, engines=["vllm"], engine_python=Path("/bin/true"))
        assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_asked_is_said_before_anything_is_done(tmp_path):
    for arguments, message in (
        ((["tgi"], "hf", None), "no engine 'tgi'"),
        ((["vllm"], "patch", Path("/bin/true")), "reads hf and nemotron_h, not 'patch'"),
        ((["vllm"], "hf", None), "--engine-python"),
        ((["vllm"], "hf", tmp_path / "python"), "there is no program"),
        (([], "hf", Path("/bin/true")), "--engine-python is for --prove"),
    ):
        with pytest.raises(UserError, match=message):
            check_engines(*arguments)


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ("Traceback\nModuleNotFoundError: No module named 'vllm'", "it is not installed for"),
        (
            "pydantic: 1 error\n  Value error, hybrids are served without it [type=value_error, x]",
            "hybrids are served without it$",
        ),
        ("Value error, The repository x contains custom code which must", "install this package beside it"),
        ("", "it ended"),
    ],
)
def test_what_an_engine_says_is_one_line(errors, message, base, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat >&2 <<'EOF'\n{errors}\nEOF\nexit 1\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(UserError, match=message) as raised:
        engine_of("vllm").prove(python, base.model, tmp_path)
    assert "\n" not in str(raised.value)


def test_an_interpreter_may_be_named_from_where_the_command_runs(base, tmp_path, monkeypatch):
    """As the page writes it: serving/bin/python."""
    monkeypatch.chdir(tmp_path)
    python = Path("python")
    for script, message in (
        ("#!/bin/sh\necho it ran >&2\nexit 1\n", "it ran$"),
        ("#!/bin/sh\n", "python is none$"),
        ("#!/no/such/program\n", "--engine-python: python does not run"),
    ):
        python.write_text(script)
        python.chmod(0o755)
        with pytest.raises(UserError, match=message):
            engine_of("vllm").prove(python, base.model, tmp_path)


def grouped():
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=load(BASE).model.config.vocab_size, hidden_size=64, num_heads=8, head_dim=16, n_groups=2, state_size=32,
        num_hidden_layers=3, chunk_size=32, use_bias=True,
    )  # fmt: skip
    model = Mamba2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)
    return model


def small_130m():
    """mamba2-130m's widths, with fewer layers and words."""
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=load(BASE).model.config.vocab_size, hidden_size=768, num_heads=24, head_dim=64, n_groups=1, state_size=128,
        num_hidden_layers=4, tie_word_embeddings=True, initializer_range=0.05,
    )  # fmt: skip
    return Mamba2ForCausalLM(config)


CASES = {
    "two heads under a gate": plan(sites="L0.H2,7", blend=0.4),
    "layers with four heads and with two, shared pairs, no gate": plan(
        sites=["L0.H1,2,3,7", "L2.H5,6"], shared=True, starts={"L0.H2": {"sign": -1, "tau": 2.0}}
    ),
    "wider than the state, without log dt": plan(sites="L0.H2,7", time_step=False, width=160),
    "a layer": plan(sites="L1", kind="layer"),
    "a donor's layer with its MLP": plan(
        sites="L1", kind="layer", init="donor", donor=str(ROOT / "checkpoints/tiny-llama"), mlp=True
    ),
    "two groups": plan(sites="L1.H1,6"),
    "mamba2-130m's widths": plan(sites="L2.H5", blend=0.5),
}
OTHERS = {"two groups": grouped, "mamba2-130m's widths": small_130m}
PATCH = "two heads under a gate"  # this is served from a patch, too
# One engine after the other in one process, which imports vLLM once. "cached": what vLLM is to have kept of the prompts.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SETTINGS = {"enforce_eager": True, "kv_cache_memory_bytes": 192 * 2**20}


def hybrid_of(case, base):
    chosen = CASES[case]
    model = OTHERS[case]() if case in OTHERS else base.model
    return perturbed(splice(model, chosen, None if chosen.donor is None else load(chosen.donor).model))


def ask(jobs, **environment):
    """What vLLM answers, without the way to it of prove_in_engine; its errors where it fails."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    here = {key: value for key, value in os.environ.items() if key != "VLLM_CPU_KVCACHE_SPACE"}  # the settings say
    done = subprocess.run(
        [PYTHON.absolute(), "-P", ask_vllm.__file__], input=json.dumps(jobs).encode(), capture_output=True, check=False,
        env=here | quiet | environment,
    )  # fmt: skip
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.decode(errors="replace")


def job(folder, vocabulary, **settings):
    prompts = proving._prompts(vocabulary)
    return {"folder": str(folder), "prompts": prompts, "new": NEW, "settings": SETTINGS | settings}


NEW = [proving.NEW - 3 * i for i in range(len(proving.LENGTHS))]


@pytest.fixture(scope="module")
def served_all(base, tmp_path_factory):
    """By case, the live hybrid and what vLLM answers for its folder; and for a patch."""
    root, hybrids, folders = tmp_path_factory.mktemp("served"), {}, {}
    for case in CASES:
        hybrids[case] = hybrid_of(case, base)
        folders[case] = root / str(len(folders))
        hybrids[case].save_pretrained(folders[case])
        base.tokenizer.save_pretrained(folders[case])
    folders["a patch"] = root / "patch"
    export(hybrids[PATCH], folders["a patch"], format="patch", base=BASE)
    hybrids["a patch"] = hybrids[PATCH]
    vocabulary = base.model.config.vocab_size
    said = ask([job(folder, vocabulary) for folder in folders.values()], **ONE_PROCESS)
    assert isinstance(said, list), said[-3000:]
    return {case: (hybrids[case], answers) for case, answers in zip(folders, said, strict=True)}


@vllm
@served
@pytest.mark.parametrize("case", [*CASES, "a patch"])
def test_vllm_serves_it(case, served_all, monkeypatch, tmp_path):
    """All greedy tokens and log-probabilities are the live model's, of requests alone and of those that join and leave, with
    prompts read in pieces, and with the beginnings of prompts that vLLM has kept."""
    hybrid, answers = served_all[case]
    monkeypatch.setattr(proving, "_ask", lambda *_, **__: answers)
    proof = engine_of("vllm").prove(PYTHON, hybrid, tmp_path)
    assert proof.tokens == 2 * sum(NEW)
    assert proof.difference <= proof.tolerance
    for prompt, cached in zip(proving.LENGTHS, answers["cached"], strict=True):
        assert 0 <= cached < prompt
    if case != "mamba2-130m's widths":  # whose blocks are longer than the prompts
        assert sum(answers["cached"]) > 0


@vllm
@served
def test_vllm_serves_compiled_in_its_own_processes(base, tmp_path):
    """As `vllm serve` runs it, and as --prove asks."""
    hybrid = hybrid_of(PATCH, base)
    hybrid.save_pretrained(tmp_path, tokenizer=base.tokenizer)
    base.tokenizer.save_pretrained(tmp_path)
    proof = engine_of("vllm").prove(PYTHON, hybrid, tmp_path)
    assert proof.tokens == 2 * sum(NEW)


@vllm
@served
def test_two_processes_divide_the_layers(base, monkeypatch, tmp_path):
    """A pipeline of two, with a graft in each half, compiled: see refusal."""
    hybrid = hybrid_of("layers with four heads and with two, shared pairs, no gate", base)
    hybrid.save_pretrained(tmp_path)
    base.tokenizer.save_pretrained(tmp_path)
    # vLLM would give each process a NUMA node of its own.
    settings = {"pipeline_parallel_size": 2, "enforce_eager": False}
    said = ask(job(tmp_path, base.model.config.vocab_size, **settings), VLLM_CPU_OMP_THREADS_BIND="nobind")
    assert isinstance(said, dict), said[-3000:]
    monkeypatch.setattr(proving, "_ask", lambda *_, **__: said)
    assert engine_of("vllm").prove(PYTHON, hybrid, tmp_path).tokens == 2 * sum(NEW)


@vllm
@served
def test_vllm_refuses_what_it_would_serve_wrongly(base, tmp_path):
    hybrid = splice(base, plan(sites="L0.H2,7"))
    hybrid.config.time_step_limit = (0.0, 0.5)
    hybrid.save_pretrained(tmp_path, tokenizer=base.tokenizer)
    with pytest.raises(UserError, match="does not bound the time step"):
        engine_of("vllm").prove(PYTHON, hybrid, tmp_path)


def settings_of_vllm(**changes):
    """As far as `refusal` reads them."""
    settings = {
        "tensor_parallel_size": 1, "speculative_config": None, "lora_config": None, "use_replayssm": False,
        "enforce_eager": False,
    } | changes  # fmt: skip
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=settings["tensor_parallel_size"], pipeline_parallel_size=2),
        cache_config=SimpleNamespace(use_replayssm=settings["use_replayssm"]),
        model_config=SimpleNamespace(enforce_eager=settings["enforce_eager"]), device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=settings["speculative_config"], lora_config=settings["lora_config"],
    )  # fmt: skip


def test_what_vllm_cannot_do_is_refused_in_one_line(base):
    """Where there is no vLLM to ask: what the plugin says when vLLM has read its settings."""
    config = splice(base, plan(sites="L0.H2,7")).config
    assert refusal(config, settings_of_vllm()) is None
    for changes, message in (
        ({"tensor_parallel_size": 2}, "cannot be split over devices: serve it with --tensor-parallel-size 1"),
        ({"enforce_eager": True}, "runs a pipeline of processes only compiled: leave --enforce-eager out"),
        ({"speculative_config": object()}, "without speculative decoding"),
        ({"lora_config": object()}, "adapters are not served"),
        ({"use_replayssm": True}, "without --use-replayssm"),
    ):
        said = refusal(config, settings_of_vllm(**changes))
        assert message in said
        assert "\n" not in said
    for field, value, message in (
        ("time_step_limit", (0.0, 0.5), "is in [0, 0.5]"), ("time_step_limit", (0.1, float("inf")), "is in [0.1, inf]"),
        ("hidden_act", "gelu", "knows silu, and not gelu"),
    ):  # fmt: skip
        other = type(config)(**config.to_dict() | {field: value})
        assert message in refusal(other, settings_of_vllm())
    config = splice(base, plan(sites="L0.H2;L1.H3", init="copy", blend=0.1)).config
    assert "the grafts at L0 and L1 have values of their own" in refusal(config, settings_of_vllm())
    config = splice(base, plan(sites="L1", kind="layer")).config
    config.grafts[0]["conv"] = 4  # as mamba_ssm's own hybrids have them
    assert "L1 has a convolution" in refusal(config, settings_of_vllm())


def test_one_width_and_one_number_of_heads_serve_all_layers(base):
    """Those of the widest, and what divides all."""
    config = splice(base, plan(sites=["L0.H1,2,3,7", "L2.H5,6"])).config
    assert (head_size(config), kv_heads(config)) == (64, 2)  # values of 32 and dt need more than 32
    config = splice(base, plan(sites="L0.H2,7", time_step=False)).config
    assert (head_size(config), kv_heads(config)) == (32, 2)
    with pytest.raises(ValueError, match="holds no grafts: serve its base"):
        head_size(type(config)(**config.to_dict() | {"grafts": []}))
    with pytest.raises(ValueError, match="300 wide, and vLLM's backends take 256 at most"):
        head_size(splice(base, plan(sites="L0.H2,7", width=300)).config)


@pytest.fixture(scope="module")
def patch(base, tmp_path_factory):
    """A folder with a patch, and beside it its base."""
    root = tmp_path_factory.mktemp("patch")
    shutil.copytree(BASE, root / "base")
    hybrid = hybrid_of(PATCH, base)
    export(hybrid, root / "patch", format="patch", base=str(root / "base"))
    return hybrid, root / "patch"


def of_patch(folder, change=lambda name, tensor: tensor):
    """What vLLM's loader hands over: the patch's tensors, and the base's."""
    from safetensors.torch import load_file

    own = load_file(folder / "patch.safetensors").items()
    base = load_file(folder.parent / "base/model.safetensors").items()
    changed = ((name, change(name, tensor)) for name, tensor in base)
    return [*own, *((FROM_BASE + name, tensor) for name, tensor in changed if tensor is not None)]


def test_a_patch_and_its_base_are_the_hybrids_tensors(patch):
    """With the tied output by a second name, as some files hold it."""
    hybrid, folder = patch
    patched = Patched.read(str(folder))
    tensors = of_patch(folder)
    embedding = dict(tensors)[FROM_BASE + "backbone.embeddings.weight"]
    joined = dict(patched.joined([*tensors, (FROM_BASE + "lm_head.weight", embedding)], tied=True))
    expected = dict(held(hybrid))
    assert joined.keys() == expected.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in expected.items())
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Mamba2HybridForCausalLM"]
    assert Patched.read(BASE) is None


def test_another_base_is_refused_by_the_first_tensor_that_differs(patch, tmp_path):
    _, folder = patch
    patched = Patched.read(str(folder))
    name = "backbone.layers.1.mixer.D"
    for change, message in (
        (lambda n, t: t + 1 if n == name else t, f"the tensor '{name}' differs"),
        (lambda n, t: t.double() if n == name else t, f"the tensor '{name}' differs"),
        (lambda n, t: None if n == name else t, f"the tensor '{name}' is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            list(patched.joined(of_patch(folder, change), tied=True))
    with pytest.raises(ValueError, match="a tensor 'x', which the patch does not know"):
        list(patched.joined([*of_patch(folder), (FROM_BASE + "x", torch.zeros(1))], tied=True))
    shutil.copytree(folder, tmp_path / "alone/patch")
    with pytest.raises(ValueError, match="not here: put it there, or join the two first: surgery export"):
        Patched.read(str(tmp_path / "alone/patch"))
    shutil.copytree(folder.parent, tmp_path / "both")
    with (tmp_path / "both/patch/patch.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(ValueError, match="is damaged"):
        Patched.read(str(tmp_path / "both/patch"))
