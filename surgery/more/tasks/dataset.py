"""Our probes as data sets for lm-evaluation-harness: the `custom_dataset` of the YAML files beside this one, with their
metadata."""

from typing import Any

from datasets import Dataset, DatasetDict
from transformers import AutoTokenizer

from surgery.evaluation.asking import WRITTEN, examples
from surgery.evaluation.task import bench_seed
from surgery.probes import make

EXAMPLES = 1000  # --limit takes the first ones


def choices(*, probe: str, options: dict[str, Any], tokenizer: Any = None, pretrained: Any = None, **_: Any) -> DatasetDict:
    """Questions. tokenizer, pretrained: what the harness was given, for a probe that measures its prompts in tokens."""
    words = AutoTokenizer.from_pretrained(tokenizer or pretrained, trust_remote_code=False) if tokenizer or pretrained else None
    asked: Any = make(probe, tokenizer=words, **options)
    questions: Any = examples(asked, False, EXAMPLES, bench_seed(0))
    rows = [{"prompt": q.prompt, "choices": list(q.choices), "answer": q.answer} for q in questions]
    return DatasetDict({"test": Dataset.from_list(rows)})


def completions(*, probe: str, options: dict[str, Any], **_: Any) -> DatasetDict:
    asked: Any = make(probe, **options)
    made: Any = examples(asked, probe in WRITTEN, EXAMPLES, bench_seed(0))
    return DatasetDict({"test": Dataset.from_list([{"prompt": c.prompt, "answer": c.answer} for c in made])})
