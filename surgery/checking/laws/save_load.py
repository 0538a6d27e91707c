"""A folder that save_pretrained writes is the model: tied weights, buffers, several files."""

import tempfile
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from surgery.checking.law import Law, NotApplicable, Subject, prepared

LARGEST = 2**30  # bytes that are written to a temporary folder


def cases(s: Subject):
    source = s.source
    if sum(p.nbytes for p in source.parameters()) > LARGEST:
        raise NotApplicable("its weights are larger than 1 GiB; `surgery export` proves what it writes")

    def run():
        shown = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            with tempfile.TemporaryDirectory() as folder:
                source.save_pretrained(folder, max_shard_size="200KB")
                again: Any = prepared(type(source).from_pretrained(folder, dtype=source.dtype))
                again = again.to(s.dtype)
        except (OSError, SafetensorError) as error:
            if getattr(error, "errno", None) is None and "I/O" not in str(error):
                raise
            raise NotApplicable(f"there is no room for it in a temporary folder: {error}") from error
        finally:
            (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
        with torch.no_grad(), s.precision():
            return again(input_ids=s.ids[:1], use_cache=False).logits, s.right

    return {"in several files": run}


LAW = Law(
    "save and load again",
    "what was trained is lost, or another model comes back",
    "compare the logits of the folder with those of the model before you delete it",
    cases,
)
