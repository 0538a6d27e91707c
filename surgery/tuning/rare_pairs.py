"""Which pairs of tokens are rare in the text that tuning trains on: counted in the sixteenth of it that is held out, so that no
row that is looked at for hits is part of what was counted."""

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.probes.hits import PairCounts
from surgery.records.recipe import Data
from surgery.tuning.draws import Draws, open_sources
from surgery.tuning.text_sources import Reading

TOKENS = 2**17  # that are counted: of 10 in a million, one is seen
STRETCH = 256  # of an excerpt


def training_pairs(tokenizer: PreTrainedTokenizerBase, data: Data) -> PairCounts:
    """The pairs in TOKENS tokens of the training text, drawn by its weights: the same for every run, whatever its seed. Raises
    UserError for text that cannot be read or is too short."""
    sources = open_sources(data, Reading(tokenizer, STRETCH, 0, held_out=True))
    drawn = Draws("pairs", [text.weight for text in data.train_text], TOKENS)
    excerpts: list[np.ndarray] = []
    counted = 0
    for source, index in drawn:
        if counted >= TOKENS:
            break
        excerpts.append(np.array(sources[source].excerpt(index), dtype=np.int64))
        counted += len(excerpts[-1])
    if not counted:
        raise UserError("data.train_text holds no text in which pairs of tokens can be counted")
    return PairCounts(excerpts)
