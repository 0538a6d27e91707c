"""The forward of language models made of such blocks alone: Mamba-1, Mamba-2, Falcon-Mamba, Llamba.

Parameters have the names that transformers gives them. What is computed is said here, because transformers' own forward takes
no packed rows and overflows in float16.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.mamba2.modeling_mamba2 import Mamba2CausalLMOutput, Mamba2Output
from transformers.utils import can_return_tuple, is_tracing

from .graft import is_plain
from .hybrid import OF_LOSS, GraftedModel, HybridLanguageModel, one_cache, refuse_unknown
from .packing import PACKED, packing_of
from .reference import at_least_float32

FUSED = ("MambaRMSNorm", "Mamba2RMSNorm", "FalconMambaRMSNorm")  # weight * x / sqrt(mean(x^2) + variance_epsilon)
FUSED_GATED = ("MambaRMSNormGated",)  # the same of x * silu(gate)
MOST = 256.0  # the largest number that a projection in float16 is given
IGNORED = ("max_length_q", "max_length_k", "output_attentions")  # of what trainers and PEFT hand to every model


class HybridBlock(GradientCheckpointingLayer):
    """Norm, mixer, residual: the block of every Mamba."""

    def __init__(self, config: Any, norm: nn.Module, mixer: nn.Module):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm, self.mixer = norm, mixer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        residual = hidden_states.to(torch.float32) if self.residual_in_fp32 else hidden_states
        return residual + self.mixer(normed(self.norm, hidden_states), **kwargs)


class HybridBackbone(GraftedModel):
    """A mixin before a backbone of transformers with `layers` and a norm behind them. mixer_class: makes the mixers in
    the place of stock ones, where there are some."""

    mixer_class: Any = None
    last_norm = "norm_f"
    _no_split_modules: Any = ["HybridBlock"]

    def __init__(self: Any, config: Any):
        super().__init__(config)  # type: ignore[call-arg]
        if self.mixer_class is not None:
            norms = [block.norm for block in self.layers]
            blocks = (HybridBlock(config, norm, self.mixer_class(config, layer)) for layer, norm in enumerate(norms))
            self.layers = nn.ModuleList(blocks)
            self.put_grafts()
            self.post_init()

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers. Documents that share a row (packing.py says how that is told) are computed as if each stood
        alone, and nothing is cached."""
        config, cache = self.config, one_cache(cache_params, past_key_values)
        refuse_unknown(self, kwargs, (*PACKED, *IGNORED))
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        if attention_mask is not None and attention_mask.dim() != 2:
            raise ValueError("attention_mask has to be (batch, tokens): a recurrence reads every token that is there")
        hidden = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        packing = packing_of(hidden, attention_mask, position_ids, cache, use_cache, kwargs)
        use_cache = (config.use_cache and not self.training and packing is None) if use_cache is None else use_cache
        use_cache = use_cache and not (self.gradient_checkpointing and self.training)
        if use_cache and cache is None:
            cache = DynamicCache(config=config)
        cache = self.with_room(cache)
        if cache is not None and not is_tracing(hidden):  # a cache of states alone does not count tokens
            before = getattr(cache, "tokens_read", 0) if self.has_read(cache) else 0
            cache.tokens_read = before + hidden.shape[1]
        mask = create_recurrent_attention_mask(config, hidden, attention_mask, past_key_values=cache)
        if hidden.shape[1] == 1 and attention_mask is not None and not is_tracing(attention_mask):
            last = attention_mask[:, -1:]  # of a token alone transformers gives no mask
            if 0 < int(last.sum()) < len(last):  # of no row: the mask is longer than what is read
                mask = last
        with_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = []
        for block in self.layers:
            hidden = block(hidden, cache_params=cache, attention_mask=mask, packing=packing)
            if with_states:
                states.append(hidden)
        hidden = getattr(self, self.last_norm)(hidden)
        return Mamba2Output(
            last_hidden_state=hidden,
            cache_params=cache if use_cache else None,
            hidden_states=(*states, hidden) if with_states else None,
        )


