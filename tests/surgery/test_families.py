"""Families are found by listing their folder, and come from other packages as well."""

from importlib.metadata import EntryPoint

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from surgery import families as package
from surgery.errors import UserError
from surgery.families import families, family_of
from surgery.locating.locate import locate
from surgery.locating.planning import plan
from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice, unsplice
from surgery.world.tokenizer import build_tokenizer
from tests.conftest import BASES, VOCABULARY, random_selective
from tests.surgery.outside import OutsideConfig, OutsideForCausalLM
from tests.surgery.test_stock_hybrids import CONFIGURATIONS


def test_every_family_has_a_base_in_the_tests():
    """So that a new family's laws are tested: tests/conftest.py, or test_stock_hybrids.py."""
    tested = {base().config.model_type for base in BASES.values()} | {make().model_type for make in CONFIGURATIONS.values()}
    assert tested == {family.model_type for family in families().values()}


def test_an_unknown_type_is_told_which_file_to_write():
    with pytest.raises(UserError, match=r"'llama' is not supported as a base .*surgery/families/llama\.py"):
        family_of(LlamaConfig())


def test_a_family_from_another_package(monkeypatch, tokens, tmp_path):
    entry = EntryPoint("outside", "tests.surgery.outside:FAMILY", "surgery.families")
    monkeypatch.setattr(package, "entry_points", lambda group: [entry])
    families.cache_clear()
    try:
        base = random_selective(OutsideConfig, OutsideForCausalLM)
        assert torch.equal(adopt(base)(tokens).logits, adopt(BASES["mamba"]())(tokens).logits)
        hybrid = splice(base, Plan(sites=("L1.H3,4",)))
        assert (hybrid(tokens).logits - base(tokens).logits).abs().max() > 1e-3
        hybrid.save_pretrained(tmp_path)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits, hybrid(tokens).logits)
        assert type(unsplice(hybrid)) is OutsideForCausalLM
    finally:
        families.cache_clear()


def test_a_field_that_nobody_handles_is_refused():
    for name in ("plain", "mamba", "falcon mamba"):
        base = BASES[name]()
        base.config.sliding_window = 5
        with pytest.raises(UserError, match=rf"'sliding_window' \(5\) is not handled by the {base.config.model_type} family"):
            adopt(base)


ONE_EACH = ("groups", "mamba", "falcon mamba", "llamba")


@pytest.mark.parametrize("name", ONE_EACH)
def test_located_spliced_generating_saved_and_loaded_again(name, tmp_path):
    tokenizer = build_tokenizer()
    base = BASES[name](vocab_size=VOCABULARY)
    ranking = locate(base, tokenizer, options={"pairs": 3}, examples=6, confirm=0.05, layers=False, batch_size=3)
    assert {score.kind for score in ranking.heads} == {"ssm"}
    assert len(ranking.heads) == len(anatomy(base).sites())
    assert ranking.heads[0].splice_loss is not None
    hybrid = splice(base, plan(ranking, heads=2)).eval()
    prompt = tokenizer("sun:17\nmap:80\nThe value of the key 'map' is", return_tensors="pt")
    written = hybrid.generate(**prompt, max_new_tokens=4, do_sample=False)
    hybrid.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.generate(**prompt, max_new_tokens=4, do_sample=False), written)
