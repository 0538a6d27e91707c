"""What every JSON file of the toolkit has in common: strictness, provenance, atomic writing, and a seal on measurements."""

import hashlib
import json
import os
import platform
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Self

import pydantic

from surgery.errors import UserError
from surgery.records.names import display_name, strip_paths
from surgery.records.reading import parse_json, read_content
from surgery.runtime.ownership.complaints import refuse
from surgery.runtime.ownership.files import put

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "scipy", "tokenizers", "peft")
# Optional ones, named where they are in use: module -> distribution.
OPTIONAL = {"lm_eval": "lm_eval", "bitsandbytes": "bitsandbytes", "datasets": "datasets", "sentencepiece": "sentencepiece"}
KERNEL_PACKAGES = ("triton", "mamba-ssm", "causal-conv1d", "flash-attn", "kernels")  # optional, and only of use on GPUs


class Record(pydantic.BaseModel):
    """A frozen record that refuses unknown keys. The text below a field is its description in the JSON schema."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    @pydantic.field_validator("schema_version", check_fields=False)
    @classmethod
    def _known(cls, version: int) -> int:
        """Refuse a file of a later version, whose fields may mean something else."""
        known = cls.model_fields["schema_version"].default
        if not 1 <= version <= known:
            raise ValueError(f"schema_version is {version}, and this version of the toolkit knows those up to {known}")
        return version

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a JSON file. Raises UserError with one line if it is missing or does not fit."""
        return cls._parsed(cls._file_text(path), path)

    @classmethod
    def _file_text(cls, path: str | Path) -> str:
        if not isinstance(path, str | Path):
            raise UserError(f"{cls.__name__}.read takes the name of a file, not {type(path).__name__}")
        usual = Path(path) / f"{cls.__name__.lower()}.json"
        if Path(path).is_dir():
            hint = f"; did you mean {usual}?" if usual.exists() else ""
            raise UserError(f"cannot read {path}: it is a folder, and what is needed is a file, a {usual.name}{hint}")
        return read_text(path)

    @classmethod
    def _parsed(cls, text: str, path: str | Path) -> Self:
        parse_json(text, str(path))  # a key that is there twice, which pydantic takes in silence
        try:
            return cls.model_validate_json(text)
        except pydantic.ValidationError as error:
            kind, of_another = cls.__name__.lower(), error.errors()[0]["type"] in ("missing", "extra_forbidden", "json_invalid")
            raise UserError(f"{path}{f' holds no {kind}' if of_another else ''}: {first_line(error)}") from error

    def text(self) -> str:
        """What its file holds."""
        return self.model_dump_json(indent=2) + "\n"

    def write(self, path: str | Path) -> None:
        """Write it. A file that is there is replaced only where it is ours (runtime/ownership). Raises UserError for any
        other."""
        write_text(path, self.text())


class Marked(Record):
    """A record whose file may stand alone, and carries a digest of its own content: so it is known whether it is still as we
    wrote it, and may be replaced by another of its kind."""

    seal: str | None = pydantic.Field(default=None, exclude_if=lambda seal: seal is None)
    """sha256 of the file's JSON without this field (keys sorted, no blanks). Only in files; a record in memory has none."""

    def text(self) -> str:
        content = self.model_dump_json(indent=2, exclude={"seal"})
        return f'{content.removesuffix("}").rstrip()},\n  "seal": "{_seal(content)}"\n}}\n'

    def write(self, path: str | Path) -> None:
        put(path, self.text().encode(), own=self.wrote)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """As Record.read, also a file that was edited."""
        return super().read(path).model_copy(update={"seal": None})

    @classmethod
    def wrote(cls, content: bytes) -> bool:
        """Whether a file's content is a record of this kind, as we wrote it."""
        try:
            text = content.decode()
            record = cls.model_validate_json(text)
            return record.seal == _seal(text) and record.text() == text
        except (ValueError, TypeError, AttributeError):  # pydantic's errors and those of Unicode and JSON are ValueErrors
            return False

    @classmethod
    def check_place(cls, path: Path) -> None:
        """Raise UserError, before the work that leads to a record, unless it may be written to `path`."""
        if path.is_dir():
            raise UserError(f"cannot write {path}: it is a folder")
        refuse([path] if os.path.lexists(path) and path.exists() and not cls.wrote(read_content(path)) else [])


