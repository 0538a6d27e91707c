"""What vLLM has to know of a hybrid before it builds the model: its attention's shape, its limits, what is refused."""

from typing import Any

from transformers import Mamba2Config
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

from surgery.serving.limits import MODEL_TYPE, head_size, kv_heads, refusal
from surgery.serving.patches import Patched, holds_tokenizer

ARCHITECTURE = "Mamba2HybridForCausalLM"
CONTEXT = 32768  # tokens; the model has no positions to run out of, and vLLM wants a limit (--max-model-len sets another)


class ServedMamba2Config(Mamba2Config):
    """config.json of a hybrid, as hybrids/mamba2.py describes it; at the top of a module, since vLLM's workers unpickle it."""

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
    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None:
        """Called when vLLM has read the configuration. A patch without a tokenizer has its base's."""
        if model_config.tokenizer != model_config.model or holds_tokenizer(model_config.model):
            return
        patched = Patched.read(model_config.model, model_config.revision)
        if patched is not None:
            model_config.tokenizer, model_config.tokenizer_revision = patched.place, patched.revision

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        """Called when vLLM has read all of its settings."""
        config = vllm_config.model_config.hf_config
        reason = refusal(config, vllm_config)
        if reason is not None:
            raise ValueError(reason)
