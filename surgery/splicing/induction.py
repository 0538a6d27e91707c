"""The starts induction and copy: grafts that are induction heads before anything is trained.

An induction head (Olsson et al., arXiv 2209.11895) attends to the token behind an earlier occurrence of the current one. The
dual start is as good at that as the head's SSM was, and a base that hardly learnt to recall has no such head. But a graft of
Mamba-2 has all that it takes. Queries and keys are the same projection P of the layer's input, and the keys' convolution takes
it from one token back:

    q_t = SiLU(P (u_t - m)),    k_s = SiLU(P (u_{s-1} - m))

So the score is large where the token before s is the one at t. P are the directions in which the inputs of different tokens
differ most, each divided by its spread, so that all tell tokens apart alike. The inputs u are those of single tokens, each read
alone by the base, and m is their mean: the start needs no text. Values, gate, norm and output stay the head's own.

What a head's values carry, and its output writes, decides which tokens such a graft can bring back: often few names. The start
copy gives it values of its own, and an output that writes them as what the model's head reads as that token:

    v_s = P' (u_s - m),    out_t = g W sum_s a_ts v_s,    W = R^T V / n

V (n, c) are the values of n single tokens, whose c directions are white, so that W is the least-squares map from a token's
values to R (n, d): the directions in the residual stream that raise each token's logit above the others' (its row of the
model's head, less the mean row, times the weight of the last norm). They are as long as the stream is on its way into the last
norm, so that g, which starts at the plan's blend, is the share of it that a copy adds. The heads of the layer stay as they are.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.families import families, family_of
from surgery.families.dual_start import generator
from surgery.hybrids.dual import DualMixer
from surgery.hybrids.patching import hooked
from surgery.models.anatomy import mixer_at
from surgery.models.offloaded import device_of, fetched
from surgery.models.quantised import dense
from surgery.records.plan import Plan

TOKENS = 1024  # that are read, at most; drawn from the vocabulary
ROWS = 256  # read at a time
SHARP = 16.0  # the score of equal tokens at tau 1, about
POWER = 0.355  # the mean of SiLU(z) ** 2 for a standard normal z
BACK = 1  # the token before a key is compared, unless the plan knows at which place its head reads


def check_induction(base: PreTrainedModel, mixers: Iterable[Any], plan: Plan) -> None:
    """Raise UserError where grafts of the base's family cannot start as induction heads. mixers: with their grafts, which
    need no values."""
    for mixer in mixers:
        conv = getattr(mixer.graft, "qk_conv", None)
        if conv is None or conv.kernel_size[0] <= BACK or type(mixer).prepare is not DualMixer.prepare:
            raise UserError(
                "init: an induction head looks one token back, by a convolution of its queries and keys as Mamba-2 has it, and "
                f"grafts of {family_of(base.config).model_type} have none; take init: dual"
            )
    if plan.init == "copy" and not family_of(base.config).copies:
        known = sorted({family.model_type for family in families().values() if family.copies}, reverse=True)
        raise UserError(
            f"init: copy is for {' and '.join(known)}, whose mixers add to the residual stream as it is; take init: induction"
        )


def token_inputs(base: PreTrainedModel, plan: Plan) -> dict[int, Tensor]:
    """Layer -> the inputs (tokens, d) of its mixer, of single tokens that are each read alone; of the plan's layers."""
    inputs = _inputs(base, plan, [mixer_at(base, site.layer) for site in plan.sites])
    return {site.layer: of_layer for site, of_layer in zip(plan.sites, inputs, strict=True)}


@torch.no_grad()
def token_outputs(base: PreTrainedModel, plan: Plan) -> Tensor:
    """(tokens, d): of the same tokens, R (see above)."""
    backbone: Any = base.base_model
    last: Any = getattr(backbone, getattr(backbone, "last_norm", "norm_f"))
    (stream,) = _inputs(base, plan, [last])
    head: Any = base.get_output_embeddings()
    with fetched(head), fetched(last):
        rows = dense(head).float().cpu()
        directions = (rows[_tokens(base, plan)] - rows.mean(0)) * last.weight.float().cpu()
    return torch.nn.functional.normalize(directions, dim=-1) * stream.norm(dim=-1).mean()


def _tokens(base: PreTrainedModel, plan: Plan) -> Tensor:
    """(tokens,): the ids of those that are read."""
    embeddings: Any = base.get_input_embeddings()
    return torch.randperm(embeddings.weight.shape[0], generator=generator(plan, 0))[:TOKENS].sort().values


@torch.no_grad()
def _inputs(base: PreTrainedModel, plan: Plan, modules: Sequence[Any]) -> list[Tensor]:
    """What enters each of the modules, (tokens, d), where the base reads single tokens, each alone."""
    embeddings: Any = base.get_input_embeddings()
    kept: list[list[Tensor]] = [[] for _ in modules]

    def keep(number: int, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        kept[number].append(hidden[:, 0].float().cpu())

    def listening() -> list[Any]:
        return [module.register_forward_pre_hook(partial(keep, i), with_kwargs=True) for i, module in enumerate(modules)]

    device = device_of(embeddings, embeddings.weight)
    with hooked(listening):
        for part in _tokens(base, plan).split(ROWS):
            base.base_model(input_ids=part[:, None].to(device), use_cache=False)
    return [torch.cat(parts) for parts in kept]


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


@torch.no_grad()
def fill_copy(mixer: Any, inputs: Tensor, outputs: Tensor) -> None:
    """Give a graft with values of its own, which has its induction start, those values and the output that copies them. Its
    heads share the directions in which tokens differ most. inputs: token_inputs of its layer; outputs: token_outputs."""
    graft: Any = mixer.graft
    projection = whitening(inputs, graft.v_proj.out_features)
    offset = projection @ inputs.mean(0)
    graft.v_proj.weight.copy_(projection)
    graft.v_proj.bias.copy_(-offset)
    written = (inputs @ projection.T - offset).T @ outputs / len(inputs)  # (values, d)
    graft.o_proj.weight.copy_(written.T)


def whitening(inputs: Tensor, width: int) -> Tensor:
    """(width, d): the projection to the `width` directions in which inputs (n, d) differ most, such that each has variance 1.
    Rows beyond the number of such directions are 0."""
    _, spread, directions = torch.linalg.svd((inputs - inputs.mean(0)).double(), full_matrices=False)
    real = spread[:width] > 1e-6 * spread[:1]
    rows = directions[:width][real] / spread[:width][real, None] * len(inputs) ** 0.5
    return torch.cat([rows, rows.new_zeros(width - len(rows), inputs.shape[1])]).float()
