"""Proving an export in a serving engine: the engine's answers in float32 against the live model's.

The engine lives in an environment of its own, since it pins other versions. It is asked for greedy tokens and for the most
probable ones of every step. The live model reads the same tokens in one pass: each that the engine chose must be its own most
probable one, and log-probabilities must agree within a bound.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from surgery.errors import UserError
from surgery.exporting.verify import chosen, in_float32
from surgery.kernels.dispatch import use
from surgery.records.record import Record
from surgery.serving import ask_vllm

CLOSE = 2e-4  # log-probabilities in float32, which an engine sums in another order
# The script that asks, and the formats that the engine reads.
ENGINES = {"vllm": (Path(ask_vllm.__file__), ("hf", "nemotron_h"))}
LENGTHS = (1, 24, 190, 7, 33, 80, 150, 12, 64, 100)  # of prompts, in tokens
NEW = 64  # tokens after the first prompt, and 3 fewer after each next, so that they leave one by one
INSTALLED = "pip install --no-deps mamba-surgery"


class EngineProof(Record):
    """How an export was proved in a serving engine.

    prompts: their lengths in tokens. Each was asked alone, and all together in requests that join and leave, read in pieces.
    tokens: how many greedy tokens were compared in all, every one the live model's most probable (or within `tolerance` of it).
    difference: the largest one of log-probabilities, of the five most probable tokens of each step.
    """

    engine: str
    version: str
    dtype: str = "float32"
    prompts: tuple[int, ...]
    tokens: int
    difference: float
    tolerance: float

    def line(self) -> str:
        return (
            f"served by {self.engine} {self.version} in {self.dtype}: all {self.tokens:,} greedy tokens after prompts of "
            f"{min(self.prompts)} to {max(self.prompts)} tokens are the live model's, of requests alone and of "
            f"{len(self.prompts)} that join and leave; log-probabilities differ by at most {self.difference:.2g}"
        )


def check_engines(engines: Sequence[str], format: str, python: Path | None) -> None:
    """Raise UserError unless each engine is known and reads `format`, and its interpreter is there."""
    if python is not None and not engines:
        raise UserError("--engine-python is for --prove; name an engine, or leave it out")
    for engine in engines:
        if engine not in ENGINES:
            raise UserError(f"--prove: there is no engine '{engine}' here; there are {', '.join(ENGINES)}")
        if format not in ENGINES[engine][1]:
            raise UserError(f"--prove: {engine} reads {' and '.join(ENGINES[engine][1])}, not '{format}'")
        if python is None:
            raise UserError(f"--prove: say which Python has {engine} installed: --engine-python ENVIRONMENT/bin/python")
        if not python.is_file() or not os.access(python, os.X_OK):
            raise UserError(f"--engine-python: there is no program {python}")


def prove_in_engine(engine: str, python: Path, hybrid: PreTrainedModel, folder: Path) -> EngineProof:
    """Ask the engine for the folder's answers, and compare. Raises UserError if it cannot serve the folder, or gives other
    answers than the live model."""
    prompts = _prompts(min(hybrid.config.vocab_size, 50_000))
    new = [NEW - 3 * i for i in range(len(prompts))]
    said = _ask(engine, python, {"folder": str(folder.resolve()), "prompts": prompts, "new": new})
    live = in_float32(hybrid, chosen("auto", hybrid))
    read: dict[tuple[int, ...], Tensor] = {}  # what was asked alone and together has the same answers, and is read once
    worst, tokens = 0.0, 0
    for how in ("alone", "together"):
        for prompt, steps in zip(prompts, said[how], strict=True):
            text = (*prompt, *(token for token, _ in steps[:-1]))
            if text not in read:
                read[text] = _log_probabilities(live, text, len(steps))
            difference, other = _compare(read[text], steps)
            worst, tokens = max(worst, difference), tokens + len(steps)
            if other is not None:
                raise UserError(f"{engine} serves another model: after a prompt of {len(prompt)} tokens its token {other + 1} "
                                f"is not the live model's (requests {how}); nothing was written")  # fmt: skip
    if not worst <= CLOSE:
        raise UserError(f"{engine} serves another model: its log-probabilities differ by {worst:.2g}; nothing was written")
    return EngineProof(
        engine=engine, version=said["version"], prompts=LENGTHS, tokens=tokens, difference=worst, tolerance=CLOSE
    )  # fmt: skip


def _prompts(vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]


@torch.no_grad()
def _log_probabilities(live: PreTrainedModel, text: tuple[int, ...], count: int) -> Tensor:
    """After each of the last `count` tokens of a text: (count, vocabulary), in float64 on the CPU."""
    with use(graft_attention="sdpa"):
        logits = live(torch.tensor([text], device=live.device), logits_to_keep=count).logits[0]
    return logits.double().log_softmax(-1).cpu()


def _compare(own: Tensor, steps: list[Any]) -> tuple[float, int | None]:
    """The largest difference to the live model's log-probabilities, and the first step at which the engine chose a token that
    the live model does not."""
    worst = 0.0
    for i, (token, probable) in enumerate(steps):
        for other, value in probable.items():
            gap = abs(own[i, int(other)].item() - value)
            worst = max(worst, gap) if gap == gap else float("inf")  # noqa: PLR0124 (what is not a number)
        if not own[i].max() - own[i, token] <= CLOSE:
            return worst, i
    return worst, None


def _ask(engine: str, python: Path, job: dict[str, Any]) -> dict[str, Any]:
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    settings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with tempfile.TemporaryDirectory() as place:  # where nothing can be imported from by mistake
        # Not resolved: the link in bin/ is what tells an interpreter its environment.
        program: list[str | Path] = [python.absolute(), "-P", ENGINES[engine][0]]
        try:
            done = subprocess.run(
                program, input=json.dumps(job).encode(), capture_output=True, check=False, cwd=place, env=quiet | settings
            )
        except OSError as error:
            raise UserError(f"--engine-python: {python} does not run: {error.strerror}") from error
    if done.returncode == 0:
        try:
            answers: dict[str, Any] = json.loads(done.stdout)
        except ValueError as error:
            raise UserError(f"{engine} gave no answers: --engine-python is to be a Python, and {python} is none") from error
        return answers
    raise UserError(f"{engine} cannot serve the folder: {_reason(done.stderr.decode(errors='replace'), python)}")


def _reason(errors: str, python: Path) -> str:
    """The line of an engine's traceback that says what was wrong, and what to do about it where that is known."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if any("No module named 'vllm'" in line for line in lines):
        return f"it is not installed for {python}"
    refused = [line for line in lines if line.startswith("Value error, ")]
    raised = [line for line in lines if "Error: " in line]
    reason = (refused or raised[::-1] or lines[::-1] or ["it ended"])[0]
    reason = reason.removeprefix("Value error, ").split("[type=")[0].strip()
    if "custom code" in reason or "not supported" in reason:
        return f"it does not know hybrids; install this package beside it: {python} -m {INSTALLED}"
    return reason
