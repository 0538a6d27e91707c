"""Splice attribution: one forward and one backward tell, of every head, whether attention there would help.

Put a gate g between a head's own output and what its graft would make of it (modeling/graft.py),

    y_t(g) = (1 - g m_t) y_t + g (sigma sum_s p_ts x_s + m_t D x_t),    p_t = softmax([sigma tau q_t.k_s + log_write_s, b])

At g = 0 the model is the base. The *slope* of a head is minus the gradient of a question's loss by its gate there: at what rate
the loss falls when the head begins to turn into attention, in nats a question. It needs no gate in the model: it is the
gradient by the head's output, times what would change there,

    slope = - sum_t dL/dy_t . (sigma sum_s p_ts x_s + m_t (D x_t - y_t)),    m_t = 1 - p_t,null

The order of slopes is close to that of exact gains, above all among the leading heads; their size is not (exact.py measures
it). sigma and tau are open, so every start of STARTS is tried in the same pass, and each head keeps the one with the largest
slope. The gradient is the same for all of them, and so are the products q.k and dL/dy.x, of which each start takes a softmax
and a sum.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from surgery.errors import UserError
from surgery.kernels.functions import on_gpu
from surgery.modeling.graft import ChannelGraft, Streams
from surgery.modeling.reference import at_least_float32
from surgery.probes.encoded import Encoded
from surgery.probes.scoring import logits_at_points
from surgery.records.plan import Start
from surgery.runtime.progress import bar

# The largest scale is where the softmax is as good as an argmax: slopes rise up to about tau = 2 and are flat from there
# (tiny-mamba2's L0.H5: 4.4, 10.9, 13.9, 14.3 up to 2, and 14.3 at 4 and 16), and sharper starts retrieve no more.
STARTS = tuple(Start(sign=sign, tau=tau) for sign in (1, -1) for tau in (0.25, 0.5, 1.0, 2.0))
WEIGHTS = 2**19  # attention weights that are held at once: what a processor's cache holds; on a GPU 32 times as many
SHARE = 0.4  # of the memory that is free, for what a backward pass keeps


@dataclass(frozen=True)
class Slopes:
    """slopes: by layer, (starts, heads), in nats a question. correct, loss: of the base, one value a question."""

    slopes: dict[int, Tensor]
    correct: np.ndarray
    loss: np.ndarray


def graft_mixers(model: Any) -> dict[int, Any]:
    """The mixers of an adopted model that can be grafted, and are not yet, by layer; none in a model of no family."""
    if not hasattr(model, "mixer_at"):
        return {}
    mixers = {layer: model.mixer_at(layer) for layer in range(model.config.num_hidden_layers)}
    return {layer: mixer for layer, mixer in mixers.items() if mixer is not None and mixer.graft is None}


def attribute(model: Any, encoded: Encoded, batch_size: int = 32, nulls: Mapping[int, Tensor] | None = None) -> Slopes:
    """Slopes of all heads, for every start. model: adopted (splicing/splice.py). nulls: of nulls.py; without it, m = 1.

    Raises UserError where the model's logits or the gradients are not finite.
    """
    mixers = graft_mixers(model)
    totals = {layer: torch.zeros(len(STARTS), mixer.num_heads, dtype=torch.float64) for layer, mixer in mixers.items()}
    correct, loss = np.zeros(len(encoded), dtype=bool), np.zeros(len(encoded))

    def tap(mixer: Any, streams: Streams, y: Tensor, _: Any) -> Tensor:
        y = y if y.requires_grad else y.detach().requires_grad_()  # at the first layer nothing requires a gradient

        def read(gradient: Tensor) -> None:
            # A hook on y that holds y is a cycle that is never freed, so it goes as soon as it has read.
            handle.remove()
            null = None if nulls is None else nulls[mixer.layer_idx]
            found = start_slopes(mixer, streams, y, gradient, null)  # stays there: reading it would wait for a GPU
            totals[mixer.layer_idx] = totals[mixer.layer_idx].to(found.device, non_blocking=True) + found

        handle = y.register_hook(read)
        return y

    with frozen(model):
        with tapped(mixers, lambda mixer, streams, y, _: y if y.requires_grad else y.detach().requires_grad_()):
            rows = fit_batch(model, encoded, batch_size)
        batches = bar(list(encoded.batches(rows)), "attribution")
    with frozen(model), tapped(mixers, tap):
        for chosen, part in batches:
            logits = logits_at_points(model, part)
            losses = part.loss(logits)
            if losses.requires_grad:
                losses.sum().backward()
            correct[chosen], loss[chosen] = part.correct(logits).cpu().numpy(), losses.detach().cpu().numpy()
    slopes = {layer: total.cpu() / len(encoded) for layer, total in totals.items()}
    if not all(each.isfinite().all() for each in slopes.values()):
        raise UserError("the gradients by the heads' gates are not finite; try dtype=float32")
    return Slopes(slopes, correct, loss)


@torch.no_grad()
def start_slopes(mixer: Any, streams: Streams, y: Tensor, gradient: Tensor, nulls: Tensor | None) -> Tensor:
    """(starts, heads): the slope of each head for each start, summed over rows. y and gradient (b, t, h, p): a mixer's own
    output and the loss's gradient by it. nulls (starts, heads)."""
    at = torch.arange(gradient.shape[1], device=gradient.device)
    if not on_gpu(gradient):  # where it would have to be waited for
        at = gradient.abs().amax((0, 2, 3)).nonzero()[:, 0]  # behind the last mixer, losses look at few tokens
    nulls = None if nulls is None else nulls.to(gradient.device, non_blocking=True)
    x, y, gradient = (at_least_float32(each) for each in (streams.x, y[:, at], gradient[:, at]))
    D = getattr(mixer, "D", None)
    rest = gradient * ((0 if D is None else at_least_float32(D)[:, None] * x[:, at]) - y)  # what m multiplies, (b, at, h, p)
    slopes = torch.zeros(len(STARTS), x.shape[2], dtype=torch.float64, device=x.device)
    if issubclass(mixer.graft_class, ChannelGraft):
        assert streams.write is not None
        write = at_least_float32(streams.write)
        values = torch.cat([write * x[..., 0], write], -1)
        for i, rows, some, logits in attention_logits(mixer, streams, at):
            sums, w = (logits[:, 0].softmax(-1) @ values[rows]).chunk(2, -1)
            held = open_share(logits, None if nulls is None else nulls[i, some])[:, 0, :, None]
            lost = 1 - held
            found, m = held * sums, held * w
            changes = (STARTS[i].sign * gradient[rows, ..., 0] * found + rest[rows, ..., 0] * m) / (m + lost)
            slopes[i] -= changes.double().sum((0, 1))
        return slopes
    rest = rest.sum(-1).transpose(1, 2)  # b h at
    x, gradient = x.transpose(1, 2), gradient.transpose(1, 2)  # b h t p, b h at p
    products: tuple[Any, Tensor] = (None, rest)
    for i, rows, heads, logits in attention_logits(mixer, streams, at):
        if products[0] != (rows, heads):
            products = ((rows, heads), gradient[rows, heads] @ x[rows, heads].mT)
        found = STARTS[i].sign * torch.linalg.vecdot(logits.softmax(-1), products[1])
        change = open_share(logits, None if nulls is None else nulls[i, heads]) * (found + rest[rows, heads])
        slopes[i, heads] -= change.double().sum((0, 2))
    return slopes


