"""A prompt that `generate` reads in pieces (prefill_chunk_size) is the prompt."""

import torch

from surgery.checking.law import Law, Subject

PROMPT, NEW, SIZE = 30, 3, 13


def cases(s: Subject):
    def run():
        made = s.generate(s.ids[:1, :PROMPT], NEW, prefill_chunk_size=SIZE)
        return torch.stack(made.logits, 1), s.logits(made.sequences)[:, PROMPT - 1 : -1]

    return {f"prefill_chunk_size={SIZE}": run}


LAW = Law(
    "prefill by chunks",
    "a long prompt that is read in pieces loses what stood before the last piece",
    "leave prefill_chunk_size out",
    cases,
)
