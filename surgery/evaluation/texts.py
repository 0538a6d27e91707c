"""The loss on held-out text as a task of suites."""

from collections.abc import Callable
from functools import partial

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.evaluation.cells import digest, watched
from surgery.evaluation.task import Outcome, Shapes, Task, bench_seed
from surgery.probes.perplexity import TextWindows
from surgery.records.recipe import Bench, Data

WINDOW_ROWS = 4  # of the rows of a batch, what a window of text stands for: it is several times as long as a question


def windows_at_once(options: Bench) -> int:
    """Windows of text in a forward pass."""
    return max(1, options.batch_size // WINDOW_ROWS)


def text_shapes(rows: Tensor, batch_size: int) -> Shapes:
    """Of the forwards over rows of text."""
    return [(len(ids), ids.shape[1]) for ids in rows.split(batch_size)]


def text_tasks(
    name: str, rows_of: Callable[[Tensor], Tensor], losses: Callable[[PreTrainedModel, Tensor, int], np.ndarray],
    options: Bench, tokenizer: PreTrainedTokenizerBase, data: Data, seed: int,
) -> list[Task]:  # fmt: skip
    """A task for each seed that draws another text. rows_of: windows -> the rows that are read; losses: of such rows."""
    together = windows_at_once(options)
    text = TextWindows(data.held_out_text, options.windows, options.window)
    result: list[Task] = []
    known: set[str] = set()
    for s in range(seed, seed + options.seeds):
        rows = rows_of(text.token_windows(tokenizer, bench_seed(s)))
        digests = tuple(digest(str(row)) for row in rows.tolist())
        if {*digests} <= known:  # a text file is the same for every seed
            continue
        known |= {*digests}

        def measure(model: PreTrainedModel, rows: Tensor = rows, digests: tuple[str, ...] = digests) -> Outcome:
            with watched(model) as inputs:
                values = losses(model, rows, together)
            return Outcome(values, digests, inputs())

        shapes = partial(text_shapes, rows, together)
        result.append(Task(name, s, f"{name} {' '.join(digests)}", measure, count=len(rows), shapes=shapes))
    return result
