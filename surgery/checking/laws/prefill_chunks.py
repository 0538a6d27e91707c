"""A prompt that `generate` reads in pieces (prefill_chunk_size) is the prompt."""

from surgery.checking.law import Law, Subject

PROMPT, NEW, SIZE = 30, 3, 13


def cases(s: Subject):
    return {f"prefill_chunk_size={SIZE}": lambda: s.continue_by_generate(PROMPT, NEW, prefill_chunk_size=SIZE)}


LAW = Law(
    "prefill by chunks",
    "a long prompt that is read in pieces loses what stood before the last piece",
    "leave prefill_chunk_size out",
    cases,
)
