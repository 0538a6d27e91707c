"""What vLLM can serve of a hybrid, read from its configuration: the widths of its attention, and what is refused. Nothing here
needs vLLM."""

import math
from typing import Any

MODEL_TYPE = "mamba2_hybrid"  # what the plugin serves
SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # of an attention head, that vLLM's backends have in common


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
    if not config.grafts:
        raise ValueError("this folder's model holds no grafts: serve its base")
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
    parallel = vllm_config.parallel_config
    reasons = {
        "the heads of a graft cannot be split over devices: serve it with --tensor-parallel-size 1, and divide layers"
        " (--pipeline-parallel-size) or requests (--data-parallel-size)":
            parallel.tensor_parallel_size > 1,
        # vLLM 0.32 makes the buffers between processes in the run that compiles the model, and in no other.
        "on a CPU, vLLM runs a pipeline of processes only compiled: leave --enforce-eager out":
            parallel.pipeline_parallel_size > 1
            and vllm_config.model_config.enforce_eager
            and vllm_config.device_config.device_type == "cpu",
        "hybrids are served without speculative decoding: leave --speculative-config out":
            vllm_config.speculative_config is not None,
        "adapters are not served on a hybrid: merge them first, and leave --enable-lora out":
            vllm_config.lora_config is not None,
        "hybrids are served without --use-replayssm": vllm_config.cache_config.use_replayssm,
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None) or why_not(config)


def why_not(config: Any) -> str | None:
    """Why a hybrid of this configuration cannot be served, however vLLM is started; None if it can."""
    if config.model_type != MODEL_TYPE:
        return f"vLLM's plugin serves hybrids of Mamba-2, and this is a {config.model_type}"
    if windows := [f"L{graft['layer']}" for graft in config.grafts or () if graft.get("kind") == "window"]:
        return f"heads in {' and '.join(windows)} have a window, and vLLM's attention keeps all keys"
    try:
        head_size(config)
    except ValueError as error:
        return str(error)
    low, high = config.time_step_limit
    convolved = [f"L{graft['layer']}" for graft in config.grafts if is_layer_graft(graft) and graft["conv"]]
    copying = [f"L{graft['layer']}" for graft in config.grafts if graft.get("own_values")]
    reasons = {
        f"vLLM's Mamba-2 does not bound the time step, and this model's is in [{low:g}, {high:g}]":
            low > 0 or high != float("inf"),
        f"vLLM's convolution knows silu, and not {config.hidden_act}": config.hidden_act not in ("silu", "swish"),
        f"the layer graft at {' and '.join(convolved)} has a convolution, which vLLM's attention has not": bool(convolved),
        f"the grafts at {' and '.join(copying)} have values of their own (init: copy), which the plugin does not serve":
            bool(copying),
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)
