"""Proving an export in a serving engine: the engine's answers in float32 against the live model's.

The engine lives in an environment of its own, since it pins other versions. It is asked for greedy tokens and for the most
probable ones of every step. The live model reads the same tokens in one pass: each that the engine chose must be its own most
probable one, and log-probabilities must agree within a bound.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting import llama_cpp
from surgery.exporting.tolerance import tolerance
from surgery.exporting.verify import chosen, in_float32
from surgery.kernels.dispatch import use
from surgery.models.quantised import is_quantised
from surgery.records.record import Record
from surgery.runtime.memory import free_disk, size
from surgery.serving import ask_llama_cpp, ask_mlx_lm, ask_vllm
from surgery.serving.other_python import ask, check_python

LENGTHS = (1, 24, 700, 190, 7, 33, 80, 150, 12, 64, 100)  # of prompts, in tokens
NEW = 64  # tokens after the first prompt, and 3 fewer after each next, so that they leave one by one
# For engines that split texts into tokens by code of their own.
TEXTS = (
    "The value of the key 'map' is",
    "It's what they'd say: WE'RE 12,345 strong; she'll pay $6.50 (or 7%)...",
    "def f(x):\n    return x  # twice\n\n\n\tdone  ",
    "Ünïcödé, naïve café, 北京大学, кофе, \u200dzero, 🙂🙂",
    " leading   and    runs of spaces\r\n",
)


@dataclass(frozen=True)
class Engine:
    """script: what asks it, run by its Python. formats: those that it reads. module: what that Python imports. texts: whether
    it splits texts by code of its own. prepare: the folder that is asked; what is to be written for it goes to another one."""

    script: Path
    formats: tuple[str, ...]
    module: str
    texts: bool = False
    prepare: Callable[[PreTrainedModel, Path, Path], Path] = lambda hybrid, folder, place: folder


def _gguf(hybrid: PreTrainedModel, folder: Path, place: Path) -> Path:
    """The folder of a GGUF in float32: matrices of 16 bits llama.cpp multiplies by numbers that it rounds to them."""
    if (folder / llama_cpp.FILE).exists() and {p.dtype for p in hybrid.parameters()} == {torch.float32}:
        return folder
    needed = 4 * sum(p.numel() for p in hybrid.parameters())
    if needed > (free := free_disk(place)):
        raise UserError(
            f"llama_cpp is asked for a copy in float32: that takes {size(needed)}, and {size(free)} are free in {place}"
        )
    llama_cpp.convert(folder, place / llama_cpp.FILE, "f32", folder.name)
    return place


ENGINES = {
    "vllm": Engine(Path(ask_vllm.__file__), ("hf", "nemotron_h"), "vllm"),
    "mlx_lm": Engine(Path(ask_mlx_lm.__file__), ("nemotron_h",), "mlx_lm"),
    "llama_cpp": Engine(Path(ask_llama_cpp.__file__), ("gguf", "nemotron_h"), "xllamacpp", texts=True, prepare=_gguf),
}
Pythons = str | Path | Mapping[str, str | Path] | None


class Otherwise(Record):
    """An engine under another setting: of its `tokens` greedy ones, how many are the live model's most probable (or within the
    tolerance of it), and the largest difference of log-probabilities. It is measured and said, and is no part of the proof."""

    setting: str
    tokens: int
    same: int
    difference: float

    def line(self) -> str:
        same = f"{self.setting}, {self.same:,} of {self.tokens:,} tokens are the live model's"
        return f"{same}, and log-probabilities differ by at most {self.difference:.2g}"


class EngineProof(Record):
    """How an export was proved in a serving engine.

    prompts: their lengths in tokens. Each was asked alone, and all together in requests that join and leave, read in pieces.
    tokens: how many greedy tokens were compared in all, every one the live model's most probable (or within `tolerance` of it).
    difference: the largest one of log-probabilities, of the five most probable tokens of each step. tolerance: that of the
    longest text. texts: how many it splits into the tokenizer's tokens, if it does so itself. setting: what it was told.
    otherwise: what it answers if told otherwise.
    """

    engine: str
    version: str
    dtype: str = "float32"
    prompts: tuple[int, ...]
    tokens: int
    difference: float
    tolerance: float
    texts: int = 0
    setting: str = ""
    otherwise: tuple[Otherwise, ...] = ()

    def line(self) -> str:
        how = f", {self.setting}" if self.setting else ""
        texts = f"; {self.texts} texts are split into the same tokens" if self.texts else ""
        return (
            f"served by {self.engine} {self.version} in {self.dtype}{how}: all {self.tokens:,} greedy tokens after prompts of "
            f"{min(self.prompts)} to {max(self.prompts)} tokens are the live model's, of requests alone and of "
            f"{len(self.prompts)} that join and leave; log-probabilities differ by at most {self.difference:.2g}{texts}"
            + "".join(f"; {each.line()}" for each in self.otherwise)
        )


def read_pythons(text: str | None) -> Pythons:
    """--engine-python: one interpreter, or ENGINE=PYTHON,ENGINE=PYTHON."""
    if text is None or text.partition("=")[0] not in ENGINES:
        return text
    pythons = {}
    for part in text.split(","):
        engine, _, python = part.partition("=")
        if not python:
            raise UserError(f"--engine-python: '{part}' is not ENGINE=PYTHON")
        pythons[engine.strip()] = python.strip()
    return pythons


def check_engines(engines: Sequence[str], format: str, pythons: Pythons) -> dict[str, Path]:
    """The interpreter of each engine. Raises UserError unless each is known, reads `format`, and has an interpreter that is
    there."""
    engines = [engines] if isinstance(engines, str) else engines
    if pythons is not None and not engines:
        raise UserError("--engine-python is for --prove; name an engine, or leave it out")
    own = pythons if isinstance(pythons, Mapping) else dict.fromkeys(engines, pythons)
    if unused := [engine for engine in own if engine not in engines]:
        raise UserError(f"--engine-python names a Python for '{unused[0]}', which --prove does not name")
    interpreters = {}
    for engine in engines:
        if engine not in ENGINES:
            raise UserError(f"--prove: there is no engine '{engine}' here; there are {', '.join(ENGINES)}")
        if format not in (formats := ENGINES[engine].formats):
            raise UserError(f"--prove: {engine} reads {' and '.join(formats)}, not '{format}'")
        if (named := own.get(engine)) is None:
            raise UserError(f"--prove: say which Python has {engine} installed: --engine-python ENVIRONMENT/bin/python")
        python = interpreters[engine] = Path(named)
        check_python(python, "--engine-python")
        if engine == "llama_cpp":
            llama_cpp.source()
    return interpreters


def prove_in_engine(
    engine: str, python: Path, hybrid: PreTrainedModel, folder: Path, *, verify: str = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> EngineProof:  # fmt: skip
    """Ask the engine for the folder's answers, and compare. verify: how much of the live model may be in memory for it, one of
    VERIFICATIONS; for "tensors", with which nothing is computed, as little as for "layers". tokenizer: for engines that split
    texts themselves. Raises UserError if it cannot serve the folder, or gives other answers than the live model."""
    way = chosen(verify, hybrid)
    if way == "tensors" and not is_quantised(hybrid):
        way = "layers"
    prompts = _prompts(min(hybrid.config.vocab_size, 50_000))
    job: dict[str, Any] = {"prompts": prompts, "new": [NEW - 3 * i for i in range(len(prompts))]}
    if ENGINES[engine].texts:
        job["texts"] = list(TEXTS) if tokenizer is not None else []
    with tempfile.TemporaryDirectory() as place:
        asked = ENGINES[engine].prepare(hybrid, folder, Path(place))
        converted = "converted to GGUF in float32" if asked != folder else ""
        said = _ask(engine, python, job | {"folder": str(asked.resolve())})
    for text, split in zip(job.get("texts", ()), said.get("texts", ()), strict=True):
        if tokenizer is not None and (own := tokenizer(text).input_ids) != split:
            raise UserError(f"{engine} splits {text!r} into other tokens, {split}, not {own}; nothing was written")
    live = in_float32(hybrid, way)
    read: dict[tuple[int, ...], tuple[Tensor, float]] = {}  # asked alone and together it has the same answers, read once

    def compared(answers: Sequence[Any]) -> list[Compared]:
        each = []
        for prompt, steps in zip(prompts, answers, strict=True):
            text = (*prompt, *(token for token, _ in steps[:-1]))
            if text not in read:
                own = _log_probabilities(live, text, len(steps))
                read[text] = own, tolerance(own, len(text), hybrid.config.num_hidden_layers)
            each.append(_compare(*read[text], steps))
        return each

    worst = allowed = 0.0
    for how in ("alone", "together"):
        for prompt, found in zip(prompts, compared(said[how]), strict=True):
            worst, allowed = max(worst, found.difference), max(allowed, found.tolerance)
            if found.others:
                raise UserError(
                    f"{engine} serves another model: after a prompt of {len(prompt)} tokens its token {found.others[0] + 1} is "
                    f"not the live model's (requests {how}); nothing was written"
                )
            if not found.difference <= found.tolerance:
                raise UserError(
                    f"{engine} serves another model: its log-probabilities differ by {found.difference:.2g}, after a prompt of "
                    f"{len(prompt)} tokens; nothing was written"
                )
    answers = [step for how in ("alone", "together") for steps in said[how] for step in steps]
    if (told := sum(bool(probable) for _, probable in answers)) < len(answers) / 2:
        raise UserError(f"{engine} tells probabilities of {told} of its {len(answers)} tokens only; nothing was written")
    otherwise = []
    for setting, others in said.get("otherwise", {}).items():
        each, tokens = compared(others), sum(map(len, others))
        same, difference = tokens - sum(len(one.others) for one in each), max(one.difference for one in each)
        otherwise.append(Otherwise(setting=setting, tokens=tokens, same=same, difference=difference))
    return EngineProof(
        engine=engine, version=said["version"], prompts=tuple(map(len, prompts)), difference=worst, tolerance=allowed,
        tokens=len(answers), texts=len(job.get("texts", ())),
        setting=", ".join(filter(None, (converted, said.get("setting")))), otherwise=tuple(otherwise),
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


class Compared(NamedTuple):
    """difference: the largest one to the live model's log-probabilities. others: the steps at which the engine chose a token
    that the live model does not."""

    difference: float
    tolerance: float
    others: list[int]


def _compare(own: Tensor, most: float, steps: list[Any]) -> Compared:
    """most: by how much log-probabilities may differ."""
    worst, others = 0.0, []
    for i, (token, probable) in enumerate(steps):
        for other, value in probable.items():
            gap = abs(own[i, int(other)].item() - value)
            worst = max(worst, gap) if gap == gap else float("inf")  # noqa: PLR0124 (what is not a number)
        if not own[i].max() - own[i, token] <= most:
            others.append(i)
    return Compared(worst, most, others)


def _ask(engine: str, python: Path, job: dict[str, Any]) -> dict[str, Any]:
    known = ENGINES[engine]
    answers: dict[str, Any] = ask(engine, known.module, python, known.script, job, "--engine-python")
    return answers
