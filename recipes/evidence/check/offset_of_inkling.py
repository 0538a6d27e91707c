"""Inkling: with a static cache, queries of a step stand one place too far on.

get_query_offset returns the cache's own counter, a tensor, which update() advances in place before it is read. Right are the
logits of a growing cache. Exits with 1 while the fault is there.
"""

from plain import ids, judge, make
from transformers import DynamicCache, StaticCache

CELLS = {"static cache": ("inkling_text",)}

if __name__ == "__main__":
    model, text = make("inkling_text"), ids(1, 21)
    logits = []
    for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=24)):
        model(input_ids=text[:, :20], past_key_values=cache, use_cache=True)
        logits.append(model(input_ids=text[:, 20:], past_key_values=cache, use_cache=True).logits)
    judge("a token after a static cache differs", {"inkling_text": (logits[1] - logits[0]).abs().max().item()})
