"""What a hybrid remembers of the operation, as PEFT's models keep their peft_config: its plan and its base.

It lives in `hybrid.surgery`. A folder that save_pretrained wrote keeps it in plan.json and base.json; one that export wrote, in
plan.json and export.json.
"""

import json
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from surgery.errors import UserError
from surgery.hybrids.patching import note_of, set_note
from surgery.hybrids.spliced import Spliced
from surgery.loading.opened import Checkpoint
from surgery.loading.origin import Origin, origin
from surgery.records.names import display_name
from surgery.records.plan import PLAN, Plan, published
from surgery.records.record import Record, read_text

BASE, EXPORT = "base.json", "export.json"


class Base(Record):
    """base.json: of which base a hybrid's folder is. fingerprint: the base's, where it is known."""

    schema_version: int = 1
    base: Origin
    fingerprint: str | None


@dataclass(frozen=True)
class Opened:
    """What load() knows of a model: its name, its fingerprint, and its tokenizer."""

    name: str
    fingerprint: str
    tokenizer: PreTrainedTokenizerBase


@dataclass(frozen=True)
class Surgery:
    """What was done to a base.

    plan: the one that splice obeyed. base: the base's name, as load() takes it. base_fingerprint: as the plan's provenance has
    it. tokenizer: the base's, if it was opened by load(). None stands for what is not known.
    """

    plan: Plan
    base: str | None = None
    base_fingerprint: str | None = None
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False, compare=False)

    def published(self) -> "Surgery":
        """For others, to whom it is no matter where the base lies here."""
        return self if self.base is None else replace(self, base=display_name(self.base))

    def write(self, folder: str | Path) -> None:
        """Write plan.json and base.json."""
        folder = Path(folder)
        published(self.plan).write(folder / PLAN)
        if self.base is not None:
            Base(base=origin(self.base, folder), fingerprint=self.base_fingerprint).write(folder / BASE)


def opened(base: PreTrainedModel | Checkpoint) -> Opened | None:
    """What is known of a base because load() opened it; None for a model from elsewhere."""
    if isinstance(base, Checkpoint):
        return Opened(base.name, base.fingerprint, base.tokenizer)
    return note_of(base, "opened")


def remembered_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a model that load() opened, or of the base that a hybrid remembers."""
    surgery: Surgery | None = getattr(model, "surgery", None)
    known = surgery or opened(model)
    return None if known is None else known.tokenizer


def remember(model: PreTrainedModel, surgery: Surgery | None = None, base: Opened | None = None) -> None:
    """Let a hybrid remember what was done, and any model what load() knows of it, or of its base."""
    if surgery is not None:
        set_note(model, "surgery", surgery)
    if base is not None:
        set_note(model, "opened", base)


def read_surgery(folder: str | Path, tokenizer: PreTrainedTokenizerBase | None = None) -> Surgery:
    """What the folder of a hybrid says was done. Raises UserError if it holds no plan."""
    folder = Path(folder)
    plan = Plan.read(folder / PLAN)
    origins = plan.provenance
    base, fingerprint = (None, None) if origins is None else (origins.base, origins.base_fingerprint)
    if (folder / EXPORT).exists():
        with suppress(UserError, ValueError, KeyError, TypeError):  # a damaged one keeps nobody from using the hybrid
            base = Origin.model_validate(json.loads(read_text(folder / EXPORT))["base"]).place(folder)
    elif (folder / BASE).exists():
        record = Base.read(folder / BASE)
        base, fingerprint = record.base.place(folder), record.fingerprint
    return Surgery(plan, base, fingerprint, tokenizer)


def recalled(hybrid: PreTrainedModel) -> Surgery | None:
    """Of a hybrid that transformers loaded, from beside its weights; None if they lie there without a plan."""
    quietly = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    try:
        revision = getattr(hybrid.config, "_commit_hash", None)  # of the Hub: the one that the weights are of
        path = cached_file(str(hybrid.name_or_path), PLAN, revision=revision, _raise_exceptions_for_gated_repo=False, **quietly)
        return None if path is None else read_surgery(Path(path).parent)
    except (OSError, UserError):
        return None


Spliced.recall = recalled
