"""Several processes of one run, as accelerate starts them, and a fresh Python process."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from surgery.errors import UserError

T = TypeVar("T")


def is_main() -> bool:
    """Whether this is the process that writes files and prints; true where there is only one."""
    return os.environ.get("RANK", "0") == "0"


def is_distributed() -> bool:
    """Whether `accelerate launch` or torchrun started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def on_main(work: Callable[[], T]) -> T:
    """Do something in the main process alone; all others wait, and get its result. An error is raised in all of them."""
    if not is_distributed():
        return work()
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    state = PartialState()
    told: list[tuple[T | None, BaseException | None] | None] = [None]
    if state.is_main_process:
        try:
            told = [(work(), None)]
        except Exception as error:
            told = [(None, error)]
    result, failure = broadcast_object_list(told)[0]
    if failure is not None:
        raise failure
    return result


def run_fresh(script: Path, arguments: Sequence[str], *, timeout: float | None = None) -> bytes:
    """What a script prints on standard output, run by this Python in a process of its own, outside the current folder.

    The process sees no GPU and no Hub. Raises UserError, with the last line of its errors, if it fails.
    """
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "0", "TOKENIZERS_PARALLELISM": "false"}
    dropped = ("PYTHONPATH", "PYTHONSTARTUP", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in dropped} | hidden
    command = [sys.executable, "-P", str(script), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"a fresh Python process did not end within {timeout:.0f} s: {script.name}") from error
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise UserError(f"a fresh Python process failed: {lines[-1] if lines else f'status {done.returncode}'}")
    return done.stdout
