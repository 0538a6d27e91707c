"""What every JSON file of the toolkit has in common: strictness, provenance, atomic writing."""

import os
import platform
import tempfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

import pydantic
import torch

from surgery.errors import UserError

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "scipy")
KERNEL_PACKAGES = ("triton", "mamba-ssm", "causal-conv1d", "flash-attn", "kernels")  # optional, and only of use on GPUs


class Record(pydantic.BaseModel):
    """A frozen record that refuses unknown keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a JSON file. Raises UserError with one line if it is missing or does not fit."""
        text = read_text(path)
        try:
            return cls.model_validate_json(text)
        except pydantic.ValidationError as error:
            raise UserError(f"{path}: {first_line(error)}") from error

    def write(self, path: str | Path) -> None:
        write_text(path, self.model_dump_json(indent=2) + "\n")


class Environment(Record):
    """When, with what and on what something was made or measured."""

    schema_version: int = 1
    toolkit: str
    created: str
    packages: dict[str, str]
    machine: str
    threads: int


class Provenance(Environment):
    """Where a file comes from."""

    seed: int
    base: str
    base_fingerprint: str
    recipe: dict[str, Any] | None = None


def environment(packages: tuple[str, ...] = PACKAGES) -> Environment:
    """The environment of something that is made now."""
    return Environment(
        toolkit=toolkit(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        packages={"python": platform.python_version(), **{name: _version(name) for name in packages}},
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        threads=torch.get_num_threads(),
    )


def provenance(base: str, fingerprint: str, seed: int, recipe: dict[str, Any] | None = None) -> Provenance:
    """The provenance of something that is made now."""
    return Provenance(**environment().model_dump(), seed=seed, base=base, base_fingerprint=fingerprint, recipe=recipe)


def first_line(error: pydantic.ValidationError) -> str:
    """The first complaint of a validation error in one line, naming the key."""
    detail = error.errors()[0]
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return f"unknown key '{where}'"
    message = detail["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message


def read_text(path: str | Path, what: str = "") -> str:
    """A UTF-8 file; `what` says what it is to hold ("the recipe"). Raises UserError with one line if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {f'{what} {path}'.strip()}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {f'{what} {path}'.strip()}: not UTF-8 at byte {error.start}") from error


def write_text(path: str | Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    path, temporary = Path(path), None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp's default is for secrets
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def toolkit() -> str:
    """The version of this package."""
    return _version("mamba-surgery")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
