"""What a step of tuning keeps for its backward pass: nothing below the first graft, no copies of fixed weights, and only what
enters the blocks where more does not fit."""

import copy

import pytest
import torch
from accelerate import disk_offload
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FalconMambaConfig, FalconMambaForCausalLM

from surgery.costs import estimate
from surgery.jobs.stages import first_change
from surgery.models import pieces
from surgery.models.pace import Pace, Work
from surgery.models.quantised import has_quantised_weight
from surgery.records.plan import Plan
from surgery.records.recipe import Lesson, Lora, Recipe, Tune
from surgery.runtime import memory
from surgery.splicing.splice import adopt, graft_parameters, splice, stock
from surgery.tuning import backward_memory
from surgery.tuning.backward_memory import KeepingWeights
from surgery.tuning.distil import Distillation
from surgery.tuning.loop import started_run, tune
from surgery.tuning.sequences import IGNORE
from surgery.tuning.trainable import trainable, training
from tests.models import VOCABULARY, random_base, random_llamba, random_selective

KINDS = {
    "mamba2": random_base,
    "falcon": lambda **fields: random_selective(FalconMambaConfig, FalconMambaForCausalLM, **fields),
    "llamba": random_llamba,
}
DEPTH = {"mamba2": "num_hidden_layers", "falcon": "num_hidden_layers", "llamba": "n_layer"}
LESSON = Lesson(options={"pairs": (2, 4)}, queries=3)
SHORT = Tune(steps=2, batch_size=4, lessons=(LESSON,), text_batch_size=2, text_tokens=16, warmup_steps=1)


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def batch(t=24):
    ids = torch.randint(1, 99, (2, t), generator=torch.Generator().manual_seed(3))
    targets = torch.where(torch.arange(t) % 2 == 0, ids.roll(-1, 1), IGNORE)
    places = torch.arange(t).expand(2, t)
    return ids, targets, (ids.flip(0), torch.ones_like(ids, dtype=torch.bool), places)


def kept(distillation, parts):
    """(bytes that a forward keeps beside what the model holds; the gradients of its loss; the shapes of what is kept)"""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*distillation.parameters(), *distillation.buffers())}
    storages = {}

    def keep(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            storages[storage.data_ptr()] = storage, tuple(tensor.shape)
        return tensor

    distillation.train()
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = distillation(*parts)["loss"]
    size, shapes = sum(storage.nbytes() for storage, _ in storages.values()), {shape for _, shape in storages.values()}
    trained = [p for p in distillation.student.parameters() if p.requires_grad]
    return size, torch.autograd.grad(loss, trained), shapes


def measured(base, layer, parts, dtype=torch.float32, **options):
    """As kept, of the hybrid of a base with a graft in one layer. options: of Distillation."""
    hybrid = splice(base.to(dtype), Plan(sites=(f"L{layer}.H1",), blend=0.5))
    teacher = adopt(stock(hybrid))
    with training(hybrid, trainable(hybrid, None), teacher):
        return kept(Distillation(hybrid, teacher, **options), parts)


def test_nothing_below_the_first_graft_is_kept(kind):
    shallow, deep = (measured(KINDS[kind](**{DEPTH[kind]: layers}), layers - 1, batch())[0] for layers in (1, 4))
    everything = measured(KINDS[kind](**{DEPTH[kind]: 4}), 0, batch())[0]
    assert shallow == deep
    assert everything > 2 * deep


@pytest.mark.parametrize(("kind", "dtype"), [("mamba2", torch.float16), ("falcon", torch.float32), ("llamba", torch.float16)])
def test_no_copies_of_fixed_weights_are_kept(kind, dtype, monkeypatch):
    base = KINDS[kind]()
    projections = {tuple(p.shape) for name, p in base.named_parameters() if name.endswith("_proj.weight")}
    projections |= {shape[::-1] for shape in projections}
    ours = measured(copy.deepcopy(base), 0, batch(), dtype, bf16=True)
    monkeypatch.setattr(
        KeepingWeights, "__torch_function__", lambda self, f, types, args=(), kwargs=None: f(*args, **kwargs or {})
    )
    theirs = measured(base, 0, batch(), dtype, bf16=True)
    assert all(torch.equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True))
    assert ours[0] < theirs[0]
    assert len(ours[2] & projections) < len(theirs[2] & projections)


