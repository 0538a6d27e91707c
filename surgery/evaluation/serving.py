"""What models cost in a serving engine: the suite `serving`. The engine lives in an environment of its own, and is given each
model's folder."""

import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.cells import Kept
from surgery.evaluation.results import Serving
from surgery.models.quantised import is_quantised
from surgery.records.recipe import Bench
from surgery.runtime.consent import consent
from surgery.runtime.listing import listed
from surgery.runtime.other_python import SETTING, ask, check_python
from surgery.runtime.processes import is_main
from surgery.splicing.splice import stock


class Served(Kept):
    """What one model cost."""

    serving: tuple[Serving, ...]


def check_serving(options: Bench) -> None:
    """Raise UserError if the suite `serving` lacks an engine, or an engine was named for nothing."""
    chosen = "serving" in options.suites
    python = consent().engine_python
    if python is None:
        if chosen:
            raise UserError(
                "the suite serving needs a Python that has vLLM and this package installed: "
                "--engine-python ENVIRONMENT/bin/python"
            )
        return
    if not chosen:
        raise UserError(f"{SETTING} is for the suite serving: add it to bench.suites, or leave it out")
    check_python(python)


def try_engine(options: Bench) -> None:
    """Raise UserError, before hours of work that end with it, if the engine of the suite `serving` is not there."""
    check_serving(options)
    if (python := consent().engine_python) is not None and is_main():
        versions(python)


def versions(python: Path) -> dict[str, str]:
    """Of the engine and of what it computes with, by name. Nothing is imported there."""
    said: dict[str, str] = _ask(python, {"only": "versions"})
    if not any(name.startswith("vllm") for name in said):
        raise UserError(f"{SETTING}: vllm is not installed for {python}")
    return said


def serve(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    python: Path,
    contexts: list[int],
    concurrencies: tuple[int, ...],
) -> Served:
    """Write the model's folder to a temporary place, have vLLM serve it there, and measure it by vLLM's own client.

    Raises UserError if vLLM cannot serve it.
    """
    if is_quantised(model):
        raise UserError("the suite serving does not measure quantised models: vLLM quantises in ways of its own")
    with tempfile.TemporaryDirectory() as folder:
        (model if getattr(model.config, "grafts", True) else stock(model)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        job = {"folder": folder, "contexts": contexts, "concurrencies": list(concurrencies)}
        said: dict[str, Any] = _ask(python, job)
    cache = {"cache_bytes_per_token": said["cache"]["token"], "state_bytes": said["cache"]["state"]}
    return Served(serving=tuple(Serving(packages=said["packages"], **cache, **cell) for cell in said["cells"]))


def _ask(python: Path, job: dict[str, Any]) -> Any:
    return ask("vllm", "vllm", python, import_module(listed("engines")["vllm"]).BENCH, job)
