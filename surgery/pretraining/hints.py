"""Attention hints: tell two heads of a Transformer where to look while it learns retrieval.

A Transformer has to learn both halves of retrieval at once: an aggregate head is useless before there are summaries to choose
from, and a gather head before something reads its summaries. Small models stay on that plateau for thousands of steps. So the
first steps of pretraining may hint at what a gather head and an aggregate head look at. The places of these two heads are then
known, which makes such a model a test for locating.
"""

import torch
from torch import Tensor

from surgery.records.site import Site
from surgery.tuning.sequences import IGNORE

KEY = 2  # tokens back from a value to its key ("key:value"), and from the end of a question to its key ("'key' is")


def hint_loss(attentions: tuple[Tensor, ...], ids: Tensor, targets: Tensor, gather: Site, aggregate: Site) -> Tensor:
    """The negative log of the attention weight at the hinted positions, in nats, summed over the three hints.

    attentions: of every layer, (b, heads, t, t). ids, targets: collated dictionaries (b, t), in which a value is one token and
    occurs first in its pair. Hints: the gather head looks from values and from questions at their keys, the aggregate head from
    questions at the value that answers them.
    """
    row, query = (targets != IGNORE).nonzero(as_tuple=True)
    value = (ids[row] == targets[row, query, None]).int().argmax(1)
    gathered, aggregated = (attentions[head.layer][:, head.heads[0]] for head in (gather, aggregate))
    weights = (gathered[row, query, query - KEY], gathered[row, value, value - KEY], aggregated[row, query, value])
    tiny = torch.finfo(weights[0].dtype).tiny
    return -torch.stack([weight.clamp_min(tiny).log().mean() for weight in weights]).sum()
