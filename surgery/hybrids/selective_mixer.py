"""The mixer of Mamba-1 (mamba.py has its mathematics) as it is in transformers' Mamba and Falcon-Mamba, and in Jamba."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.models.mamba.modeling_mamba import apply_mask_to_padding_states

from surgery.hybrids.constants import Index
from surgery.hybrids.mixer import SMALLEST, Graft, GraftedMixer, Projected
from surgery.hybrids.parts import at_least_float32, convolved, gated, is_quantised_weight, seen_keys, time_step
from surgery.kernels.attention import graft_attention
from surgery.kernels.conv import SILU
from surgery.kernels.functions import own_precision, result_dtype
from surgery.kernels.mixing import attention_matrix, selective_matrix
from surgery.kernels.packing import Packing
from surgery.kernels.selective import selective_scan, selective_step


class ChannelGraft(Graft):
    """Queries and keys for the grafted channels of one layer. Its projections are named as in a Transformer, for PEFT.

    pairs: for every query-key pair, the places in `heads` of the channels that it serves.
    """

    def __init__(self, mixer: Any, spec: dict[str, Any]):
        super().__init__(spec, len(spec["pairs"]), mixer.intermediate_size)
        self.pairs: list[list[int]] = spec["pairs"]
        self.places = [Index(places) for places in self.pairs]
        flat = [place for places in self.pairs for place in places]
        self.by_place = Index(sorted(range(len(flat)), key=flat.__getitem__))
        self.each = max(map(len, self.pairs))  # the value width: smaller sets are padded with zeros
        size = len(self.pairs) * self.width
        self.q_proj = nn.Linear(mixer.intermediate_size, size, bias=False)
        self.k_proj = nn.Linear(mixer.intermediate_size, size, bias=False)

    def split(self, qk: Tensor, normalise: Any = None) -> tuple[Tensor, Tensor]:
        """qk (b, t, 2 * pairs * width) -> q and k (b, pairs, t, width), such that q . k is the score, sign and scale included.
        normalise: what the base does to B and C, applied to as many of the leading dimensions as they have."""
        b, t, _ = qk.shape
        q, k = qk.view(b, t, 2, len(self.pairs), self.width).permute(2, 0, 3, 1, 4)
        if normalise is not None:
            q, k = normalise(q, k)
        return self.sharpen(q), k

    def values(self, m: Tensor) -> Tensor:
        """m (b, t, grafted channels) -> (b, pairs, t, each)."""
        rows = [F.pad(places.of(m, -1), (0, self.each - len(places.values))) for places in self.places]
        with own_precision(m.device.type):  # autocast to bfloat16 takes no float16 here
            return torch.stack(rows, dim=1)

    def channels(self, v: Tensor) -> Tensor:
        """v (b, t, pairs, each) -> (b, t, grafted channels), the inverse of `values`."""
        rows = [v[:, :, i, : len(places)] for i, places in enumerate(self.pairs)]
        return self.by_place.of(torch.cat(rows, dim=-1), -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Packing | None) -> Tensor:
        """v (b, pairs, s, each, or twice that with the time step) -> (b, t, grafted channels)."""
        if self.time_step:
            with own_precision(v.device.type):  # autocast would go back to float16
                y, written = at_least_float32(graft_attention(q, k, v, mask)).split(self.each, dim=-1)
            y = y / written.clamp_min(SMALLEST)
        else:
            y = graft_attention(q, k, v, mask)
        return self.channels(y * self.sign(y).transpose(0, 1))


@dataclass(eq=False)
class ChannelProjected(Projected):
    """values (b, t, channels, 1), keys and queries (b, t, 1, n), gate (b, t, channels). dt (b, t, channels): time steps ready
    for use, in float32 at least."""

    dt: Tensor


class SelectiveMixer(GraftedMixer):
    """A mixin before a stock mixer of the kind of MambaMixer. A head is a channel; keys are B, queries C, values x."""

    graft_class = ChannelGraft
    num_heads = property(lambda self: self.intermediate_size)

    def project(
        self: Any, hidden_states: Tensor, cache: Cache | None = None, attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> ChannelProjected:  # fmt: skip
        hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)
        x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        silu = self.activation in SILU
        x = convolved(x, self.conv1d.weight, self.conv1d.bias, cache, self.layer_idx, silu, packing)
        x = apply_mask_to_padding_states(x if silu else self.act(x), attention_mask)
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        dt, B, C = self.normalise(*self.x_proj(x).split(sizes, dim=-1))
        if is_quantised_weight(self.dt_proj.weight):
            dt = self.dt_proj(dt).transpose(1, 2)
        else:
            dt = self.dt_proj.weight @ dt.transpose(1, 2)  # b channels t
            if self.dt_proj.bias is not None:
                dt = dt + self.dt_proj.bias.to(dt.dtype)[:, None]
        return ChannelProjected(x[..., None], B[:, :, None], C[:, :, None], gate, time_step(dt).transpose(1, 2))

    def normalise(self, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What Falcon-Mamba and Jamba do to them, and Mamba-1 does not."""
        return dt, B, C

    def scan(self: Any, projected: ChannelProjected, cache: Cache | None = None, packing: Packing | None = None) -> Tensor:
        A, D = self.of_scanned(-torch.exp(self.A_log.float()), 0), self.of_scanned(self.D.float(), 0)
        x, dt = self.of_scanned(projected.values[..., 0], -1), self.of_scanned(projected.dt, -1)
        B, C = projected.keys[:, :, 0], projected.queries[:, :, 0]
        dt = dt.to(x.dtype)  # as in transformers
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            return selective_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)[:, None, :, None]
        y, state = selective_scan(x, dt, A, B, C, D, state, packing=packing)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer_idx)
        return y[..., None]

    def attend(
        self: Any, projected: ChannelProjected, cache: Cache | None = None, mask: Tensor | Packing | None = None
    ) -> Tensor:
        graft: ChannelGraft = self.graft
        x = projected.values[..., 0]
        q, k = self.queries_and_keys(x)
        own = graft.grafted.of(x, -1)
        v = graft.values(own)
        if graft.time_step:
            write = graft.grafted.of(projected.dt, -1).clamp_min(SMALLEST)
            # float16 has no room for time steps and what they multiply: many would be 0, and so would be divided by 0.
            dtype = result_dtype(x)
            v = torch.cat([graft.values(write * own), graft.values(write)], dim=-1).to(dtype)
            q, k = q.to(dtype), k.to(dtype)
        if cache is not None:
            k, v = seen_keys(cache, self.layer_idx, k, v)
        return (graft.attend(q, k, v, mask) + graft.grafted.of(self.D, 0) * own)[..., None]

    def queries_and_keys(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (b, t, channels) -> the graft's q and k (b, pairs, t, width)."""
        qk = torch.cat([self.graft.q_proj(x), self.graft.k_proj(x)], dim=-1)
        return self.graft.split(qk, self.normalise_qk)

    normalise_qk: Any = None

    def own_matrices(self: Any, projected: ChannelProjected, rows: Tensor | None, heads: Sequence[int] | None) -> Tensor:
        """The time step included, D not."""
        A, B, C = -torch.exp(self.A_log.float()), projected.keys[:, :, 0], projected.queries[:, :, 0]
        channels = list(range(self.num_heads) if heads is None else heads)
        return selective_matrix(projected.dt, A, B, C, rows=rows, channels=channels)[0]

    def grafted_matrices(
        self: Any, matrices: Tensor, projected: ChannelProjected, rows: Tensor | None, heads: Sequence[int] | None
    ) -> Tensor:
        graft: ChannelGraft = self.graft
        row_of = {channel: row for row, channel in enumerate(range(self.num_heads) if heads is None else heads)}
        shared = attention_matrix(*self.queries_and_keys(projected.values[..., 0]), rows=rows)[0]  # pairs rows t
        shared = shared.to(matrices.dtype)
        for pair, places in enumerate(graft.pairs):
            for place in places:
                if (channel := graft.heads[place]) in row_of:
                    own = shared[pair]
                    if graft.time_step:
                        own = own * projected.dt[0, :, channel].clamp_min(SMALLEST)
                        own = own / own.sum(-1, keepdim=True)
                    share = 1.0 if graft.gate is None else graft.gate[place]
                    row = row_of[channel]
                    matrices[row] = (1 - share) * matrices[row] + share * graft.signs[pair] * own
        return matrices

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        return gated(self.out_proj, y.squeeze(-1), gate)


class NormedSelectiveMixer(SelectiveMixer):
    """One that normalises dt, B and C before the scan."""

    def normalise(self: Any, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norms = zip((self.dt_layernorm, self.b_layernorm, self.c_layernorm), (dt, B, C), strict=True)
        dt, B, C = (norm(m) for norm, m in norms)
        return dt, B, C

    def normalise_qk(self: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        n = self.ssm_state_size
        norms = ((self.c_layernorm, q), (self.b_layernorm, k))
        q, k = (torch.cat([norm(m[..., :n]), m[..., n:]], dim=-1) for norm, m in norms)
        return q, k
