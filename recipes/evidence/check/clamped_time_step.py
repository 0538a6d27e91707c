"""Nemotron-H and Zamba2: decoding bounds the time step by time_step_min, and a forward of the whole text does not.

Plain transformers, random weights, CPU. Exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96}
CONFIGS = {
    "nemotron_h": {
        **ATTENTION,
        **{"layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 8, "mamba_head_dim": 16},
        **{"ssm_state_size": 16, "n_groups": 1, "chunk_size": 16, "head_dim": 16},
    },
    "zamba2": {
        **ATTENTION,
        **{"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2, "mamba_d_state": 16, "mamba_ngroups": 1},
        **{"n_mamba_heads": 8, "mamba_headdim": 16, "chunk_size": 16, "num_mem_blocks": 1, "attention_head_dim": 32},
    },
}


@torch.no_grad()
def difference(name: str, least: float) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | CONFIGS[name], time_step_min=least)).eval()
    for parameter in model.parameters():
        parameter.mul_(5.0 if parameter.dim() > 1 else 1.0)  # so that some time steps are small
    ids = torch.randint(3, 97, (1, 30))
    first = model(input_ids=ids[:, :20], use_cache=True)
    logits, cache = [], first.past_key_values
    for t in range(20, 30):
        output = model(input_ids=ids[:, t : t + 1], past_key_values=cache, use_cache=True, position_ids=torch.tensor([[t]]))
        logits, cache = [*logits, output.logits], output.past_key_values
    return (torch.cat(logits, 1) - model(input_ids=ids, use_cache=False).logits[:, 20:]).abs().max().item()


found = {(name, least): difference(name, least) for name in CONFIGS for least in (0.001, 1e-30)}
for (name, least), value in found.items():
    print(f"{name}, time_step_min={least:g}: tokens after a cache differ by {value:.2g}")
sys.exit(any(value > 1e-4 for value in found.values()))
