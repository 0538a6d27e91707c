"""What vLLM calls in each of its processes before it reads a model: the entry point `vllm.general_plugins` of this package.

Names only are registered, so that CUDA is not initialised before vLLM forks. With it `vllm serve FOLDER` serves a folder that
`surgery export --as hf` wrote of a Mamba-2 with head grafts or layer grafts.
"""

from transformers import AutoConfig

from surgery.serving.vllm_config import ARCHITECTURE, Convertor, HybridServing, ServedMamba2Config

MODEL = "surgery.serving.vllm_model:ServedMamba2ForCausalLM"


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
