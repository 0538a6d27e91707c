"""A patch served on its base, without a joined copy: an engine reads the patch's tensors and then the base's, which are checked
one after the other as loading/checkpoint.py checks them. Nothing here needs an engine, nor the classes of hybrids."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError
from torch import Tensor

from surgery.loading.origin import Origin
from surgery.models.answers import tensor_digest

RECORD, WEIGHTS = "patch.json", "patch.safetensors"  # as splicing/joining.py names and describes them
FROM_BASE = "base:"  # before the name of a tensor that the base's folder holds
TIED = "lm_head.weight"
# Names of the original layout, where they are others than transformers'.
ORIGINAL = {"backbone.embedding.weight": "backbone.embeddings.weight"}


@dataclass(frozen=True)
class Patched:
    """name: of the base. place: its folder or its id on the Hub. tensors: "dtype shape sha256" by name, of all that the base
    holds. removed: those of them that the hybrid has no place for."""

    name: str
    place: str
    revision: str | None
    tensors: dict[str, str]
    removed: frozenset[str]

    @classmethod
    def read(cls, model: str, revision: str | None = None) -> "Patched | None":
        """Of a folder, or of a repository of the Hub; None if it is no patch. Raises ValueError, in one line that says what to
        do, if the patch is damaged or its base is not here."""
        record = _file(model, RECORD, revision)
        if record is None:
            return None
        fields = json.loads(record.read_text(encoding="utf-8"))
        weights = _file(model, WEIGHTS, revision)
        if weights is None or _digest(weights) != fields["weights"]:
            raise ValueError(f"{model}/{WEIGHTS} is damaged: it is not the file that {RECORD} describes")
        base = Origin.model_validate(fields["base"])
        place = base.place(record.parent)
        if not base.hub and not Path(place).is_dir():
            raise ValueError(
                f"{model} is a patch on {place}, which is not here: put it there, or join the two first: "
                f"surgery export {model} --base BASE --out FOLDER"
            )
        return cls(base.name, place, base.revision, fields["base_tensors"], frozenset(fields["removed"]))

    def joined(self, weights: Iterable[tuple[str, Tensor]], tied: bool) -> Iterator[tuple[str, Tensor]]:
        """The hybrid's tensors. weights: the patch's, then the base's, whose names begin with FROM_BASE. tied: whether the
        embedding is the output's weight, too, and a file may hold it by both names.

        Raises ValueError for the first tensor of the base that is not the one which the patch was made for.
        """
        changed, seen = set(), set()
        for name, tensor in weights:
            if not name.startswith(FROM_BASE):
                changed.add(name)
                yield name, tensor
                continue
            own = name.removeprefix(FROM_BASE)
            own = ORIGINAL.get(own, own)
            if own == TIED and tied and own not in self.tensors:
                continue
            if own not in self.tensors:
                raise ValueError(self._refused(f"it has a tensor '{own}', which the patch does not know"))
            if tensor_digest(tensor) != self.tensors[own]:
                raise ValueError(self._refused(f"the tensor '{own}' differs"))
            seen.add(own)
            if own not in changed and own not in self.removed:
                yield own, tensor
        if missing := self.tensors.keys() - seen:
            raise ValueError(self._refused(f"the tensor '{min(missing)}' is missing"))

    def _refused(self, reason: str) -> str:
        return (
            f"{self.place} is not as the base that the patch was made for ({self.name}): {reason}; if surgery.load opens the "
            f"patch, join the two first: surgery export PATCH --out FOLDER"
        )


def _file(model: str, name: str, revision: str | None) -> Path | None:
    folder = Path(model)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    try:
        return Path(hf_hub_download(model, name, revision=revision))
    except (EntryNotFoundError, LocalEntryNotFoundError, RepositoryNotFoundError, HFValidationError):
        return None


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def holds_tokenizer(model: str) -> bool:
    """Of a local folder; one of the Hub is taken to hold what it needs."""
    folder: Any = Path(model)
    return not folder.is_dir() or any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json"))
