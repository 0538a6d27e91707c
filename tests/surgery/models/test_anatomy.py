"""Where the heads of a model are: what a head owns of the output projection's input is what it wrote."""

from itertools import groupby
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PhiConfig,
    RecurrentGemmaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from surgery.errors import UserError
from surgery.models.anatomy import Anatomy, anatomy
from surgery.records.plan import Plan
from surgery.splicing.splice import adopt, splice
from tests.surgery.modeling import bases, stock_bases

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "pad_token_id": 0}
TRANSFORMERS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "gpt_neox": GPTNeoXConfig(**SIZES),
    "phi": PhiConfig(**SIZES),
    "opt": OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
    "falcon": FalconConfig(**SIZES),
}
KINDS = {
    "mamba2": ("0-1 ssm", 6, 8),
    "mamba": ("0-1 ssm", 48, 1),
    "llamba": ("0-1 ssm", 6, 4),
    "bamba": ("0 attention, 1-2 ssm", 4, 16),
    "nemotron_h": ("0 attention, 1 ssm, 2 no mixer, 3 ssm", 4, 16),
    "falcon_h1": ("0-2 ssm and attention", 4, 16),
    "zamba2": ("0 ssm, 1-2 ssm and attention, 3 ssm, 4 ssm and attention", 4, 16),
    "jamba": ("0 attention, 1-2 ssm", 64, 1),
    "qwen3_next": ("0 attention, 1-2 ssm", 4, 12),
    "olmo_hybrid": ("0 attention, 1-2 ssm", 4, 12),
    "kimi_linear": ("0 attention, 1-2 ssm", 4, 8),
}


def kinds_of(found: Anatomy) -> str:
    """Which layers are what, e.g. "0-3 ssm, 4 attention, 5 ssm and attention"."""
    names = [" and ".join(each.kind for each in found.mixers_of(n)) or "no mixer" for n in range(len(found.blocks))]
    runs = [(name, [layer for layer, _ in run]) for name, run in groupby(enumerate(names), key=lambda pair: pair[1])]
    return ", ".join(f"{run[0]}-{run[-1]} {name}" if len(run) > 1 else f"{run[0]} {name}" for name, run in runs)


def make_base(name: str) -> Any:
    return (bases if name in bases.BASES else stock_bases).make_base(name)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "adopted"])
def test_mixers_of_a_base_and_of_its_hybrid_class(name: str, ours: bool) -> None:
    model = make_base(name)
    found = anatomy(adopt(model) if ours else model)
    kinds, heads, width = KINDS[name]
    assert kinds_of(found) == kinds
    for mixer in found.ssms:
        assert (mixer.heads, mixer.width, mixer.first) == (heads, width, 0)


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_heads_of_transformers(name: str) -> None:
    found = anatomy(AutoModelForCausalLM.from_config(TRANSFORMERS[name]))
    assert kinds_of(found) == "0-1 attention"
    assert {(mixer.heads, mixer.width) for mixer in found.mixers} == {(4, 8)}


def test_a_recurrence_of_channels_beside_attention() -> None:
    config = RecurrentGemmaConfig(**SIZES | {"num_hidden_layers": 3}, lru_width=32, block_types=["recurrent", "attention"])
    found = anatomy(AutoModelForCausalLM.from_config(config))
    assert kinds_of(found) == "0 ssm, 1 attention, 2 ssm"
    assert [(mixer.heads, mixer.width) for mixer in found.mixers] == [(32, 1), (4, 8), (32, 1)]


@pytest.mark.parametrize("name", ["mamba2", "bamba", "qwen3_next", "kimi_linear"])
def test_the_columns_of_a_head_are_what_it_wrote(name: str) -> None:
    """Of heads in one norm's group, what one writes scales the others; its own columns alone become zero."""
    model, seen = adopt(make_base(name)), []
    mixer = anatomy(model).ssms[0]
    mixer.module.tap = lambda module, streams, y, _: y.index_fill(2, torch.tensor([1]), 0)
    hook = mixer.out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(bases.make_rows())
    hook.remove()
    zero = (seen[0] == 0).flatten(0, -2).all(0)
    assert zero[mixer.columns(1)].all()
    assert zero.sum() == mixer.width


def test_other_layouts_are_refused_and_layer_grafts_are_attention() -> None:
    config = T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=30)
    with pytest.raises(UserError, match="encoder"):
        anatomy(T5ForConditionalGeneration(config))
    hybrid = splice(make_base("bamba"), Plan(kind="layer", sites=("L1",)))
    assert kinds_of(anatomy(hybrid)) == "0-1 attention, 2 ssm"
