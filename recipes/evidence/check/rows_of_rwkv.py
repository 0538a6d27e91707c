"""RWKV: rows of a batch are mixed when a cache is continued.

The last hidden state has no axis of tokens, so that shifting it makes (rows, rows, width) of (rows, 1, width).

Plain transformers, random weights, CPU. Exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("rwkv", **SMALL, attention_hidden_size=64)).eval()
ids = torch.randint(3, 97, (2, 21))
with torch.no_grad():
    state = model(input_ids=ids[:, :20], use_cache=True).state
    logits = model(input_ids=ids[:, 20:], state=state, use_cache=True).logits
print(f"logits of one token in each of 2 rows have the shape {tuple(logits.shape)}; right is (2, 1, 97)")
sys.exit(logits.shape != (2, 1, 97))
