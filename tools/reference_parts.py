"""What the code says of itself, as Markdown for docs/reference/: commands, settings, the report's fields, probes, suites."""

import dataclasses
import inspect
from typing import Any

import typer

from surgery.cli.app import app
from surgery.cli.sections import rows, sections
from surgery.evaluation import markdown
from surgery.evaluation.report import Report
from surgery.probes import probes
from surgery.probes.question import CompletionProbe, PassageProbe, WritingProbe
from surgery.records.sections.benching import SUITES


def verbs() -> str:
    """A section for each command, from its help."""
    group: Any = typer.main.get_command(app)  # click's own types differ between versions of typer
    context = typer.Context(group, info_name="surgery")
    return "\n\n".join(_verb(group.get_command(context, name)) for name in group.list_commands(context))


def _verb(command: Any) -> str:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    usage = " ".join(
        ["surgery", command.name, *(_metavar(parameter) for parameter in shown if parameter.param_type_name == "argument")]
    )
    body = [[_parameter(parameter), cell(getattr(parameter, "help", None) or "")] for parameter in shown]
    table = "\n\n" + markdown.table(["", "meaning"], body) if body else ""
    text, _, examples = inspect.cleandoc(command.help or "").replace("\b", "").partition("Examples:")
    lines = "".join(f"\n    {line.strip()}" for line in examples.splitlines() if line.strip())
    text = prose(text) + (f"\n\nExamples:\n{lines}" if lines else "")
    return f"## {command.name}\n\n    {usage}{' [OPTIONS]' if body else ''}\n\n{text}{table}"


def _metavar(argument: Any) -> str:
    name = argument.name.upper() + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _parameter(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{_metavar(parameter)}`"
    option = parameter.opts[0]
    value = "" if parameter.is_flag else f" {parameter.metavar or option.strip('-').replace('-', '_').upper()}"
    return f"`{option}{value}`"


def settings() -> str:
    """A table for each section of a recipe."""
    return "\n\n".join(_section(name, kind) for name, kind in sections().items())


def _section(name: str, kind: type) -> str:
    body = [
        [f"`{row.key}`", cell(row.type), f"`{row.default}`" if row.default else "", cell(row.meaning)] for row in rows(name)
    ]
    table = markdown.table(["key", "type", "default", "meaning"], body)
    return f"## {name or 'recipe'}\n\n{prose(inspect.getdoc(kind) or '')}\n\n{table}"


def report() -> str:
    """A section for each kind of record in report.json, from its docstring and its schema."""
    schema = Report.model_json_schema(mode="serialization")
    records = {"Report": schema, **schema.get("$defs", {})}
    return "\n\n".join(_record(name, definition) for name, definition in records.items() if "properties" in definition)


def _record(name: str, definition: dict[str, Any]) -> str:
    body = [[f"`{field}`", _kind(of), cell(of.get("description", ""))] for field, of in definition["properties"].items()]
    described = any(row[2] for row in body)
    header, body = (["field", "type", "meaning"], body) if described else (["field", "type"], [row[:2] for row in body])
    return f"## {name}\n\n{prose(definition.get('description', ''))}\n\n{markdown.table(header, body)}"


def _kind(of: dict[str, Any]) -> str:
    """A JSON schema's type, in words."""
    if "$ref" in of:
        name = of["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in of:
        return " or ".join(dict.fromkeys(_kind(option) for option in of["anyOf"]))
    if "enum" in of:
        return ", ".join(f"`{value}`" for value in of["enum"])
    if of.get("type") == "array":
        return f"list of {_kind(of['items'])}" if "items" in of else "list"
    if of.get("type") == "object":
        inner = of.get("additionalProperties")
        return f"name -> {_kind(inner)}" if isinstance(inner, dict) else "object"
    return str(of.get("type", "anything"))


def probes_and_suites() -> str:
    """Two tables: the probes with their options, and what each suite measures."""
    body = []
    for name, kind in sorted(probes().items()):
        fields = [field for field in dataclasses.fields(kind) if field.name != "tokenizer"]
        options = ", ".join(
            f"`{field.name}`" + ("" if field.default is dataclasses.MISSING else f" (`{field.default}`)") for field in fields
        )
        kinds = {"completion": CompletionProbe, "writing": WritingProbe, "text": PassageProbe}
        asks = next((word for word, protocol in kinds.items() if issubclass(kind, protocol)), "choice")
        body.append([f"`{name}`", asks, options or "none", cell(inspect.getdoc(kind) or "")])
    measured = [[f"`{name}`", cell(text)] for name, text in SUITES.items()]
    return f"""## Probes

{markdown.table(["probe", "kind", "options (default)", "what it asks"], body)}

A *choice* probe asks questions with candidates, and can locate and teach. A *completion* probe asks for a text, a *writing*
probe for answers anywhere in what is written; both can be measured. A *text* probe asks for tokens of running text, and can
locate.

## Suites

{markdown.table(["suite", "what is measured"], measured)}"""


def prose(text: str) -> str:
    """A docstring as Markdown: what looks like markup in it is none."""
    return inspect.cleandoc(text).replace("\f", "").replace("<", "&lt;").replace("[", "\\[")


def cell(text: str) -> str:
    """A text as one cell of a table."""
    return prose(" ".join(text.split())).replace("|", "\\|")
