"""What vLLM's plugin can serve of a hybrid, read from its configuration. Nothing here needs vLLM."""

import math
from typing import Any

MODEL_TYPE = "mamba2_hybrid"
SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)  # of an attention head, that vLLM's backends have in common


def grafts_of(config: Any) -> dict[int, dict[str, Any]]:
    """The configuration's grafts by layer."""
    return {graft["layer"]: graft for graft in config.grafts or ()}


def columns(config: Any, graft: dict[str, Any]) -> int:
    """Numbers of a value: head_dim, the time step, and 1 where there is a null key (vllm_model.py)."""
    return int(config.head_dim) + bool(graft["time_step"]) + bool(graft.get("null"))


def head_size(config: Any) -> int:
    """The width of queries, keys and values in the paged cache, the same in all layers: vLLM plans for one. Raises ValueError
    where no backend has it."""
    if not config.grafts:
        raise ValueError("this folder's model holds no grafts: serve its base")
    needed = max(max(graft["width"], columns(config, graft)) for graft in config.grafts)
    if needed > SIZES[-1]:
        raise ValueError(f"this hybrid's attention is {needed} wide, and vLLM's backends take {SIZES[-1]} at most")
    return next(size for size in SIZES if size >= needed)


def kv_heads(config: Any) -> int:
    """How many heads one of vLLM's attention layers has here, the same in all: a graft with more has several."""
    return math.gcd(*(len(graft["heads"]) for graft in config.grafts))


def why_not(config: Any) -> str | None:
    """Why a hybrid of this configuration cannot be served; None if it can."""
    if config.model_type != MODEL_TYPE:
        return f"vLLM's plugin serves hybrids of Mamba-2, and this is a {config.model_type}"
    for graft in config.grafts or ():
        if graft.get("kind") == "layer":
            return f"L{graft['layer']} is a layer of attention: export the hybrid with --format nemotron_h, and serve that"
    try:
        head_size(config)
    except ValueError as error:
        return str(error)
    low, high = config.time_step_limit
    if low > 0 or high != math.inf:
        return f"vLLM's Mamba-2 does not bound the time step, and this model's is in [{low:g}, {high:g}]"
    return None if config.hidden_act in ("silu", "swish") else f"vLLM's convolution knows silu, and not {config.hidden_act}"


def refusal(config: Any, vllm_config: Any) -> str | None:
    """Why this hybrid cannot be served as vLLM was told to, and what to do; None if it can."""
    parallel = vllm_config.parallel_config
    if parallel.tensor_parallel_size > 1:
        return "the heads of a graft cannot be split over devices: serve it with --tensor-parallel-size 1"
    if vllm_config.speculative_config is not None:
        return "hybrids are served without speculative decoding: leave --speculative-config out"
    if vllm_config.lora_config is not None:
        return "adapters are not served on a hybrid: merge them first, and leave --enable-lora out"
    return why_not(config)
