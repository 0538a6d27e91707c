"""What the hybrids of stock hybrid models share: Bamba, Falcon-H1, Granite, Nemotron-H, Zamba2, Jamba, and the Qwens, OLMo and
Kimi with their delta rules.

All SSM mixers are ours. Attention, MLPs, experts, shared blocks and the forward around them stay transformers' own, so a
configuration's fields mean what transformers makes of them. What is added around the stock forward:

- a cache has room for the grafts' keys;
- without position_ids, positions count the tokens that exist, so that a prompt may be padded on the right as well, and its
  cache be continued;
- documents that share a row (packing.py says how that is told) are computed as rows of their own, each as if it stood alone.
  No stock mixer, attention or router needs to know of them;
- a keyword argument that nothing reads is refused.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.utils import is_tracing

from .graft import GraftMixer
from .hybrid import OF_LOSS, GraftedModel, one_cache, refuse_unknown
from .packing import PACKED, Packing, packing_of

LENGTHS = ("max_length_q", "max_length_k")  # of packed documents, for kernels of stock attention
OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits", "return_dict")


class StockBackbone(GraftedModel):
    """A mixin before a backbone of transformers that holds mixers of several kinds in `layers`. mixers: the stock one and ours,
    which is put in its place, wherever that is in a block."""

    mixers: tuple[type, type[GraftMixer]]

    def __init__(self: Any, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        stock, ours = self.mixers
        for layer, block in enumerate(self.layers):
            name = next((name for name, module in block.named_modules() if type(module) is stock), None)
            if name is None:
                continue
            mixer: Any = ours(config, layer)
            for buffer in block.get_submodule(name)._non_persistent_buffers_set:
                mixer.register_buffer(buffer, block.get_submodule(name)._buffers[buffer], persistent=False)
            block.set_submodule(name, mixer)
        self.put_grafts()
        self.post_init()

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache_params: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, with `cache_params` as another name of past_key_values, and what packing.py reads."""
        refuse_unknown(self, kwargs, (*PACKED, *LENGTHS, *OF_LOSS, *OUTPUTS))
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        cache = one_cache(cache_params, past_key_values)
        mask = attention_mask if isinstance(attention_mask, Tensor) else None
        if mask is not None and mask.dim() != 2:  # attention would obey it, and the states would not
            raise ValueError("attention_mask has to be (batch, tokens); position_ids or seq_idx say where documents begin")
        told = attention_mask is None or mask is not None  # masks that generate has prepared, a dict, say nothing of padding
        flat = position_ids if told and position_ids is not None and position_ids.dim() == 2 else None
        packing = packing_of(tokens, mask, flat, cache, use_cache, kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name in OUTPUTS}
        if packing is not None:
            return self.read_apart(packing, tokens, "input_ids" if inputs_embeds is None else "inputs_embeds", kwargs)
        position_ids = None if position_ids is None else position_ids.to(tokens.device)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        use_cache = use_cache and not (self.layers[0].gradient_checkpointing and self.training)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        cache = self.with_room(cache)  # before its length is asked, which only keys know
        if mask is not None:
            new = tokens.shape[1]
            if position_ids is None:  # how many tokens that exist stand before each
                position_ids = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -new:]
            if new == 1 and not is_tracing(mask) and not bool(mask[:, -1].all()):
                # Stock models read such a token as if it existed.
                raise ValueError(
                    "a token that is padding cannot be read alone: leave it out, or read it together with other tokens"
                )
        elif position_ids is None:
            seen = 0 if cache is None else cache.get_seq_length()
            position_ids = (torch.arange(tokens.shape[1], device=tokens.device) + seen)[None]
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def read_apart(self: Any, packing: Packing, tokens: Tensor, name: str, options: dict[str, Any]) -> Any:
        """The output for packed rows, of documents that were read as rows of their own. Padding behind them changes nothing, as
        all is causal."""
        if options.get("output_attentions"):
            raise ValueError("output_attentions: packed documents have no attention weights in common")
        output: Any = None

        def run(rows: Tensor) -> tuple[Tensor, ...]:
            nonlocal output
            forward: Any = super(StockBackbone, self).forward  # type: ignore[misc]
            output = forward(**{name: rows}, use_cache=False, **{**options, "return_dict": True})
            states = getattr(output, "hidden_states", None) or ()
            routed = getattr(output, "router_logits", None) or ()
            return (output.last_hidden_state, *states, *(logits.view(*rows.shape[:2], -1) for logits in routed))

        last, *rest = packing.apply(run, tokens)
        output.last_hidden_state = last
        for kind in ("hidden_states", "router_logits"):
            if getattr(output, kind, None):
                count = len(output[kind])
                parts, rest = rest[:count], rest[count:]
                output[kind] = tuple(part.flatten(0, 1) if kind == "router_logits" else part for part in parts)
        return output if options.get("return_dict") is not False else output.to_tuple()
