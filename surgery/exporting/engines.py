"""The serving engines that can prove an export, one file each, found by listing the folders `engines` around the core: a new
engine is a new file. The engine itself lives in an environment of its own, since it pins other versions."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from surgery.errors import UserError
from surgery.records.record import Record
from surgery.runtime.listing import listed
from surgery.runtime.other_python import check_python

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Pythons = str | Path | Mapping[str, str | Path] | None


class AltSetting(Record):
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
    otherwise: tuple[AltSetting, ...] = ()

    def line(self) -> str:
        how = f", {self.setting}" if self.setting else ""
        texts = f"; {self.texts} texts are split into the same tokens" if self.texts else ""
        return (
            f"served by {self.engine} {self.version} in {self.dtype}{how}: all {self.tokens:,} greedy tokens after prompts of "
            f"{min(self.prompts)} to {max(self.prompts)} tokens are the live model's, of requests alone and of "
            f"{len(self.prompts)} that join and leave; log-probabilities differ by at most {self.difference:.2g}{texts}"
            + "".join(f"; {each.line()}" for each in self.otherwise)
        )


class Engine(Protocol):
    """A module of a folder `engines`.

    It may also hold: `check()`, which raises UserError if something that it takes besides its Python is not here;
    `why_not(format, config)`, why it cannot serve a hybrid of this configuration in one of its formats (None if it can); and
    BENCH, the script that measures what a model costs in the engine.
    """

    FORMATS: tuple[str, ...]  # those that it reads

    def prove(
        self, python: Path, hybrid: "PreTrainedModel", folder: Path, *, verify: str = "auto",
        tokenizer: "PreTrainedTokenizerBase | None" = None,
    ) -> EngineProof:  # fmt: skip
        """Ask it for the folder's answers, and compare them with the live model's. verify: how much of that may be in memory
        for it, one of VERIFICATIONS. Raises UserError if it cannot serve the folder, or gives other answers."""


def engine_of(name: str) -> Any:
    """The Engine of that name. Raises UserError if there is none."""
    known = listed("engines")
    if name not in known:
        raise UserError(f"--prove: there is no engine '{name}' here; there are {', '.join(known)}")
    return importlib.import_module(known[name])


def engine_why_not(name: str, format: str, config: Any) -> str | None:
    """Why an engine cannot serve a hybrid of this configuration in a format that it reads; None if it can."""
    ask = getattr(engine_of(name), "why_not", None)  # an engine without the function serves all
    return None if ask is None else ask(format, config)


def read_pythons(text: str | None) -> Pythons:
    """--engine-python: one interpreter, or ENGINE=PYTHON,ENGINE=PYTHON."""
    if text is None or text.partition("=")[0] not in listed("engines"):
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
        known = engine_of(engine)
        if format not in known.FORMATS:
            raise UserError(f"--prove: {engine} reads {' and '.join(known.FORMATS)}, not '{format}'")
        if (named := own.get(engine)) is None:
            raise UserError(f"--prove: say which Python has {engine} installed: --engine-python ENVIRONMENT/bin/python")
        python = interpreters[engine] = Path(named)
        check_python(python)
        getattr(known, "check", lambda: None)()
    return interpreters
