"""The suite retrieval: every probe of the project."""

import dataclasses
from typing import Any

from surgery import probes as known
from surgery.evaluation.asking import NEEDLE, Asking, sized_options
from surgery.evaluation.suites import measured
from surgery.evaluation.suites.quick import dictionaries
from surgery.probes.skills import FACTS
from surgery.records.recipe import Bench, Data

PLACE = 10
SUITES = {"retrieval": "Every probe of the project over its sizes, the needle over lengths and depths."}
LENGTHS = "also"
DEPTHS = (0.0, 0.5, 1.0)  # where in a text a needle is hidden: 0 at its beginning, 1 at its end


def probes(options: Bench, data: Data) -> dict[str, Asking]:
    if "retrieval" not in measured(options):
        return {}
    asked = dictionaries(options)
    for name in sorted({*known.probes()} - {"kv", *FACTS}):
        if _in_tokens(known.probes()[name]):
            continue
        sized = {size: fields for size in options.pairs if (fields := sized_options(name, size))}
        asked |= {f"{name}.{size}": Asking(name, fields) for size, fields in sized.items()}
    for length in options.lengths:
        asked |= {f"needle.{length}.{round(100 * depth)}": Asking(NEEDLE, {"depth": depth}, length) for depth in DEPTHS}
    return asked


def _in_tokens(kind: Any) -> bool:
    """Whether a probe's prompts have a length in tokens, and not a number of what is to be remembered."""
    return any(field.name == "tokenizer" for field in dataclasses.fields(kind))
