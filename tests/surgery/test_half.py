"""float16 and bfloat16: models as near to float64 as their base is, tuned like in float32, stored as they were."""

import copy
import math

import numpy as np
import pytest
import torch
from accelerate import cpu_offload
from accelerate.state import AcceleratorState
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    Trainer,
    TrainingArguments,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from surgery.costs import rehearsal
from surgery.errors import UserError
from surgery.families.mamba2 import Mamba2HybridConfig, Mamba2HybridForCausalLM
from surgery.kernels.dispatch import use
from surgery.locating.attribution import attribute_starts
from surgery.locating.replay import Replay
from surgery.locating.subject import Subject
from surgery.locating.walk import fully_gated
from surgery.probes.encoded import encode
from surgery.probes.kv import KVRetrieval
from surgery.records.plan import Plan
from surgery.records.recipe import EarlyStopping, Lesson, Lora, Tune
from surgery.splicing.splice import adopt, graft_parameters, splice
from surgery.tuning import steps
from surgery.tuning.loop import tune
from surgery.tuning.trainable import trainable, training
from tests.models import BASES, VOCABULARY, but_slow, random_base, random_selective, subject

HALF = {torch.float16: 1e-2, torch.bfloat16: 6e-2}  # and how far from float64 a random model's logits may be
half = pytest.mark.parametrize("dtype", HALF, ids=str)
HEADS = Plan(sites=("L0.H1,2,7", "L2.H3"), blend=0.5)
WHOLE = Plan(sites=("L1.H3,5",), starts={"L1.H3": {"sign": -1, "tau": 0.5}})
NO_TIME_STEP = Plan(sites=("L1.H3,5",), time_step=False)
LAYER = Plan(kind="layer", sites=("L1",))
FAMILIES = ("plain", "mamba", "falcon mamba", "llamba")
MODELS = {
    **{f"{base}, {name}": (base, plan) for base in FAMILIES for name, plan in (("gated", HEADS), ("heads", WHOLE))},
    "mamba, no time step": ("mamba", NO_TIME_STEP),
    **{f"{base}, layer": (base, LAYER) for base in ("plain", "falcon mamba", "llamba")},
}


QUICK = ("plain, gated", "mamba, heads", "mamba, no time step", "falcon mamba, gated", "llamba, heads", "falcon mamba, layer")


@pytest.fixture(params=but_slow(MODELS, *QUICK), ids=lambda name: name.replace(",", "").replace(" ", "-"))
def model(request):
    base, plan = MODELS[request.param]
    return splice(BASES[base](), plan)


@pytest.fixture(scope="module")
def padded() -> dict[str, Tensor]:
    """Three rows, two of them padded on the left."""
    ids = torch.randint(1, 99, (3, 29), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :9] = mask[2, :20] = 0
    return {"input_ids": ids, "attention_mask": mask}


def relative(actual: Tensor, exact: Tensor) -> float:
    return ((actual.double() - exact).norm() / exact.norm()).item()


@torch.no_grad()
def logits(model, inputs, dtype) -> Tensor:
    """Of all tokens; those of padding are finite, and 0 here."""
    found = copy.deepcopy(model).to(dtype)(**inputs, use_cache=False).logits
    assert found.isfinite().all()
    return found * inputs["attention_mask"][..., None]


@half
@torch.no_grad()
def test_cached_logits_are_near_those_of_float64(model, padded, dtype):
    exact, narrow = logits(model, padded, torch.float64), copy.deepcopy(model).to(dtype)
    ids, mask = padded.values()
    output = narrow(ids[:, :25], attention_mask=mask[:, :25], use_cache=True)
    parts = [output.logits]
    for i in range(25, ids.shape[1]):
        seen = {"attention_mask": mask[:, : i + 1], "cache_params": output.cache_params, "use_cache": True}
        parts.append(narrow(ids[:, i : i + 1], **seen).logits)
    found = torch.cat(parts, 1)
    assert found.isfinite().all()
    assert relative(found * mask[..., None], exact) < HALF[dtype]


