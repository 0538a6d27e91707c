"""Whether the sizes of a recipe fit into memory at all: before anything is allocated, and by the least that they take, the
states of all tokens that go through the model at once, in one layer. What passes may need more; --dry-run estimates it."""

from typing import Any

from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.records.recipe import Bench, Tune
from surgery.runtime.memory import capacity, size
from surgery.runtime.processes import state


def check_tuning(options: Tune, model: PreTrainedModel) -> None:
    """Raise UserError where a process's share of a micro-batch of text cannot be held."""
    rows = -(-options.text_batch_size // (options.gradient_accumulation_steps * state().num_processes))
    _check(model, "tune.text_batch_size, tune.text_tokens", rows, options.text_tokens)


def check_bench(options: Bench, model: PreTrainedModel) -> None:
    """Raise UserError where a window of text cannot be held."""
    _check(model, "bench.window", 1, options.window)


def _check(model: PreTrainedModel, names: str, rows: int, tokens: int) -> None:
    """names: the settings that `rows` and `tokens` come from."""
    embeddings: Any = model.get_input_embeddings()
    least, most = rows * tokens * embeddings.weight.shape[-1] * model.dtype.itemsize, capacity(model.device)
    if least > most:
        raise UserError(
            f"{names}: {rows:,} x {tokens:,} tokens at once have states of {size(least)} in one layer alone, and "
            f"{model.device} has {size(most)} in all; choose smaller ones"
        )
