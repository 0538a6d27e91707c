"""The table of docs/architectures.md: every recurrent architecture of the installed transformers, held to every law.

    python recipes/evidence/check/architectures.py            # asks, writes architectures.json beside this file, fills the page
    python recipes/evidence/check/architectures.py mamba jamba  # asks these again, and keeps the rest of the record
    python recipes/evidence/check/architectures.py page         # fills the page from the record

An architecture is recurrent if the modeling file of its language model updates a recurrent state or that of a convolution. Each
is a small random model in float64 (surgery/checking/shrink.py), on a CPU, with the plain PyTorch paths of transformers.
"""

import importlib
import importlib.util
import json
import re
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from surgery.checking.check import all_laws, check
from surgery.checking.shrink import read_config, shrink
from surgery.errors import UserError
from surgery.runtime.files import write_text

HERE = Path(__file__).parent
RECORD, PAGE = HERE / "architectures.json", HERE.parents[2] / "docs" / "architectures.md"
BEGIN, END = "<!-- filled by recipes/evidence/check/architectures.py -->", "<!-- end -->"
MARKS = re.compile(r"update_recurrent_state|update_conv_state|rnn_state|recurrent_states|RwkvLinearAttention|get_linear_cache")
SIGNS = {"right": "✓", "wrong": "**✗**", "refused": "-", "not applicable": ""}


def recurrent_types() -> list[str]:
    """Model types of language models; of a model that reads images as well, the part that reads text."""
    found = {}
    for name, model in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        module = f"transformers.models.{model_type_to_module_name(name)}"
        place = importlib.util.find_spec(module)
        texts = (path.read_text(encoding="utf-8") for path in Path(str(place and place.origin)).parent.glob("modeling_*.py"))
        if any(MARKS.search(text) for text in texts) and (model not in found or "_text" in name):
            found[model] = name
    return sorted(name for name in found.values() if name in CONFIG_MAPPING_NAMES)


def ask(name: str) -> dict[str, Any]:
    """What the laws have found about an architecture, or why it was not asked."""
    try:
        report = check(architecture=name, full=True)
    except UserError as error:
        return {"error": str(error)}
    print(f"{name}: {', '.join(finding.law for finding in report.wrong) or 'nothing wrong'}", flush=True)
    laws = {}
    for finding in json.loads(report.to_json())["findings"]:
        laws[finding["law"]] = {key: finding[key] for key in ("verdict", "difference", "where")}
        laws[finding["law"]]["wrong"] = [case["name"] for case in finding["cases"] if case["verdict"] == "wrong"]
        laws[finding["law"]]["cases"] = len(finding["cases"])
    config = {key: value for key, value in shrink(read_config(name)).to_diff_dict().items() if key != "transformers_version"}
    return {"dtype": report.dtype, "config": config, "laws": laws}


def find_scripts() -> dict[tuple[str, str], list[str]]:
    """(architecture, law) -> the scripts here that show the fault: each names in CELLS what it shows."""
    sys.path.insert(0, str(HERE))
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(HERE.glob("*.py")):
        for law, names in getattr(importlib.import_module(path.stem), "CELLS", {}).items():
            for name in names:
                found.setdefault((name, law), []).append(path.stem)
    return found


def page(record: dict[str, Any]) -> str:
    """The table, and below it what is wrong where."""
    scripts = find_scripts()
    names = [law.name for law in all_laws().values()]
    asked = {name: found["laws"] for name, found in record["architectures"].items() if "laws" in found}
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    lines = [f"Versions: {versions}; {len(asked)} architectures, {len(names)} laws.", "", f"| | {' | '.join(names)} |"]
    lines.append("|---|" + ":-:|" * len(names))
    for name, found in asked.items():
        lines.append(f"| {name} | " + " | ".join(SIGNS[found[law]["verdict"]] for law in names) + " |")
    lines += ["", "✓ right · **✗** wrong · - refuses in words · empty: not applicable", "", "## What is wrong where", ""]
    lines += ["| architecture | law | cases | largest difference | where | script |", "|---|---|---|---|---|---|"]
    for name, found in asked.items():
        for law in names:
            if found[law]["verdict"] == "wrong":
                told = found[law]["difference"]
                apart = "" if told is None else f"{told:.1e}"
                where = found[law]["where"].rpartition(": ")[2] if told is not None else found[law]["where"].partition(": ")[2]
                wrong, cases = found[law]["wrong"], found[law]["cases"]
                cases = f"{len(wrong)} of {cases}" if len(wrong) > 3 else ", ".join(wrong)
                shown = ", ".join(scripts.get((name, law), ["none"]))
                lines.append(f"| {name} | {law} | {cases} | {apart} | {where[:110].replace('|', '/')} | {shown} |")
    lines += [
        "",
        *(f"{name} was not asked: {found['error']}" for name, found in record["architectures"].items() if "error" in found),
    ]
    return "\n".join(lines)


def main() -> None:
    """Ask, write the record, fill the page."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() and len(sys.argv) > 1 else {"architectures": {}}
    for name in (name for name in sys.argv[1:] or recurrent_types() if name != "page"):
        record["architectures"][name] = ask(name)
    record["architectures"] = dict(sorted(record["architectures"].items()))
    record["versions"] = {package: version(package) for package in ("transformers", "torch")}
    write_text(RECORD, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    write_text(PAGE, f"{before}{BEGIN}\n{page(record)}\n{END}{after}")


if __name__ == "__main__":
    main()
