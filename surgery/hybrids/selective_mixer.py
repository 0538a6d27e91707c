"""The mixer of Mamba-1 (mamba.py has its mathematics) as it stands in transformers' Mamba and Falcon-Mamba, and in Jamba."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache
from transformers.models.mamba.modeling_mamba import apply_mask_to_padding_states

from surgery.hybrids.common import Graft
from surgery.hybrids.constants import Index
from surgery.hybrids.parts import at, at_least_float32, convolved, fetching, gated, is_quantised_weight, seen_keys, time_step
from surgery.kernels.attention import graft_attention
from surgery.kernels.conv import SILU
from surgery.kernels.functions import own_precision, result_dtype
from surgery.kernels.mixing import attention_matrix, selective_matrix
from surgery.kernels.packing import Packing
from surgery.kernels.selective import selective_scan, selective_step

READ = ("conv1d", "dt_proj", "graft")  # modules of a mixer whose tensors are read without calling them
SMALLEST = 1e-30  # time step: softplus reaches 0, in float32 too


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


class SelectiveMixer:
    """Stands before a stock mixer of the kind of MambaMixer: three steps (project, mix, finish), the middle one partly
    attention."""

    returns_pair = False  # see DualMixer

    def take_grafts(self: Any, config: Any) -> None:
        """Make room for what the configuration says of this layer."""
        self.graft = ChannelGraft.of(config, self)
        self.ssm_heads = Graft.scanned(self.graft, self.intermediate_size)

    @fetching(*READ)
    def forward(
        self: Any, hidden_states: Tensor, cache_params: Cache | None = None, attention_mask: Tensor | None = None,
        causal_mask: Tensor | None = None, positions_to_keep: Tensor | None = None, packing: Packing | None = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        x, dt, B, C, gate = self.project(hidden_states, cache_params, attention_mask, packing)
        y = self.mix(x, dt, B, C, cache_params, causal_mask, packing)
        return self.finish(at(positions_to_keep, y), at(positions_to_keep, gate))

    def project(
        self: Any,
        hidden_states: Tensor,
        cache_params: Cache | None = None,
        attention_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> tuple[Tensor, ...]:
        """u (b, t, d) -> x and dt, ready for use, (b, t, channels), dt in float32 at least, B and C (b, t, n), gate z
        (b, t, channels). Updates the cache's conv state."""
        hidden_states = apply_mask_to_padding_states(hidden_states, attention_mask)
        x, gate = self.in_proj(hidden_states).chunk(2, dim=-1)
        silu = self.activation in SILU
        x = convolved(x, self.conv1d.weight, self.conv1d.bias, cache_params, self.layer_idx, silu, packing)
        x = apply_mask_to_padding_states(x if silu else self.act(x), attention_mask)
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        dt, B, C = self.normalise(*self.x_proj(x).split(sizes, dim=-1))
        if is_quantised_weight(self.dt_proj.weight):
            dt = self.dt_proj(dt).transpose(1, 2)
        else:
            dt = self.dt_proj.weight @ dt.transpose(1, 2)  # b channels t
            if self.dt_proj.bias is not None:
                dt = dt + self.dt_proj.bias.to(dt.dtype)[:, None]
        return x, time_step(dt).transpose(1, 2), B, C, gate

    def normalise(self, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What Falcon-Mamba and Jamba do to them, and Mamba-1 does not."""
        return dt, B, C

    def mix(
        self: Any,
        x: Tensor,
        dt: Tensor,
        B: Tensor,
        C: Tensor,
        cache_params: Cache | None = None,
        causal_mask: Tensor | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """Every channel's own mixing, the D skip included: (b, t, channels)."""
        heads = self.ssm_heads
        if len(heads) == self.intermediate_size:
            y = self.scan(x, dt, B, C, heads, cache_params, packing)
        elif heads:
            others = self.graft.others
            y = self.scan(others.of(x, -1), others.of(dt, -1), B, C, heads, cache_params, packing)
        else:
            y = x[..., :0].to(result_dtype(x))
        if self.graft is None:
            return y
        attended = self.attend(x, dt, cache_params, packing or causal_mask)
        return self.graft.blend(y[..., None], attended[..., None]).squeeze(-1)

    def scan(
        self: Any,
        x: Tensor,
        dt: Tensor,
        B: Tensor,
        C: Tensor,
        heads: list[int],
        cache_params: Cache | None,
        packing: Packing | None = None,
    ) -> Tensor:
        """The SSM's mixing for the channels `heads`, all or those that are not grafted; x and dt (b, t, len(heads))."""
        A, D = -torch.exp(self.A_log.float()), self.D.float()
        if len(heads) < self.intermediate_size:
            A, D = self.graft.others.of(A, 0), self.graft.others.of(D, 0)
        dt = dt.to(x.dtype)  # as in transformers
        state = None if cache_params is None else cache_params.get_recurrent_state(self.layer_idx)
        if state is not None and x.shape[1] == 1:
            return selective_step(state, x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D)[:, None]
        y, state = selective_scan(x, dt, A, B, C, D, state, packing=packing)
        if cache_params is not None:
            cache_params.update_recurrent_state(state, self.layer_idx)
        return y

    def attend(
        self: Any, x: Tensor, dt: Tensor, cache_params: Cache | None = None, causal_mask: Tensor | Packing | None = None
    ) -> Tensor:
        """The grafts' mixing: (b, t, grafted channels)."""
        graft: ChannelGraft = self.graft
        q, k = self.queries(x)
        own = graft.grafted.of(x, -1)
        v = graft.values(own)
        if graft.time_step:
            write = graft.grafted.of(dt, -1).clamp_min(SMALLEST)
            # float16 has no room for time steps and what they multiply: many would be 0, and so would be divided by 0.
            dtype = result_dtype(x)
            v = torch.cat([graft.values(write * own), graft.values(write)], dim=-1).to(dtype)
            q, k = q.to(dtype), k.to(dtype)
        if cache_params is not None:
            k, v = seen_keys(cache_params, self.layer_idx, k, v)
        return graft.attend(q, k, v, causal_mask) + graft.grafted.of(self.D, 0) * own

    def queries(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (b, t, channels) -> the graft's q and k (b, pairs, t, width)."""
        qk = torch.cat([self.graft.q_proj(x), self.graft.k_proj(x)], dim=-1)
        return self.graft.split(qk, self.normalise_qk)

    normalise_qk: Any = None

    @fetching("", *READ)
    def halves(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """For locate: every channel's SSM mixing (b, t, c, 1), the grafted ones' attention (b, t, grafted channels, 1), both
        with their D skip, and the gate that `finish` takes."""
        x, dt, B, C, gate = self.project(hidden_states)
        y = self.scan(x, dt, B, C, self.ssm_heads, None)
        return y[..., None], self.attend(x, dt)[..., None], gate

    @fetching("", *READ)
    def matrices(self: Any, hidden_states: Tensor, rows: Tensor | None = None, heads: Sequence[int] | None = None) -> Tensor:
        """The mixing matrices of channels (`heads`; of all, unless given) for one sequence (1, t, d): (channels, rows, t). SSM
        channels: time step included, D not. Grafted ones: their attention (where a blend gate is open, the mixture)."""
        x, dt, B, C, _ = self.project(hidden_states)
        channels = list(range(self.intermediate_size) if heads is None else heads)
        row_of = {channel: row for row, channel in enumerate(channels)}
        matrix = selective_matrix(dt, -torch.exp(self.A_log.float()), B, C, rows=rows, channels=channels)[0]
        graft: ChannelGraft | None = self.graft
        if graft is None:
            return matrix
        shared = attention_matrix(*self.queries(x), rows=rows)[0].to(matrix.dtype)  # pairs rows t
        for pair, places in enumerate(graft.pairs):
            for place in places:
                if (channel := graft.heads[place]) in row_of:
                    own = shared[pair]
                    if graft.time_step:
                        own = own * dt[0, :, channel].clamp_min(SMALLEST)
                        own = own / own.sum(-1, keepdim=True)
                    share = 1.0 if graft.gate is None else graft.gate[place]
                    row = row_of[channel]
                    matrix[row] = (1 - share) * matrix[row] + share * graft.signs[pair] * own
        return matrix

    def finish(self: Any, y: Tensor, gate: Tensor) -> Tensor:
        """Gate and output projection: (..., c) or (..., c, 1) -> (..., d)."""
        y = y.squeeze(-1) if y.dim() > gate.dim() else y
        return gated(self.out_proj, y, gate)


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
