"""Attention hints: tell two heads of a model without convolutions where to look while it learns retrieval.

A Transformer has to learn both halves of retrieval at once: an aggregate head is useless before there are summaries to choose
from, and a gather head before something reads its summaries. Small models stay on that plateau for thousands of steps. So the
first steps of pretraining may hint at what a gather head and an aggregate head look at. The places of these two heads are then
known, which makes such a model a test for locating. Linear attention without a convolution (mLSTM) has the same to learn, and
its mixing matrices stand where a Transformer has attention weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.hybrids.patching import hooked
from surgery.records.site import Site
from surgery.tuning.sequences import IGNORE

KEY = 2  # tokens back from a value to its key ("key:value"), and from the end of a question to its key ("'key' is")


def looks(model: Any, ids: Tensor, gather: Site, aggregate: Site) -> tuple[Tensor, Tensor, Tensor]:
    """The last hidden states (b, t, d) for ids (b, t), and how much either head looks from where to where: (b, t, t), between
    0 and 1.

    Of attention these are the weights; transformers' eager implementation returns them. The weights of linear attention may be
    negative, and have any size: (1 + w / sum |w|) / 2, with the sum over a row, is a half where a position has no weight, and
    1 where it has all. Raises UserError for a head that the model does not have.
    """
    layers, heads = model.base_model.layers, (gather, aggregate)
    for head in heads:
        if head.layer >= len(layers):
            raise UserError(f"hints: {head} is in none of the model's {len(layers)} layers")
    mixers = [next((part for part in layers[head.layer].modules() if hasattr(part, "matrices")), None) for head in heads]
    entering: dict[nn.Module | None, Tensor] = {}

    def keep(mixer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        entering[mixer] = given[0] if given else named["hidden_states"]

    with hooked(lambda: [mixer.register_forward_pre_hook(keep, with_kwargs=True) for mixer in mixers if mixer is not None]):
        output = model.base_model(input_ids=ids, use_cache=False, output_attentions=None in mixers)
    gathered, aggregated = (
        _weights(output.attentions, head, ids.shape[1]) if mixer is None else _shares(mixer, entering[mixer], head)
        for head, mixer in zip(heads, mixers, strict=True)
    )
    return output.last_hidden_state, gathered, aggregated


def _weights(attentions: Sequence[Tensor | None], head: Site, tokens: int) -> Tensor:
    weights = attentions[head.layer] if head.layer < len(attentions) else None
    if weights is None or weights.shape[-2:] != (tokens, tokens):
        raise UserError(f"hints: L{head.layer} shows no weights of its heads; attention does, and xLSTM")
    _check_head(head, weights.shape[1])
    return weights[:, head.heads[0]]


def _shares(mixer: Any, entering: Tensor, head: Site) -> Tensor:
    _check_head(head, mixer.num_heads)
    matrices = torch.cat([mixer.matrices(sequence[None], heads=head.heads) for sequence in entering])
    whole = matrices.abs().sum(-1, keepdim=True)
    return (1 + matrices / whole.clamp_min(torch.finfo(whole.dtype).tiny)) / 2


def _check_head(head: Site, heads: int) -> None:
    if head.heads[0] >= heads:
        raise UserError(f"hints: {head} is not a head of a layer that has {heads}")


def hint_loss(gathered: Tensor, aggregated: Tensor, ids: Tensor, targets: Tensor) -> Tensor:
    """The negative log of what `looks` gives at the hinted positions, in nats, summed over the three hints.

    gathered, aggregated: of the head that gathers and of the one that aggregates, (b, t, t). ids, targets: collated
    dictionaries (b, t), in which a value is one token and occurs first in its pair. Hints: the gather head looks from values
    and from questions at their keys, the aggregate head from questions at the value that answers them.
    """
    row, query = (targets != IGNORE).nonzero(as_tuple=True)
    value = (ids[row] == targets[row, query, None]).int().argmax(1)
    weights = (gathered[row, query, query - KEY], gathered[row, value, value - KEY], aggregated[row, query, value])
    tiny = torch.finfo(weights[0].dtype).tiny
    return -torch.stack([weight.clamp_min(tiny).log().mean() for weight in weights]).sum()
