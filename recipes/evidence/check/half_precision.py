"""xLSTM cannot be run in 16 bits: its chunkwise kernel multiplies matrices of two dtypes.

Plain transformers, random weights, CPU. Exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

FIELDS = {"vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 16, "pad_token_id": 0}
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model("xlstm", **FIELDS), dtype=torch.bfloat16).eval()
try:
    with torch.no_grad():
        model(input_ids=torch.randint(3, 97, (1, 20)), use_cache=False)
except RuntimeError as error:
    sys.exit(f"xlstm in bfloat16: {error}")
