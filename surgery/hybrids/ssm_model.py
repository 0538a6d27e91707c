"""The forward of language models made of such blocks alone: Mamba, Mamba-2, Falcon-Mamba, Llamba.

Modules stay those that transformers makes, with their names. What they compute is said here, because transformers' own forward
takes no packed rows, no mask of pairs and no positions, overflows in float16, and computes the last block for all tokens where
few are wanted. Without grafts it is the base itself: with the stock kernels its logits equal transformers' bit for bit.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.mamba2.modeling_mamba2 import Mamba2CausalLMOutput, Mamba2Output

from surgery.hybrids.packed import PACKED, packing
from surgery.hybrids.parts import as_weight, gather_positions, normed


class HybridBlock(GradientCheckpointingLayer):
    """Norm, mixer, residual: the block of every Mamba.

    positions_to_keep: which of the b * t positions' states are wanted, by number; what follows the mixing is then done for them
    alone, and they are (positions, d).
    """

    keeps_positions = True

    def forward(self: Any, hidden_states: Tensor, positions_to_keep: Tensor | None = None, **kwargs: Any) -> Tensor:
        residual = hidden_states.to(torch.float32) if self.residual_in_fp32 else hidden_states
        mixed = self.mixer(normed(self.norm, hidden_states), positions_to_keep=positions_to_keep, **kwargs)
        return gather_positions(positions_to_keep, residual) + mixed


class HybridBackbone:
    """A mixin before a stock backbone."""

    last_norm: ClassVar[str] = "norm_f"

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
        """As in transformers; attention_mask may say which pairs of tokens there are, (b, 1, t, all tokens so far). Documents
        that share a row (packed.py says how that is told) are computed as if each stood alone, and nothing is cached. packing:
        what packed.packing says of the same batch, where that is known."""
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
        handed = {
            "attention_mask": create_recurrent_attention_mask(config, hidden, attention_mask, past_key_values=cache_params),
            "pairs": attention_mask if attention_mask is not None and attention_mask.dim() == 4 else None,
            "position_ids": position_ids,
            "packing": documents,
        }
        with_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = []
        for block in self.layers:
            hidden = block(hidden, cache_params=cache_params, **handed)
            if with_states:
                states.append(hidden)
        hidden = getattr(self, self.last_norm)(hidden)
        output = Mamba2Output(
            last_hidden_state=hidden,
            cache_params=cache_params if use_cache else None,
            hidden_states=(*states, hidden) if with_states else None,
        )
        return output if (config.return_dict if return_dict is None else return_dict) else output.to_tuple()


class HybridLanguageModel:
    """A mixin before StockHybrid. All mixers are ours."""

    all_mixers = packs = plain_blocks = True
    _no_split_modules: Any = ["HybridBlock", "LayerGraftBlock"]

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

    def cached(self: Any, arguments: dict[str, Any]) -> dict[str, Any]:
        """The backbone makes a cache where one is wanted."""
        self.with_room(arguments.get("cache_params"))
        return arguments
