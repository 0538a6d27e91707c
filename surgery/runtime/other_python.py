"""Running a script of ours in an engine's own environment: a job goes in as JSON, and answers come out."""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from surgery.errors import UserError

INSTALLED = "pip install --no-deps mamba-surgery"
SETTING = "--engine-python"  # what the user calls the Python


def check_python(python: Path) -> None:
    """Raise UserError if there is no such program."""
    if not python.is_file() or not os.access(python, os.X_OK):
        raise UserError(f"{SETTING}: there is no program {python}")


def ask(engine: str, module: str, python: Path, script: Path, job: Any) -> Any:
    """What the script answers. module: which one of the engine it imports. Raises UserError, in one line, if it fails."""
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with tempfile.TemporaryDirectory() as place:  # where nothing can be imported from by mistake
        # Not resolved: the link in bin/ is what tells an interpreter its environment.
        program: list[str | Path] = [python.absolute(), "-P", script]
        try:
            done = subprocess.run(
                program, input=json.dumps(job).encode(), capture_output=True, check=False, cwd=place, env=quiet | settings
            )
        except OSError as error:
            raise UserError(f"{SETTING}: {python} does not run: {error.strerror}") from error
    if done.returncode == 0:
        try:
            return json.loads(done.stdout)
        except ValueError as error:
            raise UserError(f"{engine} gave no answers: {SETTING} is to be a Python, and {python} is none") from error
    raise UserError(
        f"{engine} cannot serve the folder: {_reason(engine, module, done.stderr.decode(errors='replace'), python)}"
    )


def _reason(engine: str, module: str, errors: str, python: Path) -> str:
    """The line of an engine's traceback that says what was wrong, and what to do about it where that is known."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if any(f"No module named '{module}'" in line for line in lines):
        return f"{'it' if module == engine else f'its package {module}'} is not installed for {python}"
    refused = [line for line in lines if "Value error, " in line]  # a server's log has a prefix
    raised = [line for line in lines if "Error: " in line]
    reason = (refused or raised[::-1] or lines[::-1] or ["it ended"])[0]
    reason = reason.rpartition("Value error, ")[2].split("[type=")[0].strip()
    if engine == "vllm" and ("custom code" in reason or "not supported" in reason):
        return f"it does not know hybrids; install this package beside it: {python} -m {INSTALLED}"
    return reason
