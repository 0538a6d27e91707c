"""vLLM, with the plugin of this package."""

from functools import partial
from pathlib import Path
from typing import Any

from surgery.serving import ask_vllm, bench_vllm, limits
from surgery.serving.proving import EngineScript, prove_in_engine

FORMATS = ("hf", "nemotron_h")
BENCH = Path(bench_vllm.__file__)
prove = partial(prove_in_engine, EngineScript("vllm", Path(ask_vllm.__file__), "vllm"))


def why_not(format: str, config: Any) -> str | None:
    """As Engine.why_not says."""
    return limits.why_not(config) if format == "hf" else None
