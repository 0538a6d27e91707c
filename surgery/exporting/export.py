"""Export: a hybrid as a folder that others can load, proved equal in a fresh process before it is called done."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.report import Report
from surgery.exporting import folder
from surgery.exporting.engines import Pythons, check_engines, engine_why_not
from surgery.exporting.formats import format_of, integers_why_not, writes_bases
from surgery.exporting.verifications import check_way
from surgery.exporting.verify import Proof
from surgery.loading.checkpoint import load_tokenizer
from surgery.loading.digests import Identity
from surgery.loading.opened import Checkpoint, a_type, model_of, plan_for, tokenizer_of
from surgery.models.answers import tensors
from surgery.models.quantised import is_quantised
from surgery.models.tokens import prompting
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.runtime.memory import free_disk, size
from surgery.splicing.remembered import Surgery, remembered_tokenizer


def export(
    hybrid: PreTrainedModel | Checkpoint,
    path: str | Path,
    *,
    format: str = "hf",
    tokenizer: PreTrainedTokenizerBase | None = None,
    plan: Plan | None = None,
    base: str | None = None,
    recipe: Recipe | None = None,
    report: Report | None = None,
    figures: Path | None = None,
    identity: Identity | None = None,
    verify: str = "auto",
    engines: Sequence[str] = (),
    engine_python: Pythons = None,
    **options: Any,
) -> Proof:
    """Write a hybrid in one of the formats (`surgery list formats`), and return how a fresh process proved that the folder is
    the live model.

    tokenizer, plan, base (its name, as load() takes it): unless given, those that the hybrid remembers (`hybrid.surgery`); the
    tokenizer is else taken from the base's folder. figures: a folder whose atlas travels along. identity: the hybrid's
    (digests.identify), where it is known. options: the format's own, such as
    max_shard_size="5GB" of `hf`.

    verify: "full" compares logits and 64 greedy tokens in float32, with the whole model in memory. "layers" does so with 3
    tokens and a few layers in memory at a time. "tensors" compares the tensors alone, bit for bit, and computes
    nothing. "auto" is "full" where that takes no more than half of the memory that is free, else "layers" (of a quantised
    model, "tensors"). The proof that is returned and written says which it was.

    engines: serving engines that are to prove the folder too ("vllm", "llama_cpp"), run by engine_python, the interpreter of an
    environment that has them, or one for each: {"vllm": ..., "llama_cpp": ...}. They compute in float32, with the live model
    in memory as `verify` says ("tensors": layer by layer).

    As "gguf" a base can be written, too; it then has no plan.

    An existing folder at `path` is replaced if it is an earlier export. Raises UserError, and leaves nothing behind, if the
    format cannot hold the hybrid exactly, if the disk has no room for it, if writing or proving fails, or if something that is
    not given is not remembered either.
    """
    check_way(verify)
    written = format_of(format)
    model = model_of(hybrid, "export")
    if is_quantised(model) and (reason := integers_why_not(format)):
        raise UserError(reason)
    if unknown := set(options) - set(inspect.signature(written.write).parameters):
        raise UserError(f"an export as '{format}' has no option '{min(unknown)}'")
    if not isinstance(path, str | Path):
        raise UserError(f"surgery.export takes a model and the name of a folder, not {a_type(path)}")
    pythons = check_engines(engines, format, engine_python)
    for engine in pythons:
        if refused := engine_why_not(engine, format, model.config):  # it would say so after the work
            raise UserError(f"--prove: {refused}")
    is_base = writes_bases(format) and plan is None and not getattr(model.config, "grafts", None)
    plan, base = (None, _named(model, base)) if is_base else (_plan(model, plan), _base(model, base))
    check_space(format, model, Path(path))
    if tokenizer is None:
        tokenizer = hybrid.tokenizer if isinstance(hybrid, Checkpoint) else _tokenizer(model, base)
    tokenizer = tokenizer_of(hybrid, tokenizer, "export")
    return folder.save(
        format, written, model, path, tokenizer=prompting(tokenizer), plan=plan, base=base, recipe=recipe, report=report,
        figures=figures, identity=identity, verify=verify, engines=pythons, **options,
    )  # fmt: skip


def check_space(format: str, hybrid: PreTrainedModel, path: Path) -> None:
    """Raise UserError if the disk has no room for an export of a hybrid to `path`. An earlier one there is replaced only when
    the new one is whole."""
    space = getattr(format_of(format), "space", None)
    needed = sum(tensor.nbytes for tensor in tensors(hybrid).values()) if space is None else space(hybrid)
    if needed > (free := free_disk(path)):
        raise UserError(f"cannot write {path}: it takes {size(needed)}, and {size(free)} are free there")


def _plan(hybrid: Any, plan: Plan | None) -> Plan:
    """The plan that was given, or the hybrid's own."""
    if plan is not None:
        return plan_for(plan, "export")
    remembered: Surgery | None = getattr(hybrid, "surgery", None)
    if remembered is not None:
        return remembered.plan
    if not getattr(hybrid.config, "grafts", None):
        raise UserError(
            "surgery.export takes a hybrid, and this model holds no grafts: splice it first, surgery.splice(base, plan)"
        )
    raise UserError("the hybrid does not remember its plan: say which it is, surgery.export(hybrid, path, plan=...)")


def _base(hybrid: Any, base: Any) -> str:
    """The name of the base that was given, or that the hybrid remembers."""
    if isinstance(base, Checkpoint):
        return base.name
    if isinstance(base, str | Path):
        return str(base)
    if base is not None:
        raise UserError(f"surgery.export: base is the base's name, as surgery.load takes it, not a {type(base).__name__}")
    remembered: Surgery | None = getattr(hybrid, "surgery", None)
    if remembered is None or remembered.base is None:
        raise UserError("the hybrid does not remember its base: say which it is, surgery.export(hybrid, path, base=...)")
    return remembered.base


def _named(model: Any, base: Any) -> str:
    """The name of a base that is exported itself: the one that was given, or the folder that it was loaded from."""
    name = base if base is not None else model.config._name_or_path
    if not name:
        raise UserError("the base does not say where it is from: surgery.export(base, path, base=...)")
    return _base(model, name)


def _tokenizer(hybrid: Any, base: str) -> PreTrainedTokenizerBase:
    """The tokenizer that the hybrid remembers, or else the base's."""
    if (remembered := remembered_tokenizer(hybrid)) is not None:
        return remembered
    try:
        return load_tokenizer(base)
    except UserError as error:
        raise UserError(
            f"no tokenizer was found with the base, {base}: say which it is, surgery.export(hybrid, path, tokenizer=...)"
        ) from error