class Sealed(Marked):
    """A measurement: a file which was changed by hand or by a damaged disk is not taken for what was measured. The seal is no
    signature: one that was made again does not show."""

    @classmethod
    def read(cls, path: str | Path, *, unsealed: Literal["refuse", "say", "take"] = "say") -> Self:
        """As Record.read. Raises UserError also if the seal does not fit. unsealed: what to do with a file without a seal, from
        which it was removed: refuse it as evidence, say so where it is only shown, or take it as it is."""
        text = cls._file_text(path)
        record = cls._parsed(text, path)
        if record.seal is None and unsealed == "refuse":
            raise UserError(f"{path} has no seal: it was edited; make it again")
        if record.seal is None and unsealed == "say":
            from surgery.runtime.progress import say

            say(f"{path} has no seal: it is not known whether it still holds what was measured")
        if record.seal not in (None, _seal(text)):
            raise UserError(f"{path} is not as it was written: its content does not fit its seal; make it again")
        return record.model_copy(update={"seal": None})


def _seal(text: str) -> str:
    content = {name: value for name, value in json.loads(text).items() if name != "seal"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class Environment(Record):
    """When, with what and on what something was made or measured."""

    schema_version: int = 1
    """The version of this record's fields."""
    toolkit: str
    """The version of this package."""
    code: str | None = None
    """A digest of this package's source files: in a checkout they can differ under one version number."""
    created: str
    """When, in UTC."""
    packages: dict[str, str]
    """The versions of the packages in use."""
    machine: str
    """System, processors and GPU."""
    threads: int
    """Threads of torch."""

    @property
    def threads_in_words(self) -> str:
        return f"{self.threads} thread{'s' * (self.threads != 1)}"


class Provenance(Environment):
    """Where a file comes from. It names no path on the machine that made it: of files and folders it has the last part."""

    seed: int
    """The seed of the run."""
    base: str
    """The base: an id of the Hub, or the name of its folder."""
    base_fingerprint: str
    """A digest of the base's configuration and weights."""
    recipe: dict[str, Any] | None = None
    """The whole recipe, defaults included."""


def environment(packages: tuple[str, ...] = PACKAGES) -> Environment:
    """The environment, now. packages: named whether they are in use or not."""
    import torch

    used = [distribution for module, distribution in OPTIONAL.items() if module in sys.modules]
    return Environment(
        toolkit=toolkit(),
        code=code_digest(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        packages={"python": platform.python_version(), **{name: package_version(name) for name in (*packages, *used)}},
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
        + (f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""),
        threads=torch.get_num_threads(),
    )


def provenance(base: str, fingerprint: str, seed: int, recipe: dict[str, Any] | None = None) -> Provenance:
    """The provenance of what is made now."""
    return Provenance(
        **environment().model_dump(),
        seed=seed,
        base=display_name(base),
        base_fingerprint=fingerprint,
        recipe=strip_paths(recipe),
    )


def first_line(error: pydantic.ValidationError) -> str:
    """The first complaint of a validation error in one line, naming the key."""
    return complaint_line(error.errors()[0])


def complaint_line(detail: Any) -> str:
    """One of the errors of a validation error in one line, naming the key."""
    where = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        name, colon, value = str(detail["loc"][-1]).partition(":")  # YAML reads {every:4} as the key "every:4"
        return f"unknown key '{where}'" + (f"; a space belongs after the colon: '{name}: {value}'" if colon else "")
    if detail["type"] == "missing" and where:
        return f"the key '{where}' is missing"
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "too_short" and detail["ctx"]["min_length"] == 1:
        message = "give at least one"
    return f"{where}: {message}" if where else message


def read_text(path: str | Path, what: str = "") -> str:
    """A UTF-8 file; `what` says what it is to hold ("the recipe"). Raises UserError with one line if it cannot be read."""
    content = read_content(path, what)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {f'{what} {path}'.strip()}: not UTF-8 at byte {error.start}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def write_text(path: str | Path, text: str) -> None:
    """Write a UTF-8 file so that a reader sees the old content or the new, never a part; only over what is ours."""
    put(path, text.encode())


def toolkit() -> str:
    """The version of this package."""
    return package_version("mamba-surgery")


@cache
def code_digest() -> str:
    """sha256 over the names and the content of this package's source files, the kernels' C included, but for what only draws:
    another picture changes no result."""
    root, total = Path(__file__).parent.parent, hashlib.sha256()
    folders = os.walk(root, followlinks=True)  # kernels/ is a symbolic link
    files = [Path(folder, name) for folder, _, names in folders for name in names if name.endswith((".py", ".c", ".h"))]
    for file in sorted(files, key=lambda file: file.relative_to(root).as_posix()):
        if {"figures", "views"} & {*file.relative_to(root).parts}:
            continue
        data = file.read_bytes()
        total.update(f"{file.relative_to(root).as_posix()} {len(data)} ".encode() + data)
    return total.hexdigest()


def package_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
