"""A model in a serving engine against transformers: the same prompts, alone, together and behind cached prefixes, in float32.

The engine lives in an environment of its own, since it pins other versions, and is asked by a script there (serving/ask_*.py)
for greedy tokens and the log-probabilities of the most probable ones. The model here reads the same tokens in one pass: each
token that the engine chose has to be its own most probable one, and log-probabilities to agree within what rounding explains.
"""

import json
import math
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from surgery.checking.law import WORDS, measure_rounding
from surgery.errors import UserError

SCRIPTS = {
    "vllm": ("ask_vllm.py", "vllm"),
    "llama.cpp": ("ask_llama_cpp.py", "xllamacpp"),
    "mlx-lm": ("ask_mlx_lm.py", "mlx_lm"),
}
LENGTHS = (1, 24, 300, 190, 7, 33, 80, 150, 12, 64, 100)  # tokens of the prompts: longer than a piece of those that are read
NEW = 40  # tokens after the first prompt, and 3 fewer after each next, so that they leave one by one


@dataclass(frozen=True)
class EngineFinding:
    """difference: the largest one of log-probabilities; bound: what rounding explains. tokens: how many the engine chose;
    others: how many of them the model here does not choose. where: the first of these, or the largest difference. kept: how
    many tokens of prompts it had from a cache; failed: what it says where it cannot serve with one."""

    engine: str
    version: str
    difference: float
    bound: float
    tokens: int
    others: int
    where: str
    kept: int
    failed: str

    @property
    def holds(self) -> bool:
        """Whether the engine computes the model, and refuses in words what it does not."""
        clear = not self.failed or any(word in self.failed.lower() for word in WORDS)
        return clear and not self.others and self.difference <= self.bound

    def __str__(self) -> str:
        what, same = "right" if self.holds else "wrong", f"{self.tokens - self.others} of {self.tokens}"
        line = f"{what}: {same} tokens of {self.engine} {self.version} are those of transformers"
        apart = f"log-probabilities differ by at most {self.difference:.1e} (rounding explains {self.bound:.1e})"
        kept = f"{self.kept:,} tokens of prompts came from cached prefixes" if self.kept else "it kept no prefixes of them"
        cached = f"with cached prefixes it fails: {self.failed}" if self.failed else kept
        return "; ".join(part for part in (line, apart, cached, self.where) if part)


def compare_engine(live: PreTrainedModel, folder: Path, engine: str, python: Path) -> EngineFinding:
    """Compare an engine's answers for a folder with those of transformers. live: its model, in float32 on the CPU. Raises
    UserError if the engine gives none."""
    vocabulary = min(int(live.config.vocab_size), 50_000)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in LENGTHS]
    job = {"folder": str(folder.resolve()), "prompts": prompts, "new": [max(1, NEW - 3 * i) for i in range(len(prompts))]}
    said = ask_engine(engine, python, job)
    asked = [(f"requests {how}", *each) for how in ("alone", "together") for each in zip(prompts, said[how], strict=True)]
    asked += [(f"{kept} of them cached", prompt, steps) for prompt, kept, steps in said["cached"]]
    worst, bound, others, tokens, where = 0.0, 0.0, 0, 0, ""
    for how, prompt, steps in asked:
        text = torch.tensor([[*prompt, *(token for token, _ in steps[:-1])]])
        with torch.no_grad():
            logits = live(input_ids=text, use_cache=False).logits[0]
        own = logits[-len(steps) :].double().log_softmax(-1)  # after each token that the engine was to choose: (steps, V)
        allowed = measure_rounding(live, logits, text)
        found = [(i, int(other), value) for i, (_, probable) in enumerate(steps) for other, value in probable.items()]
        apart = torch.tensor([own[i, other].item() - value for i, other, value in found] or [0.0]).abs()
        difference = math.inf if apart.isnan().any() else apart.max().item()
        # The steps at which the engine chose a token that is not the most probable one here.
        wrong = [i for i, (token, _) in enumerate(steps) if not own[i].max() - own[i, token] <= allowed]
        largest = not tokens or difference / allowed > worst / bound  # beside what rounding explains
        place = f"after a prompt of {len(prompt)} tokens, {how}"
        if wrong and not others:
            where = f"token {wrong[0] + 1} is another one {place}"
        elif not others and largest and difference > allowed:
            where = f"the largest difference is {place}"
        worst, bound = (difference, allowed) if largest else (worst, bound)
        others, tokens = others + len(wrong), tokens + len(steps)
    kept = sum(count for _, count, _ in said["cached"])
    failed = " ".join(said["failed"].split())[:200]
    return EngineFinding(engine, said["version"], worst, bound, tokens, others, where, kept, failed)


def ask_engine(engine: str, python: Path, job: dict[str, Any]) -> dict[str, Any]:
    """What the engine's script answers. Raises UserError, in one line, if it fails."""
    script, module = SCRIPTS[engine]
    if not python.is_file() or not os.access(python, os.X_OK):
        raise UserError(f"--engine-python: there is no program {python}")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    quiet["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its errors are then its own, and one engine can follow another
    settings = quiet | {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    place = Path(__file__).parents[1] / "serving" / script
    with tempfile.TemporaryDirectory() as empty:  # where nothing can be imported from by mistake
        command = [str(python.absolute()), "-P", str(place)]  # not resolved: the link tells an interpreter its environment
        done = subprocess.run(
            command, input=json.dumps(job).encode(), capture_output=True, check=False, cwd=empty, env=settings
        )
    if done.returncode == 0:
        try:
            return json.loads(done.stdout)
        except ValueError as error:
            raise UserError(f"--engine-python: {python} is no Python, or {engine} gave no answers") from error
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    if any(f"No module named '{module}'" in line for line in lines):
        raise UserError(f"{module} is not installed for {python}")
    reasons = [line for line in lines if "Error: " in line] or lines or ["it ended without a word"]
    raise UserError(f"{engine} cannot serve {job['folder']}: {reasons[-1]}")
