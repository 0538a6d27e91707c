"""Export: a hybrid as a folder that others can load, proved equal in a fresh process before it is called done."""

import inspect
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.report import Report
from surgery.exporting import folder, hf, mamba_ssm, nemotron_h, patch
from surgery.exporting.verify import Proof
from surgery.models.quantised import is_quantised
from surgery.models.tokens import prompting
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe

__all__ = ["FORMATS", "export"]

FORMATS: dict[str, folder.Format] = {"hf": hf, "patch": patch, "nemotron_h": nemotron_h, "mamba_ssm": mamba_ssm}


def export(
    hybrid: PreTrainedModel,
    path: str | Path,
    *,
    form: str = "hf",
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    base: str,
    recipe: Recipe | None = None,
    report: Report | None = None,
    figures: Path | None = None,
    **options: Any,
) -> Proof:
    """Write a hybrid as one of FORMATS, and return how a fresh process proved that it is the live model.

    base: the base's name, as load() takes it. figures: a folder whose atlas travels along. options: the format's own, such as
    max_shard_size="5GB" of `hf`. An existing folder at `path` is replaced if it is an earlier export. Raises UserError, and
    leaves nothing behind, if the form cannot hold the hybrid exactly, or if writing or proving fails.
    """
    if form not in FORMATS:
        raise UserError(f"cannot export as '{form}'; there are {', '.join(FORMATS)}")
    if is_quantised(hybrid) and form not in ("hf", "patch"):
        raise UserError(
            f"a quantised base cannot be written as '{form}', whose weights are floating-point numbers; splice and export with "
            "the base as it was before"
        )
    written = FORMATS[form]
    if strange := set(options) - set(inspect.signature(written.write).parameters):
        raise UserError(f"an export as '{form}' has no option '{min(strange)}'")
    return folder.save(
        form, written, hybrid, path, tokenizer=prompting(tokenizer), plan=plan, base=base, recipe=recipe, report=report,
        figures=figures, **options,
    )  # fmt: skip
