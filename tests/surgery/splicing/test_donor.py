"""A layer graft computes the attention of its donor; what it cannot compute is refused."""

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.splicing.splice import splice
from tests.surgery.modeling.bases import make_base, make_rows

HIDDEN = 24
SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": HIDDEN, "intermediate_size": 40, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.4, "pad_token_id": 0}
SCALED = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
DONORS = {
    "llama": lambda: LlamaConfig(**SIZES, attention_bias=True),
    "llama, scaled": lambda: LlamaConfig(**SIZES, rope_parameters={**SCALED, "original_max_position_embeddings": 16}),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=None),
    "phi3": lambda: Phi3Config(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8),
    "smollm3": lambda: SmolLM3Config(**SIZES),
}


def make_donor(config: PreTrainedConfig) -> Any:
    torch.manual_seed(3)
    donor: Any = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in donor.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 2)
    return donor.double()


def make_plan(number: int = 1) -> Plan:
    return Plan(kind="layer", sites=("L1",), donor="a donor", donor_layers={"L1": number})


@pytest.mark.parametrize("name", DONORS)
@pytest.mark.parametrize("number", [0, 1])
def test_a_graft_is_its_donor_s_attention(name: str, number: int) -> None:
    donor = make_donor(DONORS[name]())
    hybrid = splice(make_base("mamba2"), make_plan(number), donor)
    hidden = torch.randn(2, 11, HIDDEN, dtype=torch.float64)
    attention = donor.model.layers[number].self_attn
    with torch.no_grad():
        turns = donor.model.rotary_emb(hidden, torch.arange(11)[None])
        mask = torch.full((11, 11), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        want = attention(hidden, position_embeddings=turns, attention_mask=mask)[0]
        torch.testing.assert_close(hybrid.mixer_at(1)(hidden), want, atol=1e-6, rtol=1e-6)  # angles are in float32


def test_at_random_it_is_the_same_for_a_seed_and_leaves_the_donor_alone() -> None:
    one, same, other = (splice(make_base("mamba2"), Plan(kind="layer", sites=("L1",), seed=seed)) for seed in (0, 0, 1))
    logits = [model(make_rows(), use_cache=False).logits for model in (one, same, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])
    donor = make_donor(DONORS["llama"]())
    hybrid, before = splice(make_base("mamba2"), make_plan(), donor), donor.model.layers[1].self_attn.q_proj.weight.clone()
    with torch.no_grad():
        hybrid.mixer_at(1).graft.q_proj.weight.zero_()
    assert torch.equal(donor.model.layers[1].self_attn.q_proj.weight, before)


@pytest.mark.parametrize(
    ("config", "number", "word"),
    [
        (lambda: LlamaConfig(**SIZES | {"hidden_size": 32}), 0, "hidden size"),
        (lambda: LlamaConfig(**SIZES), 2, "no layer 2"),
        (lambda: MistralConfig(**SIZES, sliding_window=8), 0, "last 8"),
        (lambda: Gemma2Config(**SIZES, head_dim=8), 0, "soft-capped"),
    ],
    ids=["size", "layer", "window", "architecture"],
)
def test_what_cannot_be_taken_over_is_refused(config: Any, number: int, word: str) -> None:
    with pytest.raises(UserError, match=word):
        splice(make_base("mamba2"), make_plan(number), make_donor(config()))


def test_sites_and_widths_that_are_not_possible_are_refused() -> None:
    with pytest.raises(UserError, match="L9"):
        splice(make_base("mamba2"), Plan(kind="layer", sites=("L9",)))
    with pytest.raises(UserError, match="width"):
        splice(make_base("mamba2"), Plan(kind="layer", sites=("L1",), width=7))
