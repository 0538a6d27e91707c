"""Documents that share a row, told as transformers' collator does, do not see each other.

It tells them by position_ids alone, or by seq_idx and cu_seq_lens as well.
"""

from itertools import pairwise
from typing import Any

import torch

from surgery.checking.law import Law, Subject

FIRST, BOTH = 20, 41
WAYS = ("position_ids", "seq_idx", "cu_seq_lens")


def cases(s: Subject):
    def run(*ways: str, ends=(0, FIRST, BOTH)):
        parts = [torch.arange(end - begin) for begin, end in pairwise(ends)]
        numbers = torch.cat([torch.full_like(part, number) for number, part in enumerate(parts)])
        bounds, longest = torch.tensor(ends, dtype=torch.int32), max(map(len, parts))
        told: dict[str, dict[str, Any]] = {
            "position_ids": {"position_ids": torch.cat(parts)[None]},
            "seq_idx": {"seq_idx": numbers[None].int()},
            "cu_seq_lens": {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest},
        }
        named = {name: value for way in ways for name, value in told[way].items()}
        apart = torch.cat([s.right[:, :FIRST], s.logits(s.ids[:1, FIRST:BOTH])], 1)
        return s.logits(s.ids[:1, :BOTH], **named), apart

    def rows():
        parts = [torch.arange(FIRST), torch.arange(BOTH - FIRST)]
        places = torch.stack([torch.cat(parts), torch.cat(parts[::-1])])
        numbers = (places == 0).cumsum(-1) - 1
        found = s.logits(s.ids[:2, :BOTH], position_ids=places, seq_idx=numbers.int())
        return found[1:, BOTH - FIRST :], s.logits(s.ids[1:2, BOTH - FIRST : BOTH])

    return {
        "position_ids": lambda: run("position_ids"),
        "all three": lambda: run(*WAYS),
        "beside an empty document": lambda: run(*WAYS, ends=(0, FIRST, FIRST, BOTH)),
        "2 rows": rows,
    }


LAW = Law(
    "packed documents",
    "training on packed rows lets each document read the one before it",
    "one document a row, with padding (packing=False)",
    cases,
)
