"""RecurrentGemma: prefill_chunk_size ends in an AttributeError, because its output has no cache.

Right is what Mamba raises, a ValueError that says so. Exits with 1 while the fault is there.
"""

from plain import GREEDY, ids, judge, make

CELLS = {"prefill by chunks": ("recurrent_gemma",)}

if __name__ == "__main__":
    found = {}
    try:
        make("recurrent_gemma").generate(ids(1, 30), max_new_tokens=1, prefill_chunk_size=13, **GREEDY)
    except ValueError as error:
        print(f"refused: {error}")
    except AttributeError as error:
        found["recurrent_gemma"] = f"AttributeError: {error}"
    judge("", found)