@half
def test_gradients_are_near_those_of_float64(model, padded, dtype):
    def gradients(model):
        model(**padded, use_cache=False).logits.double()[padded["attention_mask"].bool()].logsumexp(-1).sum().backward()
        found = {name: p.grad for name, p in graft_parameters(model).items()}
        assert all(g.isfinite().all() for g in found.values())
        return torch.cat([g.double().flatten() for g in found.values()])

    exact, narrow = (gradients(copy.deepcopy(model).to(d)) for d in (torch.float64, dtype))
    assert relative(narrow, exact) < 5 * HALF[dtype]


@half
@pytest.mark.parametrize("base", ["plain", "mamba", "falcon mamba"])
def test_time_steps_that_16_bits_cannot_hold(base, padded, dtype):
    """softplus(-40) is 4e-18. Beside ordinary heads, some have no larger time step."""
    model = splice(BASES[base](), WHOLE)
    mixer = model.backbone.layers[1].mixer
    with torch.no_grad():
        bias = mixer.dt_bias if base == "plain" else mixer.dt_proj.bias
        bias[[3, 4]] = -40.0
    exact = logits(model, padded, torch.float64)
    assert relative(logits(model, padded, dtype), exact) < HALF[dtype]
    narrow = copy.deepcopy(model).to(dtype)
    narrow(**padded, use_cache=False).logits.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in narrow.parameters() if p.grad is not None)


@pytest.mark.parametrize(("config", "kind"), [(MambaConfig, MambaForCausalLM), (FalconMambaConfig, FalconMambaForCausalLM)])
def test_products_beyond_float16(config, kind, padded):
    """Where transformers' own gives NaN: y silu(gate) is beyond 65504, and so is the stream in float32 behind it."""
    base = random_selective(config, kind, residual_in_fp32=True, use_bias=True)
    with torch.no_grad():
        base.backbone.layers[0].mixer.D.mul_(1e3)
        base.backbone.layers[0].mixer.in_proj.weight.mul_(1e2)
        base.backbone.layers[0].mixer.out_proj.bias.normal_()
        assert not copy.deepcopy(base).half()(**padded).logits.isfinite().all()
    for model in (adopt(base), splice(base, WHOLE)):
        assert relative(logits(model, padded, torch.float16), logits(model, padded, torch.float64)) < 5e-2


