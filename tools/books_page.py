"""What docs/ideas/tiny-books.md says of the natural base and of the operation on it: from the recipe, the checkpoint's card and
the report, as far as they are there."""

from pathlib import Path

from surgery.evaluation import markdown
from surgery.evaluation.report import Report
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
    made = report.provenance
    return f"""{markdown.results(report)}

Measured {made.created[:10]} on {made.machine}, seed {made.seed} (`recipes/books.report.json`)."""
