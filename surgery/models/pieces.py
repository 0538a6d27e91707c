"""Logits a piece at a time.

Logits are the largest tensors of a forward: a number for every token and every word of the vocabulary, of which a loss needs
one a token. So the blocks are run once, and the head for some of the positions at a time, by the model's own forward: whatever
it does to logits (a bias, a cap, a scale), and however its head is stored or fetched, stays its own affair.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.hybrids.patching import replaced

LOGITS = 2**23  # of a piece, at most: 32 MiB in float32


def rows_at_once(model: PreTrainedModel) -> int:
    """How many rows of logits make a piece: one at least."""
    return max(1, LOGITS // model.config.get_text_config().vocab_size)


def logits_in_pieces(model: PreTrainedModel, ids: Tensor, positions: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The logits of ids (b, t) at some of the t positions, (p,) in any order: for one piece after the other, which of the p it
    has, and their logits, (b, those, vocabulary) in the model's own dtype."""
    decoder, count = model.base_model, len(positions)
    if decoder is model:  # there is no head apart from it
        yield slice(0, count), model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits
        return
    size = max(1, rows_at_once(model) // max(1, len(ids)))
    with computed_once(decoder) as is_known:
        first = 0
        while first < count:
            if first and not is_known():  # a class that does not call its own base model: a call for each piece would be dear
                size = count
            piece = slice(first, min(first + size, count))
            yield piece, model(input_ids=ids, use_cache=False, logits_to_keep=positions[piece]).logits
            first = piece.stop


@contextmanager
def computed_once(module: torch.nn.Module) -> Iterator[Callable[[], bool]]:
    """While this lasts, a module returns for every call what it computed for the first. Yields what says whether there has been
    one."""
    forward, known = module.forward, list[Any]()

    def first_alone(*args: Any, **kwargs: Any) -> Any:
        if not known:
            known.append(forward(*args, **kwargs))
        return known[0]

    with replaced({module: first_alone}):
        yield lambda: bool(known)
