"""RecurrentGemma: beams go on from each other's states.

The states lie in its modules, where beam search reorders nothing. Right are the scores that are found without a cache. Exits
with 1 while the fault is there.
"""

from plain import GREEDY, ids, judge, make

CELLS = {"beam search": ("recurrent_gemma",)}
BEAMS = GREEDY | {"num_beams": 4, "max_new_tokens": 8, "min_new_tokens": 8, "output_scores": True}

if __name__ == "__main__":
    model, text = make("recurrent_gemma"), ids(4, 12)
    cached, plain = (model.generate(text, use_cache=use, **BEAMS).sequences_scores for use in (True, False))
    judge("scores of the best beams differ", {"recurrent_gemma": (cached - plain).abs().max().item()})
