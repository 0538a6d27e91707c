"""Where the mixers of every architecture are: random models of the exact Hugging Face classes."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from surgery.errors import UserError
from surgery.models.anatomy import anatomy
from surgery.records.site import Site
from surgery.splicing.splice import adopt
from tests.models import random_base

ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = ATTENTION | {"intermediate_size": 48, "num_hidden_layers": 3}
SSD = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
MAMBA = {"hidden_size": 16, "num_hidden_layers": 3, "state_size": 4}
ARCHITECTURES: dict[str, dict] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 16},
    "mistral": LLAMA | {"sliding_window": 8},
    "gemma2": LLAMA | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8},
    "phi": LLAMA,
    "phi3": LLAMA,
    "gpt_neox": {"num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 3},
    "mamba": MAMBA,
    "falcon_mamba": MAMBA,
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8, "num_hidden_layers": 3},
    "zamba2": {
        "num_attention_heads": 4, "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "n_mamba_heads": 8, "mamba_d_state": 8, "mamba_ngroups": 2, "chunk_size": 8, "intermediate_size": 48,
        "use_mem_rope": True, "use_shared_attention_adapter": True, "adapter_rank": 4,
    },
    "nemotron_h": ATTENTION | {
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "moe"], "head_dim": 8,
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8,
        "intermediate_size": 48, "n_routed_experts": 4, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24,
    },
    "bamba": LLAMA | SSD | {"attn_layer_indices": [1]},
    "jamba": LLAMA | {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "granitemoehybrid": LLAMA | SSD | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "position_embedding_type": "rope",
        "num_local_experts": 4, "shared_intermediate_size": 24, "residual_multiplier": 0.7, "logits_scaling": 2.0,
    },
    "falcon_h1": LLAMA | SSD | {
        "num_hidden_layers": 2, "mamba_d_ssm": 32, "ssm_in_multiplier": 0.8, "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7], "attention_in_multiplier": 0.9, "attention_out_multiplier": 0.8,
        "lm_head_multiplier": 0.5, "mamba_rms_norm": True,
    },
    "recurrent_gemma": ATTENTION | {
        "num_hidden_layers": 3, "lru_width": 32, "intermediate_size": 48, "attention_window_size": 8, "num_key_value_heads": 1,
    },
    "qwen3_next": LLAMA | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24,
    },
    "xlstm": {"num_heads": 4, "num_hidden_layers": 3, "ffn_round_up_to_multiple_of": 16, "qk_dim_factor": 1.0},
    "minimax": LLAMA | {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8, "num_local_experts": 2,
        "block_size": 8,
    },
    "mpt": {"n_heads": 4, "n_layers": 3},
}  # fmt: skip


def build(name: str, vocab_size: int = 48) -> PreTrainedModel:
    """A small random model of the exact class, the same every time, with weights large enough for its heads to matter."""
    fields = {"hidden_size": 32, "vocab_size": vocab_size, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **fields | ARCHITECTURES[name])).eval()
    for parameter_name, p in model.named_parameters():
        if p.dim() > 1 and not parameter_name.endswith("A_log"):
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    return model


KINDS = {
    "llama": "0-2 attention", "qwen2": "0-2 attention", "qwen3": "0-2 attention", "mistral": "0-2 attention",
    "gemma2": "0-2 attention", "phi": "0-2 attention", "phi3": "0-2 attention", "gpt_neox": "0-2 attention",
    "mamba": "0-2 ssm", "falcon_mamba": "0-2 ssm", "mamba2": "0-2 ssm",
    "zamba2": "0 ssm, 1 ssm and attention, 2 ssm, 3 ssm and attention",
    "nemotron_h": "0 ssm, 1 no mixer, 2 attention, 3 ssm, 4 no mixer",
    "bamba": "0 ssm, 1 attention, 2 ssm", "jamba": "0 ssm, 1 attention, 2 ssm",
    "granitemoehybrid": "0 ssm, 1 attention, 2 ssm", "falcon_h1": "0-1 ssm and attention",
    "recurrent_gemma": "0-1 ssm, 2 attention", "qwen3_next": "0 ssm, 1 attention, 2 ssm",
    "xlstm": "0-2 ssm", "minimax": "0 ssm, 1 attention, 2 ssm", "mpt": "0-2 attention",
}  # fmt: skip
# In layer 0; else 4.
HEADS = {"mamba": 32, "falcon_mamba": 32, "jamba": 64, "falcon_h1": 8, "recurrent_gemma": 32, "zamba2": 8}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_layers_and_heads_of_every_architecture_are_found(name):
    found = anatomy(build(name))
    assert found.kinds() == KINDS[name]
    assert found.heads(0) == HEADS.get(name, 4)
    for mixer in found.mixers:
        assert mixer.heads * mixer.width == mixer.out.in_features
        assert mixer.columns(mixer.first) == slice(0, mixer.width)
    for layer in found.layers():  # heads of a layer are numbered through, SSM heads first
        mixers = found.mixers_of(layer)
        assert [mixer.kind for mixer in mixers] == sorted((mixer.kind for mixer in mixers), reverse=True)
        assert [mixer.first for mixer in mixers] == [0, *(mixer.heads for mixer in mixers[:-1])]
    assert len(found.sites()) == sum(mixer.heads for mixer in found.mixers)


def test_this_projects_own_classes_are_understood():
    assert anatomy(adopt(random_base())).kinds() == "0-2 ssm"


def test_sites_lead_to_their_mixers():
    found = anatomy(build("falcon_h1"))
    assert found.mixer_of(Site(1, (3,))).kind == "ssm"
    assert found.mixer_of(Site(1, (4,))).kind == "attention"
    assert found.mixer_of(Site(1, (4,))).columns(4) == slice(0, 8)
    with pytest.raises(UserError, match=r"no site L1.H8: layer 1 has heads 0-7"):
        found.mixer_of(Site(1, (8,)))
    with pytest.raises(UserError, match=r"no site L2: it has layers 0-1"):
        found.check([Site(0), Site(2)])
    with pytest.raises(UserError, match=r"no site L1.H0: layer 1 has no heads"):
        anatomy(build("nemotron_h")).check([Site(1, (0,))])


def test_an_unknown_layout_is_refused_in_one_line():
    model = build("llama")
    for block in model.model.layers:
        block.token_mixer = block.self_attn
        del block.self_attn
    with pytest.raises(UserError, match=r"llama model: layer 0 \(LlamaDecoderLayer\) holds no mixer.*models/anatomy.py"):
        anatomy(model)
    model.model.layers = nn.ModuleList()
    with pytest.raises(UserError, match="its blocks are under none of layers"):
        anatomy(model)
    model = build("llama")
    model.model.layers[2].self_attn.o_proj = nn.Bilinear(2, 2, 2)
    with pytest.raises(UserError, match="layer 2's LlamaAttention has no linear output projection named o_proj"):
        anatomy(model)
    with torch.device("meta"):
        assert anatomy(build("phi")).kinds() == "0-2 attention"  # no weight is looked at