def test_weights_stay_in_their_dtype_and_nothing_is_held_twice(tokenizer):
    """Of a base in 16 bits, what is trained alone is float32, and student and teacher have one copy of the rest."""
    base = KINDS["falcon"](vocab_size=VOCABULARY).to(torch.bfloat16)
    hybrid = splice(base, Plan(sites=("L1.H1",), blend=0.5))
    before = {p.untyped_storage().data_ptr() for p in hybrid.parameters()}
    with started_run(hybrid, tokenizer, SHORT) as run:
        for name, p in run.distillation.named_parameters():
            is_trained = ".graft." in name
            assert p.dtype == (torch.float32 if is_trained else torch.bfloat16), name
            assert is_trained or p.untyped_storage().data_ptr() in before, name
        run.finish()
    assert {p.dtype for p in hybrid.parameters()} == {torch.bfloat16}
    fixed = {p.untyped_storage().data_ptr() for name, p in hybrid.named_parameters() if ".graft." not in name}
    assert fixed <= before


@pytest.mark.parametrize(("kind", "dtype"), [("mamba2", torch.float16), ("falcon", torch.float16), ("llamba", torch.float32)])
def test_gradient_checkpointing_keeps_what_enters_the_blocks_and_changes_no_bit(kind, dtype):
    base, bf16 = KINDS[kind](**{DEPTH[kind]: 6}), dtype != torch.float32
    plain = measured(copy.deepcopy(base), 0, batch(), dtype, bf16=bf16)
    less = measured(base, 0, batch(), dtype, bf16=bf16, checkpointing=True)
    assert less[0] < plain[0] / 3
    assert all(torch.equal(a, b) for a, b in zip(plain[1], less[1], strict=True))


def test_blocks_are_computed_again_only_where_they_would_not_fit(monkeypatch):
    base = random_base(num_hidden_layers=4)
    monkeypatch.setattr(backward_memory, "FEW", 0)
    sizes = {}
    for free in (2**40, 0):
        monkeypatch.setattr(memory, "spare", lambda device, free=free: free)
        sizes[free] = measured(copy.deepcopy(base), 0, batch(), checkpointing="auto")
    assert sizes[0][0] < sizes[2**40][0] / 2
    assert sizes[2**40][0] == measured(copy.deepcopy(base), 0, batch())[0]
    assert all(torch.equal(a, b) for a, b in zip(sizes[0][1], sizes[2**40][1], strict=True))


def test_a_measured_block_draws_no_random_numbers(tokenizer, monkeypatch):
    """auto runs a block once more at the beginning; dropout must not notice."""
    monkeypatch.setattr(backward_memory, "FEW", 0)
    options = SHORT.model_copy(update={"steps": 1, "lora": Lora(target_modules=("in_proj",), lora_dropout=0.5, r=2)})
    weights = []
    for checkpointing in (False, "auto", True):
        hybrid = splice(random_base(vocab_size=VOCABULARY), Plan(sites=("L1.H3",), blend=0.5))
        tune(hybrid, tokenizer, options.model_copy(update={"gradient_checkpointing": checkpointing}))
        weights.append([p.detach().clone() for p in (*graft_parameters(hybrid).values(), *hybrid.parameters())])
    assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))


