"""`generate` on the cache of an earlier turn reads the conversation twice (Mamba, Mamba-2, RWKV), or fails (xLSTM).

Plain transformers, random weights, CPU. Exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SMALL = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
CONFIGS = {
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "xlstm": {"hidden_size": 128, "num_heads": 2, "chunk_size": 16},
}
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}


@torch.no_grad()
def difference(name: str) -> float:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SMALL | CONFIGS[name])).eval()
    for parameter in model.parameters():
        parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    first = model.generate(torch.randint(3, 97, (1, 20)), max_new_tokens=3, **GREEDY)
    cache = first.get("cache_params", first.get("past_key_values"))
    talk = torch.cat([first.sequences, torch.randint(3, 97, (1, 7))], 1)
    second = model.generate(talk, cache_params=cache, max_new_tokens=1, **GREEDY)
    return (second.logits[0] - model(input_ids=talk, use_cache=False).logits[:, -1]).abs().max().item()


wrong = False
for name in CONFIGS:
    try:
        value = difference(name)
        print(f"{name}: the first token of a second turn differs by {value:.2g}")
        wrong |= value > 1e-3
    except AttributeError as error:
        print(f"{name}: {error}")
        wrong = True
sys.exit(wrong)
