"""The language model of GLM 5.3, for which transformers has a class with a vision tower alone."""

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import PrefixChange
from transformers.generation import GenerationMixin
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig, Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextPreTrainedModel, Glm5NextTextModel
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForCausalLM


class Glm5NextTextForCausalLM(Glm5NextPreTrainedModel, GenerationMixin):
    config_class = Glm5NextTextConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _keys_to_ignore_on_load_unexpected = [*Glm5NextPreTrainedModel._keys_to_ignore_on_load_unexpected, r"^model\.visual\."]

    forward: Any = KimiLinearForCausalLM.forward  # backbone, head and loss

    def __init__(self, config: Glm5NextTextConfig):
        super().__init__(config)
        self.model = Glm5NextTextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# Published folders hold the vision tower, too: of those, too, transformers finds the language model, as it does for Qwen3.5.
register_checkpoint_conversion_mapping(
    Glm5NextTextForCausalLM.__name__,
    [PrefixChange(prefix_to_remove="language_model", model_prefix="model"), *get_checkpoint_conversion_mapping("glm5_next")],
    overwrite=True,
)
AutoModelForCausalLM.register(Glm5NextTextConfig, Glm5NextTextForCausalLM, exist_ok=True)
causal: Any = AutoModelForCausalLM._model_mapping
causal.register(Glm5NextConfig, Glm5NextTextForCausalLM, exist_ok=True)
