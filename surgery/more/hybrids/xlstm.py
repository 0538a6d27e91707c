"""xLSTM's language model with what grafts need of it (mlstm_mixer.py).

transformers' class takes no mask of padding, its cache holds three tensors of fixed shapes a layer, and it gives the logits of
all tokens. So its forward is replaced, and with it all mixers are ours: padding changes the state of any. Blocks, norms, MLPs
and the heads' soft cap stay transformers'.
"""

from typing import Any

from torch import Tensor, nn
from transformers import Cache
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.models.xlstm.modeling_xlstm import soft_cap, xLSTMModel
from transformers.utils import can_return_tuple

from surgery.hybrids.parts import as_weight
from surgery.hybrids.states import Handed, StateLayer


class XLSTMBackbone(xLSTMModel):
    """The stock backbone, whose blocks are called `layers` as well, as in all other models."""

    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__("blocks" if name == "layers" else name, value)

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """attention_mask (b, all tokens so far): which of them exist. past_key_values: of XLSTMLanguageModel.new_cache, or
        None; nothing is cached without."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        handed = Handed(past_key_values, create_recurrent_attention_mask(self.config, hidden, attention_mask))
        states = [hidden]
        for block in self.blocks:
            hidden, _ = block(hidden, handed)
            states.append(hidden)
        hidden = self.out_norm(hidden)
        with_states = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return BaseModelOutputWithPast(
            last_hidden_state=hidden, past_key_values=past_key_values,
            hidden_states=(*states[:-1], hidden) if with_states else None,
        )  # fmt: skip


class XLSTMLanguageModel:
    """A mixin before StockHybrid."""

    all_mixers = True
    exchanged = {xLSTMModel: XLSTMBackbone}

    def new_cache(self: Any) -> Cache:
        """For states alone."""
        return Cache(layers=[StateLayer(2) for _ in range(self.config.num_hidden_layers)])

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """As in transformers, with a mask of padding, a cache that can be reordered, and `logits_to_keep`. position_ids are not
        read: there are no positions."""
        read = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, past_key_values=past_key_values,
            use_cache=use_cache, output_hidden_states=output_hidden_states,
        )  # fmt: skip
        hidden = slice_logits_to_keep(read.last_hidden_state, logits_to_keep)
        logits = soft_cap(self.lm_head(as_weight(hidden, self.lm_head.weight)).float(), self.config.output_logit_soft_cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=read.past_key_values, hidden_states=read.hidden_states
        )
