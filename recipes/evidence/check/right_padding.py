"""A prompt that is padded on the right and then decoded: the pads are in the state.

Attention masks them; the mixers beside it do not: the convolution's last inputs are pads, and dt is not 0 there.

Plain transformers, random weights, CPU. Exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 16}
DELTA = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
CONFIGS = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "qwen3_5_text": {**ATTENTION, **DELTA, **MIXED},
    "lfm2": {**ATTENTION, "layer_types": ["conv", "full_attention"]},
}


@torch.no_grad()
def difference(name: str) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL, **CONFIGS[name])).eval()
    for parameter in model.parameters():
        parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    ids, cache = torch.randint(3, 97, (1, 21)), "cache_params" if name == "mamba2" else "past_key_values"
    padded, mask = torch.cat([ids[:, :20], torch.zeros(1, 7, dtype=torch.long)], 1), torch.tensor([[1] * 20 + [0] * 7])
    first = model(input_ids=padded, attention_mask=mask, use_cache=True)
    grown = torch.cat([mask, torch.ones(1, 1, dtype=torch.long)], 1)
    named = {} if name == "mamba2" else {"position_ids": torch.tensor([[20]])}
    second = model(input_ids=ids[:, 20:], attention_mask=grown, use_cache=True, **{cache: first[cache]}, **named)
    return (second.logits - model(input_ids=ids, use_cache=False).logits[:, 20:]).abs().max().item()


found = {name: difference(name) for name in CONFIGS}
print("\n".join(f"{name}: the token after a right-padded prompt differs by {value:.2g}" for name, value in found.items()))
sys.exit(any(value > 1e-4 for value in found.values()))
