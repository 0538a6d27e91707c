"""What vLLM has to know of a hybrid before it builds the model: its attention's shape, its limits, what is refused."""

import math
from typing import Any

from transformers import Mamba2Config
from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

ARCHITECTURE = "Mamba2HybridForCausalLM"
CONTEXT = 32768  # tokens; the model has no positions to run out of, and vLLM wants a limit (--max-model-len sets another)
SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # of an attention head, that vLLM's backends have in common


class Mamba2HybridConfig(Mamba2Config):
    """config.json of a hybrid, as hybrids/mamba2.py describes it; at the top of a module, since vLLM's workers unpickle it."""

    model_type = "mamba2_hybrid"

    grafts: list | None = None
    layer_types: list | None = None  # of transformers' cache; the parent's is a read-only property


def grafts_of(config: Any) -> dict[int, dict[str, Any]]:
    """The configuration's grafts by layer."""
    return {graft["layer"]: graft for graft in config.grafts or ()}


def is_layer_graft(graft: dict[str, Any]) -> bool:
    """Those of the first exports do not say which kind they are, and are heads'."""
    return graft.get("kind") == "layer"


def head_size(config: Any) -> int:
    """The width of queries, keys and values in the paged cache, the same in all layers: vLLM plans for one.

    A head graft's keys are `width` wide, its values head_dim, and one more where dt is written with them (vllm_model.py).
    """
    needed = [
        graft["head_dim"] if is_layer_graft(graft) else max(graft["width"], config.head_dim + bool(graft["time_step"]))
        for graft in config.grafts
    ]
    fitting = [size for size in SIZES if size >= max(needed)]
    if not fitting:
        raise ValueError(f"this hybrid's attention is {max(needed)} wide, and vLLM's backends take {SIZES[-1]} at most")
    return fitting[0]


def kv_heads(config: Any) -> int:
    """How many key-value heads one of vLLM's attention layers has here, the same in all: a layer with more gets several."""
    return math.gcd(
        *(graft["num_key_value_heads"] if is_layer_graft(graft) else len(graft["heads"]) for graft in config.grafts)
    )


def refusal(config: Any, vllm_config: Any) -> str | None:
    """Why this hybrid cannot be served so, and what to do; None if it can."""
    parallel, (low, high) = vllm_config.parallel_config, config.time_step_limit
    convolved = [f"L{graft['layer']}" for graft in config.grafts if is_layer_graft(graft) and graft["conv"]]
    reasons = {
        "the heads of a graft cannot be split over devices: serve it with --tensor-parallel-size 1":
            parallel.tensor_parallel_size > 1,
        "hybrids are not served in a pipeline: serve it with --pipeline-parallel-size 1": parallel.pipeline_parallel_size > 1,
        "hybrids are served without speculative decoding: leave --speculative-config out":
            vllm_config.speculative_config is not None,
        "adapters are not served on a hybrid: merge them first, and leave --enable-lora out":
            vllm_config.lora_config is not None,
        "hybrids are served without --use-replayssm": vllm_config.cache_config.use_replayssm,
        f"vLLM's Mamba-2 does not bound the time step, and this model's is in [{low:g}, {high:g}]":
            low > 0 or high != float("inf"),
        f"vLLM's convolution knows silu, and not {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
        f"the layer graft at {' and '.join(convolved)} has a convolution, which vLLM's attention has not": bool(convolved),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


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
    """Called once, when vLLM has read all of its settings."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: Any) -> None:
        config = vllm_config.model_config.hf_config
        if not config.grafts:
            raise ValueError("this folder's model holds no grafts: serve its base")
        reason = refusal(config, vllm_config)
        if reason is not None:
            raise ValueError(reason)
        if current_platform.is_cpu():
            # vLLM 0.32's Mamba-2 dies of an IndexError with it on a CPU, where it is on unless it is turned off.
            vllm_config.cache_config.enable_prefix_caching = False
