"""`generate` on the cache of an earlier turn reads the conversation twice, or fails (xLSTM).

Right is what it does with other caches: the tokens that the cache has not read are read. Exits with 1 while the fault is there.
"""

import torch
from plain import GREEDY, cache_of, ids, judge, make

CELLS = {"second turn on a returned cache": ("mamba", "falcon_mamba", "mamba2", "rwkv", "xlstm")}


def difference(name: str) -> float | str:
    model = make(name)
    first = model.generate(ids(1, 20), max_new_tokens=3, **GREEDY)
    talk = torch.cat([first.sequences, ids(1, 7)], 1)
    (cache,) = cache_of(first).values()
    taken = "state" if name == "rwkv" else "cache_params"
    try:
        second = model.generate(talk, max_new_tokens=1, **{taken: cache}, **GREEDY)
    except AttributeError as error:
        return f"AttributeError: {error}"
    return (second.logits[0] - model(input_ids=talk, use_cache=False).logits[:, -1]).abs().max().item()


if __name__ == "__main__":
    judge(
        "the first token of a second turn differs",
        {name: difference(name) for name in CELLS["second turn on a returned cache"]},
    )
