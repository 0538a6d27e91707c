"""The forward is one graph for torch.compile, which computes the same."""

import copy

import torch

from surgery.checking.law import Law, Subject, measure_rounding


def cases(s: Subject):
    def run():
        torch.compiler.reset()
        model = copy.deepcopy(s.source).eval().float()
        with torch.no_grad():
            ids = s.ids[:1, :16]
            right = model(input_ids=ids, use_cache=False).logits
            found = torch.compile(model, fullgraph=True, backend="eager")(input_ids=ids, use_cache=False).logits
        torch.compiler.reset()
        return found, right, measure_rounding(model, right[0], ids)

    return {"fullgraph=True": run}


LAW = Law(
    "compile with one graph",
    "torch.compile(fullgraph=True) fails, and without it the graph is broken where it costs most",
    "torch.compile without fullgraph, or not at all",
    cases,
    slow=True,
)
