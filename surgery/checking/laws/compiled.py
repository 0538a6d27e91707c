"""The forward is one graph for torch.compile, which computes the same."""

import copy

import torch

from surgery.checking.law import Law, Subject, rounding


def cases(s: Subject):
    def run():
        torch.compiler.reset()
        model = copy.deepcopy(s.source or s.model).eval().float()
        with torch.no_grad():
            right = model(input_ids=s.ids[:1, :16], use_cache=False).logits
            graph = torch.compile(model, fullgraph=True, backend="eager")
            found = graph(input_ids=s.ids[:1, :16], use_cache=False).logits
        torch.compiler.reset()
        return found, right, rounding(right.abs().max().item(), 16, s.layers, torch.float32)

    return {"fullgraph=True": run}


LAW = Law(
    "compile with one graph",
    "torch.compile(fullgraph=True) fails, and without it the graph is broken where it costs most",
    "torch.compile without fullgraph, or not at all",
    cases,
    slow=True,
)
