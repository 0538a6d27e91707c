"""adopt, splice and unsplice share the base's modules, and refuse what cannot be grafted."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

from surgery.errors import UserError
from surgery.modeling import family_of
from surgery.modeling.graft import ABSENT, NATS
from surgery.models.load import open_folder
from surgery.records.plan import Plan, Start
from surgery.splicing.splice import adopt, changed_since_splice, splice, unsplice
from tests.surgery.modeling.bases import BASES, STOCK, make_base, make_hybrid, make_rows

FAMILIES = pytest.mark.parametrize("name", BASES)


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


@FAMILIES
def test_splice_adds_grafts_that_learn_to_a_base_that_does_not(name: str) -> None:
    base = make_base(name)
    hybrid = splice(base, Plan(sites="L1.H1,3"))
    learning = {key for key, p in hybrid.named_parameters() if p.requires_grad}
    assert learning == set(hybrid.graft_parameters())
    shared = {key: p for key, p in hybrid.named_parameters() if key not in learning}
    assert all(p is shared[key] for key, p in base.named_parameters())
    assert hybrid.backbone.layers[0].mixer.in_proj is base.backbone.layers[0].mixer.in_proj
    assert hybrid.backbone.layers[0].mixer is not base.backbone.layers[0].mixer
    assert type(base) is family_of(base.config).base
    assert hybrid.lm_head.weight is base.lm_head.weight


@FAMILIES
def test_unsplice_gives_the_base_back_bit_for_bit(name: str) -> None:
    base, ids = make_base(name), make_rows()
    before, weights = logits_of(base, ids), {key: p.clone() for key, p in base.named_parameters()}
    hybrid = splice(base, Plan(sites="L1.H1,3"))
    hybrid.train()(ids, labels=ids).loss.backward()
    torch.optim.SGD(hybrid.graft_parameters().values(), 0.1).step()
    again = unsplice(hybrid.eval())
    assert type(again) is type(base)
    assert again.config.to_dict() == base.config.to_dict()
    assert torch.equal(logits_of(again, ids), before)
    assert all(p is dict(base.named_parameters())[key] for key, p in again.named_parameters())
    assert all(torch.equal(p, weights[key]) and p.requires_grad for key, p in again.named_parameters())


@pytest.mark.parametrize("name", STOCK)
def test_adopt_is_a_class_of_its_own_and_once_is_enough(name: str) -> None:
    base = make_base(name)
    adopted = adopt(base)
    assert type(adopted) is family_of(base.config).hybrid
    assert adopt(adopted) is adopted
    assert all(p.requires_grad for p in base.parameters())
    spliced = [logits_of(splice(model, Plan(sites="L1.H2")), make_rows()) for model in (base, adopted)]
    assert torch.equal(*spliced)


@FAMILIES
def test_grafts_may_stand_beside_those_that_the_base_brings(name: str) -> None:
    ids = make_rows()
    first = splice(make_base(name), Plan(sites="L0.H1", gate=0.5)).eval()
    before = logits_of(first, ids)
    both = splice(first, Plan(sites="L1.H3", gate=0.5)).eval()
    together = splice(make_base(name), Plan(sites=("L0.H1", "L1.H3"), gate=0.5)).eval()
    assert torch.equal(logits_of(both, ids), logits_of(together, ids))
    with both.disable_grafts():
        assert torch.equal(logits_of(both, ids), before)
    assert torch.equal(logits_of(unsplice(both), ids), before)
    assert unsplice(both).config.grafts == [{**first.config.grafts[0], "of_base": True}]
    with pytest.raises(UserError, match=r"L0\.H2"):
        splice(first, Plan(sites="L0.H2"))


@FAMILIES
def test_a_graft_starts_as_the_plan_says(name: str) -> None:
    starts = {"L1.H1": Start(sign=-1, tau=2.0, null=12.0), "L1.H4": Start(null=None)}
    hybrid = splice(make_base(name), Plan(sites="L1.H1,4", starts=starts, gate=0.25, closed_below=0.01, width=40))
    graft = hybrid.mixer_at(1).graft
    assert graft.signs == [-1, 1]
    torch.testing.assert_close(graft.log_tau.exp().tolist(), [2.0, 1.0])
    torch.testing.assert_close((NATS * graft.null).tolist(), [12.0, NATS * ABSENT])
    assert graft.gate.tolist() == [0.25, 0.25]
    assert graft.closed_below == 0.01
    assert graft.q_proj.out_features == 80


@FAMILIES
def test_the_width_beyond_the_state_size_changes_nothing_at_first(name: str) -> None:
    ids = make_rows()
    narrow, wide = (splice(make_base(name), Plan(sites="L1.H1,3", width=width)) for width in (8, 50))
    torch.testing.assert_close(logits_of(narrow, ids), logits_of(wide, ids), atol=1e-9, rtol=1e-9)


def test_queries_and_keys_start_as_the_bases() -> None:
    """Of Mamba-2: the head's scores are the base's, C_t . B_s, behind projection and convolution."""
    hybrid = splice(make_base("mamba2"), Plan(sites="L1.H1,4"))
    mixer, hidden = hybrid.mixer_at(1), torch.randn(1, 9, 24, dtype=torch.float64)
    streams = mixer.project(hidden)
    q, k = mixer.graft.queries_and_keys(mixer, hidden, streams, None, None, None)
    for place, group in enumerate((0, 1)):  # heads 1 and 4 of two groups of three
        torch.testing.assert_close(q[0, place] @ k[0, place].T, streams.q[0, :, group] @ streams.k[0, :, group].T)


@FAMILIES
@pytest.mark.parametrize(("sites", "more"), [("L7.H0", {}), ("L1.H99", {}), ("L1.H0", {"width": 2})])
def test_what_cannot_be_grafted_is_refused(name: str, sites: str, more: dict) -> None:
    with pytest.raises(UserError, match="width" if more else sites):
        splice(make_base(name), Plan(sites=sites, **more))


def test_a_hybrid_in_the_code_of_its_folder_is_not_taken_for_a_base() -> None:
    base = make_base("mamba2")
    base.__class__ = type("Hybrid", (type(base),), {"__module__": "transformers_modules.folder.mamba2"})
    base.config.grafts = [{"layer": 0}]
    with pytest.raises(UserError, match=r"surgery\.load"):
        adopt(base)


def test_other_models_are_no_bases() -> None:
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    assert adopt(llama) is llama
    with pytest.raises(UserError, match="llama"):
        splice(llama, Plan(sites="L0.H0"))
    with pytest.raises(UserError, match="Mamba2ForCausalLM"):
        unsplice(make_base("mamba2"))


@FAMILIES
@pytest.mark.parametrize("sites", ["L1.H1,3", "L1"])
def test_a_base_that_was_changed_in_place_is_said_to_be(name: str, sites: str, capsys: Any) -> None:
    hybrid = splice(make_base(name), Plan(sites=sites, kind="head" if "H" in sites else "layer"))
    adapters = LoraConfig(r=2, target_modules=["in_proj"], init_lora_weights=False)
    learns = get_peft_model(hybrid, adapters)
    unsplice(hybrid)
    unsplice(copy.deepcopy(hybrid).to(torch.float32))
    assert capsys.readouterr().err == ""
    unsplice(learns.merge_and_unload())
    said = capsys.readouterr().err
    assert "L1.H" in sites or "1 of its tensors" in said  # the other layer's
    assert "in_proj.weight" in said
    assert len(said.splitlines()) == 1


def test_a_base_that_was_changed_since_it_was_loaded_is_known(tmp_path: Path) -> None:
    make_hybrid("mamba2").save_pretrained(tmp_path)
    loaded = open_folder(tmp_path, torch.bfloat16, "cpu", False, False)
    for parameter in loaded.graft_parameters().values():
        parameter.data.add_(1)
    assert changed_since_splice(loaded.float()) == []
    loaded.backbone.norm_f.weight.data.add_(0.01)
    assert changed_since_splice(loaded) == ["backbone.norm_f.weight"]


@FAMILIES
def test_an_adapter_of_the_hybrid_leaves_the_base_alone(name: str) -> None:
    base, ids = make_base(name), make_rows()
    before = logits_of(base, ids)
    hybrid = splice(base, Plan(sites="L1.H1,3"))
    tuned = get_peft_model(hybrid, LoraConfig(r=2, target_modules=["in_proj"], modules_to_save=["graft"]))
    torch.manual_seed(0)
    for key, parameter in tuned.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter)
    assert not torch.equal(logits_of(tuned, ids), before)
    assert torch.equal(logits_of(base, ids), before)
    assert torch.equal(logits_of(unsplice(hybrid), ids), before)
    tuned.train()(ids, labels=ids).loss.backward()
    learning = {key for key, p in tuned.named_parameters() if p.requires_grad and p.grad is not None and p.grad.abs().max() > 0}
    assert any("lora_A" in key for key in learning)
    assert any("graft" in key and "q_proj" in key for key in learning)


@FAMILIES
def test_a_copy_of_a_hybrid_is_independent(name: str) -> None:
    hybrid, ids = make_hybrid(name), make_rows()
    before, twin = logits_of(hybrid, ids), copy.deepcopy(hybrid)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(0.5)
    assert torch.equal(logits_of(hybrid, ids), before)


@FAMILIES
def test_an_offloaded_base_is_spliced_as_it_is(name: str) -> None:
    from accelerate import cpu_offload

    ids, plan = make_rows(), Plan(sites="L1.H1,3", gate=0.5)
    expected = logits_of(splice(make_base(name), plan).eval(), ids)
    base = cpu_offload(make_base(name), execution_device=torch.device("cpu"))
    assert any(p.is_meta for p in base.parameters())
    torch.testing.assert_close(logits_of(splice(base, plan).eval(), ids), expected, atol=1e-9, rtol=1e-9)
    expected = logits_of(make_hybrid(name), ids)  # and a hybrid that is offloaded itself
    hybrid = cpu_offload(make_hybrid(name), execution_device=torch.device("cpu"))
    torch.testing.assert_close(logits_of(hybrid, ids), expected, atol=1e-9, rtol=1e-9)


@FAMILIES
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantised_base_is_spliced_saved_and_loaded(name: str, bits: int, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    make_base(name, dtype=torch.float32).save_pretrained(tmp_path / "base")
    how = BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
    base, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=how), make_rows()
    hybrid = splice(base, Plan(sites="L1.H1,3", gate=0.5)).eval()
    assert hybrid.backbone.layers[1].mixer.in_proj is base.backbone.layers[1].mixer.in_proj
    with hybrid.disable_grafts():
        before = logits_of(hybrid, ids)
    after = logits_of(hybrid, ids)
    assert not torch.equal(after, before)
    hybrid.save_pretrained(tmp_path / "hybrid")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hybrid").eval()
    assert type(loaded.mixer_at(1).graft.q_proj) is torch.nn.Linear
    torch.testing.assert_close(logits_of(loaded, ids), after, atol=1e-4, rtol=1e-4)


@FAMILIES
def test_repr_says_where_grafts_are(name: str) -> None:
    assert "L1.H1,3,4" in repr(make_hybrid(name))
