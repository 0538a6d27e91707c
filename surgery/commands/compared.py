"""Opens the models of a comparison: what they have in common is held once, and what does not fit is opened for its turn."""

import os
from functools import partial
from itertools import chain, count
from pathlib import Path

from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.evaluation.entries import Unheld, writing
from surgery.jobs.opening import open_beside, open_checkpoint
from surgery.kernels.dispatch import use
from surgery.loading.digests import conditions
from surgery.loading.opened import Checkpoint
from surgery.loading.sharing import own_bytes
from surgery.records.names import on_hub
from surgery.records.recipe import Recipe, changed
from surgery.runtime.memory import available
from surgery.runtime.processes import on_this_machine
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt

HELD = 0.5  # of the memory that is free, so much may go to models beside the first; the rest is for the work


def open_compared(
    recipe: Recipe, others: list[str], trust_remote_code: bool = False
) -> tuple[Recipe, Checkpoint, dict[str, Checkpoint | Unheld]]:
    """The recipe's model and, by label, the others; and the recipe that opened them. Precision alone changes answers, so unless
    the recipe says a dtype, models that are stored in several are all opened in that of the first of the others.

    What the others have in common with the recipe's model is held once. Those whose own tensors do not fit into memory together
    are opened again for their turn."""
    base = open_checkpoint(recipe, trust_remote_code)
    beside, dtypes = _open_others(base, list(labels(others).items())[1:], recipe, trust_remote_code)
    if "dtype" in recipe.model_fields_set or len(set(dtypes)) == 1:
        if turns := [label for label, other in beside.items() if isinstance(other, Unheld)]:
            say(f"too large to hold all at once; opened for each use, and timed by themselves: {', '.join(turns)}")
        return recipe, base, beside
    say(f"the models are stored in {' and '.join(sorted(set(dtypes)))}; all are compared in {dtypes[0]}, unless dtype is set")
    del base, beside  # or all would be held twice
    return open_compared(changed(recipe, dtype=dtypes[0]), others, trust_remote_code)


def _open_others(
    base: Checkpoint, named: list[tuple[str, str]], recipe: Recipe, trust_remote_code: bool
) -> tuple[dict[str, Checkpoint | Unheld], list[str]]:
    """The others by label, and the dtypes of all, the base's last."""
    beside: dict[str, Checkpoint | Unheld] = {}
    held, dtypes = [base.model], list[str]()
    # Processes on one machine share its memory; each has a GPU of its own.
    room = HELD * available(base.model.device) / (1 if base.model.device.type == "cuda" else on_this_machine())
    for label, name in named:
        other = open_beside(base, name, recipe, trust_remote_code)
        dtypes.append(_dtype(other))
        if (size := own_bytes(other.model, *held)) <= room:
            beside[label], room = other, room - size
            held.append(other.model)
            continue
        with use(**recipe.kernels):
            measured_under = conditions(adopt(other.model), base.tokenizer)
        beside[label] = Unheld(
            other.name, partial(_open_again, base, name, recipe, trust_remote_code), measured_under, writing(other.model)
        )
        del other  # before the next one is opened
    return beside, [*dtypes, _dtype(base)]


def _open_again(base: Checkpoint, name: str, recipe: Recipe, trust_remote_code: bool) -> PreTrainedModel:
    return open_beside(base, name, recipe, trust_remote_code).model


def _dtype(opened: Checkpoint) -> str:
    return str(opened.model.dtype).removeprefix("torch.")


def labels(others: list[str]) -> dict[str, str]:
    """What a comparison calls its models -> their names: the base, then each by its folder; where two share that, the second by
    the folder above it as well, or with a number."""
    labelled: dict[str, str] = {"base": ""}
    for name in others:
        if Path(name) in map(Path, list(labelled.values())[1:]):
            raise UserError(f"{name} is there twice; give each model once")
        place = Path(name if on_hub(name) else os.path.abspath(name))
        candidates = chain((place.name, "/".join(place.parts[-2:])), (f"{place.name}_{i}" for i in count(2)))
        labelled[next(label for label in candidates if label not in labelled)] = name
    return labelled
