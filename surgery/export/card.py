"""The model card: what was done, what was measured, how to load it. Its figures come from the report and nowhere else."""

from pathlib import Path

from transformers import PreTrainedModel

from surgery.bench import markdown
from surgery.bench.report import Report
from surgery.plan import Plan
from surgery.splice.splice import graft_parameters


def card(name: str, hybrid: PreTrainedModel, plan: Plan, base: str, report: Report | None, folder: Path) -> str:
    """Markdown with Hugging Face's metadata in front."""
    grafts = sum(p.numel() for p in graft_parameters(hybrid).values())
    where = ", ".join(map(str, plan.sites))
    # The Hub accepts ids only: a base that is a folder here has no id.
    base_model = f"base_model: {base}\n" if base.count("/") == 1 and not Path(base).exists() else ""
    parts = [
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n{base_model}"
        f"tags: [mamba2, hybrid, retrieval, mamba-surgery]\n---\n# {name}\n",
        f"A hybrid of `{base}`: attention in place of the SSM mixing at **{where}**, {grafts:,} new parameters, every weight "
        "of the base unchanged. Made by mamba-surgery with the dual graft: queries and keys start as the head's own C and B.\n",
        f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
```

`trust_remote_code` is needed where mamba-surgery is not installed; the code is in this folder.
""",
    ]
    if report is not None:
        parts.append(f"## Measured\n\n{markdown.results(report)}")
        if (folder / "retrieval.png").exists():
            parts.append("![Retrieval against dictionary size](retrieval.png)\n")
        made = report.provenance
        parts.append(
            f"Measured {made.created[:10]} on {made.machine}, seed {made.seed}; all numbers and their intervals are in "
            "`report.json`. Rows named control show what the same tuning does without a graft and with a graft at a random "
            "head.\n"
        )
    else:
        parts.append("Nothing was measured for this export: no report came with it.\n")
    parts.append(
        "The plan is `plan.json`" + (", the recipe `recipe.yaml`" if (folder / "recipe.yaml").exists() else "") + ".\n"
    )
    return "\n".join(parts)
