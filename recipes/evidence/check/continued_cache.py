"""Mamba-1, Falcon-Mamba, Jamba and MiniMax: several tokens after a cache are read as if there were none.

The scan of more than one token begins at a zero state, whatever the cache holds.

Plain transformers, random weights, CPU. Exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "mamba": {"state_size": 8},
    "falcon_mamba": {"state_size": 8},
    "jamba": {
        **{
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "num_experts": 1,
            "num_experts_per_tok": 1,
        },
        **{"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    },
    "minimax": {
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "num_local_experts": 2, "head_dim": 16},
        **{"layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    },
}


@torch.no_grad()
def difference(name: str) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **CONFIGS[name])).eval()
    for parameter in model.parameters():
        parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)  # as initialised, the state hardly matters
    ids = torch.randint(3, 97, (1, 41))
    cache = "cache_params" if "mamba" in name else "past_key_values"
    first = model(input_ids=ids[:, :20], use_cache=True)
    named = {"position_ids": torch.arange(20, 41)[None]} if name == "minimax" else {}  # or they would begin at 0 again
    second = model(input_ids=ids[:, 20:], use_cache=True, **{cache: first[cache]}, **named)
    return (second.logits - model(input_ids=ids, use_cache=False).logits[:, 20:]).abs().max().item()


found = {name: difference(name) for name in CONFIGS}
print(
    "\n".join(f"{name}: tokens 20 to 40 after a cache of 20 differ by {value:.2g}; right is 0" for name, value in found.items())
)
sys.exit(any(value > 1e-3 for value in found.values()))
