"""What docs/ideas/tiny-books.md says of the natural base and of the operation on it: from the recipe, the checkpoint's card and
the report, as far as they are there."""

from pathlib import Path

from surgery.evaluation import markdown
from surgery.evaluation.judgement import did_it_help
from surgery.evaluation.report import HITS, OTHERS, ModelReport, Report, value
from surgery.records.pretrain_recipe import read_pretrain_recipe

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "tiny-books.yaml"
CARD = ROOT / "checkpoints" / "tiny-books" / "README.md"
REPORT = ROOT / "recipes" / "books.report.json"


def base() -> str:
    """What it is: the card of the checkpoint, without its head; as long as there is none, what the recipe says."""
    if CARD.exists():
        _, _, body = CARD.read_text().partition("\n# ")
        return body.partition("\n")[2].strip()
    recipe = read_pretrain_recipe(RECIPE)
    fields, corpus = recipe.architecture, recipe.corpus
    assert corpus is not None
    return (
        f"The checkpoint is still being trained. It is going to be a {fields['model_type']} of {fields['num_hidden_layers']} "
        f"layers, hidden size {fields['hidden_size']}, {fields['num_heads']} heads of {fields['head_dim']} and a state of "
        f"{fields['state_size']}, with a byte-level BPE of {corpus.vocabulary:,} tokens, trained in windows of {corpus.tokens} "
        f"tokens, {corpus.batch_size} in a step."
    )


def operation() -> str:
    """What the operation gave, and on what."""
    if not REPORT.exists():
        return "It has not been done yet: `surgery run recipes/books.yaml` does it once the checkpoint is there."
    report = Report.read(REPORT)
    made, chosen, base = report.provenance, report.plan, next(iter(report.models.values()))
    assert chosen is not None
    parts = []
    for family, title in ((HITS, "recall hits"), (OTHERS, "other tokens")):
        tasks = [task for task in base.tasks if task.startswith(f"{family}.")]
        header = [f"loss on {title}", *(f"rows of {int(task.partition('.')[2]):,} tokens" for task in tasks)]
        body = [[name, *(_cell(model, task) for task in tasks)] for name, model in report.models.items()]
        parts.append(markdown.table(header, body))
    return "\n\n".join(
        [
            *parts,
            "Nats per token; in brackets the paired difference to the base, with its 95% interval.",
            "![Loss on recall hits](../../recipes/books.hits.png)",
            did_it_help(report),
            f"Grafted: {markdown.places(chosen)}, behind a gate of {chosen.blend}. Measured {made.created[:10]} on "
            f"{made.machine}, seed {made.seed} (`recipes/books.report.json`).",
        ]
    )


def _cell(model: ModelReport, task: str) -> str:
    change = f" ({model.change[task]})" if task in model.change else ""
    return f"{value(model.tasks[task]):.3f}{change}"
