"""Arguments that say where packed documents begin are taken without a word, and not read.

Right is what Bamba, Nemotron-H, Qwen3-Next and others do without their kernels: a ValueError.

Plain transformers, random weights, CPU. Exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
JAMBA = {
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 16, "block_size": 16, "num_local_experts": 2}
CONFIGS = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "jamba": {**ATTENTION, **JAMBA, "use_mamba_kernels": False},
    "minimax": {**ATTENTION, **LINEAR},
    "recurrent_gemma": {**ATTENTION, "lru_width": 64, "num_hidden_layers": 3, "attention_window_size": 128},
    "xlstm": {"hidden_size": 128, "num_heads": 2, "chunk_size": 16},
    "rwkv": {"attention_hidden_size": 64},
}


@torch.no_grad()
def difference(name: str) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | CONFIGS[name])).eval()
    ids, bounds = torch.randint(3, 97, (1, 41)), torch.tensor([0, 20, 41], dtype=torch.int32)
    told = {
        "position_ids": torch.cat([torch.arange(20), torch.arange(21)])[None],
        "seq_idx": torch.tensor([0] * 20 + [1] * 21, dtype=torch.int32)[None],
        **{"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 21, "max_length_k": 21},
    }
    packed = model(input_ids=ids, use_cache=False, **told).logits[:, 20:]
    return (packed - model(input_ids=ids[:, 20:], use_cache=False).logits).abs().max().item()


found = {name: difference(name) for name in CONFIGS}
print("\n".join(f"{name}: the second document differs from itself alone by {value:.2g}" for name, value in found.items()))
sys.exit(any(value > 1e-4 for value in found.values()))
