"""Numbers that are not finite raise an error that says where they come from; they never become a score.

A NaN compares false with everything, and argmax takes it for the largest: without a check a broken model gets a score that
looks like any other. Only what is used is checked: scores of candidates, losses. That is enough, because a NaN or an infinity
among the logits of a row makes every log-probability of that row NaN or -inf; -inf is allowed, because models mask ids of
padding with it. The cause is looked for only after a check has failed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.hybrids.patching import hooked
from surgery.runtime.processes import state


class NotFinite(UserError):
    """what: is not finite ("the logits"). where: what was being done. why: what holds the NaN, if that is known."""

    def __init__(self, what: str, where: str = "", why: str = ""):
        self.what, self.where, self.why = what, where, why
        super().__init__(f"{where}: " * bool(where) + f"{what} are not finite" + f": {why}" * bool(why))


def checked(values: Tensor, what: str) -> Tensor:
    """The values. Raises NotFinite if one of them is NaN or infinite."""
    if not values.isfinite().all():
        raise NotFinite(what)
    return values


@contextmanager
def within(where: str) -> Iterator[None]:
    """Add to a NotFinite what was being done."""
    try:
        yield
    except NotFinite as error:
        raise NotFinite(error.what, f"{where}, {error.where}" if error.where else where, error.why) from None


@contextmanager
def explained(model: nn.Module, rows: Sequence[Sequence[int]] | Tensor | None = None) -> Iterator[None]:
    """Add the cause to a NotFinite. rows: token ids, of one length or to be padded on the right, with which it happens."""
    try:
        yield
    except NotFinite as error:
        if not error.why and (why := broken_weight(model) or _first_output(model, rows)):
            raise NotFinite(error.what, error.where, why) from None
        raise


@contextmanager
def watching_logits(model: PreTrainedModel) -> Iterator[None]:
    """Within this context all logits of a model are checked, also those that only other code reads."""

    def check(_: nn.Module, __: Any, returned: Any) -> None:
        checked(returned.logits.amax(-1), "the logits")  # one pass: a NaN is the largest, and a single -inf is allowed

    with hooked(lambda: [model.register_forward_hook(check)]):
        yield


def broken_weight(model: nn.Module, besides: Sequence[str] = ()) -> str:
    """ "the weight 'backbone.layers.3.mixer.D' holds a NaN", or "". besides: weights that are left out."""
    for name, whole in [*model.named_parameters(), *model.named_buffers()]:
        weight = whole.to_local() if hasattr(whole, "to_local") else whole  # other processes may not take part in this
        if name not in besides and not weight.is_meta and _is_broken(weight):
            return f"the weight '{name}' holds {'a NaN' if weight.isnan().any() else 'an infinity'}"
    return ""


def _is_broken(values: Any) -> bool:
    """Whether there is a NaN or an infinity. -inf is none: masks are made of it."""
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.element_size() == 1:  # 8 bits have no isnan
        return False
    if not values.numel():
        return False
    largest = values.detach().max()  # a NaN counts as the largest; nothing as large as the values is made
    return bool(largest.isnan() | largest.isposinf())


@torch.no_grad()
def _first_output(model: nn.Module, rows: Sequence[Sequence[int]] | Tensor | None) -> str:
    """The first module whose output is not finite, or "". Also "" if the model may be divided among processes, as one of them
    alone cannot run it."""
    if rows is None or state().num_processes > 1:
        return ""
    ids = pad_sequence([torch.as_tensor(row) for row in rows], batch_first=True)
    first: list[str] = []

    def note(module: nn.Module, _: Any, returned: Any) -> None:
        values = returned[0] if isinstance(returned, tuple) else returned
        if not first and _is_broken(values):
            first.append(f"first in what '{names[module]}' puts out, in {str(values.dtype).removeprefix('torch.')}")

    names = {module: name for name, module in model.named_modules() if name}
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    with hooked(lambda: [module.register_forward_hook(note) for module in names]):
        model(input_ids=ids.to(device), use_cache=False)
    return "".join(first)
