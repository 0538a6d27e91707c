"""The suite hits: the loss on recall hits of held-out text (probes/hits.py), and on its other tokens, in rows of each length.

The rows of all lengths are cut from the same text. An example is a stretch of `bench.window` tokens of it, whatever the length
of the rows, so that n is the same for all lengths; the hits of a stretch are often of the same few names, and no examples of
their own. Its value is its share in the mean loss of all such tokens (statistics.shares), which is the mean over stretches.
"""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.cells import digest, watched
from surgery.evaluation.contexts import readable
from surgery.evaluation.results import HITS, OTHERS
from surgery.evaluation.suites import measured
from surgery.evaluation.task import Outcome, Task, TaskFamily, bench_seed
from surgery.evaluation.texts import text_shapes, windows_at_once
from surgery.models.finite import checked, explained
from surgery.probes.hits import PairCounts, by_stretch, hits
from surgery.probes.perplexity import TextWindows, token_losses
from surgery.records.recipe import Bench, Data
from surgery.statistics import shares
from surgery.tuning.rare_pairs import training_pairs

PLACE = 50
SUITES = {
    "hits": "Loss on recall hits of the held-out text (tokens that complete a pair seen before in the context and rare "
    "elsewhere), and on its other tokens, in rows of each length of bench.contexts."
}
LOSSES = ("recall_hits", "other_tokens")
LENGTHS = "only"
FAMILIES = {
    name: TaskFamily(f"Loss on {name.replace('_', ' ')} of text", "tokens", "tokens of a row") for name in (HITS, OTHERS)
}


def names(options: Bench) -> list[str]:
    lengths = options.lengths if "hits" in measured(options) else ()
    return [f"{name}.{length}" for length in lengths for name in (HITS, OTHERS)]


def tasks(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> list[Task]:
    together = windows_at_once(options)
    result: list[Task] = []
    known: set[str] = set()
    for s in range(seed, seed + options.seeds):
        for name, text in hit_texts(options, tokenizer, data, bench_seed(s)).items():
            digests = tuple(map(digest, text.texts()))
            identity = f"{name} {' '.join(digests)}"
            if identity in known:  # a text file is the same for every seed
                continue
            known.add(identity)
            rows = rows_at_once(options, text.chosen.shape[1], together)

            def measure(
                model: PreTrainedModel, text: ChosenTokens = text, rows: int = rows, digests: tuple[str, ...] = digests
            ) -> Outcome:
                values, inputs = text.losses(model, rows)
                return Outcome(values, digests, inputs)

            shapes = partial(text_shapes, text.rows.ids, rows)
            there = bool(text.chosen.any())
            count, lacking = (len(digests), "") if there else (0, _no_hits(name, data))
            result.append(Task(name, s, identity, measure, count=count, shapes=shapes, lacking=lacking))
    return result


class HitRows:
    """Rows of text, ids (n, t), and the losses of their tokens under a model."""

    def __init__(self, ids: Tensor):
        self.ids = ids
        self._last: tuple[weakref.ref, Any, np.ndarray, str] | None = None

    def losses(self, model: PreTrainedModel, rows_at_once: int, task: Any) -> tuple[np.ndarray, str]:
        """(nats (n, t - 1), a digest of what entered the model). Two tasks choose among the same losses, one after the other:
        what was computed for one is kept for the other, if it asks next and for the same model."""
        last, self._last = self._last, None
        if last is not None and last[0]() is model and last[1] is not task:
            return last[2], last[3]
        parts = []
        with watched(model) as inputs:
            for ids in self.ids.to(model.device).split(rows_at_once):
                losses = token_losses(model, ids)
                with explained(model, ids):
                    parts.append(checked(losses.cpu(), "the losses").double().numpy())
        self._last = weakref.ref(model), task, np.concatenate(parts), inputs()
        return self._last[2], self._last[3]


@dataclass(frozen=True, eq=False)
class ChosenTokens:
    """Some of the tokens of rows of text. chosen: (n, t) bool, False in the first column, which nothing predicts. stretch:
    tokens of an example."""

    rows: HitRows
    chosen: np.ndarray
    stretch: int

    def losses(self, model: PreTrainedModel, rows_at_once: int) -> tuple[np.ndarray, str]:
        """(of every stretch of every row, its share in the mean loss (nats) of the chosen tokens, (examples,); a digest of what
        entered the model)."""
        losses, inputs = self.rows.losses(model, rows_at_once, self)
        return shares(by_stretch(losses * self.chosen[:, 1:], self.stretch), self.counts()), inputs

    def counts(self) -> np.ndarray:
        """(examples,): chosen tokens of every stretch."""
        return by_stretch(self.chosen[:, 1:].astype(float), self.stretch)

    def texts(self) -> list[str]:
        """Of every example, what identifies it: all tokens of its row, and which of its own are chosen."""
        return [
            f"{ids} {begin} {np.flatnonzero(chosen[begin : begin + self.stretch]).tolist()}"
            for ids, chosen in zip(self.rows.ids.tolist(), self.chosen, strict=True)
            for begin in range(0, len(ids), self.stretch)
        ]


def hit_texts(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> dict[str, ChosenTokens]:
    """By the name of the task, what is measured. Lengths that the model does not read are left out. Raises UserError where the
    text is too short for a length."""
    lengths = readable(options, tokenizer) if "hits" in measured(options) else []
    if not lengths:
        return {}
    windows = max(options.windows, -(-max(lengths) // options.window))
    ids = np.array(TextWindows(data.held_out_text, windows, options.window).token_ids(tokenizer, seed))
    counts, within = _counted(tokenizer, data, ids)
    result: dict[str, ChosenTokens] = {}
    for length in lengths:
        count = min(max(1, options.windows * options.window // length), len(ids) // length)
        if not count:
            raise UserError(
                f"bench, hits: {data.held_out_text} has {len(ids)} tokens, and a row needs {length} (bench.contexts)"
            )
        ids_of_rows = ids[: count * length].reshape(count, length)
        rows, is_hit = HitRows(torch.from_numpy(ids_of_rows)), hits(ids_of_rows, counts, options.rare, within=within)
        others = ~is_hit
        others[:, 0] = False
        result |= {f"{name}.{length}": ChosenTokens(rows, chosen, options.window)
                   for name, chosen in ((HITS, is_hit), (OTHERS, others))}  # fmt: skip
    return result


def check_inputs(options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int) -> None:
    """Raise UserError for a length at which the text has no hits."""
    for name, text in hit_texts(options, tokenizer, data, bench_seed(seed)).items():
        if not text.chosen.any():
            raise UserError(_no_hits(name, data))


def _no_hits(name: str, data: Data) -> str:
    """What to say of a task for which the text has no tokens."""
    return (
        f"bench, {name}: {data.held_out_text} has no such tokens in rows of that length; take more text (bench.windows), "
        "longer rows (bench.contexts) or a larger bench.rare"
    )


def _counted(tokenizer: PreTrainedTokenizerBase, data: Data, ids: np.ndarray) -> tuple[PairCounts, bool]:
    """The pairs by which rarity is judged, and whether the held-out text is part of what was counted: the training text's; or,
    if none is named and the held-out text is a file, those of that whole file. ids (t,): of the held-out text."""
    named = any(text.source != "world" for text in data.train_text)
    if data.held_out_text == "world" or named:
        return training_pairs(tokenizer, data), False
    return PairCounts([ids]), True


def rows_at_once(options: Bench, length: int, windows: int) -> int:
    """Rows of a length in a forward pass, where it takes so many windows of perplexity."""
    return max(1, windows * options.window // length)
