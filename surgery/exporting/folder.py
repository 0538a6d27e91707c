"""How every export becomes a folder: written beside its destination, read back in a fresh process and compared with the live
model, described, and only then moved into place.

Killed at any moment it leaves, under the name that was asked for, the previous folder or the new one (runtime/ownership).
Against a power cut, which may lose what the system had not yet put on the disk, nothing is done.
"""

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation import views
from surgery.evaluation.report import Report
from surgery.exporting import card
from surgery.exporting.engines import EngineProof, engine_of
from surgery.exporting.formats import Format
from surgery.exporting.verify import Proof, chosen, prove
from surgery.loading.digests import Identity, dtypes, file_digest, identify
from surgery.loading.origin import Origin, origin
from surgery.models.tokens import tokenizers_errors
from surgery.records.names import strip_paths
from surgery.records.plan import PLAN, Plan, published
from surgery.records.recipe import Recipe
from surgery.records.record import Environment, Sealed, environment
from surgery.runtime.ownership import folder as owned
from surgery.runtime.ownership.complaints import reason
from surgery.runtime.ownership.files import check_free
from surgery.runtime.ownership.replacing import building
from surgery.runtime.progress import busy, say
from surgery.splicing.remembered import EXPORT as RECORD
from surgery.splicing.splice import graft_parameters

CARD = "README.md"


class Exported(Sealed, Environment):
    """export.json: what a folder is and how it was verified.

    digest, dtype: of the live model (digests.py), and so of what its reader loads; of an export as nemotron_h or mamba_ssm, of
    the hybrid (as gguf, or the base) that it was made from. parameters: how many numbers the
    grafts hold.
    base_unchanged: whether every tensor of the base is in the hybrid as it was, by the fingerprint in the plan; a layer graft
    has removed some. engines: the serving engines in which it was proved too. files: sha256 of everything in the folder but
    this record and the card, which is made from the other files and can be made again.
    """

    schema_version: int = 2
    format: str
    model_type: str
    base: Origin
    digest: str | None = None
    dtype: str | None = None
    parameters: int
    base_unchanged: bool
    proof: Proof
    engines: tuple[EngineProof, ...] = ()
    files: dict[str, str]


def save(
    name: str,
    form: Format,
    hybrid: PreTrainedModel,
    path: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan | None,
    base: str,
    recipe: Recipe | None,
    report: Report | None,
    figures: Path | None,
    identity: Identity | None,
    verify: str,
    engines: Mapping[str, Path],
    **options: Any,
) -> Proof:
    """Write the folder in the format `name`, prove it, say so, and return the proof. An existing folder at `path` is replaced
    if it is an earlier export. plan: None for a base. identity: the hybrid's, if it is known. verify: one of
    VERIFICATIONS. engines: those that are to prove it too, each with its interpreter. Raises UserError, and leaves
    nothing behind, if writing or proving fails."""
    path = Path(path)
    try:
        check_free(path)
        with building(path) as new:
            temporary = new.place
            identity = identity or identify(hybrid)
            if report is not None:
                check_report(report, identity.digest, dtypes(hybrid))
            with new.filling(), tokenizers_errors():
                form.write(hybrid, temporary, tokenizer=tokenizer, plan=plan, base=base, **options)  # type: ignore[arg-type]
                _papers(temporary, hybrid, plan, recipe, report, figures)
            way = chosen(verify, hybrid)
            proof = prove(form.READER, hybrid, tokenizer, temporary, verify=way, digests=identity.tensors)
            served: list[EngineProof] = []
            for engine, python in engines.items():
                with busy(f"asking {engine}"):
                    served.append(engine_of(engine).prove(python, hybrid, temporary, verify=way, tokenizer=tokenizer))
            if clear := getattr(form, "clear", None):
                clear(temporary)
            record = Exported(
                **environment().model_dump(), format=name, model_type=hybrid.config.model_type, base=origin(base, temporary),
                digest=identity.digest, dtype=dtypes(hybrid),
                parameters=sum(p.numel() for p in graft_parameters(hybrid).values()),
                base_unchanged=plan is None or (
                    plan.provenance is not None and identity.fingerprint == plan.provenance.base_fingerprint
                ),
                proof=proof, engines=tuple(served), files=digests(temporary),
            )  # fmt: skip
            with new.filling():
                (temporary / RECORD).write_text(record.text())
                (temporary / CARD).write_text(card.card(path.name, temporary, record, form.USE))
            new.replace()
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {path}: {reason(error)}") from error
    for line in (proof.line(), *(each.line() for each in served)):
        say(line)
    return proof


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file of an export but its records and its card, by name; "" of what is no file, and of a damaged one."""
    present = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if name not in (RECORD, CARD, owned.RECORD) and not file.is_dir():
            present[name] = file_digest(file) if file.exists() else ""
    return present


def check(folder: Path) -> Exported:
    """The record of an export whose files are those that were verified. Raises UserError, naming the first that is not."""
    if not (folder / RECORD).exists():
        raise UserError(f"{folder} was not verified: it holds no {RECORD}; make it with `surgery export`")
    record = Exported.read(folder / RECORD, unsealed="refuse")
    present = digests(folder)
    for file in sorted(record.files | present):
        if present.get(file) != record.files.get(file):
            what = "is missing" if file not in present else "was added" if file not in record.files else "was changed"
            raise UserError(f"{folder} is not as it was verified: '{file}' {what}")
    if not record.proof.holds():
        raise UserError(f"{folder} was not verified: its logits differ by {record.proof.difference or math.nan:g}")
    return record


def check_report(report: Report, digest: str, dtype: str) -> None:
    """Raise UserError unless a report measured the weights with this digest: a card states no other model's figures."""
    if report.row_of(digest) is not None:
        return
    measured = [model.conditions for model in report.models.values()]
    others = sorted({each.dtype for each in measured if each is not None} - {dtype})
    hint = f" (they are in {dtype}, and it measured {' and '.join(others)})" if others else ""
    raise UserError(f"the report measured other weights than these{hint}: bench what is to be exported")


def _papers(
    folder: Path, hybrid: PreTrainedModel, plan: Plan | None, recipe: Recipe | None, report: Report | None, figures: Path | None
) -> None:
    """What travels with the weights in every format."""
    if plan is not None:
        published(plan).write(folder / PLAN)
    if recipe is not None:
        (folder / "recipe.yaml").write_text(yaml.safe_dump(strip_paths(recipe.model_dump(mode="json")), sort_keys=False))
    if report is not None:
        report.write(folder / "report.json")
    views.exported(hybrid, plan, report, folder)
    for name in ("atlas.png", "report.html"):
        if figures is not None and (figures / name).exists():
            shutil.copy(figures / name, folder / name)