@pytest.mark.parametrize("how", ["zero", "mean"])
@pytest.mark.parametrize("family", ["mamba", "llamba"])
def test_heads_are_ablated_where_products_are_beyond_float16(family, how, tokenizer):
    """There a mixer's output projection reads divided numbers, and what it gives is multiplied again."""
    base = BASES[family]()
    with torch.no_grad():
        base.backbone.layers[0].mixer.in_proj.weight.mul_(30)
    torch.manual_seed(0)
    ids, other = torch.randint(1, 99, (2, 3, 12))
    last = torch.full((3,), 11)
    lost = {}
    for dtype in (torch.float32, torch.float16):
        model = adopt(copy.deepcopy(base).to(dtype))
        layer = next(Replay(subject(model), ids, last, reference=(other, last)).layers())
        lost[dtype] = layer.logits(layer.ablation(range(layer.mixers[0].heads // 2), how)) - layer.base
    assert relative(lost[torch.float16], lost[torch.float32].double()) < 5e-2


def test_a_bias_that_accelerate_keeps_elsewhere():
    model = splice(random_selective(MambaConfig, MambaForCausalLM, use_bias=True).half(), WHOLE)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        before = model(ids).logits
        assert torch.equal(cpu_offload(model, execution_device="cpu", offload_buffers=True)(ids).logits, before)


@half
@torch.no_grad()
def test_matrices(model, dtype):
    exact, narrow = (copy.deepcopy(model).to(d).backbone.layers[1].mixer for d in (torch.float64, dtype))
    u = torch.randn(1, 17, model.config.hidden_size, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert relative(narrow.matrices(u), exact.matrices(u.double())) < 2 * HALF[dtype]


@half
@pytest.mark.parametrize("name", ["plain", "mamba", "llamba"])
def test_attribution_has_the_same_order(name, dtype, tokenizer):
    base = BASES[name](vocab_size=VOCABULARY)
    encoded = encode(tokenizer, KVRetrieval(pairs=4).questions(6, 0))
    exact, narrow = (
        attribute_starts(fully_gated(Subject.of(copy.deepcopy(base).to(d), tokenizer)), encoded).sum(1).flatten()
        for d in (torch.float32, dtype)
    )
    assert narrow.isfinite().all()
    assert np.corrcoef(exact.argsort().argsort(), narrow.float().argsort().argsort())[0, 1] > 0.95


# --- tuning

LESSON = Lesson(options={"pairs": (2, 4)}, queries=3)
SHORT = Tune(steps=3, batch_size=4, lessons=(LESSON,), text_batch_size=2, text_tokens=16, save_steps=2)
TUNE = SHORT.model_copy(
    update={"lora": Lora(target_modules=("in_proj",), r=2), "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
)
KINDS = {
    "mamba-2": (random_base, HEADS),
    "mamba-1": (lambda **fields: random_selective(MambaConfig, MambaForCausalLM, **fields), HEADS),
    "falcon, layer": (lambda **fields: random_selective(FalconMambaConfig, FalconMambaForCausalLM, **fields), LAYER),
}


mamba_1 = pytest.mark.parametrize("bases", ["mamba-1"], indirect=True)


@pytest.fixture(params=but_slow(KINDS, "mamba-2"))
def bases(request, tokenizer):
    """dtype -> the base in it, and the plan; the numbers are those of float16."""
    make, plan = KINDS[request.param]
    base = make(vocab_size=VOCABULARY).half()
    return lambda dtype: (copy.deepcopy(base).to(dtype), plan)


def test_tuning_as_in_float32(bases, tokenizer):
    logs = {}
    for dtype in (torch.float32, torch.float16):
        base, plan = bases(dtype)
        hybrid = splice(base, plan)
        logs[dtype] = tune(hybrid, tokenizer, TUNE, teacher=adopt(base))
        assert {p.dtype for p in hybrid.parameters()} == {dtype}
        assert all(p.isfinite().all() for p in hybrid.parameters())
    one, two = logs.values()
    for mine, other in zip(one, two, strict=True):
        assert other["loss"] == pytest.approx(mine["loss"], rel=0.05)


@mamba_1
def test_the_control_and_what_is_tuned_of_it(bases, tokenizer):
    ends = []
    for dtype in (torch.float32, torch.float16):
        base, _ = bases(dtype)
        control = copy.deepcopy(adopt(base))
        with training(control, trainable(control, [1])) as trained:
            assert {p.dtype for p in trained.values()} == {torch.float32}
        ends.append(tune(control, tokenizer, SHORT, layers=[1], teacher=adopt(base))[-1]["loss"])
        assert all(p.dtype == dtype and p.isfinite().all() for p in control.parameters())
    assert ends[1] == pytest.approx(ends[0], rel=0.05)


@pytest.mark.slow  # in float32 it has a quick test in test_tune_resume.py
@mamba_1
def test_resumed_it_ends_bit_for_bit(bases, tokenizer, tmp_path, monkeypatch):
    base, plan = bases(torch.float16)
    whole, hybrid, again = (splice(base, plan) for _ in range(3))
    keep = EarlyStopping(eval_steps=2, accuracy=1.0, perplexity=10.0, examples=2, windows=1)
    options = TUNE.model_copy(update={"lora": None, "steps": 4, "early_stopping": keep})
    log = tune(whole, tokenizer, options)
    step, taken = steps.TrainingLoop._step, []

    def failing(*args, **named):
        taken.append(1)
        if len(taken) == 4:
            raise KeyboardInterrupt
        return step(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(steps.TrainingLoop, "_step", failing)
        with pytest.raises(KeyboardInterrupt):
            tune(hybrid, tokenizer, options, out=tmp_path)
    assert tune(again, tokenizer, options, out=tmp_path, resume=True) == log
    for name, p in graft_parameters(whole).items():
        assert torch.equal(p, again.get_parameter(name)), name


@pytest.mark.parametrize("bases", ["mamba-2"], indirect=True)
def test_a_rehearsal_leaves_float16_as_it_was(bases, tokenizer, monkeypatch):
    base, plan = bases(torch.float16)
    hybrid = splice(base, plan)
    before = {name: p.detach().clone() for name, p in hybrid.named_parameters()}
    monkeypatch.setattr(rehearsal, "SECONDS", 0.01)  # one size of a step
    rehearsal.rehearse(hybrid, tokenizer, SHORT)
    assert all(torch.equal(p, before[name]) for name, p in hybrid.named_parameters())


def test_what_does_not_fit_into_float16_is_said(tokenizer):
    hybrid = splice(random_base().half(), HEADS)
    name = "backbone.layers.0.mixer.graft.q_proj.weight"
    with (
        pytest.raises(UserError, match=f"'{name}' is beyond the range of float16; use a base in bfloat16"),
        training(hybrid, trainable(hybrid, None)) as trained,
        torch.no_grad(),
    ):
        trained[name][0, 0] = 1e5


def test_tuned_values_survive_being_stored(bases, tokenizer, tmp_path):
    """Within float16's rounding of what was learnt in float32, and then exactly."""
    base, plan = bases(torch.float16)
    hybrid = splice(base, plan)
    with training(hybrid, trainable(hybrid, None)) as trained, torch.no_grad():
        for name, p in trained.items():
            if name.endswith(("log_tau", "gate")):
                p.add_(torch.linspace(-1.2345, 2.3456, p.numel()))
        learnt = {name: p.clone() for name, p in trained.items()}
    for name, value in learnt.items():
        torch.testing.assert_close(hybrid.get_parameter(name).float(), value, rtol=2**-11, atol=2**-25)
    hybrid.save_pretrained(tmp_path)
    again = type(hybrid).from_pretrained(tmp_path)
    assert again.dtype == torch.float16
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in hybrid.named_parameters())


# --- others' training loops


def trained_by_trainer(model, folder):
    """The losses of two steps, computed in bfloat16."""
    ids = torch.randint(1, 99, (8, 40), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    options = {"max_steps": 2, "per_device_train_batch_size": 4, "report_to": "none", "logging_steps": 1, "save_strategy": "no"}
    trainer = Trainer(model, TrainingArguments(str(folder), bf16=True, use_cpu=True, disable_tqdm=True, **options), None, rows)
    trainer.train()
    AcceleratorState._reset_state()  # the Trainer's precision would be that of every later Accelerator
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def test_trainer_in_bfloat16_with_the_scan_in_pytorch(tmp_path):
    losses = []
    for backend in ("chunked", "reference"):
        with use(ssd_scan=backend):
            losses.append(trained_by_trainer(splice(random_base(), HEADS), tmp_path))
    assert all(math.isfinite(loss) for loss in losses[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_trainer_in_bfloat16_of_an_exported_folder(tmp_path):
    """Its own code, where there is nothing to compile."""
    splice(random_base(), HEADS).save_pretrained(tmp_path / "hybrid")
    kind = get_class_from_dynamic_module("mamba2_hybrid.Mamba2HybridForCausalLM", str(tmp_path / "hybrid"))
    assert not kind.__module__.startswith("surgery.")
    AutoConfig.register(Mamba2HybridConfig.model_type, Mamba2HybridConfig, exist_ok=True)  # the folder's code put its own there
    AutoModelForCausalLM.register(Mamba2HybridConfig, Mamba2HybridForCausalLM, exist_ok=True)
    losses = trained_by_trainer(kind.from_pretrained(tmp_path / "hybrid"), tmp_path)
    assert all(math.isfinite(loss) for loss in losses)
