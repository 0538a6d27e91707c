"""Hybrids inside stock models, met by what published checkpoints come with: integers, 16 bits, LoRA, another tokenizer, weights
that are read layer by layer."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import surgery
from surgery.models.quantised import exact
from surgery.records.recipe import Lora
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.tuning.loop import tune
from tests.models import VOCABULARY, but_slow
from tests.surgery.stock_bases import base_of, plan_for
from tests.surgery.test_tune import SHORT

# Of each a projection that its mixers have in the base.
PROJECTIONS = {"bamba": "in_proj", "qwen3_next": "in_proj_qkvz", "xlstm": "v", "minimax": "qkv_proj"}
IDS = torch.randint(1, 99, (2, 21), generator=torch.Generator().manual_seed(1))


def kinds(*quick):
    return pytest.mark.parametrize("name", but_slow(PROJECTIONS, *quick))


@torch.no_grad()
@kinds("bamba", "xlstm")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_in_16_bits_a_hybrid_is_as_near_to_float32_as_its_base(name, dtype):
    base = base_of(name)
    hybrid = splice(base, plan_for(base))
    narrow_base = base_of(name).to(dtype)
    narrow = splice(narrow_base, plan_for(narrow_base))
    off_base, off = ((a(IDS).logits.float() - b(IDS).logits).norm() for a, b in ((narrow_base, base), (narrow, hybrid)))
    assert off < 3 * off_base + 0.02 * hybrid(IDS).logits.norm()
    steps = narrow(IDS[:, :12], use_cache=True)
    cached = [narrow(IDS[:, t : t + 1], past_key_values=steps.past_key_values, use_cache=True).logits for t in range(12, 21)]
    apart = (torch.cat(cached, 1) - narrow(IDS).logits[:, 12:]).float().norm()
    assert apart < 3 * off_base + 0.02 * hybrid(IDS).logits.norm()


@kinds("qwen3_next")
def test_tuned_with_lora_on_the_base_s_own_projection(name, tokenizer, tmp_path):
    base_of(name, vocab_size=VOCABULARY).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = surgery.load(tmp_path / "base")
    hybrid = splice(base, plan_for(base.model))
    before = {name: p.clone() for name, p in hybrid.named_parameters()}
    tune(hybrid, tokenizer, SHORT.model_copy(update={"lora": Lora(target_modules=(PROJECTIONS[name],), r=2)}))
    changed = {name for name, p in hybrid.named_parameters() if not torch.equal(p, before[name])}
    adapted = {name for name in changed if ".graft." not in name}
    assert changed - adapted == set(graft_parameters(hybrid))
    assert adapted
    assert all(name.endswith(f"{PROJECTIONS[base.model.config.model_type]}.weight") for name in adapted)
    assert surgery.export(hybrid, tmp_path / "patch", format="patch").holds()


@kinds("xlstm")
def test_verified_layer_by_layer_from_a_base_in_float16(name, tokenizer, tmp_path):
    base_of(name, vocab_size=VOCABULARY).half().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    base = surgery.load(tmp_path / "base")
    proof = surgery.export(splice(base, plan_for(base.model)), tmp_path / "hf", verify="layers")
    assert proof.verify == "layers"
    assert proof.holds()


@kinds("bamba")
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised(name, bits, tokenizer, tmp_path):
    pytest.importorskip("bitsandbytes", reason="quantised bases need bitsandbytes")
    base_of(name, vocab_size=VOCABULARY).save_pretrained(tmp_path / "base")
    loaded = {8: {"load_in_8bit": True}, 4: {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}[bits]
    settings = BitsAndBytesConfig(**loaded)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=settings).eval()
    exact(base)
    hybrid = splice(base, plan_for(base))
    changed = (hybrid(IDS).logits - adopt(base)(IDS).logits).norm()
    assert changed > 1e-3
    with hybrid.disable_grafts():
        assert torch.equal(hybrid(IDS).logits, adopt(base)(IDS).logits)
    tune(hybrid, tokenizer, SHORT.model_copy(update={"steps": 1}))
    hybrid.save_pretrained(tmp_path / "hybrid")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid").eval()
    exact(again)
    torch.testing.assert_close(again(IDS).logits, hybrid(IDS).logits, atol=1e-4, rtol=0)
    assert type(unsplice(hybrid)) is type(base)
