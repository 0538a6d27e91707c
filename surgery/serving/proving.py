"""Proving an export in a serving engine: the engine's answers in float32 against the live model's.

The engine lives in an environment of its own, since it pins other versions. It is asked for greedy tokens and for the most
probable ones of every step. The live model reads the same tokens in one pass: each that the engine chose must be its own most
probable one, and log-probabilities must agree within a bound.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.engines import AltSetting, EngineProof
from surgery.exporting.tolerance import tolerance
from surgery.exporting.verify import chosen, in_float32
from surgery.kernels.dispatch import use
from surgery.models.quantised import is_quantised
from surgery.runtime.other_python import ask

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
class EngineScript:
    """engine: its name. script: what asks it, run by its Python. module: what that Python imports. texts: whether
    it splits texts by code of its own. prepare: the folder that is asked; what is to be written for it goes to another one."""

    engine: str
    script: Path
    module: str
    texts: bool = False
    prepare: Callable[[PreTrainedModel, Path, Path], Path] = lambda hybrid, folder, place: folder


def prove_in_engine(
    script: EngineScript, python: Path, hybrid: PreTrainedModel, folder: Path, *, verify: str = "auto",
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> EngineProof:  # fmt: skip
    """Ask the engine for the folder's answers, and compare. verify: how much of the live model may be in memory for it, one of
    VERIFICATIONS; for "tensors", with which nothing is computed, as little as for "layers". tokenizer: for engines that split
    texts themselves. Raises UserError if it cannot serve the folder, or gives other answers than the live model."""
    engine, way = script.engine, chosen(verify, hybrid)
    if way == "tensors" and not is_quantised(hybrid):
        way = "layers"
    prompts = _prompts(min(hybrid.config.vocab_size, 50_000))
    job: dict[str, Any] = {"prompts": prompts, "new": [NEW - 3 * i for i in range(len(prompts))]}
    if script.texts:
        job["texts"] = list(TEXTS) if tokenizer is not None else []
    with tempfile.TemporaryDirectory() as place:
        asked = script.prepare(hybrid, folder, Path(place))
        converted = "converted to GGUF in float32" if asked != folder else ""
        said = _ask(script, python, job | {"folder": str(asked.resolve())})
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
        otherwise.append(AltSetting(setting=setting, tokens=tokens, same=same, difference=difference))
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


def _ask(script: EngineScript, python: Path, job: dict[str, Any]) -> dict[str, Any]:
    answers: dict[str, Any] = ask(script.engine, script.module, python, script.script, job)
    return answers
