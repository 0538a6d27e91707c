"""The model card: what was done, what was measured, how to load it. It is made from an export's other files and from nothing
else, so that it can be made again and compared."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from safetensors import safe_open

from surgery.errors import UserError
from surgery.evaluation import markdown
from surgery.evaluation.report import Report
from surgery.loading.origin import Origin
from surgery.records.names import as_code, in_markdown, is_control
from surgery.records.plan import PLAN, Plan


def card(name: str, folder: Path, record: Any, use: str) -> str:
    """Markdown with Hugging Face's metadata in front.

    name: what the folder will be loaded by, a path or an id. record: its export.json. use: how its format is loaded, with NAME
    for the name.
    """
    planned, base = folder / PLAN, record.base.published(folder).name
    plan = Plan.read(planned) if planned.exists() else None
    parts = [
        f"---\n{_metadata(record, plan)}\n---\n# {in_markdown(name.rsplit('/', 1)[-1])}\n",
        *_what(base, plan, record, _gates(folder)),
        f"```python\n{use.replace('NAME', json.dumps(name, ensure_ascii=False)[1:-1])}\n```\n",
        f"{LOADS[record.format]}\n" if record.format in LOADS else "",
        f"Verified against the live model when it was written: {record.proof.line()}.\n",
        *(f"Also {each.line()}.\n" for each in record.engines),
    ]
    measured = folder / "report.json"
    report = Report.read(measured, unsealed="refuse") if measured.exists() else None
    figures = _measured(report, record) if report else "Nothing was measured: no report came with it.\n"
    parts.append(f"## Measured\n\n{figures}")
    parts.append(f"## Limits\n\n{_limits(report, record.base)}\n")
    recipe = ", the recipe `recipe.yaml`" if (folder / "recipe.yaml").exists() else ""
    papers = f"The plan is `plan.json`{recipe}; `export.json`" if plan else "`export.json`"
    parts.append(
        f"## Provenance\n\nMade {record.created[:10]} by mamba-surgery {record.toolkit}. {papers} holds the digests of all "
        "files.\n"
    )
    return markdown.with_pictures_of(folder, "\n".join(part for part in parts if part))


def _gates(folder: Path) -> list[float]:
    """The shares that attention has in the output of grafted heads, by the folder's tensors; none where there is no gate."""
    shares: list[float] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.endswith(".graft.gate"):
                    shares += tensors.get_tensor(name).float().flatten().tolist()
    return shares


def _what(base: str, plan: Plan | None, record: Any, gates: list[float]) -> list[str]:
    if plan is None:
        return [f"{as_code(base)}, as it is, in another format.\n"]
    if not plan.sites:
        return [
            f"A hybrid of {as_code(base)}, without new parameters: **{plan.windows}** of its own attention; these heads keep "
            f"no other keys (arXiv 2410.10819).{'' if record.base_unchanged else ' Adapters were tuned and merged.'}\n",
            "![Where windows are](sites.png)\n",
        ]
    return [
        f"A hybrid of {as_code(base)}: attention at **{markdown.sites_text(plan)}**, {record.parameters:,} new parameters. "
        f"{_how(plan, record.base_unchanged, gates)}\n",
        "![Where attention went in](sites.png)\n",
    ]


LOADS = {
    "hf": "`trust_remote_code` is needed where mamba-surgery is not installed; the code is in this folder.",
    "patch": "It needs mamba-surgery and the base. Any other base is refused, with the name of the first tensor that differs.",
    "gguf": "Or with llama.cpp's own server: `llama-server -m model.gguf -c 4096 --flash-attn off`. Its flash attention rounds "
    "more on CPUs; if that was measured, it is given below.",
}


def _metadata(record: Any, plan: Plan | None) -> str:
    about = ModelCardData(
        base_model=record.base.name if record.base.hub else None,  # the Hub accepts ids only
        base_model_relation=_relation(record, plan) if record.base.hub else None,
        library_name={"patch": "mamba-surgery", "gguf": "gguf"}.get(record.format, "transformers"),
        pipeline_tag="text-generation",
        tags=[record.model_type.removesuffix("_hybrid"), *(["hybrid", "retrieval"] if plan else []), "mamba-surgery"],
        **record.base.licence,
    )
    return about.to_yaml()


