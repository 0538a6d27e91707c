"""Exports in serving engines: an engine's answers are compared with the live model's, and vLLM serves every kind of hybrid. The
first runs everywhere, with answers that stand in for an engine's; the second where vLLM is installed (`make serving`)."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from surgery import UserError, export, load, splice
from surgery.exporting import engines
from surgery.exporting.engines import check_engines, prove_in_engine
from surgery.exporting.folder import Exported
from surgery.records.plan import Plan

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
    monkeypatch.setattr(engines, "LENGTHS", (1, 9))
    monkeypatch.setattr(engines, "NEW", 6)


def test_an_engine_with_the_live_models_answers_is_a_proof(base, short, monkeypatch, tmp_path):
    hybrid = perturbed(splice(base, plan(sites="L0.H2,7", blend=0.4)))
    monkeypatch.setattr(engines, "_ask", lambda engine, python, job: own_answers(hybrid, job))
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
        monkeypatch.setattr(engines, "_ask", ask)
        with pytest.raises(UserError, match=message):
            export(hybrid, tmp_path / "out", base=BASE, engines=["vllm"], engine_python=Path("/bin/true"))
        assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_asked_is_said_before_anything_is_done(tmp_path):
    for arguments, message in (
        ((["tgi"], "hf", None), "no engine 'tgi'"),
        ((["vllm"], "patch", Path("/bin/true")), "reads hf and nemotron_h, not 'patch'"),
        ((["vllm"], "hf", None), "--engine-python"),
        ((["vllm"], "hf", tmp_path / "python"), "there is no program"),
        ((["vllm"], "hf", tmp_path), "there is no program"),
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
        prove_in_engine("vllm", python, base.model, tmp_path)
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
            prove_in_engine("vllm", python, base.model, tmp_path)


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


CASES = {
    "two heads under a gate": plan(sites="L0.H2,7", blend=0.4),
    "layers with four heads and with two, shared pairs": plan(
        sites=["L0.H1,2,3,7", "L2.H5,6"], shared=True, starts={"L0.H2": {"sign": -1, "tau": 2.0}}
    ),
    "wider than the state, without log dt": plan(sites="L0.H2,7", time_step=False, width=160),
    "a layer": plan(sites="L1", kind="layer"),
    "a donor's layer with its MLP": plan(
        sites="L1", kind="layer", init="donor", donor=str(ROOT / "checkpoints/tiny-llama"), mlp=True
    ),
    "two groups": plan(sites="L1.H1,6"),
}


@vllm
@served
@pytest.mark.parametrize("case", CASES)
def test_vllm_serves_it(case, base, tmp_path):
    """All greedy tokens and log-probabilities are the live model's, of requests alone and of those that join and leave, with
    prompts read in pieces, in vLLM's own processes and compiled, as `vllm serve` runs them."""
    chosen = CASES[case]
    model = grouped() if case == "two groups" else base.model
    donor = None if chosen.donor is None else load(chosen.donor).model
    hybrid = perturbed(splice(model, chosen, donor))
    hybrid.save_pretrained(tmp_path, tokenizer=base.tokenizer)
    proof = prove_in_engine("vllm", PYTHON, hybrid, tmp_path)
    assert proof.tokens == 2 * sum(engines.NEW - 3 * i for i in range(len(engines.LENGTHS)))
    assert proof.difference <= engines.CLOSE


@vllm
@served
def test_vllm_refuses_what_it_would_serve_wrongly(base, tmp_path):
    hybrid = splice(base, plan(sites="L0.H2,7"))
    hybrid.config.time_step_limit = (0.0, 0.5)
    hybrid.save_pretrained(tmp_path, tokenizer=base.tokenizer)
    with pytest.raises(UserError, match="does not bound the time step"):
        prove_in_engine("vllm", PYTHON, hybrid, tmp_path)
