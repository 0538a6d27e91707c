"""Families are found by listing their folder, and come from other packages as well."""

from importlib.metadata import EntryPoint

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from surgery import families as package
from surgery.errors import UserError
from surgery.families import families, family_of
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice, unsplice
from tests.models import BASES, random_selective
from tests.surgery.outside import OutsideConfig, OutsideForCausalLM


def test_an_unknown_type_is_told_which_file_to_write():
    with pytest.raises(UserError, match=r"'llama' is not supported as a base .*surgery/more/families/llama\.py"):
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
