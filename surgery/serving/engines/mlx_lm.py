"""mlx-lm."""

from functools import partial
from pathlib import Path

from surgery.serving import ask_mlx_lm
from surgery.serving.proving import EngineScript, prove_in_engine

FORMATS = ("nemotron_h",)
prove = partial(prove_in_engine, EngineScript("mlx_lm", Path(ask_mlx_lm.__file__), "mlx_lm"))
