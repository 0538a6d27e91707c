"""Whether two folders hold the same, bit for bit, but for times and dates.

Of a JSON file the fields below are left out; of a text, what is written with a unit of time; weights, logs and figures count
to the last bit.
"""

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load

from surgery.runtime.ownership.folder import RECORD

# Fields of dates, times and memory, and what follows from them: the seal over all fields, and the digests of such files.
TIMES = {"created", "timings", "cpu", "memory", "seal", "seconds", "cost", "speed"}
# The difference of logits in a proof: a product's last bit depends on where a matrix lies in memory (exporting/verify.py).
PLACES = {"difference"}
TIMED = re.compile(r".*\.(json|html|md)|cost\.png")
# A stage that was done before the interruption is not among those that a report names with their time and memory.
DURATION = re.compile(
    r"(?m)^(Time|Peak memory): .*$|&#34;seconds&#34;: [\d.e-]+|<dt>(time|memory|peak memory)</dt><dd>[^<]*|"
    r"\b\d[\d.,]*( |&nbsp;)?(s|ms|min|h|KiB|MiB|GiB|tokens/s)\b|at most [\d.e-]+|\b\d{4}-\d\d-\d\d([T ][\d:+]+(Z|\b))?"
)


def content(folder: Path) -> dict[str, str]:
    """File or empty folder -> a digest of what it holds but for times; hidden ones too."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.name == RECORD:  # what is ours: each record has a token of its own, and lines of what is gone by now
            continue
        if path.is_file():
            found[name] = hashlib.sha256(lasting(path)).hexdigest()[:16]
        elif not any(path.iterdir()):
            found[f"{name}/"] = ""
    return found


def lasting(path: Path) -> bytes:
    """The bytes of a file without times and dates."""
    data = path.read_bytes()
    if path.name in ("cost.png", "seconds.json"):
        return b"times"
    if path.suffix == ".json":
        try:
            return json.dumps(_lasting(json.loads(data)), sort_keys=True).encode()
        except ValueError:
            return data
    if path.suffix == ".safetensors" and path.parent.name == "planning":  # which keeps how long each plan took
        with suppress(SafetensorError):
            tensors = {name: tensor for name, tensor in load(data).items() if name != "seconds"}
            return repr([(name, tensor.dtype, tensor.tolist()) for name, tensor in sorted(tensors.items())]).encode()
    if path.suffix in (".md", ".html"):
        return DURATION.sub("<time>", data.decode(errors="replace")).encode()
    return data


def _lasting(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _lasting(each) for name, each in value.items() if name not in TIMES | PLACES}
        if isinstance(text := kept.get("summary"), str):  # of a study, in words
            kept["summary"] = DURATION.sub("<time>", text)
        if isinstance(files := kept.get("files"), dict):
            kept["files"] = {name: "" if TIMED.fullmatch(name) else digest for name, digest in files.items()}
        return kept
    return [_lasting(each) for each in value] if isinstance(value, list) else value


def differences(reference: dict[str, str], other: dict[str, str]) -> list[str]:
    """What is not the same, a line each."""
    lines = []
    for name in sorted({*reference, *other}):
        if name not in other:
            lines.append(f"{name} is missing")
        elif name not in reference:
            lines.append(f"{name} was left over")
        elif reference[name] != other[name]:
            lines.append(f"{name} differs")
    return lines
