"""The model card: what was done, what was measured, how to load it."""

import json
from pathlib import Path
from typing import Any

import yaml

from surgery.records.plan import Plan
from surgery.records.report import Report
from surgery.report.markdown import escape, load_lines, markdown_table
from surgery.report.tables import changes_table, short_table
from surgery.runtime.files import write_text

NEEDS = {"transformers": ">=5.23,<5.24", "torch": ">=2.6"}  # as pyproject.toml says; a test compares them
NEEDED = ", ".join(package + versions for package, versions in NEEDS.items())
USE = {
    "hf": f"It needs {NEEDED}. `trust_remote_code` lets the code in this folder run; "
    "where mamba-surgery is installed, `import surgery.modeling` does without.",
    "patch": "It needs mamba-surgery and the base. Any other base is refused, with the name of the first tensor that differs.",
    "nemotron_h": "For engines that know NemotronH; no code of this folder runs.",
    "gguf": "For llama.cpp: `llama-server -m model.gguf`.",
}


def write_card(folder: Path, record: Any, name: str, plan: Plan | None, report: Report | None) -> None:
    """Write README.md. record: the folder's Export. name: how the folder will be loaded: its name, or an id of the Hub."""
    write_text(folder / "README.md", render_card(record, name, plan, report))


def render_card(record: Any, name: str, plan: Plan | None, report: Report | None) -> str:
    """The card's text, with Hugging Face's metadata in front."""
    parts = [f"---\n{_metadata(record)}---", f"# {escape(name.rsplit('/', 1)[-1])}", _describe(record, plan)]
    if record.format in ("hf", "patch"):
        code = f"import surgery\n\nmodel, tokenizer = surgery.load({json.dumps(name)})\n"
        code = load_lines(name) if record.format == "hf" else code
        parts += ["## Use it", f"```python\n{code}```"]
    parts += [USE.get(record.format, "")]
    parts += [f"Verified when it was written: {record.proof}."] if record.proof is not None else []
    parts += ["## Measured", *_measured(report, record)]
    lines = ["Nothing is known of it beyond what is stated above. It is unfit for whatever the base is unfit for."]
    if report is not None and not any(model.role == "control" for model in report.models.values()):
        lines.append("No control was measured: a gain over the base may come from the tuning alone.")
    licence = escape(", ".join(record.base.licence.values()))
    lines.append(f"The licence is the base's ({licence})." if licence else "The base's licence is not known: ask its makers.")
    parts += ["## Limits", " ".join(lines)]
    parts += [f"Made {record.created[:10]} by mamba-surgery {record.toolkit}; `export.json` holds the digests of all files."]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(record: Any) -> str:
    about: dict[str, Any] = {
        "library_name": "mamba-surgery" if record.format == "patch" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": [record.model_type.removesuffix("_hybrid"), "hybrid", "retrieval", "mamba-surgery"],
        **record.base.licence,
    }
    if record.base.hub:  # the Hub accepts ids only
        about["base_model"] = record.base.name
        about["base_model_relation"] = "adapter" if record.format == "patch" else "finetune"
    return yaml.safe_dump(about, sort_keys=False, allow_unicode=True)


def _describe(record: Any, plan: Plan | None) -> str:
    base = f"`{record.base.name}`"
    parts = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in record.changed})
    changed = f" The base's own weights were changed, too, as by merged adapters: {len(record.changed)} of its tensors "
    changed = f"{changed}({escape(', '.join(parts))})." if parts else ""
    if plan is None:
        return f"A model made of {base} ({record.model_type}).{changed}"
    sites = ", ".join(f"`{site}`" for site in plan.sites)
    if plan.kind == "layer":
        start = f"with the weights of `{plan.donor}`" if plan.donor else "at random"
        return f"A hybrid of {base}: ordinary attention in the place of the mixer at {sites}, which started {start}.{changed}"
    heads = [(site.layer, head) for site in plan.sites for head in site.heads]
    said = f"A hybrid of {base}: gated attention beside the SSM at the heads {sites}, {record.parameters:,} new parameters."
    if any(plan.start(layer, head).null is not None for layer, head in heads):
        said += " Attention acts only where it has found something; elsewhere the head computes what its SSM computes."
    return said + changed


def _measured(report: Report | None, record: Any) -> list[str]:
    """The verdict, one table, and what the edit changed; of a report that measured these weights."""
    if report is None:
        return ["Nothing was measured: no report came with it."]
    rows = [name for name, model in report.models.items() if model.fingerprint == record.fingerprint]
    row = report.verdict.model if report.verdict.model in rows else rows[0]
    model, made = report.models[row], report.provenance
    parts = [f"**Did it help? {escape(report.verdict.sentence)}**" if row == report.verdict.model else ""]
    parts += [escape(" ".join(report.verdict.details)) if row == report.verdict.model else ""]
    parts += [markdown_table(short_table(report)), f"The weights of this folder are the row *{escape(model.description)}*."]
    if model.changes:
        parts += [
            "Difference to the base on the same questions, with 95% intervals:",
            markdown_table(changes_table(report, row)),
        ]
    if model.on_text is not None and row != report.verdict.model:
        parts += [model.on_text.sentence()]
    return [*parts, f"Measured {made.created[:10]} on {made.machine}, seed {made.seed}; all of it is in `report.json`."]
