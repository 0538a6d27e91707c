"""The controls that learn: what else might have done as well as the edit, tuned on the same examples.

Some are plans, to be spliced: grafts at other heads of the same layers, of other layers, or at all heads of the layers over a
window; attention in the place of the whole layers. The others are the base with no graft, of which something else learns.
"""

import copy
import random
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import UserError
from surgery.kernels.attention import attend_plain
from surgery.locating.attribution import graft_mixers
from surgery.modeling.graft import ChannelGraft, GraftMixer, Streams
from surgery.modeling.packing import Packing
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.splicing.splice import adopt, unsplice
from surgery.tuning.examples import Batches

PLANS = ("same_layer", "random_site", "window", "whole_layer")
# Controls in which the base's weights learn, or new ones that start at random; and their largest learning rate, times the root
# of the width: with 128 dimensions their loss falls at 0.002, and not at a graft's 0.009 (recipes/evidence/automatic).
SLOW, SLOW_RATE = ("tuned", "adapters", "whole_layer"), 0.02263


def control_plan(name: str, model: Any, plan: Plan, seed: int) -> Plan:
    """The plan of a control: `same_layer` (other heads of the plan's layers, at random), `random_site` (heads of other layers),
    `window` (all heads of the plan's layers; `narrow` says how far they see), `whole_layer`. Attention begins with sign 1, tau
    1 and no null key; make_plan sets what the plan's own heads have. Raises UserError where the model has no other heads."""
    if name != "random_site" and plan.kind != "head":
        raise UserError(f"the control {name} is for plan.kind=head")
    if name == "whole_layer":
        return Plan(kind="layer", sites=tuple(Site(site.layer) for site in plan.sites), seed=seed)
    hybrid, rng = adopt(model), random.Random(f"{name} {seed}")
    layers = list(graft_mixers(hybrid))
    own = {site.layer: site.heads for site in plan.sites}
    if name == "random_site":
        others = [layer for layer in layers if layer not in own]
        if len(others) < len(own):
            raise UserError(f"the control random_site needs other layers than the plan's, and the model has {len(layers)}")
        places = dict(zip(sorted(rng.sample(others, len(own))), own.values(), strict=True))
    else:
        places = own
    sites = []
    for layer, heads in places.items():
        free = [head for head in range(hybrid.mixer_at(layer).num_heads) if name != "same_layer" or head not in heads]
        if len(free) < len(heads):
            raise UserError(f"the control {name} needs {len(heads)} heads in layer {layer}, which has {len(free)}")
        sites.append(Site(layer, tuple(free if name == "window" else rng.sample(free, len(heads)))))
    return plan.model_copy(update={"sites": tuple(sites), "starts": {}, "seed": seed, "provenance": None})


def longest_row(batches: Batches) -> int:
    """Tokens of the longest row that the first eight steps of tuning see."""
    return max(part.ids.shape[1] for step in range(8) for part in batches.step(step))


def narrow(hybrid: Any, edited: Any, tokens: int) -> int:
    """Let the grafts see the last tokens alone, and say how many: as many as take the bytes that the keys and values of the
    grafts of `edited` take of a text of `tokens`. A cache goes on to hold all tokens."""
    numbers = dict.fromkeys((hybrid, edited), 0)  # of keys and values in a cache, for each token
    for model in numbers:
        for mixer in model.own_mixers():
            graft, size = mixer.graft, mixer.head_dim
            if isinstance(graft, ChannelGraft):
                size = graft.each * (2 if graft.time_step else 1)
            numbers[model] += len(graft.signs) * (graft.width + size)
    window = -(-tokens * numbers[edited] // numbers[hybrid])
    for mixer in hybrid.own_mixers():
        mixer.graft.attend = partial(attend_near, window=window)
    return window


def attend_near(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    null: Tensor | None,
    mask: Tensor | None,
    packing: Any,
    *,
    window: int,
) -> tuple[Tensor, Tensor]:
    """kernels/attention.py: attend, where a query sees the last `window` keys alone, its own included."""
    y, m = attend_plain(q, k, v, bias, null, mask, None if packing is None else packing.seq_idx, window)
    return y, m if null is not None else torch.ones_like(m)


def trainable_control(model: Any, plan: Plan, name: str = "tuned") -> Any:
    """The base with no graft, of which something learns; it shares with the base what does not. `tuned`: the mixers of the
    plan's layers, on copies of their own. `initial_state`: the state with which each layer begins. `adapters`: nothing yet;
    tune adds them (tune.lora)."""
    control = adopt(unsplice(model) if hasattr(model.config, "grafts") else model)
    for parameter in control.parameters():
        parameter.requires_grad_(False)
    if name == "tuned":
        for site in plan.sites:
            mixer: Any = control.mixer_at(site.layer)
            for own, child in list(mixer.named_children()):  # which learn, in the place of those that it shares
                setattr(mixer, own, copy.deepcopy(child))
            for own, parameter in list(mixer.named_parameters(recurse=False)):
                setattr(mixer, own, nn.Parameter(parameter.detach().clone()))
            for parameter in mixer.parameters():
                parameter.requires_grad_(parameter.is_floating_point())
    elif name == "initial_state":
        for mixer in [m for m in control.modules() if isinstance(m, GraftMixer)]:
            mixer.tap = InitialState(mixer)
    elif name != "adapters":
        raise UserError(f"there is no control '{name}' that learns without a plan of its own")
    return control


class InitialState(nn.Module):
    """The state with which a layer begins, as one token before the text would leave it: a value x0 for each head and a write
    vector k0 for each group. It is used as a mixer's tap, and reads whole texts only, no cache.

    The recurrences here are linear in what they write, so what the state adds is the scan of that token alone, with nothing
    written afterwards.
    """

    def __init__(self, mixer: Any):
        super().__init__()
        p, n = mixer.head_dim, mixer.ssm_state_size
        self.x0 = nn.Parameter(torch.zeros(mixer.num_heads, p))
        self.k0 = nn.Parameter(
            torch.randn(mixer.n_groups, n, generator=torch.Generator().manual_seed(mixer.layer_idx)) / n**0.5
        )
        like = next(mixer.parameters())
        self.to(like.device)

    def forward(self, mixer: Any, streams: Streams, y: Tensor, packing: Packing | None) -> Tensor:
        """y (b, t, h, p), with what the state adds to each text."""
        zero, one = torch.zeros((), device=y.device), torch.ones((), device=y.device)
        before = {"x": self.x0, "k": self.k0, "q": zero, "write": one, "decay": zero}
        given = {name: each for name in before if (each := getattr(streams, name)) is not None}
        given["x"] = torch.zeros_like(streams.x)

        def scan(*texts: Tensor) -> Tensor:
            begun = {}
            for name, text in zip(given, texts, strict=True):
                begun[name] = torch.cat([before[name].to(text).expand(len(text), 1, *text.shape[2:]), text], dim=1)
            return mixer.scan(replace(streams, **begun))[:, 1:]

        return y + (scan(*given.values()) if packing is None else packing.apply(scan, *given.values()))
