"""Lightning attention (arXiv 2501.08313), in MiniMax: linear attention with a decay of its own for each head, which is fixed.

    S_t = exp(-a) S_{t-1} + v_t k_t^T,    y_t = S_t q_t

It is the scan of Mamba-2 (ssd.py) with a time step of 1: `ssd` does that, at its speed. `stock` is the module inside
transformers, with nothing around its scan; `reference` walks over the tokens.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from surgery.kernels.dispatch import Backend, Operation
from surgery.kernels.functions import result_dtype, seeded
from surgery.kernels.operators import Signature
from surgery.kernels.packing import Packing, check_no_state
from surgery.kernels.ssd import ssd_scan


def lightning_scan(
    q: Tensor, k: Tensor, v: Tensor, slope: Tensor, state: Tensor | None = None,
    *, block_size: int = 256, packing: Packing | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scan a sequence.

    q and k (b, t, h, n); v (b, t, h, p); slope (h,), positive: a above; state (b, h, p, n). Returns y (b, t, h, p) in the dtype
    of v (for float16, ours give float32), and the state after the last token. `block_size` is the checkpoint's; only the stock
    backend uses it.

    packing: of the tokens, where several documents share a row; every one begins from an empty state, and the states are those
    after each, (documents, h, p, n). `ssd` then serves, whatever is asked for: the others have no time step to stand still by
    at padding.
    """
    if packing is not None:
        check_no_state(state)
        return ssd_scan(v, torch.ones_like(v[..., 0]), -slope, k, q, packing=packing)
    if not v.numel():
        shape = (len(v), *v.shape[2:], k.shape[-1])
        empty = v.new_zeros(shape, dtype=torch.promote_types(v.dtype, torch.float32))
        return v.to(result_dtype(v)), empty if state is None else state
    return LIGHTNING_SCAN(v, q, k, slope, state, block_size, backend=backend)


def _ssd(v, q, k, slope, state, block_size):
    return ssd_scan(
        v, torch.ones_like(v[..., 0]), -slope.to(torch.promote_types(slope.dtype, torch.float32)), k, q, None, state
    )


def _one_width(v, q, k, slope, state, block_size) -> str | None:
    return None if v.shape == k.shape else "its values are as wide as its keys"


def _stock(v, q, k, slope, state, block_size):
    from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention as Stock

    def same(x: Tensor) -> Tensor:
        return x

    _, _, heads, width = v.shape
    kept: dict[int, Tensor] = {}
    module: Any = SimpleNamespace(  # no projection, no norm, and an open gate
        num_attention_heads=heads, head_dim=width, block_size=block_size, layer_idx=0, slope_rate=slope.view(-1, 1, 1),
        act_fn=same, qkv_proj=same, norm=same, out_proj=same, output_gate=lambda u: u.new_full((), torch.inf),
    )  # fmt: skip
    module.query_decay, module.key_decay, module.diagonal_decay = Stock.decay_factors(module, module.slope_rate)
    cache: Any = SimpleNamespace(
        get_linear_cache=lambda _: None if state is None else state.transpose(-1, -2), set_linear_cache=kept.__setitem__
    )
    forward: Any = Stock.forward  # of another module
    y, _ = forward(module, torch.cat([q, k, v], -1).flatten(2), None, None, cache)
    return y.unflatten(-1, (heads, width)), kept[0].transpose(-1, -2)


def _reference(v, q, k, slope, state, block_size):
    state = v.new_zeros(len(v), *v.shape[2:], k.shape[-1]) if state is None else state
    out = []
    for t in range(v.shape[1]):
        state = state * (-slope).exp()[:, None, None] + v[:, t, ..., None] * k[:, t, :, None]
        out.append((state * q[:, t, :, None]).sum(-1))
    return torch.stack(out, 1), state


def _example(device: torch.device, dtype: torch.dtype) -> tuple:
    options = seeded()
    v, q, k = (torch.randn(1, 40, 4, 8, **options).to(device, dtype) for _ in range(3))
    return v, q, k, (0.1 + torch.rand(4, **options)).to(device), None, 16


LIGHTNING_SCAN = Operation(
    "lightning_scan",
    Backend("ssd", _ssd),
    Backend("stock", _stock, _one_width, probed=True),
    Backend("reference", _reference),
    example=_example,
    signature=Signature(
        ("Tensor v", "Tensor q", "Tensor k", "Tensor slope", "Tensor? state", "SymInt block_size"),
        2,
        lambda v, q, k, *rest: [
            (v.shape, result_dtype(v)),
            ((len(v), *v.shape[2:], k.shape[-1]), torch.promote_types(v.dtype, torch.float32)),
        ],
    ),
)
