"""Attention hints: where two heads of a Transformer are to look while it learns retrieval.

A Transformer has to invent both halves of retrieval at once: an aggregate head is of no use before there are summaries to
choose from, and a gather head of none before something reads them. Small ones stay on that plateau for thousands of steps
(CHANGELOG), so pretraining may say in its first steps what a gather head and an aggregate head look at. Where those two are is
then known, which makes such a model a test of whoever looks for them.
"""

import torch
from torch import Tensor

from surgery.records.site import Site
from surgery.tuning.sequences import IGNORE

KEY = 2  # from a value back to its key ("key:value"), and from a question's end to the key asked for ("'key' is")


def hint_loss(attentions: tuple[Tensor, ...], ids: Tensor, targets: Tensor, gather: Site, aggregate: Site) -> Tensor:
    """Negative log of the weight that falls where it should, in nats, summed over the three hints.

    attentions: of every layer, (b, heads, t, t). ids, targets: dictionaries as collated (b, t); a value is one token there, and
    occurs first in its pair. The gather head is to look from values and from questions at their keys, the aggregate head from
    questions at the value that answers them.
    """
    row, asked = (targets != IGNORE).nonzero(as_tuple=True)
    value = (ids[row] == targets[row, asked, None]).int().argmax(1)
    gathered, aggregated = (attentions[head.layer][:, head.heads[0]] for head in (gather, aggregate))
    weights = (gathered[row, asked, asked - KEY], gathered[row, value, value - KEY], aggregated[row, asked, value])
    tiny = torch.finfo(weights[0].dtype).tiny
    return -torch.stack([weight.clamp_min(tiny).log().mean() for weight in weights]).sum()
