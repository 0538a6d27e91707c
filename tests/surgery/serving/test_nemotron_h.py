"""A hybrid with layer grafts as a NemotronH of transformers' own."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import surgery
from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.serving.nemotron_h import export_nemotron_h


@pytest.fixture(scope="module")
def base():
    return surgery.load("checkpoints/tiny-mamba2")


@pytest.mark.parametrize("layers", [("L2",), ("L0", "L3")])
def test_same_logits_and_tokens(base, layers, tmp_path):
    model, tokenizer = base
    hybrid = surgery.splice(model, Plan(kind="layer", sites=layers, width=32)).eval()
    export_nemotron_h(hybrid, tokenizer, tmp_path)
    other = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    ids = torch.randint(3, 90, (2, 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = hybrid.double()(input_ids=ids, use_cache=False).logits
        assert (other(input_ids=ids, use_cache=False).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    greedy = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(other.generate(ids, **greedy), hybrid.generate(ids, **greedy))


def test_refuses_heads(base, tmp_path):
    model, tokenizer = base
    hybrid = surgery.splice(model, Plan(sites=("L2.H1",)))
    with pytest.raises(UserError, match="L2"):
        export_nemotron_h(hybrid, tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())
