"""What docs/evidence/text.md says of the natural base and of the operation on it: from the recipe, the checkpoint's card and
the report, as far as they are there."""

from pathlib import Path

import numpy as np

from surgery.evaluation import markdown
from surgery.evaluation.judgement import did_it_help
from surgery.evaluation.report import Report
from surgery.evaluation.results import HITS, OTHERS, ModelReport, value
from surgery.records.pretrain_recipe import read_pretrain_recipe
from tools.copy_cache import CopyCache
from tools.recall import ALL, APART, BASE, Recall

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "tiny-books.yaml"
CARD = ROOT / "checkpoints" / "tiny-books" / "README.md"
CACHE = ROOT / "recipes" / "copy-cache.json"
RECALL = ROOT / "recipes" / "recall.json"
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
    made, chosen, base = report.provenance, report.plan, report.base
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
            _copy_cache(),
            did_it_help(report),
            f"Grafted: {markdown.sites_text(chosen)}, behind a gate of {chosen.blend}. Measured {made.created[:10]} on "
            f"{made.machine}, seed {made.seed} (`recipes/books.report.json`).",
        ]
    )


def _copy_cache() -> str:
    """The rival that nobody trains, on the same tokens."""
    record = CopyCache.read(CACHE, unsealed="refuse")
    lengths = sorted({int(task.partition(".")[2]) for task in record.change})
    names = {HITS: "recall hits", OTHERS: "other tokens", "all": "all tokens"}
    header = ["copy cache, untrained", *(f"rows of {length:,} tokens" for length in lengths)]
    body = [
        [title, *(f"{record.cached[task].value:.3f} ({record.change[task]})" for task in (f"{kind}.{n}" for n in lengths))]
        for kind, title in names.items()
    ]
    given = ", ".join(f"{share:.2f} after {order} token{'s' * (order != '1')}" for order, share in record.shares.items())
    return "\n\n".join(
        [
            markdown.table(header, body),
            f"The copy cache is a table of n-grams of the row so far, mixed into the base's probabilities; nothing is trained "
            f"and nothing grafted. Its share is {given} that occurred before, chosen on {' and '.join(record.chosen_on)}. "
            f"Measured {record.created[:10]} by version {record.toolkit} (`recipes/copy-cache.json`).",
        ]
    )


def recall() -> str:
    """What is recalled, with novels as units."""
    record = Recall.read(RECALL, unsealed="refuse")
    names = {HITS: "repeated rare bigrams", APART: "rare tokens, no bigram", ALL: "all tokens"}
    novels = list(record.tokens)
    header = ["nats per token, change to the base", *names.values()]
    count = {kind: sum(record.tokens[novel][kind] for novel in novels) for kind in names}
    body = [["tokens", *(f"{count[kind]:,}" for kind in names)]]
    body += [
        ["base: loss, mean over novels", *(f"{np.mean([record.loss[BASE][n][kind] for n in novels]):.3f}" for kind in names)]
    ]
    for name, change in record.change.items():
        body.append([name, *(str(change[kind].mean) for kind in names)])
        body.append(["a further novel", *("[{:+.3f}, {:+.3f}]".format(*change[kind].new) for kind in names)])
    return "\n\n".join(
        [
            markdown.table(header, body),
            f"Rows of {record.length:,} tokens of {len(novels)} novels by two authors of whom the base has read nothing; a "
            f"novel is a unit. Rare: at most {record.rare:g} in a million tokens. Grafts: {record.grafts}, untrained. "
            f"Measured {record.created[:10]} by version {record.toolkit} (`recipes/recall.json`).",
        ]
    )


def _cell(model: ModelReport, task: str) -> str:
    change = f" ({model.change[task]})" if task in model.change else ""
    return f"{value(model.tasks[task]):.3f}{change}"
