"""report.json, as records. Every figure in a report was measured by bench.py in the run that wrote it."""

from typing import Any

from surgery.plan import Plan
from surgery.records import Provenance, Record
from surgery.statistics import Estimate, Proportion


class Perplexity(Record):
    """value: perplexity; loss: mean nats per token over windows, with its interval."""

    value: float
    loss: Estimate


class Cost(Record):
    """Decoding one token after `context` tokens, batch 1: the median time, and the bytes that the cache holds."""

    context: int
    milliseconds: float
    cache_bytes: int


class ModelReport(Record):
    """One model's results. kv: by number of pairs. change: the paired difference to the base on the same examples (accuracies,
    and "perplexity" as the difference of the mean loss in nats)."""

    description: str
    plan: Plan | None
    kv: dict[str, Proportion]
    knowledge: Proportion
    letters: Proportion
    perplexity: Perplexity
    cost: tuple[Cost, ...]
    change: dict[str, Estimate]


class Report(Record):
    """models: by name, the base first. plan: the graft's. timings: seconds by stage. training: the last losses of each tuned
    model."""

    provenance: Provenance
    plan: Plan | None
    models: dict[str, ModelReport]
    timings: dict[str, float]
    training: dict[str, dict[str, float]]
    settings: dict[str, Any]
