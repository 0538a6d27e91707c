"""What every JSON file of the toolkit has in common: strict fields, where it comes from, atomic writing."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import pydantic

from surgery.errors import UserError
from surgery.runtime.files import read_text, write_text

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "scipy", "tokenizers", "peft")


class Record(pydantic.BaseModel):
    """A frozen record that refuses unknown fields. The text below a field is its description."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a JSON file. Raises UserError, in one line, where it is missing or does not fit."""
        text = read_text(path)
        try:
            return cls.model_validate_json(text)
        except pydantic.ValidationError as error:
            raise UserError(f"{path} holds no {cls.__name__.lower()}: {first_error(error)}") from error

    def text(self) -> str:
        """What its file holds."""
        return self.model_dump_json(indent=2) + "\n"

    def write(self, path: str | Path) -> None:
        """Write the JSON file; a reader sees the old content or the new one."""
        write_text(path, self.text())


class Provenance(Record):
    """Where a file comes from. It names no path on the machine that made it."""

    toolkit: str
    """The version of this package."""
    created: str
    """When, in UTC."""
    packages: dict[str, str]
    """Versions of Python and of the packages in use."""
    machine: str
    """System, number of processors and GPU."""
    seed: int
    """The seed of the run."""
    base: str
    """The base: an id on the Hub, or the name of its folder."""
    fingerprint: str
    """sha256 of the base's configuration and weights (models/digests.py)."""
    recipe: dict[str, Any] | None = None
    """The whole recipe, defaults included, without paths."""

    def is_of_other(self, fingerprint: str) -> bool:
        """Whether the base had another fingerprint. Not known, and False, where a recipe set its dtype."""
        return (self.recipe or {}).get("dtype", "auto") == "auto" and self.fingerprint != fingerprint


def provenance(base: str, fingerprint: str, seed: int, recipe: dict[str, Any] | None = None) -> Provenance:
    """The provenance of a file that is made now."""
    import torch

    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    name = os.path.normpath(base) if base else ""
    if name and (name.count("/") != 1 or is_elsewhere(name)):  # no id of the Hub, and no folder in one of the current folder's
        name = os.path.basename(os.path.abspath(name))
    packages = {"python": platform.python_version(), **{name: installed_version(name) for name in PACKAGES}}
    return Provenance(
        toolkit=installed_version("mamba-surgery"),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        packages=packages,
        machine=machine,
        seed=seed,
        base=name,
        fingerprint=fingerprint,
        recipe=recipe,
    )


def is_elsewhere(name: str) -> bool:
    """Whether a name is the path of something outside the current folder, which no record is to show."""
    return Path(name).is_absolute() or name.startswith(("..", "~"))


def installed_version(package: str) -> str:
    """The version of an installed distribution, or "not installed"."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def first_error(error: pydantic.ValidationError) -> str:
    """The first complaint of pydantic's in one line, with the field's name."""
    detail = error.errors()[0]
    where, message = ".".join(map(str, detail["loc"])), detail["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
