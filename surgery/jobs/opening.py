"""Opens the models that a job works on, on the device, in the dtype and with the kernels that its recipe says."""

from typing import Any

import torch
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.hybrids.layer_graft import brings_only_layers
from surgery.kernels.dispatch import requested, use
from surgery.kernels.operations import operations
from surgery.loading.opened import Checkpoint
from surgery.models.finite import broken_weight
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.records.record import Provenance
from surgery.runtime.processes import own_device
from surgery.runtime.progress import say
from surgery.splicing.load import load


def open_checkpoint(
    recipe: Recipe, trust_remote_code: bool = False, base: str | None = None, beside: Checkpoint | None = None
) -> Checkpoint:
    """Load the recipe's model onto its device, and see that the kernels which were asked for can serve it. base: of a patch, if
    not where it says. beside: a model that is open; what both have in common is held once."""
    device = recipe.device
    if device == "auto":
        device = own_device() or ("cuda" if torch.cuda.is_available() else "cpu")
    opened = load(
        recipe.model,
        tokenizer=recipe.tokenizer,
        dtype=recipe.dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        base=base,
        beside=beside,
    )
    if why := broken_weight(opened.model) or _strange_words(opened):
        raise UserError(f"{recipe.model} cannot be used: {why}")
    with use(**recipe.kernels):
        for operation in map(operations().__getitem__, requested()):
            operation.choose(*operation.example(opened.model.device, opened.model.dtype))
    return opened


def _strange_words(opened: Checkpoint) -> str:
    """What keeps the tokenizer from being this model's, or "": an id without an embedding. Tokens that were added
    to a vocabulary may have one, as long as no text has them."""
    embeddings: Any = opened.model.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    added = opened.tokenizer.get_added_vocab()
    ids = [number for token, number in opened.tokenizer.get_vocab().items() if token not in added]
    largest = max([*ids, *opened.tokenizer("a 1")["input_ids"]], default=0)
    return "" if largest < rows else f"its tokenizer has ids up to {largest:,}, and its embeddings are for {rows:,}"


def open_base(recipe: Recipe, trust_remote_code: bool = False, *, kind: str | None = None) -> Checkpoint:
    """As open_checkpoint, for what a plan of that kind (by default the recipe's) is carried out on. Raises UserError for a
    hybrid, unless its grafts are whole layers and the plan's are not."""
    opened = open_checkpoint(recipe, trust_remote_code)
    layers = getattr(opened.model.config, "grafts", None) and (kind or recipe.plan.kind) == "layer"
    if is_hybrid(opened) or layers:
        raise UserError(f"{recipe.model} is a hybrid already; grafts go into {_base_of_hybrid(recipe.model)}")
    return opened


def is_hybrid(opened: Checkpoint) -> bool:
    """Whether a model has grafts of heads, or windows. One that has whole layers is as good as a base."""
    return not brings_only_layers(opened.model.config)


def advise_base(opened: Checkpoint) -> None:
    """Say so if a model that is to be located in is a hybrid: it can be, but no plan can be made of that."""
    if is_hybrid(opened):
        say(
            f"{opened.name} is a hybrid: its heads can be measured, but grafts go into {_base_of_hybrid(opened.name)}. "
            "Its attention can have windows (plan.kind=window)"
        )


def _base_of_hybrid(name: str) -> str:
    """A hybrid's base, in words."""
    from surgery.exporting.source import base_of  # with it come the figures of a card

    try:
        return f"its base, {base_of(name)}"
    except UserError:  # it does not say
        return "its base"


def as_ranked(ranked: Provenance | None, recipe: Recipe) -> Recipe:
    """The recipe, opening its model as a ranking did, from where a ranking or a plan comes: a dtype and a tokenizer of the Hub
    are said once, unless the recipe says one itself. Of a folder's path a record keeps the last part alone."""
    said = (ranked and ranked.recipe) or {}
    same = {"dtype": said.get("dtype", "auto")}
    same |= {"tokenizer": said["tokenizer"]} if "/" in (said.get("tokenizer") or "") else {}
    return recipe.model_copy(update={name: value for name, value in same.items() if name not in recipe.model_fields_set})


def open_beside(base: Checkpoint, name: str, recipe: Recipe, trust_remote_code: bool = False) -> Checkpoint:
    """Another model, to be asked what `base` is asked; what both have in common is held once. Raises UserError if its tokenizer
    is another."""
    other = open_checkpoint(recipe.model_copy(update={"model": name}), trust_remote_code, beside=base)
    if other.tokenizer.get_vocab() != base.tokenizer.get_vocab():
        raise UserError(f"{name} has another tokenizer than {base.name}; their examples would not be the same")
    return other


def open_donor(plan: Plan, trust_remote_code: bool = False) -> PreTrainedModel | None:
    """The model that a plan's grafts start from, if it names one."""
    return None if plan.donor is None else load(plan.donor, trust_remote_code=trust_remote_code).model
