"""Hybrids whose forward is ours: configuration, block, backbone, language model.

The files of this package travel with every exported checkpoint (see sources.py), so they depend on torch, transformers and the
kernels only. A hybrid is a base whose mixers are ours: each works in three steps (project, mix, finish), and the middle one may
partly be attention. Without grafts it is the base itself: with the stock kernels its logits equal transformers' bit for bit.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.models.mamba2.modeling_mamba2 import Mamba2CausalLMOutput, Mamba2Output

from surgery.hybrids.layer_graft import is_layer_graft, make_mixer, whole_block
from surgery.hybrids.packed import PACKED, packing
from surgery.hybrids.parts import RMSNorm, as_weight, at, normed
from surgery.hybrids.spliced import Spliced, classes_of
from surgery.kernels.functions import traced


def describe_layers(config: Any, module: str, name: str) -> None:
    """Fill in what follows from a hybrid configuration's `grafts`: the kinds of its layers, and where its code is.

    module: the file of the classes; name: what their names begin with.
    """
    config.grafts = config.grafts or []
    grafted = {graft["layer"]: graft for graft in config.grafts}
    config.layer_types = [_layer_type(grafted.get(i)) for i in range(config.num_hidden_layers)]
    config.auto_map = classes_of(module, name)


def _layer_type(graft: dict[str, Any] | None) -> str:
    """What transformers' cache is to hold for a layer: states (of an SSM, of a convolution), keys and values, or both."""
    if graft is None:
        return "linear_attention"
    return "full_attention" if is_layer_graft(graft) and not graft["conv"] else "hybrid"


def positions(config: Any, hidden: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Tensor | None:
    """Where these tokens stand, (b or 1, t), counted from their row's first real one; None if no graft asks.

    attention_mask: the user's. One that is not (b, all tokens so far) does not tell, and the cache's length has to.
    """
    turning = [graft["layer"] for graft in config.grafts if is_layer_graft(graft) and graft["rope"]]
    if not turning:
        return None
    t = hidden.shape[1]
    past = 0 if cache is None else int(cache.get_seq_length(turning[0]))
    if attention_mask is not None and attention_mask.shape == (len(hidden), past + t):
        return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)[:, -t:]
    return torch.arange(past, past + t, device=hidden.device)[None]


class HybridBlock(GradientCheckpointingLayer):
    """Norm, mixer, residual: the block of every Mamba. A layer graft with an MLP brings its own.

    positions_to_keep: which of the b * t positions' states are wanted, by number; what follows the mixing is then done for them
    alone, and they are (positions, d).
    """

    keeps_positions = True

    def __init__(self, config: Any, mixer: Any):
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = None if whole_block(mixer) else RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.mixer = mixer

    def forward(self, hidden_states: Tensor, positions_to_keep: Tensor | None = None, **kwargs: Any) -> Tensor:
        residual = hidden_states.to(torch.float32) if self.residual_in_fp32 else hidden_states
        if self.norm is None:
            return self.mixer.block(residual, positions_to_keep=positions_to_keep, **kwargs)
        mixed = self.mixer(normed(self.norm, hidden_states), positions_to_keep=positions_to_keep, **kwargs)
        return at(positions_to_keep, residual) + mixed


class HybridBackbone:
    """The forward of a backbone; stands before a family's PreTrainedModel."""

    mixer_class: ClassVar[type]
    last_norm: ClassVar[str] = "norm_f"
    norm_f: Any  # mypy would compare it with the parent's
    _no_split_modules: Any = ["HybridBlock"]
    _supports_sdpa = True

    def __init__(self: Any, config: Any):
        PreTrainedModel.__init__(self, config)  # the parent's would build a stock backbone
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.make_block(config, i) for i in range(config.num_hidden_layers))
        self.gradient_checkpointing = False
        self.norm_f = RMSNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_init()

    def make_block(self: Any, config: Any, index: int) -> nn.Module:
        """The block of a layer, as the configuration says."""
        return HybridBlock(config, make_mixer(config, index, self.mixer_class))

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in transformers. Documents that share a row (packed.py says how that is told) are computed as if each stood alone,
        and nothing is cached. packing: what packed.packing says of the same batch, where that is known."""
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        if "packing" in kwargs:
            documents = kwargs["packing"]
        else:
            documents = packing(hidden, attention_mask, position_ids, cache_params, use_cache, kwargs)
        use_cache = (config.use_cache and not self.training and documents is None) if use_cache is None else use_cache
        use_cache = use_cache and not (self.gradient_checkpointing and self.training)
        if use_cache and cache_params is None:
            cache_params = DynamicCache(config=config)
        if position_ids is None:
            position_ids = documents.positions() if documents else positions(config, hidden, attention_mask, cache_params)
        places = {
            "attention_mask": create_recurrent_attention_mask(config, hidden, attention_mask, past_key_values=cache_params),
            "causal_mask": self._graft_mask(hidden, attention_mask, cache_params) if config.grafts and not documents else None,
            "position_ids": position_ids,
            "packing": documents,
        }
        with_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = []
        for block in self.layers:
            hidden = block(hidden, cache_params=cache_params, **places)
            if with_states:
                states.append(hidden)
        hidden = getattr(self, self.last_norm)(hidden)
        output = Mamba2Output(
            last_hidden_state=hidden,
            cache_params=cache_params if use_cache else None,
            hidden_states=(*states, hidden) if with_states else None,
        )
        return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def _graft_mask(self: Any, hidden: Tensor, attention_mask: Tensor | None, cache: Cache | None) -> Any:
        """For graft_attention: None, which keys exist (b, s), or, where the mask is no such thing, which pairs."""
        past = 0 if cache is None else int(cache.get_seq_length(self.config.grafts[0]["layer"]))
        if attention_mask is not None and attention_mask.shape != (len(hidden), past + hidden.shape[1]):
            return create_causal_mask(self.config, hidden, attention_mask, cache)
        if attention_mask is None:
            return None
        # Whether there is padding at all is worth knowing for a prompt. A trace cannot look, and in a step it would make the
        # host wait for a GPU.
        looked_at = not traced(attention_mask) and (hidden.shape[1] > 1 or attention_mask.is_cpu)
        return None if looked_at and attention_mask.all() else attention_mask.bool()


class HybridCausalLM(Spliced):
    """The language model; stands before a family's stock one."""

    packs = True
    backbone_class: ClassVar[type]
    _no_split_modules: Any = ["HybridBlock"]
    _supports_sdpa = True

    def __init__(self: Any, config: Any):
        PreTrainedModel.__init__(self, config)
        self.backbone = self.backbone_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_params: Cache | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        read = self.backbone(
            input_ids,
            inputs_embeds=inputs_embeds,
            cache_params=cache_params,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            return_dict=True,
            **{name: kwargs[name] for name in PACKED if name in kwargs},
        )
        hidden = slice_logits_to_keep(read.last_hidden_state, logits_to_keep)
        logits = self.lm_head(as_weight(hidden, self.lm_head.weight)).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = Mamba2CausalLMOutput(
            loss=loss, logits=logits, cache_params=read.cache_params, hidden_states=read.hidden_states
        )
        return output if (self.config.return_dict if return_dict is None else return_dict) else output.to_tuple()

    def mixer_at(self: Any, layer: int) -> Any:
        """The mixer of a layer."""
        return self.base_model.layers[layer].mixer

    def prepare_inputs_for_generation(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> dict:
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)  # type: ignore[misc]
        if inputs.get("attention_mask") is None:
            # The parent drops it after the prompt; attention still needs it.
            inputs["attention_mask"] = kwargs.get("attention_mask")
        return inputs
