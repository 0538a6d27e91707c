"""What models cost in a serving engine: the suite `serving`. The engine lives in an environment of its own, and is given each
model's folder."""

import tempfile
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.cells import Kept
from surgery.evaluation.report import Serving
from surgery.models.quantised import is_quantised
from surgery.records.recipe import Bench
from surgery.serving import bench_vllm
from surgery.serving.other_python import ask, check_python

SETTING = "bench.engine_python"


class Served(Kept):
    """What one model cost."""

    serving: tuple[Serving, ...]


def check_serving(options: Bench) -> None:
    """Raise UserError if the suite `serving` lacks an engine, or an engine was named for nothing."""
    chosen = "serving" in options.suites
    if options.engine_python is None:
        if chosen:
            raise UserError(
                "the suite serving needs a Python that has vLLM and this package installed: "
                "--set bench.engine_python=ENVIRONMENT/bin/python"
            )
        return
    if not chosen:
        raise UserError("bench.engine_python is for the suite serving: add it to bench.suites, or leave it out")
    check_python(Path(options.engine_python), SETTING)


def versions(python: Path) -> dict[str, str]:
    """Of the engine and of what it computes with, by name. Nothing is imported there."""
    said: dict[str, str] = _ask(python, {"only": "versions"})
    if not any(name.startswith("vllm") for name in said):
        raise UserError(f"bench.engine_python: vllm is not installed for {python}")
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
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        job = {"folder": folder, "contexts": contexts, "concurrencies": list(concurrencies)}
        said: dict[str, Any] = _ask(python, job)
    cache = {"cache_bytes_per_token": said["cache"]["token"], "state_bytes": said["cache"]["state"]}
    return Served(serving=tuple(Serving(packages=said["packages"], **cache, **cell) for cell in said["cells"]))


def _ask(python: Path, job: dict[str, Any]) -> Any:
    return ask("vllm", "vllm", python, Path(bench_vllm.__file__), job, SETTING)
