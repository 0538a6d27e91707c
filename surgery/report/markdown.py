"""report.md: the verdict, how to use the result, one table; the rest below it."""

import json
import re
from collections.abc import Sequence

from surgery.records.report import Report
from surgery.report.tables import Table, changes_table, controls_table, costs_table, results_table, short_table
from surgery.runtime.progress import printable


def load_lines(folder: str) -> str:
    """The Python lines that load an exported hybrid."""
    return (
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"model = AutoModelForCausalLM.from_pretrained({json.dumps(folder)}, trust_remote_code=True)\n"
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(folder)}, trust_remote_code=True)\n"
    )


def render_markdown(report: Report, *, hybrid: str | None = None, figures: Sequence[str] = ()) -> str:
    """The whole report in Markdown.

    hybrid: the folder of the exported hybrid as seen from the report, if there is one. figures: files beside the report.
    """
    verdict, provenance = report.verdict, report.provenance
    parts = [f"# {escape(provenance.base)}: base and hybrid compared", f"**Did it help? {escape(verdict.sentence)}**"]
    parts += [escape(text) for text in (" ".join(verdict.details), verdict.advice) if text]
    if hybrid is not None:
        parts += [
            "## Use it",
            f"The hybrid is the folder `{hybrid}` beside this file; these lines run there.",
            f"```python\n{load_lines(hybrid)}```",
        ]
    parts += ["## Results", markdown_table(short_table(report))]
    parts += [f"![{name.removesuffix('.png')}]({name})" for name in figures]
    parts += [
        "## All measurements",
        "Brackets: 95% intervals over questions or documents. More is better, except for losses.",
        markdown_table(results_table(report)),
    ]
    if len(controls := controls_table(report)) > 1:
        rate = "Those that are trained see the same examples; base weights and whole layers learn at a lower rate."
        parts += ["## Controls", f"Would something else have done as well? {rate}", markdown_table(controls)]
    for name, model in list(report.models.items())[1:]:
        parts += [f"### {escape(model.description)}: difference to the base", markdown_table(changes_table(report, name))]
        parts += [escape(model.on_text.sentence())] if model.on_text is not None else []
    if any(model.costs for model in report.models.values()):
        parts += ["## Speed and memory", "The models in turn, in one run; brackets: the spread of the rounds."]
        parts += [markdown_table(costs_table(report))]
    parts += ["## Provenance", markdown_table([["", ""], *describe_provenance(report)])]
    return "\n\n".join(parts) + "\n"


def describe_provenance(report: Report) -> list[list[str]]:
    """(what, value) of where the report comes from; the fingerprint of each model as it was measured."""
    provenance = report.provenance
    return [
        ["made", f"{provenance.created} by mamba-surgery {provenance.toolkit}"],
        ["machine", provenance.machine],
        ["packages", ", ".join(f"{name} {version}" for name, version in provenance.packages.items())],
        ["seed", str(provenance.seed)],
        *([model.description, f"fingerprint {model.fingerprint[:16]}"] for model in report.models.values()),
    ]


def markdown_table(table: Table) -> str:
    """A pipe table; figures stand to the right."""
    header, *rows = [[escape(cell).replace("|", "\\|") for cell in row] for row in table]
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *rows))


def escape(text: str) -> str:
    """A text that comes from a user or a model's name, as Markdown shows it: no link, no emphasis, no HTML. Brackets of an
    interval stay, and control characters are written out."""
    return re.sub(r"([\\`*<>_]|\[(?=[^\]]*\]\())", r"\\\1", printable(text))
