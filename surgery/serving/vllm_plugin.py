"""What vLLM calls in each of its processes before it reads a model: the entry point `vllm.general_plugins` of this package.

Names only are registered, so that CUDA is not initialised before vLLM forks. With it `vllm serve FOLDER` serves a folder that
`surgery export` wrote of a Mamba-2 with grafts at heads. It runs in the engine's environment, beside the transformers that
it pins, and imports nothing else of this package.
"""

from typing import Any

from transformers import AutoConfig, Mamba2Config
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from surgery.serving.vllm_limits import MODEL_TYPE, head_size, kv_heads, refusal

ARCHITECTURE = "Mamba2HybridForCausalLM"
MODEL = "surgery.serving.vllm_model:ServedMamba2ForCausalLM"
CONTEXT = 32768  # tokens; the model has no positions to run out of, and vLLM wants a limit (--max-model-len sets another)


class ServedMamba2Config(Mamba2Config):
    """config.json of a hybrid; at the top of a module, since vLLM's workers unpickle it."""

    model_type = MODEL_TYPE

    grafts: list | None = None
    layer_types: list | None = None  # which folders up to 0.20 hold; the parent's is a read-only property


class Convertor(ModelArchConfigConvertorBase):
    """Mamba-2's `head_dim` is the SSM's, not the attention's."""

    def get_head_size(self) -> int:
        return head_size(self.hf_config)

    def get_total_num_attention_heads(self) -> int:
        return kv_heads(self.hf_config)

    def get_total_num_kv_heads(self) -> int:
        return kv_heads(self.hf_config)

    def derive_max_model_len_and_key(self) -> tuple[float, str | None]:
        return CONTEXT, None


class HybridServing(VerifyAndUpdateConfig):
    """Called when vLLM has read all of its settings."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        reason = refusal(vllm_config.model_config.hf_config, vllm_config)
        if reason is not None:
            raise ValueError(reason)


def register() -> None:
    """May be called more than once."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP
    from vllm.transformers_utils.model_arch_config_convertor import MODEL_ARCH_CONFIG_CONVERTORS

    AutoConfig.register(ServedMamba2Config.model_type, ServedMamba2Config, exist_ok=True)
    MODEL_ARCH_CONFIG_CONVERTORS[ServedMamba2Config.model_type] = Convertor
    MODELS_CONFIG_MAP[ARCHITECTURE] = HybridServing
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, MODEL)
