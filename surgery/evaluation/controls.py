"""The controls that bench.controls names: what else might have done as well as the edit.

In a report a control is a model called control_NAME. Those that are trained see the same training examples as the hybrid
(tuning/controls.py makes them, pipeline.py tunes them); the others need nothing but the base, and bench makes them itself.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surgery.evaluation.texts import row_logits

PREFIX = "control_"
ORDERS = (1, 2, 3)  # tokens before, by which a copy cache looks for what followed
SHARES = np.linspace(0, 0.95, 96)


@dataclass(frozen=True)
class Control:
    """words: in plain words. trained: whether it learns from the training examples."""

    words: str
    trained: bool


CONTROLS = {
    "tuned": Control("no attention, the same layers tuned", True),
    "same_layer": Control("as many other heads of the same layer, tuned", True),
    "random_site": Control("as many random heads of other layers, tuned", True),
    "window": Control("attention at all heads of the layer over a window of equal bytes, tuned", True),
    "adapters": Control("no attention, adapters on all layers tuned", True),
    "initial_state": Control("no attention, the initial state tuned", True),
    "whole_layer": Control("attention in the place of the whole layer, tuned", True),
    "prompt_twice": Control("the base, which reads the prompt twice", False),
    "copy_cache": Control("the base with an untrained n-gram cache", False),
}
NAMES = {"base": "base", "spliced": "as many located heads, untrained", "tuned": "as many located heads, tuned"}


def is_control(name: str) -> bool:
    """Whether a model's name is a control's."""
    return name.startswith(PREFIX) and name.removeprefix(PREFIX) in CONTROLS


def describe_model(name: str, model: Any = None) -> str:
    """A model of a run in plain words: "2 located heads, tuned". Another name is the user's, and is its own description."""
    words = CONTROLS[name.removeprefix(PREFIX)].words if is_control(name) else NAMES.get(name, name)
    grafts = getattr(getattr(model, "config", None), "grafts", None) or ()
    heads = sum(len(entry.get("heads") or ()) for entry in grafts)
    if not grafts:
        return name if words.startswith("as many") else words
    what, count = ("head", heads) if heads else ("layer", len(grafts))
    what = "channel" if any(entry.get("pairs") for entry in grafts) else what  # of a Mamba-1
    return words.replace("as many", str(count)).replace("heads", what + "s" * (count != 1))


class CopyCache(nn.Module):
    """A base whose probabilities are mixed with those of an n-gram cache of the same text, with nothing trained.

    Where the last tokens stood in the row before (of ORDERS the most that did), the cache says what followed there, each time
    with equal weight. shares: of the probability that the cache gets, by order. Source: the cache of arXiv 1612.04426 with
    exact matches in the place of similarity.
    """

    def __init__(self, base: Any, shares: dict[int, float]):
        super().__init__()
        self.base, self.shares, self.config = base, shares, base.config

    @property
    def device(self) -> torch.device:
        return self.base.device

    def forward(self, input_ids: Tensor, use_cache: bool = False, logits_to_keep: Tensor | int = 0) -> Any:
        """logits (b, positions, vocabulary): log-probabilities. logits_to_keep: as in transformers."""
        logits = self.base(input_ids=input_ids, use_cache=False, logits_to_keep=logits_to_keep).logits
        kept = torch.arange(input_ids.shape[1], device=logits.device)
        kept = kept[logits_to_keep] if isinstance(logits_to_keep, Tensor) else kept[-logits_to_keep:]
        log_p = logits.float().log_softmax(-1)
        for number, ids in enumerate(input_ids.tolist()):
            row, found = log_p[number], find_followers(ids)
            for place, position in enumerate(kept.tolist()):
                order, followers = found[position]
                share = self.shares.get(order, 0.0)
                if followers and share:
                    row[place] += math.log1p(-share)
                    tokens = torch.tensor(list(followers), device=row.device)
                    counts = torch.tensor([*followers.values()], device=row.device, dtype=row.dtype)
                    row[place, tokens] = torch.logaddexp(row[place, tokens], (share * counts / counts.sum()).log())
        return SimpleNamespace(logits=log_p)


def find_followers(ids: Sequence[int]) -> list[tuple[int, Counter[int]]]:
    """Behind each token: how many last tokens stood earlier in the row (0: none), and how often which token followed them."""
    followed: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    result: list[tuple[int, Counter[int]]] = []
    for end in range(1, len(ids) + 1):
        contexts = [tuple(ids[end - order : end]) for order in ORDERS if order <= end]
        best = max((context for context in contexts if followed.get(context)), key=len, default=())
        result.append((len(best), Counter(followed[best]) if best else Counter()))
        if end < len(ids):
            for context in contexts:
                followed[context][ids[end]] += 1
    return result


def fit_copy_cache(base: Any, rows: Tensor, batch: int) -> CopyCache:
    """The copy cache whose share for each order is that under which rows of training text (n, t) lose least."""
    known: dict[int, list[float]] = {order: [] for order in ORDERS}
    given: dict[int, list[float]] = {order: [] for order in ORDERS}
    for _, ids, logits in row_logits(base, rows, batch):
        right = logits[:, :-1].float().softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        for row, probabilities in zip(ids.tolist(), right.tolist(), strict=True):
            for (order, followers), token, p in zip(find_followers(row), row[1:], probabilities, strict=False):
                if order:
                    known[order].append(p)
                    given[order].append(followers[token] / followers.total())
    shares = {}
    for order in ORDERS:
        p, q = np.array(known[order]), np.array(given[order])
        losses = [-np.log((1 - share) * p + share * q).mean() for share in SHARES] if len(p) else [0.0]
        shares[order] = float(SHARES[int(np.argmin(losses))])
    return CopyCache(base, shares)
