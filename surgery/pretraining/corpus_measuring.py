"""What a base that was trained on text of one's own is measured by: its loss on held-out text, apart on recall hits
(probes/hits.py) and on the other tokens in rows of several lengths, and key-value retrieval."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.pretraining.corpus import Corpus, spread
from surgery.pretraining.recipe import CorpusOptions
from surgery.probes.hits import by_stretch, hits
from surgery.probes.kv import KVRetrieval
from surgery.probes.perplexity import token_losses
from surgery.probes.scoring import answer
from surgery.runtime.progress import Track
from surgery.splicing.splice import adopt
from surgery.statistics import mean, proportion, shares

MORE = 4  # times the windows that are measured during training
LENGTHS = (1, 2, 4, 8)  # of rows, in windows
RARE = 10.0  # how often, in a million tokens of the text that was learnt, a pair occurs that may be a hit
PAIRS = (4, 8, 16)  # of key-value retrieval: its prompts are nothing like prose


def measure_on_corpus(
    model: PreTrainedModel, corpus: Corpus, options: CorpusOptions, examples: int, seed: int
) -> dict[str, Any]:
    """Means with 95% intervals: nats per token and per byte of held-out text; by the length of rows, nats per hit and per other
    token; accuracies of retrieval. An example is a window of `tokens` tokens; per byte, and for hits, its value is its share
    in the mean over all bytes, or hits (statistics.shares)."""
    model, window = adopt(model).eval(), options.tokens
    windows = spread(corpus.held_out, window + 1, MORE * options.eval_windows)
    losses = _losses(model, windows, options.batch_size, "held-out text")
    size = np.array([len(text.encode()) for text in corpus.tokenizer.batch_decode(windows[:, 1:])])
    figures: dict[str, Any] = {
        "windows": len(windows),
        "nats_per_token": _estimate(losses.mean(1)),
        "nats_per_byte": _estimate(shares(losses.sum(1), size)),
    }
    for length in (window * factor for factor in LENGTHS):
        if len(corpus.held_out) < length:
            break
        rows = spread(corpus.held_out, length, max(1, len(windows) * window // length))
        losses = _losses(model, rows, max(1, options.batch_size * window // length), f"rows of {length} tokens")
        is_hit = hits(rows.numpy(), corpus.pairs, RARE, within=False)[:, 1:]
        for name, chosen in (("hits", is_hit), ("others", ~is_hit)):
            number = by_stretch(chosen.astype(float), window)
            if number.any():
                share = _estimate(shares(by_stretch(losses * chosen, window), number))
                figures[f"{name}.{length}"] = {**share, "tokens": int(number.sum())}
    for pairs in PAIRS:
        questions = KVRetrieval(pairs).questions(examples, seed + 77)
        figures[f"kv.{pairs}"] = proportion(answer(model, corpus.tokenizer, questions).correct).model_dump(mode="json")
    return figures


def _losses(model: PreTrainedModel, rows: Tensor, rows_at_once: int, what: str) -> np.ndarray:
    """(rows, t - 1): nats of all tokens but each row's first."""
    parts = [
        token_losses(model, ids.to(model.device)).double().cpu() for ids in Track(rows.split(rows_at_once), f"measuring {what}")
    ]
    return torch.cat(parts).numpy()


def _estimate(values: np.ndarray) -> dict[str, Any]:
    return mean(values).model_dump(mode="json")
