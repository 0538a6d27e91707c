"""What docs/evidence/text.md says of the natural base and of the operation on it: from the recipe, the checkpoint's card and
the report, as far as they are there."""

from pathlib import Path

import numpy as np

from surgery.evaluation import markdown
from surgery.evaluation.judgement import did_it_help
from surgery.evaluation.report import Report
from surgery.evaluation.results import HITS, OTHERS, ModelReport, value
from tools.copy_cache import CopyCache
from tools.recall import ALL, APART, BASE, Recall
from tools.recall_places import RECORD as PLACES
from tools.recall_places import WITHOUT, Change, RecallPlaces

ROOT = Path(__file__).parent.parent
CACHE = ROOT / "recipes" / "copy-cache.json"
RECALL = ROOT / "recipes" / "recall.json"
REPORT = ROOT / "recipes" / "books.report.json"


def card(name: str) -> str:
    """What a base is: the card of the checkpoint, without its head."""
    _, _, body = (ROOT / "checkpoints" / name / "README.md").read_text().partition("\n# ")
    return body.partition("\n")[2].strip()


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


def recall_places() -> str:
    """Whether it matters on prose where the attention is, with novels as units."""
    record = RecallPlaces.read(PLACES, unsealed="refuse")
    lengths = list(record.tokens)
    shown = lengths[1]
    names = {HITS: "repeated rare bigrams", APART: "rare tokens, no bigram", ALL: "all tokens"}
    kinds = [["tokens", *(f"{record.tokens[shown][kind]:,}" for kind in names)]]
    kinds.append(["base: loss, mean over novels", *(f"{record.loss[shown][kind]:.3f}" for kind in names)])
    kinds += [[name, *(str(of[shown][kind].mean) for kind in names)] for name, of in record.change.items()]
    sizes = [["base: loss", *(f"{record.loss[length][HITS]:.3f}" for length in lengths)]]
    sizes += [[name, *(str(of[length][HITS].mean) for length in lengths)] for name, of in record.change.items()]
    beyond = [
        [name, *(f"{of[length].over.mean}; {_better(of[length])}" for length in lengths)]
        for name, of in record.beyond.items()
        if not name.startswith(WITHOUT)
    ]
    heads = [[head, *("" if each is None else str(each) for each in of.values())] for head, of in record.scores.items()]
    rows = [f"rows of {int(length):,} tokens" for length in lengths]
    drawn = "; ".join(f"{where}: {', '.join(plans)}" for where, plans in record.drawn.items())
    novels = len(next(iter(record.beyond.values()))[shown].novels)
    return "\n\n".join(
        [
            markdown.table(["located head", "without it, nats", "an untrained graft saves, nats"], heads),
            markdown.table([f"change to the base, nats, rows of {int(shown):,} tokens", *names.values()], kinds),
            markdown.table(["repeated rare bigrams, change to the base", *rows], sizes),
            markdown.table(["repeated rare bigrams, the tuned grafts at the located heads against", *rows], beyond),
            f"Means over {novels} novels by two authors of whom the base has read nothing, with 95% intervals over novels; in "
            "the last table also the number of novels in which the interval over rows is below 0. Random heads: the mean of "
            f"{len(record.drawn['heads of other layers'])} draws. Heads: {drawn}; gate {record.blend:g}, {record.steps} steps. "
            f"Measured {record.created[:10]} on {record.machine}, version {record.toolkit} (`recipes/recall-places.json`, "
            "`python -m tools.recall_places`).",
        ]
    )


def _better(change: Change) -> str:
    below = sum(each.ci95[1] < 0 for each in change.novels.values())
    return f"{below} of {len(change.novels)}"


def _cell(model: ModelReport, task: str) -> str:
    change = f" ({model.change[task]})" if task in model.change else ""
    return f"{value(model.tasks[task]):.3f}{change}"
