"""Mixing matrices of any model that has an anatomy, for one sequence at a time.

Attention: the weights that transformers' eager implementation returns. SSMs: written out from the mixer's own projections. This
project's classes do that themselves; of the others it is done here if they are built as Mamba-2 is (the SSMs of Zamba2, Bamba,
NemotronH, Falcon-H1 and GraniteMoeHybrid share its attributes) or as Mamba-1 is (Jamba). The rest (RecurrentGemma's RG-LRU,
Qwen3-Next's gated DeltaNet) has no matrices here.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from surgery.hybrids.patching import replaced
from surgery.kernels.mixing import selective_matrix, ssd_matrix
from surgery.locating.subject import Subject
from surgery.models.anatomy import MixerPlace
from surgery.records.site import Site

SSD = ("in_proj", "conv1d", "act", "n_groups", "ssm_state_size", "conv_dim", "dt_bias", "time_step_limit")
SELECTIVE = ("in_proj", "conv1d", "act", "x_proj", "dt_proj", "time_step_rank", "ssm_state_size")


@torch.inference_mode()
def mixing_matrices(
    subject: Subject, ids: Tensor, rows: Tensor | None = None, sites: Collection[Site] | None = None
) -> dict[Site, Tensor]:
    """The matrices (rows, t) of heads (all, or the given ones) for one sequence, ids (t,); nothing for a head that has none
    here. rows: the positions whose rows are computed (all, where None).

    y = M x with x the head's values. SSM heads: time step included, D not. Of a model with thousands of channels, name a few.
    """
    anatomy = subject.anatomy
    heads_of: dict[int, list[int]] = {}  # by number of the mixer, heads as the mixer numbers them
    for site in anatomy.sites() if sites is None else sites:
        mixer = anatomy.mixer_of(site)
        heads_of.setdefault(anatomy.mixers.index(mixer), []).append(site.heads[0] - mixer.first)
    matrices: dict[Site, Tensor] = {}

    def watched(i: int) -> Any:
        mixer, own = anatomy.mixers[i], anatomy.mixers[i].module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            returned = own(*args, **kwargs)
            entering = args[0] if args else kwargs["hidden_states"]
            # Computed here, so that one layer's weights are held at a time.
            if (its_matrices := _matrices(mixer, entering, returned, heads_of[i], rows)) is not None:
                for head, matrix in zip(heads_of[i], its_matrices, strict=True):
                    matrices[Site(mixer.layer, (mixer.first + head,))] = matrix
            return returned

        return forward

    attention = any(anatomy.mixers[i].kind == "attention" for i in heads_of)
    with _eager(subject.model, attention), replaced({anatomy.mixers[i].module: watched(i) for i in heads_of}):
        subject.model(input_ids=ids[None], use_cache=False, logits_to_keep=1)  # nobody looks at them
    return matrices


@contextmanager
def _eager(model: PreTrainedModel, needed: bool) -> Iterator[None]:
    """The model with the attention that returns its weights."""
    before = model.config._attn_implementation
    if not needed or before == "eager":
        yield
        return
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _matrices(mixer: MixerPlace, hidden: Tensor, returned: Any, heads: list[int], rows: Tensor | None) -> Tensor | None:
    """(heads, rows, t), or None."""
    module: Any = mixer.module
    if hasattr(module, "matrices"):
        return module.matrices(hidden, rows, heads)
    if mixer.kind == "attention":
        weights = returned[1] if isinstance(returned, tuple) and len(returned) > 1 else None
        if weights is None or weights.shape[1] != mixer.heads:
            return None
        return weights[0, heads] if rows is None else weights[0, heads][:, rows]
    if all(hasattr(module, name) for name in SSD) and module.A_log.dim() == 1:
        return _ssd(module, hidden, heads, rows)
    if all(hasattr(module, name) for name in SELECTIVE) and module.A_log.dim() == 2:
        return _selective(module, hidden, heads, rows)
    return None


def _ssd(module: Any, hidden: Tensor, heads: list[int], rows: Tensor | None) -> Tensor:
    """A mixer as in Mamba-2; Falcon-H1 scales what enters it and what its projection gives."""
    b, t, _ = hidden.shape
    projected = module.in_proj(hidden * getattr(module, "ssm_in_multiplier", 1.0)) * getattr(module, "mup_vector", 1.0)
    _, xBC, dt = projected.split([module.intermediate_size, module.conv_dim, module.num_heads], dim=-1)
    xBC = module.act(module.conv1d(xBC.transpose(1, 2))[..., :t]).transpose(1, 2)
    state = module.n_groups * module.ssm_state_size
    _, B, C = xBC.split([module.intermediate_size, state, state], dim=-1)
    dt = F.softplus(dt + module.dt_bias.to(dt.dtype)).clamp(*module.time_step_limit)
    B, C = (m.reshape(b, t, module.n_groups, module.ssm_state_size) for m in (B, C))
    return ssd_matrix(dt, -torch.exp(module.A_log.float()), B, C, heads=heads, rows=rows)[0]


def _selective(module: Any, hidden: Tensor, channels: list[int], rows: Tensor | None) -> Tensor:
    """A mixer as in Mamba-1; Falcon-Mamba and Jamba normalise B, C and dt."""
    t, n = hidden.shape[1], module.ssm_state_size
    x = module.in_proj(hidden).transpose(1, 2).chunk(2, dim=1)[0]
    x = module.act(module.conv1d(x)[..., :t]).transpose(1, 2)
    parts = module.x_proj(x).split([module.time_step_rank, n, n], dim=-1)
    norms = (getattr(module, name, None) for name in ("dt_layernorm", "b_layernorm", "c_layernorm"))
    dt, B, C = (part if norm is None else norm(part) for norm, part in zip(norms, parts, strict=True))
    dt = F.softplus(module.dt_proj(dt))
    return selective_matrix(dt, -torch.exp(module.A_log.float()), B, C, channels=channels, rows=rows)[0]
