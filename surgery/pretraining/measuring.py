"""What a built-in model is measured by: retrieval at several sizes, knowledge, lettered questions, perplexity."""

import math
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.probes.knowledge import Knowledge, Letters
from surgery.probes.kv import KVRetrieval
from surgery.probes.perplexity import TextWindows
from surgery.probes.question import Probe
from surgery.probes.scoring import answer
from surgery.splicing.splice import adopt
from surgery.statistics import proportion

SIZES = (4, 8, 16, 32, 64)


def measured_probes() -> dict[str, Probe]:
    """The probes by the names that measured.json has for them."""
    retrieval: dict[str, Probe] = {f"kv.{pairs}": KVRetrieval(pairs) for pairs in SIZES}
    return retrieval | {"knowledge": Knowledge(), "letters": Letters()}


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: int, seed: int) -> dict[str, Any]:
    """Held-out accuracy with 95% intervals, by probe, and perplexity per token."""
    model = adopt(model).eval()
    figures: dict[str, Any] = {
        name: proportion(answer(model, tokenizer, probe.questions(examples, seed + 77)).correct).model_dump(mode="json")
        for name, probe in measured_probes().items()
    }
    text = TextWindows()
    figures["perplexity"] = math.exp(text.losses(model, text.token_windows(tokenizer, seed + 77)).mean())
    return figures
