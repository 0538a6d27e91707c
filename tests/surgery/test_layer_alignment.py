"""Hidden-state alignment: what is copied, what is learnt, and what does not fit."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from surgery.errors import UserError
from surgery.pretraining.layer_alignment import align_layers, attention_states, copy_shared
from surgery.records.plan import Plan
from surgery.splicing.splice import splice
from surgery.tuning.trainable import own_mixers
from tests.models import SAME, random_llamba


def teacher(**changes) -> LlamaForCausalLM:
    torch.manual_seed(1)
    fields = {
        "vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**fields | changes)).eval()


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(1, 99, (4, 24), generator=generator)


def test_some_layers_learn_alone_also_where_heads_are_attention():
    """What a layer learns does not depend on whether others learn beside it; the rest stays as it is."""
    teach = teacher()
    base = random_llamba()
    align_layers(base, teach, batches(), steps=2, learning_rate=3e-3)
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    hybrid = own_mixers(splice(base, Plan(sites="L1.H0,3")), [1])
    log = align_layers(hybrid, teach, batches(), steps=50, learning_rate=3e-3, layers=[1])
    assert log[0].keys() == {"step", "L1"}
    after = hybrid.state_dict()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed
    assert all(name.startswith("backbone.layers.1.mixer.") for name in changed)
    assert all(torch.equal(tensor, before[name]) for name, tensor in base.state_dict().items()), "the base has its own"
    graft = "backbone.layers.1.mixer.graft.q_proj.weight"
    assert not torch.equal(after[graft], splice(base, Plan(sites="L1.H0,3")).state_dict()[graft])


def test_the_mixers_learn_and_the_rest_is_the_teachers(tokens, request):
    student, model = random_llamba(), teacher()
    log = align_layers(student, model, batches(), steps=100, learning_rate=3e-3)
    assert [entry["step"] for entry in log] == [50, 100]
    assert all(log[1][f"L{i}"] < 0.9 * log[0][f"L{i}"] for i in range(3))
    assert torch.equal(student.backbone.embedding.weight, model.model.embed_tokens.weight)
    assert torch.equal(student.backbone.layers[2].mlp.up_proj.weight, model.model.layers[2].mlp.up_proj.weight)
    # Where the mixers give what the attention gives, the whole is the teacher.
    request.getfixturevalue("in_float64")
    student, model = student.double(), model.double()
    for block, (_, wanted) in zip(student.backbone.layers, attention_states(model, tokens), strict=True):
        block.mixer.forward = lambda *_, wanted=wanted, **__: wanted
    torch.testing.assert_close(student(tokens).logits, model(tokens).logits, **SAME)


@pytest.mark.parametrize(
    ("changes", "complaint"), [({"num_hidden_layers": 2}, "2 layers"), ({"intermediate_size": 80}, "does not fit")]
)
def test_a_teacher_of_another_size_is_refused(changes, complaint):
    with pytest.raises(UserError, match=complaint):
        copy_shared(random_llamba(), teacher(**changes))