class SSMLanguageModel(HybridLanguageModel):
    """A mixin before a language model of transformers with `backbone` and `lm_head`."""

    _no_split_modules: Any = ["HybridBlock"]
    cache_name = "cache_params"

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: Cache | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, with `past_key_values` as another name of cache_params, and what packing.py reads."""
        refuse_unknown(self, kwargs, (*PACKED, *IGNORED, *OF_LOSS))
        read = self.backbone(
            input_ids,
            inputs_embeds=inputs_embeds,
            cache_params=one_cache(cache_params, past_key_values),
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            return_dict=True,
            **{name: kwargs[name] for name in PACKED if name in kwargs},
        )
        hidden = slice_logits_to_keep(read.last_hidden_state, logits_to_keep)
        logits = at_least_float32(self.lm_head(as_weight(hidden, self.lm_head.weight)))
        loss = None
        if labels is not None:
            told = {name: kwargs[name] for name in OF_LOSS if name in kwargs}
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **told)
        return Mamba2CausalLMOutput(loss=loss, logits=logits, cache_params=read.cache_params, hidden_states=read.hidden_states)


def as_weight(x: Tensor, weight: Tensor) -> Tensor:
    """x in the dtype of the weight that it meets, unless that is quantised, or autocast casts by itself."""
    device = x.device.type
    autocasts = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(weight.dtype) if is_plain(weight) and not autocasts else x


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """A block's norm of the stream x, in the dtype of the norm's weight. What a stream in float32 holds may be beyond float16's
    range; behind the norm it is not."""
    weight: Any = norm.weight
    return as_weight(norm(x), weight) if weight.dtype == torch.float16 else rms_norm(norm, as_weight(x, weight))


def rms_norm(norm: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """norm(x), or norm(x, gate): on a CPU by the module, elsewhere by `fused_norm`, if that computes the same and nothing hooks
    the module."""
    known = type(norm).__name__ in (FUSED if gate is None else FUSED_GATED)
    hooked = hasattr(norm, "_hf_hook") or norm._forward_hooks or norm._forward_pre_hooks
    whole = getattr(norm, "group_size", x.shape[-1]) == x.shape[-1]
    if x.device.type != "cpu" and known and whole and not hooked and x.dtype == norm.weight.dtype:
        return fused_norm(norm, x, gate)
    return norm(x) if gate is None else norm(x, gate)


def fused_norm(norm: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    """By PyTorch's own norm, which is one kernel in the place of seven."""
    if gate is None:
        return F.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon).to(x.dtype)
    wide = x.float() * F.silu(gate.float())
    return F.rms_norm(wide, wide.shape[-1:], norm.weight.float(), norm.variance_epsilon).to(x.dtype)


def gated(out_proj: nn.Module, y: Tensor, gate: Tensor) -> Tensor:
    """out_proj(y silu(gate)), y and gate (..., c), in the dtype of the gate, or, for float16, in float32: there the product and
    its projection may be beyond float16's range, so a token's own power of two is divided out before and multiplied after."""
    if gate.dtype != torch.float16:
        return out_proj((y * F.silu(gate)).to(gate.dtype))  # not the weight's dtype: a quantised one has integers
    x = y.float() * F.silu(gate.float())
    largest = x.detach().abs().amax(-1, keepdim=True)
    scale = torch.exp2((largest / MOST).log2().ceil().clamp_min(0))
    out = out_proj((x / scale).half()).float() * scale
    bias = getattr(out_proj, "bias", None)
    return out if bias is None else out + bias * (1 - scale)


def time_step(x: Tensor) -> Tensor:
    """softplus, in float32 at least: float16 would have 0 for all x below -17, which has neither a logarithm nor a quotient."""
    return F.softplus(at_least_float32(x))