def test_the_cross_entropy_of_many_targets_is_computed_in_pieces(monkeypatch):
    base = random_base().double()
    plain = measured(copy.deepcopy(base), 1, batch()[:2], torch.float64)
    monkeypatch.setattr(pieces, "LOGITS", 5 * 99)
    parted = measured(base, 1, batch()[:2], torch.float64)
    assert (24, 99) in plain[2]
    assert not any(shape[-1:] == (99,) for shape in parted[2])
    for a, b in zip(plain[1], parted[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-12)  # logits are float32


@pytest.mark.parametrize("how", ["disk", 4, 8])
def test_a_base_on_the_disk_or_in_few_bits_is_held_once_and_its_weights_are_kept_once(how, tmp_path):
    """Neither the teacher nor the way back has copies of it. Checkpointing fetches weights again."""
    base = random_base()
    if how == "disk":
        disk_offload(base, str(tmp_path / "weights"), execution_device="cpu", offload_buffers=True)
    else:
        pytest.importorskip("bitsandbytes")
        base.save_pretrained(tmp_path)
        settings = BitsAndBytesConfig(**{f"load_in_{how}bit": True})
        base = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=settings).eval()
    projections = {tuple(p.shape) for name, p in random_base().named_parameters() if name.endswith("_proj.weight")}
    projections |= {shape[::-1] for shape in projections}
    hybrid = splice(base, Plan(sites=("L0.H1",), blend=0.5))
    modules = {id(module) for module in hybrid.modules()}
    teacher = adopt(stock(hybrid))
    with training(hybrid, trainable(hybrid, None), teacher):
        distillation = Distillation(hybrid, teacher)
        own = [module for module in distillation.teacher_blocks.modules() if has_quantised_weight(module)]
        assert len(own) == (0 if how == "disk" else 2)  # of the grafted block
        assert all(id(module) in modules for module in own)
        plain = kept(distillation, batch())
        less = kept(Distillation(hybrid, teacher, checkpointing=True), batch())
    assert all(torch.equal(a, b) for a, b in zip(plain[1], less[1], strict=True))
    assert not less[2] & projections
    assert less[0] < plain[0] / 2
    if how != "disk":
        assert not plain[2] & projections


def test_a_tuning_that_ran_out_of_memory_is_resumed_with_checkpointing(tokenizer, tmp_path):
    """It changes no result, so it may change."""
    hybrid, other = (splice(random_base(vocab_size=VOCABULARY), Plan(sites=("L1.H3",))) for _ in range(2))
    options = SHORT.model_copy(update={"gradient_checkpointing": False, "steps": 1})
    log = tune(hybrid, tokenizer, options, out=tmp_path)
    assert tune(other, tokenizer, options.model_copy(update={"gradient_checkpointing": True}), out=tmp_path, resume=True) == log
    assert all(torch.equal(p, other.get_parameter(name)) for name, p in graft_parameters(hybrid).items())
    earlier = Recipe(model="x", tune=options)
    assert first_change(earlier, Recipe(model="x", tune=SHORT.model_copy(update={"steps": 1})), ("tune",)) is None
    assert first_change(earlier, Recipe(model="x", tune=SHORT), ("tune",)) is not None


@pytest.mark.parametrize(
    ("checkpointing", "free", "tried"),
    [("auto", 100, [False]), ("auto", 40, [False, True]), (True, 100, [True]), (False, 1, [False])],
)
def test_the_estimate_decides_as_the_run_will(checkpointing, free, tried, monkeypatch):
    asked = []
    held = Pace((1.0, 0.0), (50.0, 0.0))
    monkeypatch.setattr(estimate, "step_work", lambda *_: (Work(1, 8, 8), None))
    costs = object.__new__(estimate.Costs)
    monkeypatch.setattr(costs, "_rehearsed", lambda options: asked.append(options.gradient_checkpointing) or (held, 0))
    costs.recipe, costs.tokenizer = Recipe(model="x", tune=Tune(gradient_checkpointing=checkpointing)), None
    costs.available, costs.held = 30 + free, 30
    costs._timed_step()
    assert asked == tried
