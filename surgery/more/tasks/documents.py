"""Facts of documents, as completions: the protocol of "Just read twice: closing the recall gap for recurrent language models"
(arXiv 2407.05483) on its own data sets. The harness has its SWDE, FDA and SQuAD; these are the others."""

import re
from typing import Any

MARKS = re.compile(r"\[(?:PAR|DOC|TLE)\]")  # in the documents of TriviaQA


def prompt(doc: dict[str, Any]) -> str:
    """The document, without the question where it ends with it, and the beginning of a sentence that the answer completes."""
    context, question = MARKS.sub("", doc["context"].strip()), doc["question"].strip()
    while question and context.lower().endswith(question.lower()):
        context = context[: -len(question)]
    return f"{context.strip().strip('.')}. {question}"


def contains(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Whether one of the answers occurs in what was written, whatever its case."""
    return {"contains": float(any(answer.lower() in results[0].lower() for answer in doc["answers"]))}
