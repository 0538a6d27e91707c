"""Small random bases whose SSMs stand among other layers, and hybrids of them whose grafts matter."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
)

from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan, Start
from surgery.splicing.splice import splice

VOCABULARY = 99
SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}
TYPES = ["full_attention", "linear_attention", "linear_attention"]
DELTA = {"num_hidden_layers": 3, "layer_types": TYPES, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}

# Three to five layers each. In all of them L1 has an SSM, and so has the last.
CONFIGURATIONS = {
    "bamba": lambda: BambaConfig(**SIZES, **SSM, num_hidden_layers=3, attn_layer_indices=[0]),
    "granitemoehybrid": lambda: GraniteMoeHybridConfig(
        **SIZES,
        **SSM,
        num_hidden_layers=3,
        layer_types=TYPES,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
        residual_multiplier=0.5,
        logits_scaling=2.0,
        position_embedding_type="rope",
    ),
    "nemotron_h": lambda: NemotronHConfig(
        **SIZES,
        head_dim=8,
        layers_block_type=["full_attention", "linear_attention", "moe", "linear_attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
        time_step_min=1e-30,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SIZES,
        **SSM,
        num_hidden_layers=3,
        mamba_d_ssm=64,
        mamba_rms_norm=True,
        ssm_in_multiplier=0.7,
        ssm_out_multiplier=1.3,
        ssm_multipliers=[0.5, 0.8, 1.1, 1.4, 0.9],
        mamba_proj_bias=True,
    ),
    "falcon_h1, no norm": lambda: FalconH1Config(**SIZES, **SSM, num_hidden_layers=3, mamba_d_ssm=64, mamba_rms_norm=False),
    "zamba2": lambda: Zamba2Config(
        **SIZES | {"num_key_value_heads": 4},
        num_hidden_layers=5,
        layers_block_type=["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
        num_mem_blocks=2,
        n_mamba_heads=4,
        mamba_d_state=8,
        mamba_ngroups=2,
        chunk_size=8,
        use_shared_attention_adapter=True,
        adapter_rank=4,
        use_mem_rope=True,
        time_step_min=1e-30,
    ),
    "jamba": lambda: JambaConfig(
        **SIZES,
        num_hidden_layers=3,
        attn_layer_period=4,
        attn_layer_offset=0,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
    ),
    "qwen3_next": lambda: Qwen3NextConfig(**SIZES, **DELTA, **EXPERTS, head_dim=8),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**SIZES, **DELTA, head_dim=8),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(**SIZES, **DELTA, **EXPERTS, head_dim=8),
    "olmo_hybrid": lambda: OlmoHybridConfig(**SIZES, **DELTA),
    "kimi_linear": lambda: KimiLinearConfig(
        **SIZES | {"num_key_value_heads": 4},
        num_hidden_layers=3,
        layer_types=TYPES,
        linear_num_heads=4,
        linear_head_dim=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_layer_types=["dense", "sparse", "dense"],
    ),
}
PROJECTIONS = "in_proj x_proj in_proj_qkvz in_proj_qkv q_proj k_proj v_proj".split()


def make_base(name: str, dtype: torch.dtype = torch.float64, dense: bool = False) -> Any:
    """A random base of a family, the same every time, in inference. dense: without experts, where it has some by layer."""
    torch.manual_seed(0)
    config = CONFIGURATIONS[name]()
    if dense and hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["dense"] * config.num_hidden_layers
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    model.set_experts_implementation("eager")  # the others know no float64
    with torch.no_grad():  # as initialised, mixers do next to nothing, and the norms of Jamba have no weights
        for mixer in anatomy(model).ssms:
            for part in PROJECTIONS:
                if hasattr(mixer.module, part):
                    getattr(mixer.module, part).weight.normal_(std=0.3)
            for part in ("b_layernorm", "c_layernorm"):
                if hasattr(mixer.module, part):
                    getattr(mixer.module, part).weight.uniform_(0.5, 2)
    return model.to(dtype)


def make_hybrid(
    name: str, null: float | None = 0.5, dtype: torch.dtype = torch.float64, dense: bool = False, **more: Any
) -> Any:
    """A hybrid with grafts at two heads of L1 and one of the last layer. more: of the plan."""
    base = make_base(name, dtype, dense)
    sites = ("L1.H0,3", f"L{base.config.num_hidden_layers - 1}.H2")
    starts = {"L1.H0": Start(sign=1, tau=0.8, null=null), "L1.H3": Start(sign=-1, tau=1.5, null=null)}
    starts |= {f"{sites[1]}": Start(sign=1, tau=0.5, null=null)}
    return splice(base, Plan(**{"sites": sites, "starts": starts, "gate": 0.7, **more})).eval()


def make_rows(batch: int = 2, length: int = 23, seed: int = 1) -> torch.Tensor:
    """Random ids, none of them padding."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))
