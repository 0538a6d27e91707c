"""The arrays of a ranking with very many heads, in a safetensors file beside its ranking.json.

Arrays as in Heads, each in the smallest whole numbers that hold it, or in float64. Of a score: <score>.value, .low, .high and
.n for the heads that were measured, and <score>.at, where those are, unless it is all.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from surgery.errors import UserError
from surgery.loading.hub import one_line
from surgery.locating.heads import KINDS, ROLES, SCORES, Heads
from surgery.records.plan import Start
from surgery.records.reading import read_content
from surgery.records.record import Record
from surgery.records.site import MOST
from surgery.runtime.ownership.files import put
from surgery.statistics import Intervals

WHOLE = {"layer": int, "head": int, "kind": np.uint8, "role": np.uint8, "sign": np.int8}
PARTS = ("value", "low", "high")


class Arrays(Record):
    """What ranking.json says of the file: its name, its digest, and how many heads it holds."""

    file: str
    """Beside ranking.json."""
    sha256: str
    """Of the file's bytes."""
    heads: int
    """How many there are; ranking.json itself lists the leading ones."""


def write(heads: Heads, ranking: Path) -> Arrays:
    """Write the file, whose name is that of the ranking's and its content's digest: it takes no other file's place."""
    arrays = {name: _narrow(getattr(heads, name)) for name in WHOLE} | {"tau": heads.tau}
    for name, estimates in heads.estimates.items():
        at = np.flatnonzero(estimates.n)
        if len(at) < len(heads):
            arrays[f"{name}.at"] = _narrow(at)
        arrays |= {f"{name}.{part}": getattr(estimates, part)[at] for part in PARTS}
        arrays[f"{name}.n"] = _narrow(estimates.n[at])
    content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
    digest = hashlib.sha256(content).hexdigest()
    # with_suffix would take "ranking-2.7b" and "ranking-2.8b" for one name.
    path = ranking.with_name(f"{ranking.name.removesuffix('.json')}.{digest[:12]}.safetensors")
    put(path, content, own=content.__eq__)
    return Arrays(file=path.name, sha256=digest, heads=len(heads))


def read(about: Arrays, folder: Path) -> Heads:
    """Read it again. Raises UserError if it is missing or not as it was written."""
    path = folder / Path(about.file).name
    content = read_content(path, "the scores of a ranking in")
    if hashlib.sha256(content).hexdigest() != about.sha256:
        raise UserError(f"{path} is not as it was written: its content does not fit the ranking beside it; make both again")
    try:
        return _heads(load(content))
    except Exception as error:  # a damaged file raises whatever its bytes lead to
        raise UserError(f"{path} does not hold the scores of a ranking: {one_line(error)}") from error


def _heads(arrays: dict[str, np.ndarray]) -> Heads:
    count, estimates = len(arrays["layer"]), {}
    for name in (name for name in SCORES if f"{name}.n" in arrays):
        at = arrays.get(f"{name}.at", slice(None))
        ends = np.full((3, count), np.nan)
        ends[:, at] = [arrays[f"{name}.{part}"] for part in PARTS]
        n = np.zeros(count, dtype=int)
        n[at] = arrays[f"{name}.n"]
        estimates[name] = Intervals(ends[0], ends[1], ends[2], n)
    whole: dict[str, Any] = {name: arrays[name].astype(dtype) for name, dtype in WHOLE.items()}
    if whole["kind"].max(initial=0) >= len(KINDS) or whole["role"].max(initial=0) >= len(ROLES):
        raise ValueError("a kind or a role that this version does not know")
    if any(len(array) != count for array in (*whole.values(), arrays["tau"])):
        raise ValueError("arrays of different lengths")
    if any(whole[name].size and not 0 <= whole[name].min() <= whole[name].max() <= MOST for name in ("layer", "head")):
        raise ValueError("a layer or a head that no model has")
    starts = arrays["tau"][whole["sign"] != 0]
    if np.abs(whole["sign"]).max(initial=0) > 1 or not ((starts >= Start.least) & (starts <= Start.most)).all():
        raise ValueError("a start that no graft can have")
    if any(array.ndim != 1 for array in (*whole.values(), arrays["tau"])) or any((e.n < 0).any() for e in estimates.values()):
        raise ValueError("arrays that are none of heads")
    return Heads(**whole, tau=arrays["tau"], estimates=estimates)


def _narrow(array: np.ndarray) -> np.ndarray:
    """Whole numbers, in as few bytes as they need."""
    if array.dtype == np.int8:
        return array
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))
