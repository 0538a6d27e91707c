"""export: a hybrid as a folder that others can load, proved equal in a fresh process before it takes its place."""

import importlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.card import NEEDED, NEEDS, write_card
from surgery.exporting.fresh import LENGTHS
from surgery.exporting.origin import Origin, find_origin
from surgery.exporting.proof import Proof, prove, start_reader
from surgery.exporting.tokenizer import save_tokenizer
from surgery.models.digests import fingerprint
from surgery.records.plan import Plan
from surgery.records.record import Record, installed_version
from surgery.records.report import Report
from surgery.runtime.files import MANIFEST, file_digest, open_output, write_text
from surgery.runtime.progress import say
from surgery.splicing.splice import changed_since_splice

RECORD, PLAN, REPORT = "export.json", "plan.json", "report.json"
# Format -> one line about it, and where its writer is: write(hybrid, tokenizer, folder, **options). "hf" and "patch" are read
# back by the proof here; the others, for other programs, prove themselves.
FORMATS = {
    "hf": (
        "a Hugging Face folder, with the modeling code for where this package is not installed",
        "exporting.export:write_hf",
    ),
    "patch": (
        "what differs from the base, small enough for a mail; needs this package and the base",
        "exporting.patch:write_patch",
    ),
    "nemotron_h": ("for engines that know NemotronH; grafts of whole layers", "serving.nemotron_h:export_nemotron_h"),
    "gguf": ("for llama.cpp; grafts of whole layers, and bases", "serving.gguf:export_gguf"),
}
READERS = {"hf": "transformers", "patch": "surgery"}
HEAD = f"""\
# Needs {NEEDED}. Older versions copy only files that are imported here.
import transformers as _transformers
from packaging.specifiers import SpecifierSet as _Versions

if not _Versions("{NEEDS["transformers"]}").contains(_transformers.__version__, prereleases=True):
    raise ImportError("this model's code needs {NEEDED}; this is transformers " + _transformers.__version__)
"""


class Export(Record):
    """export.json: what a folder is, and how it was verified."""

    format: str
    toolkit: str
    created: str
    model_type: str
    base: Origin
    fingerprint: str
    """Of the live model, and so of what its reader loads."""
    parameters: int
    """How many numbers the grafts hold."""
    changed: tuple[str, ...] = ()
    """The base's own tensors that hold other values than in the base, as after merging adapters."""
    proof: Proof | None
    """None: its format is for another program."""
    files: dict[str, str]
    """sha256 of everything in the folder but this record and the card."""


def export(
    hybrid: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: str | Path,
    *,
    format: str = "hf",
    plan: Plan | None = None,
    report: Report | None = None,
    base: str | Path | None = None,
    verify: str = "quick",
    overwrite: bool = False,
    **options: Any,
) -> Proof | None:
    """Write a hybrid into a folder, and return how a fresh process proved that the folder is the live model.

    format: one of FORMATS. plan, report: travel with it; the report must have measured these weights. base: the base's folder
    or Hub id, by default what the plan's provenance names. verify: "quick" or "full" (64 greedy tokens, always in float32).
    options: of the format, such as max_shard_size="5GB" of hf. Raises UserError, and leaves the folder as it was, if anything
    fails.
    """
    check_export(hybrid, format, verify, report)
    inputs = [] if base is None else [base]
    with open_output(out, inputs, overwrite=overwrite) as output, output.new_folder(".") as folder:
        proof = write_export(
            hybrid, tokenizer, folder, Path(out), format=format, plan=plan, report=report, base=base, verify=verify, **options
        )
    return proof


def check_export(hybrid: PreTrainedModel, format: str, verify: str, report: Report | None) -> None:
    """Raise UserError for what cannot be exported, before anything is written."""
    if format not in FORMATS:
        raise UserError(f"there is no format '{format}'; there are {', '.join(FORMATS)}")
    if verify not in LENGTHS:
        raise UserError(f"verify is '{verify}'; take {' or '.join(LENGTHS)}")
    if hasattr(hybrid, "peft_config") or any(".base_layer." in name for name, _ in hybrid.named_parameters()):
        raise UserError("the model has unmerged adapters of peft; export model.merge_and_unload()")
    if report is not None and fingerprint(hybrid) not in {model.fingerprint for model in report.models.values()}:
        raise UserError("the report measured other weights than these; bench what is to be exported")