def open_share(logits: Tensor, null: Tensor | None) -> Tensor:
    """m (b, h, t), of scores (b, h, t, s) and the null keys' logits (h,)."""
    if null is None:
        return logits.new_ones(logits.shape[:-1])
    return (logits.logsumexp(-1) - null.to(logits)[:, None]).sigmoid()


def attention_logits(mixer: Any, streams: Streams, at: Tensor) -> Iterator[tuple[int, slice, slice, Tensor]]:
    """The scores of untrained grafts at some tokens, `at`, a piece at a time, and each piece for all starts: (number of the
    start, rows, heads, scores (b, h, at, t), -inf where a key is later). Channels share one score, without their time steps."""
    channels = issubclass(mixer.graft_class, ChannelGraft)  # whose project has normalised queries and keys already
    q, k = (streams.q, streams.k) if channels else mixer.prepare(streams.q, streams.k)
    q, k = at_least_float32(q)[:, at].transpose(1, 2), at_least_float32(k).transpose(1, 2)  # b g t n
    heads = 1 if channels else mixer.num_heads
    (b, groups), later = k.shape[:2], torch.arange(k.shape[2], device=k.device) > at[:, None]
    bias = torch.zeros(later.shape, dtype=k.dtype, device=k.device).masked_fill(later, -torch.inf)
    added, held = None, WEIGHTS * (32 if on_gpu(k) else 1)
    if streams.log_write is not None and not channels:
        # Contiguous: what is added to it takes its order in memory, and softmax would copy.
        added = at_least_float32(streams.log_write).transpose(1, 2).contiguous()
    rows_at_once, heads_at_once = max(1, held // (heads * later.numel())), max(1, min(heads, held // later.numel()))
    for first in range(0, b, rows_at_once):
        rows = slice(first, min(first + rows_at_once, b))
        for head in range(0, heads, heads_at_once):
            some = slice(head, min(head + heads_at_once, heads))
            group = torch.arange(some.start, some.stop, device=k.device) // (heads // groups)
            scores = q[rows, group] @ k[rows, group].mT
            masked = bias if added is None else bias + added[rows, some, None]
            for i, start in enumerate(STARTS):
                yield i, rows, some, torch.add(masked, scores, alpha=start.sign * start.tau)


@contextmanager
def tapped(mixers: Mapping[int, Any], tap: Any) -> Iterator[None]:
    """Mixers whose own output goes through `tap(mixer, streams, y, packing)`."""
    try:
        for mixer in mixers.values():
            mixer.tap = tap
        yield
    finally:
        for mixer in mixers.values():
            mixer.tap = None


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """A model of whose weights no gradient is computed."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learning:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def fit_batch(model: Any, encoded: Encoded, batch_size: int) -> int:
    """How many rows a forward and backward may take, at most `batch_size`: what the backward of one row keeps is measured."""
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, dict[int, torch.UntypedStorage]()

    def keep(tensor: Tensor) -> None:  # nothing is unpacked, since there is no backward
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no other takes its address

    longest = max(encoded.rows, key=len)
    short = torch.tensor([longest[: min(64, len(longest))]], device=next(model.parameters()).device)
    with torch.enable_grad(), saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=short, use_cache=False, logits_to_keep=1)
    held = sum(storage.nbytes() for storage in kept.values())
    row = 2 * held * len(longest) / short.shape[1]  # twice: gradients, and what a tap holds
    device = short.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return max(1, min(batch_size, int(SHARE * free / max(row, 1))))
