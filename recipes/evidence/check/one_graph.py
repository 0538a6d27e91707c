"""Qwen4-Exp says that it compiles as one graph (_can_compile_fullgraph), and does not: its indexer counts visible keys.

Right is a graph, or a False there. Exits with 1 while the fault is there.
"""

import torch
from plain import ids, judge, make

CELLS = {"compile with one graph": ("qwen4_exp_text",)}

if __name__ == "__main__":
    model, found = make("qwen4_exp_text"), {}
    try:
        torch.compile(model, fullgraph=True, backend="eager")(input_ids=ids(1, 16), use_cache=False)
    except Exception as error:
        found["qwen4_exp_text"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    print(f"_can_compile_fullgraph is {model._can_compile_fullgraph}")
    judge("", found)