def _relation(record: Any, plan: Plan | None) -> str:
    """As the Hub calls it; a conversion is "quantized" there, in whatever dtype."""
    return "quantized" if plan is None else "adapter" if record.format == "patch" else "finetune"


def _how(plan: Plan, base_unchanged: bool, gates: list[float]) -> str:
    """What was done, by the plan's kind of graft and where it started. gates: as they are now."""
    if plan.kind == "layer":
        source = f"with the weights of {as_code(str(plan.donor))}" if plan.init == "donor" else "initialised at random"
        mlp = ", its MLP and norms included" if plan.mlp else ""
        return f"It replaces the SSM's whole mixer there, {source}{mlp}."
    starts = {"donor": f"heads of {as_code(str(plan.donor))}", "dual": "the heads' own C and B (the dual graft)",
              "induction": "those of induction heads, which look at what followed the same token",
              "copy": "those of induction heads, which look at what followed the same token"}  # fmt: skip
    start = starts[plan.init]
    kept = ", and every weight of the base is unchanged" if base_unchanged else ""
    place = "It replaces only the SSM's mixing"
    if gates:
        low, high = min(gates), max(gates)
        now = f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} to {high:.3f}"
        began = "" if plan.blend is None else f"began at {plan.blend:g} and "
        place = f"It is mixed with the SSM's output, which stays: its share {began}is {now}"
    done = f"{place}; queries and keys start as {start}{kept}."
    if plan.init == "copy":
        done = (
            "It is an added copy mechanism: all heads of the SSM stay. Its own values make the token that it finds more "
            f"likely; queries and keys start as {start}{kept}."
        )
    if not plan.kept_state:
        return done
    size = len(next(iter(plan.kept_state.values()))[0])
    return f"{done} Heads that stay an SSM keep the {size} dimensions of their state that text needed most (`kept_state`)."


def _measured(report: Report, record: Any) -> str:
    """The table, its controls, and the differences to the base with their intervals. Raises UserError for a report that did not
    measure these weights."""
    row, origins = record.digest and report.row_of(record.digest), report.provenance
    if row is None:
        raise UserError("report.json did not measure the weights that export.json names")
    parts = [markdown.results(report), f"The weights of this export are the row **{row}**, measured in {record.dtype}.\n"]
    if changed := [(name, model.change) for name, model in report.models.items() if model.change]:
        tasks = list(changed[0][1])
        header = ["model", *map(markdown.unit, tasks)]
        rows = [[name, *(str(change[task]) for task in tasks)] for name, change in changed]
        parts.append(
            f"Difference to the base on the same examples, with 95% intervals:\n\n{markdown.named_table(header, rows)}\n"
        )
    if report.base.kv:
        parts.append("![Retrieval against dictionary size](retrieval.png)\n")
    parts.append(f"Measured {origins.created[:10]} on {origins.machine}, seed {origins.seed}; all of it is in `report.json`.\n")
    return "\n".join(parts)


def _limits(report: Report | None, base: Origin) -> str:
    lines = ["Nothing is known of it beyond what is stated above. It is unfit for whatever the base is unfit for."]
    if report is not None:
        if sizes := report.base.kv:
            examples = next(iter(sizes.values())).n
            lines.append(
                f"Retrieval was measured on synthetic dictionaries of at most {max(map(int, sizes))} pairs, {examples} "
                "examples a cell."
            )
        controls = [name for name in report.models if is_control(name)]
        lines.append(
            "The rows named control are the same tuning without a graft, and grafts at random heads: a gain counts only as far "
            "as it exceeds theirs."
            if controls
            else "No control was measured: a gain over the base may come from the tuning only."
        )
    if base.licence:
        lines.append(f"The licence is the base's ({in_markdown(', '.join(base.licence.values()))}).")
    else:
        lines.append("The base's licence is not known: ask its makers before you use or share this.")
    return " ".join(lines)