def write_export(
    hybrid: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    home: Path,
    *,
    format: str = "hf",
    plan: Plan | None = None,
    report: Report | None = None,
    base: str | Path | None = None,
    verify: str = "quick",
    **options: Any,
) -> Proof | None:
    """Fill an empty folder with an export, and prove it. home: where the folder will lie. The rest is as in export()."""
    place = base if base is not None else plan.provenance.base if plan is not None and plan.provenance else "unknown"
    reader, proof = READERS.get(format), None
    with start_reader(hybrid) if reader else nullcontext() as process, ThreadPoolExecutor(1) as beside:
        if format == "patch" and place == "unknown":
            raise UserError("a patch needs its base; name it with --base")
        if format == "patch":
            options |= {"base": place, "home": home}
        module, _, function = FORMATS[format][1].partition(":")
        getattr(importlib.import_module(f"surgery.{module}"), function)(hybrid, tokenizer, folder, **options)
        if plan is not None:
            plan.write(folder / PLAN)
        if report is not None:
            report.write(folder / REPORT)
        files, name = beside.submit(list_files, folder), beside.submit(fingerprint, hybrid)
        if reader and process:
            proof = prove(process, hybrid, len(tokenizer), folder, reader=reader, verify=verify, base=str(place))
    changed, origin = set(changed_since_splice(hybrid)), find_origin(place, home)
    if base is None and origin.revision is None:  # a plan may name a folder, seen from where it was made
        origin = origin.model_copy(update={"hub": False})
    if hybrid.name_or_path:
        with suppress(UserError):  # if the folder that the hybrid was loaded from is no export
            source = Path(hybrid.name_or_path).resolve()
            before = Export.read(source / RECORD)
            changed |= set(before.changed)
            if not origin.hub and Path(place).name == before.base.name and not Path(place).is_dir():  # it moved
                path = before.base.path and os.path.relpath(source / before.base.path, home.resolve())
                origin = before.base.model_copy(update={"path": path})
    if changed:
        say(f"export: {len(changed)} of the base's own tensors were changed ('{min(changed)}'), as the card says")
    record = Export(
        format=format,
        toolkit=installed_version("mamba-surgery"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        model_type=hybrid.config.model_type,
        base=origin,
        fingerprint=name.result(),
        parameters=sum(p.numel() for p in getattr(hybrid, "graft_parameters", dict)().values()),
        changed=tuple(sorted(changed)),
        proof=proof,
        files=files.result(),
    )
    record.write(folder / RECORD)
    write_card(folder, record, home.resolve().name, plan, report)
    return proof


def write_hf(hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """A complete Hugging Face folder, with the modeling code for where this package is not installed."""
    # save_pretrained refuses what bases come with, like a temperature without do_sample; it is written as it is.
    own, hybrid.generation_config = hybrid.generation_config, GenerationConfig()
    try:
        hybrid.save_pretrained(folder, max_shard_size=max_shard_size)
    except ValueError as error:
        raise UserError(f"cannot write the weights: {' '.join(str(error).split())}") from error
    finally:
        hybrid.generation_config = own
    own.to_json_file(folder / "generation_config.json", keys_to_pop=["compile_config"])
    save_tokenizer(tokenizer, folder)
    code = sorted(path.stem for path in folder.glob("*.py"))
    entries = {target.partition(".")[0] for target in getattr(hybrid.config, "auto_map", {}).values()}
    for entry in entries & set(code):
        imports = "".join(f"from .{each} import __name__ as _\n" for each in code if each != entry)
        path = folder / f"{entry}.py"
        write_text(path, f"{HEAD}\n{imports}\n{path.read_text(encoding='utf-8')}")


def list_files(folder: Path) -> dict[str, str]:
    """sha256 of every file of an export but its record, its card and what this machine notes about it."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(MANIFEST[:14]))
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: file_digest(path) for name, path in named.items() if name not in (RECORD, "README.md")}
