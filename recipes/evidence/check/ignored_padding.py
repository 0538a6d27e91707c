"""xLSTM and RWKV do not read attention_mask; RecurrentGemma's convolution reads the pads.

Plain transformers, random weights, CPU. Exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
CONFIGS = {
    "xlstm": {"hidden_size": 128, "num_heads": 2, "chunk_size": 16},
    "rwkv": {"attention_hidden_size": 64},
    "recurrent_gemma": {**ATTENTION, "lru_width": 64, "num_hidden_layers": 3, "attention_window_size": 128},
}


@torch.no_grad()
def difference(name: str) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | CONFIGS[name])).eval()
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.1)  # biases begin at 0, which hides that pads are read
    ids = torch.randint(3, 97, (1, 20))
    padded, mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1), torch.tensor([[0] * 5 + [1] * 20])
    named = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if name == "recurrent_gemma" else {}
    logits = model(input_ids=padded, attention_mask=mask, use_cache=False, **named).logits[:, 5:]
    return (logits - model(input_ids=ids, use_cache=False).logits).abs().max().item()


found = {name: difference(name) for name in CONFIGS}
print("\n".join(f"{name}: behind 5 masked pads a prompt's logits differ by {value:.2g}" for name, value in found.items()))
sys.exit(any(value > 1e-4 for value in found.values()))
