"""Exact ablation and splicing of every head, sharing all the work that they share.

A batch walks through the base once. At each layer the mixer's projections, its scan and its dual attention are computed for
all heads together; a variant (one head ablated, or spliced) changes that layer's output and runs the layers above alone. A
head of layer l therefore costs the layers after l instead of the whole model, and one of the last layer next to nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from surgery.families import Hybrid
from surgery.plan import Plan, Start
from surgery.site import Site
from surgery.splice import splice


@dataclass(frozen=True)
class Variant:
    """The base with one change, and the logits (rows, vocabulary) at the rows' last tokens. `site` None: no change."""

    kind: str  # "base", "ablate" or "splice"
    site: Site | None
    logits: Tensor


def fully_gated(base: PreTrainedModel, layers: int, heads: int, starts: dict[str, Start] | None = None) -> PreTrainedModel:
    """The base with a dual graft at every head, all blend gates at 0. It computes what the base computes."""
    everywhere = tuple(Site(layer, tuple(range(heads))) for layer in range(layers))
    return splice(base, Plan(sites=everywhere, starts=starts or {}, shared=True, blend=0.0)).eval()


@torch.inference_mode()
def variants(base: Hybrid, gated: Hybrid, ids: Tensor, last: Tensor) -> Iterator[Variant]:
    """Every layer and head ablated and spliced, and first the base itself.

    base: adopted; gated: the same, fully gated; ids (rows, t), padded on the right; last (rows,): each row's last token.
    """
    backbone = base.backbone
    at = torch.arange(len(ids), device=ids.device), last

    def logits(hidden: Tensor, blocks: list[nn.Module]) -> Tensor:
        for block in blocks:
            hidden = block(hidden)
        if hidden.dim() == 3:
            hidden = hidden[at]
        return base.lm_head(backbone.norm_f(hidden).to(base.lm_head.weight.dtype))

    hidden = backbone.embeddings(ids)
    blocks = list(backbone.layers)
    for layer, block in enumerate(gated.backbone.layers):
        above, mixer = blocks[layer + 1 :], block.mixer
        gate, x, B, C, dt, qk = mixer.project(block.norm(hidden.to(block.norm.weight.dtype)))
        y = mixer.scan(x, B, C, dt, mixer.ssm_heads, None)
        attended = mixer.attend(x, dt, qk)
        residual = hidden.to(torch.float32) if block.residual_in_fp32 else hidden
        following = residual + mixer.finish(y, gate)
        if not above:  # nothing mixes positions any more: the last tokens are enough
            residual, gate, y, attended = residual[at], gate[at], y[at], attended[at]
        if layer == 0:
            yield Variant("base", None, logits(following, above))
        normed = mixer.norm(y.flatten(-2), gate)
        whole = residual + F.linear(normed, mixer.out_proj.weight, mixer.out_proj.bias)
        yield Variant("ablate", Site(layer), logits(residual.clone(), above))
        yield Variant("splice", Site(layer), logits(residual + mixer.finish(attended, gate), above))
        for head in range(mixer.num_heads):
            columns = slice(head * mixer.head_dim, (head + 1) * mixer.head_dim)
            silenced = whole - F.linear(normed[..., columns], mixer.out_proj.weight[:, columns])
            yield Variant("ablate", Site(layer, (head,)), logits(silenced, above))
            changed = y.clone()
            changed[..., head, :] = attended[..., head, :]
            yield Variant("splice", Site(layer, (head,)), logits(residual + mixer.finish(changed, gate), above))
        hidden = following
