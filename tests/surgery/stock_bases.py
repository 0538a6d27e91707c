"""Small random bases of every family whose mixers stand among other layers of a stock model."""

import torch
from transformers import (
    AutoModelForCausalLM,
    BailingHybridConfig,
    BambaConfig,
    FalconH1Config,
    Glm5NextTextConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen4ExpTextConfig,
    Zamba2Config,
    xLSTMConfig,
)

from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan

SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
EXPERTS = {"num_experts_per_tok": 2}
DELTA = {
    "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
LATENT = {  # attention, and layers with experts
    "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_local_experts": 4,
    "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse", "dense"],
}  # fmt: skip
KDA = {"num_hidden_layers": 3, "layer_types": DELTA["layer_types"], "linear_num_heads": 4, "linear_head_dim": 8}

# Three or four layers each; in all of them L1 has an SSM, and so has the last.
CONFIGURATIONS = {
    "bamba": lambda: BambaConfig(**SIZES, **SSM, num_hidden_layers=3, attn_layer_indices=[0]),
    "nemotron_h": lambda: NemotronHConfig(
        **SIZES, head_dim=8, layers_block_type=["full_attention", "linear_attention", "moe", "linear_attention"],
        mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=8, n_routed_experts=4,
        moe_intermediate_size=16, moe_shared_expert_intermediate_size=16, time_step_min=1e-30, **EXPERTS,
    ),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **SIZES, **SSM, num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"],
        num_local_experts=4, shared_intermediate_size=16, residual_multiplier=0.5, logits_scaling=2.0,
        position_embedding_type="rope", **EXPERTS,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SIZES, **SSM, num_hidden_layers=2, mamba_d_ssm=64, mamba_rms_norm=True, ssm_in_multiplier=0.7,
        ssm_out_multiplier=1.3, ssm_multipliers=[0.5, 0.8, 1.1, 1.4, 0.9], mamba_proj_bias=True,
    ),
    "falcon_h1, no norm": lambda: FalconH1Config(
        **SIZES, **SSM, num_hidden_layers=2, mamba_d_ssm=64, mamba_rms_norm=False, ssm_multipliers=[0.5, 0.8, 1.1, 1.4, 0.9],
    ),
    "zamba2": lambda: Zamba2Config(
        **SIZES | {"num_key_value_heads": 4}, num_hidden_layers=5,
        layers_block_type=["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        num_mem_blocks=2, n_mamba_heads=4, mamba_d_state=8, mamba_ngroups=2, chunk_size=8, use_shared_attention_adapter=True,
        adapter_rank=4, use_mem_rope=True, time_step_min=1e-30,
    ),
    "jamba": lambda: JambaConfig(
        **SIZES, num_hidden_layers=3, attn_layer_period=4, attn_layer_offset=0, expert_layer_period=2, expert_layer_offset=1,
        num_experts=4, mamba_d_state=8, mamba_dt_rank=4, **EXPERTS,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **SIZES, **DELTA, head_dim=8, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, **EXPERTS,
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**SIZES, **DELTA, head_dim=8),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(
        **SIZES, **DELTA, head_dim=8, num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, **EXPERTS,
    ),
    "olmo_hybrid": lambda: OlmoHybridConfig(**SIZES, **DELTA),
    "qwen4_exp_text": lambda: Qwen4ExpTextConfig(
        **SIZES | {"eos_token_id": 98}, **DELTA, head_dim=8, num_experts=4, moe_intermediate_size=16, hc_count=2, hc_lowrank=8,
        shared_expert_intermediate_size=16, ple_layer_ids=[2], heads_per_ngram=2, ngram_vocab_size_base=50,
        split_ngram_parts=2, make_ngram_vocab_size_divisible_by=2, indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8,
        indexer_budget=16, indexer_compress_ratio=4, **EXPERTS,
    ),
    "kimi_linear": lambda: KimiLinearConfig(**SIZES | KDA | LATENT, qk_rope_head_dim=4, **EXPERTS),
    "bailing_hybrid": lambda: BailingHybridConfig(
        **SIZES | LATENT, num_hidden_layers=3, layer_types=DELTA["layer_types"], head_dim=8, qk_rope_head_dim=4, n_group=2,
        topk_group=1, **EXPERTS,
    ),
    "glm5_next_text": lambda: Glm5NextTextConfig(
        **SIZES | KDA | LATENT, q_lora_rank=8, index_topk=16, index_kpool=4, index_head_dim=8, index_n_heads=2, hc_mult=2,
        **EXPERTS,
    ),
    "xlstm": lambda: xLSTMConfig(  # of other widths than multiples of 64 transformers 5.23 cannot make the cache
        **SIZES | {"hidden_size": 64}, num_hidden_layers=3, num_heads=4, qk_dim_factor=1.0, chunk_size=8,
    ),
    "minimax": lambda: MiniMaxConfig(
        **SIZES, num_hidden_layers=3, layer_types=["full_attention", "linear_attention", "linear_attention"], head_dim=8,
        num_local_experts=4, block_size=16, **EXPERTS,
    ),
}  # fmt: skip
KINDS = [name for name in CONFIGURATIONS if "," not in name]
MAMBAS = ("bamba", "nemotron_h", "granitemoehybrid", "falcon_h1", "falcon_h1, no norm", "zamba2", "jamba")
ADOPTED = ("xlstm", "kimi_linear", "bailing_hybrid", "glm5_next_text")  # all of whose mixers become ours

PROJECTIONS = "in_proj x_proj in_proj_qkvz in_proj_qkv q_proj k_proj v_proj q k v igate_preact fgate_preact qkv_proj"


def base_of(name: str, **changes) -> PreTrainedModel:
    """The same weights every time."""
    config = CONFIGURATIONS[name]()
    for field, value in changes.items():
        setattr(config, field, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation("eager")  # the others know no float64
    with torch.no_grad():  # as initialised, mixers do next to nothing, and the norms of Jamba have no weights
        for mixer in anatomy(model).ssms:
            for part in PROJECTIONS.split():
                if hasattr(mixer.module, part):
                    getattr(mixer.module, part).weight.normal_(std=0.3)
            if hasattr(mixer.module, "igate_preact"):
                mixer.module.igate_preact.bias.zero_()
            for part in ("b_layernorm", "c_layernorm"):
                if hasattr(mixer.module, part):
                    getattr(mixer.module, part).weight.uniform_(0.5, 2)
    return model


def plan_for(base: PreTrainedModel, **fields) -> Plan:
    """Two heads of L1 and one of the last layer, or, where that is L1, of the first."""
    last = len(anatomy(base).blocks) - 1
    return Plan(sites=("L1.H0,3", f"L{last if last > 1 else 0}.H2"), **fields)
