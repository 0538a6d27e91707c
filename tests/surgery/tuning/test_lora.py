"""Adapters learn where they can, and the base's weights stay."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.records.recipe import Lora
from surgery.splicing.splice import splice
from surgery.tuning.loop import tune
from surgery.tuning.lora import match_targets
from tests.surgery.tuning.small import TOKENIZER, few_steps, make_plan, toy_base, toy_hybrid


@pytest.mark.parametrize(
    ("family", "targets", "found"),
    [
        ("mamba2", ("q_projection",), "q_projection"),
        ("mamba2", ("in_proj", "out_proj", "conv1d"), "conv1d"),
        ("mamba", ("conv1d",), "conv1d"),
        ("mamba2", ("norm",), "norm"),
        ("mamba2", ("q_proj",), "q_proj"),
        ("mamba2", ("lm_head",), "lm_head"),
        ("mamba2", ("in_proj", "mixer.in_proj"), "in_proj"),
    ],
)
def test_targets_that_would_learn_nothing_are_refused(family: str, targets: tuple[str, ...], found: str) -> None:
    with pytest.raises(UserError, match=found):
        match_targets(toy_hybrid(family), Lora(target_modules=targets))


def test_adapters_are_merged_into_copies(tmp_path: Path) -> None:
    base = toy_base()
    hybrid = splice(base, Plan(**make_plan("mamba2"))).eval()
    ids = torch.arange(1, 30)[None]
    said = base(input_ids=ids).logits
    log = tune(hybrid, TOKENIZER, few_steps(lora=Lora(target_modules=("in_proj", "out_proj"), r=2)), folder=tmp_path)
    assert torch.equal(base(input_ids=ids).logits, said)
    assert not any(".lora_" in name or ".base_layer" in name for name, _ in hybrid.named_parameters())
    ours, theirs = hybrid.mixer_at(0).in_proj.weight, base.backbone.layers[0].mixer.in_proj.weight
    assert not torch.equal(ours, theirs)
    assert torch.linalg.matrix_rank(ours - theirs) == 2
    assert len(log.steps) == 4
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    assert any("lora_A" in name for name in names)
    assert any(".graft." in name for name in names)


def test_peft_puts_what_was_saved_on_an_untuned_hybrid(tmp_path: Path) -> None:
    from peft import PeftModel

    hybrid = toy_hybrid()
    tune(hybrid, TOKENIZER, few_steps(lora=Lora(target_modules=("in_proj",), r=2)), folder=tmp_path)
    loaded = PeftModel.from_pretrained(toy_hybrid(), tmp_path / "adapter").eval()
    ids = torch.arange(1, 30)[None]
    assert torch.allclose(loaded(input_ids=ids).logits, hybrid(input_ids=ids).logits, atol=1e-10)


def test_adapters_alone_learn_on_a_base() -> None:
    from surgery.tuning.controls import trainable_control

    base = toy_base()
    control = trainable_control(base, Plan(**make_plan("mamba2")), "adapters")
    ids = torch.arange(1, 30)[None]
    said = base(input_ids=ids).logits
    tune(control, TOKENIZER, few_steps(lora=Lora(target_modules=("in_proj",))), teacher=base)
    assert torch.equal(base(input_ids=ids).logits, said)
    assert not torch.equal(control(input_ids=ids).logits, said)
