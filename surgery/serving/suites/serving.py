"""The suite serving: what models cost in a serving engine. It lives in an environment of its own, and is given each model's
folder."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.cells import Kept, kept
from surgery.evaluation.contexts import readable
from surgery.evaluation.decoding import here
from surgery.evaluation.entries import ModelPool
from surgery.evaluation.results import Serving
from surgery.evaluation.suites import measured
from surgery.loading.digests import Conditions
from surgery.models.finite import within
from surgery.models.quantised import is_quantised
from surgery.records.names import is_control
from surgery.records.recipe import Bench
from surgery.runtime.consent import consent
from surgery.runtime.other_python import SETTING, ask, check_python
from surgery.runtime.processes import is_main
from surgery.runtime.progress import Track
from surgery.serving.engines.vllm import BENCH
from surgery.splicing.splice import stock

PLACE = 80
SUITES = {
    "serving": "Tokens per second, time to the first token and cache in vLLM, by its own benchmark client, against context and "
    "concurrency (--engine-python, bench.concurrencies)."
}
LENGTHS = "only"


class Served(Kept):
    """What one model cost."""

    serving: tuple[Serving, ...]


def fields(
    models: ModelPool, under: Mapping[str, Conditions], options: Bench, tokenizer: PreTrainedTokenizerBase, folder: Path | None
) -> dict[str, dict[str, Any]]:
    """Of one model after the other, by the first process. Controls cost what their models cost."""
    python, contexts = consent().engine_python, readable(options, tokenizer)
    found: dict[str, dict[str, Any]] = {}
    if "serving" in measured(options) and python is not None and is_main():
        common = {"cell": "serving", **here(), "engine": versions(python)}
        asked = {"contexts": contexts, "concurrencies": options.concurrencies}
        for name in Track([name for name in models if not is_control(name)], "serving"):
            key = common | asked | {"models": [under[name].model_dump()]}

            def measure(name: str = name) -> Served:
                with within(f"{name}, serving"):
                    return serve(models[name], tokenizer, python, contexts, options.concurrencies)

            found[name] = {"serving": kept(folder, key, Served, measure).serving}
    return found


def check(options: Bench) -> None:
    """Raise UserError if the suite lacks an engine, or an engine was named for nothing."""
    chosen = "serving" in measured(options)
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


def try_out(options: Bench) -> None:
    """Raise UserError if the engine is not there."""
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
    return ask("vllm", "vllm", python, BENCH, job)
