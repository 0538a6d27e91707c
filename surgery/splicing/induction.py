"""The induction start: grafts that are induction heads before anything is trained.

An induction head (Olsson et al., arXiv 2209.11895) attends to the token behind an earlier occurrence of the current one. The
dual start is as good at that as the head's SSM was, and a base that hardly learnt to recall has no such head. But a graft of
Mamba-2 has all that it takes. Queries and keys are the same projection P of the layer's input, and the keys' convolution takes
it from one token back:

    q_t = SiLU(P (u_t - m)),    k_s = SiLU(P (u_{s-1} - m))

So the score is large where the token before s is the one at t. P are the directions in which the inputs of different tokens
differ most, each divided by its spread, so that all tell tokens apart alike. The inputs u are those of single tokens, each read
alone by the base, and m is their mean: the start needs no text. Values, gate, norm and output stay the head's own.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families import family_of
from surgery.families.dual_start import generator
from surgery.hybrids.dual import DualGraft
from surgery.models.anatomy import mixer_at
from surgery.models.offloaded import device_of
from surgery.records.plan import Plan

TOKENS = 1024  # that are read, at most; drawn from the vocabulary
ROWS = 256  # read at a time
SHARP = 16.0  # the score of equal tokens at tau 1, about
POWER = 0.355  # the mean of SiLU(z) ** 2 for a standard normal z
BACK = 1  # the token before a key is compared, unless the plan knows at which place its head reads


def check_induction(base: PreTrainedModel, hybrid: PreTrainedModel, plan: Plan) -> None:
    """Raise UserError where grafts of the base's family cannot start as induction heads."""
    for site in plan.sites:
        graft: Any = mixer_at(hybrid, site.layer).graft
        if type(graft) is not DualGraft or graft.qk_conv is None or graft.qk_conv.kernel_size[0] <= BACK:
            raise UserError(
                "init: an induction head looks one token back, by a convolution of its queries and keys as Mamba-2 has it, and "
                f"grafts of {family_of(base.config).model_type} have none; take init: dual"
            )


@torch.no_grad()
def token_inputs(base: PreTrainedModel, plan: Plan) -> dict[int, Tensor]:
    """Layer -> the inputs (tokens, d) of its mixer, of single tokens that are each read alone; of the plan's layers."""
    embeddings: Any = base.get_input_embeddings()
    count = embeddings.weight.shape[0]
    ids = torch.randperm(count, generator=generator(plan, 0))[:TOKENS].sort().values
    kept: dict[int, list[Tensor]] = {site.layer: [] for site in plan.sites}

    def keep(layer: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        kept[layer].append(hidden[:, 0].float().cpu())

    device = device_of(embeddings, embeddings.weight)
    handles = [mixer_at(base, layer).register_forward_pre_hook(partial(keep, layer), with_kwargs=True) for layer in kept]
    try:
        for part in ids.split(ROWS):
            base.base_model(input_ids=part[:, None].to(device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {layer: torch.cat(parts) for layer, parts in kept.items()}


@torch.no_grad()
def fill_induction(mixer: Any, plan: Plan, inputs: Tensor) -> None:
    """Give a head graft, which has its dual start, the queries and keys of induction heads. inputs: token_inputs of its layer.
    Where the place is known at which the heads of a query-key pair read (Plan.places), and the convolution reaches so far back,
    the keys match such that they read there."""
    graft: Any = mixer.graft
    conv, width, pairs = graft.qk_conv, graft.width, len(graft.pair_groups)
    inputs = inputs * getattr(mixer, "ssm_in_multiplier", 1.0)  # Falcon-H1's mixer begins with it
    projection = whitening(inputs, width)
    for proj in (graft.q_proj, graft.k_proj):
        proj.weight.copy_(projection.repeat(pairs, 1))
        if proj.bias is not None:
            proj.bias.zero_()
    taps = conv.kernel_size[0]
    conv.weight.zero_()
    queries, keys = conv.weight[:, 0].view(2, pairs, width, taps)
    queries[..., -1] = 1
    known: list[set[int]] = [set() for _ in range(pairs)]  # of the heads of each pair, how far back their keys compare
    for head, pair in zip(graft.heads, graft.pair_of_head.values, strict=True):
        # Place 1 is the token behind the match (tuning/hinting.py), place 0 the one after it.
        known[pair].add(2 - plan.places.get(f"L{mixer.layer_idx}.H{head}", 2 - BACK))
    for pair, backs in enumerate(known):
        back = backs.pop() if len(backs) == 1 else BACK
        keys[pair, :, -1 - (back if 0 < back < taps else BACK)] = 1
    if conv.bias is not None:
        conv.bias.copy_(-(projection @ inputs.mean(0)).repeat(2 * pairs))
    graft.log_tau += torch.tensor(SHARP / (POWER * max(1, int(projection.any(1).sum())))).log()


def whitening(inputs: Tensor, width: int) -> Tensor:
    """(width, d): the projection to the `width` directions in which inputs (n, d) differ most, such that each has variance 1.
    Rows beyond the number of such directions are 0."""
    _, spread, directions = torch.linalg.svd((inputs - inputs.mean(0)).double(), full_matrices=False)
    real = spread[:width] > 1e-6 * spread[:1]
    rows = directions[:width][real] / spread[:width][real, None] * len(inputs) ** 0.5
    return torch.cat([rows, rows.new_zeros(width - len(rows), inputs.shape[1])]).float()
