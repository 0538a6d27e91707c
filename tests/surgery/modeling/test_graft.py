"""A graft computes what docs/derivations.md says: against plain loops in float64, gradients included."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surgery.modeling.delta import SHARPNESS, DeltaMixer
from surgery.modeling.delta_reference import EPS
from surgery.modeling.graft import NATS
from surgery.records.plan import Start
from tests.surgery.modeling import stock_bases
from tests.surgery.modeling.bases import BASES, make_hybrid, make_rows

FAMILIES = pytest.mark.parametrize("name", BASES)
DELTA = ("qwen3_next", "kimi_linear")
READS = {"L1.H3": Start(sign=-1, tau=0.8, null=0.5, null_query=(0.4, -0.3, 0.2))}


def plain_queries_and_keys(mixer: Any, hidden: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """q and k (b, t, pairs, width), without sign and scale."""
    graft, name = mixer.graft, type(mixer).__name__
    if graft.qk_conv is None if hasattr(graft, "qk_conv") else True:
        q, k = (proj(x[..., 0]).unflatten(-1, (len(graft.signs), -1)) for proj in (graft.q_proj, graft.k_proj))
        if name.startswith("Falcon"):
            n = mixer.ssm_state_size
            q, k = (
                torch.cat([norm(m[..., :n]), m[..., n:]], -1) for norm, m in ((mixer.c_layernorm, q), (mixer.b_layernorm, k))
            )
        return q, k
    qk = torch.cat([graft.q_proj(hidden), graft.k_proj(hidden)], -1).transpose(1, 2)
    qk = graft.qk_conv(qk)[..., : hidden.shape[1]].transpose(1, 2)
    qk = F.silu(qk) if mixer.activation == "silu" else qk
    qk = qk.unflatten(-1, (2, len(graft.signs), -1))
    if isinstance(mixer, DeltaMixer):
        qk = qk * (SHARPNESS**0.5 / (qk.square().sum(-1, keepdim=True) + EPS).sqrt())
    return qk.unbind(2)


def plain_graft(mixer: Any, hidden: Tensor, streams: Any, y: Tensor) -> Tensor:
    """y (b, t, h, p) with the graft in it, head by head and token by token."""
    graft, columns = mixer.graft, list(y.unbind(2))
    q, k = plain_queries_and_keys(mixer, hidden, streams.x)
    pair_of = {
        place: i for i, places in enumerate(getattr(graft, "pairs", [[i] for i in range(len(graft.heads))])) for place in places
    }
    for place, head in enumerate(graft.heads):
        pair, rows = pair_of[place], []
        sigma, tau = graft.signs[pair], graft.log_tau[pair].exp()
        for t in range(y.shape[1]):
            scores = sigma * tau * torch.einsum("bw,bsw->bs", q[:, t, pair], k[:, : t + 1, pair])
            if graft.time_step:
                scores = scores + streams.write[:, : t + 1, head].log()
            if graft.null is not None:
                b = (NATS * graft.null[pair]).expand(len(scores), 1)
                if graft.null_query is not None:
                    b = b + (sigma * tau * q[:, t, pair] @ graft.null_query[pair])[:, None]
                scores = torch.cat([scores, b], 1)
            p = scores.softmax(-1)
            m = 1 - p[:, -1:] if graft.null is not None else torch.ones_like(p[:, :1])
            x = streams.x[:, : t + 1, head]
            found = torch.einsum("bs,bsp->bp", p[:, : t + 1], x)
            own = y[:, t, head]
            g, D = graft.gate[place], getattr(mixer, "D", None)
            rows.append((1 - g * m) * own + g * (sigma * found + (0 if D is None else m * D[head] * x[:, t])))
        columns[head] = torch.stack(rows, 1)
    return torch.stack(columns, 2)


@pytest.mark.parametrize("name", [*BASES, *DELTA])
@pytest.mark.parametrize(
    ("null", "more"), [(None, {}), (0.5, {}), (0.5, {"starts": READS})], ids=["without", "null-key", "reads-query"]
)
def test_graft_is_its_formula_with_all_gradients(name: str, null: float | None, more: dict[str, Any]) -> None:
    mixer = (stock_bases.make_hybrid if name in DELTA else make_hybrid)(name, null, **more).mixer_at(1)
    hidden = torch.randn(2, 13, mixer.hidden_size, dtype=torch.float64)
    directions: Tensor | None = None
    results = []
    for compute in (lambda *args: mixer.graft(lambda: mixer, *args), lambda *args: plain_graft(mixer, *args)):
        mixer.zero_grad()
        u = hidden.clone().requires_grad_()
        streams = mixer.project(u)
        y = compute(u, streams, mixer.scan(streams))
        directions = torch.randn_like(y) if directions is None else directions
        (y * directions).sum().backward()
        gradients = {key: p.grad.clone() for key, p in mixer.graft.named_parameters()}
        results.append({"y": y.detach(), "input": u.grad, **gradients})
    for key, one in results[0].items():
        # The delta rule's write strength is float32, as in transformers.
        close = {"atol": 1e-6, "rtol": 1e-6} if name in DELTA else {"atol": 1e-9, "rtol": 1e-7}
        torch.testing.assert_close(one, results[1][key], **close)
    assert results[0]["gate"].abs().max() > 0


@FAMILIES
def test_without_its_null_key_a_graft_is_the_limit_of_one_with_it(name: str) -> None:
    ids = make_rows()
    with torch.no_grad():
        far, without = make_hybrid(name, null=-1000.0)(ids).logits, make_hybrid(name, null=None)(ids).logits
        never, hybrid = make_hybrid(name, null=1000.0)(ids).logits, make_hybrid(name)
        with hybrid.disable_grafts():
            base = hybrid(ids).logits
    torch.testing.assert_close(far, without, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(never, base, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("null", [None, 0.5, -10.0])
@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_small_time_steps_cost_no_precision(name: str, null: float | None) -> None:
    hybrid, ids = make_hybrid(name, null), make_rows()
    with torch.no_grad():
        for layer in range(2):
            hybrid.mixer_at(layer).dt_proj.bias.fill_(-15.0)  # a hundredth of what rounding takes from 1
        truth = hybrid(ids).logits
        assert (hybrid.float()(ids).logits - truth).abs().max() < 1e-5


@FAMILIES
def test_watch_sees_the_shares(name: str) -> None:
    hybrid, seen = make_hybrid(name), []
    graft = hybrid.mixer_at(1).graft
    graft.watch = lambda graft, m: seen.append((graft, m))
    with torch.no_grad():
        hybrid(make_rows())
    ((watched, m),) = seen
    assert watched is graft
    assert m.shape == (2, 23, 3)
    assert 0 < m.min() < m.max() <= 1


@FAMILIES
def test_tap_sees_streams_and_changes_what_a_mixer_gives(name: str) -> None:
    hybrid, ids, seen = make_hybrid(name), make_rows(), []

    def tap(mixer: Any, streams: Any, y: Tensor, _: Any) -> Tensor:
        seen.append((mixer, streams, y))
        return y * 0

    with torch.no_grad():
        before = hybrid(ids).logits
        hybrid.mixer_at(0).tap = tap
        after = hybrid(ids).logits
    ((mixer, streams, y),) = seen
    assert mixer is hybrid.mixer_at(0)
    assert streams.x.shape == y.shape == (2, 23, mixer.num_heads, mixer.head_dim)
    assert streams.k.shape == streams.q.shape == (2, 23, mixer.n_groups, mixer.ssm_state_size)
    assert streams.log_write is None or streams.log_write.shape == y.shape[:3]
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize("field", ["shared", "direct", "own_values"])
def test_grafts_that_went_are_refused_by_name(field: str) -> None:
    hybrid = make_hybrid("mamba2")
    config = hybrid.config.to_dict() | {"grafts": [hybrid.config.grafts[0] | {field: True}]}
    with pytest.raises(ValueError, match="went with version"):
        type(hybrid)(type(hybrid.config)(**{key: value for key, value in config.items() if key != "model_type"}))
