"""Bamba and MiniMax: positions begin at 0 again after a cache, unless position_ids are given.

Plain transformers, random weights, CPU. Exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
SSM = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
CONFIGS = {
    "bamba": {**ATTENTION, **SSM, "attn_layer_indices": [1]},
    "minimax": {
        **ATTENTION,
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "block_size": 16,
        "num_local_experts": 2,
    },
}


@torch.no_grad()
def difference(name: str, told: bool) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **CONFIGS[name])).eval()
    for parameter in model.parameters():
        parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    ids = torch.randint(3, 97, (1, 41))
    right, cache, logits = model(input_ids=ids, use_cache=False).logits, None, []
    for begin, end in [(0, 20), *((t, t + 1) for t in range(20, 41))]:
        named = {"position_ids": torch.arange(begin, end)[None]} if told else {}
        output = model(input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True, **named)
        cache, logits = output.past_key_values, [*logits, output.logits]
    return (torch.cat(logits, 1) - right).abs().max().item()


found = {(name, told): difference(name, told) for name in CONFIGS for told in (False, True)}
for (name, told), value in found.items():
    print(f"{name} {'with' if told else 'without'} position_ids: tokens after a cache differ by {value:.2g}")
sys.exit(any(value > 1e-4 for value in found.values()))
