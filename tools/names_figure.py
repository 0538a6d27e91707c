"""recipes/tiny-names.png: when tiny-names begins to recall, from the logs of its three trainings: python -m tools.redraw"""

import json
from pathlib import Path

from surgery.figures import plotting
from surgery.pretraining.recipe import read_pretrain_recipe

ROOT = Path(__file__).parent.parent
TRAININGS = {  # recipe -> its log, and what it is called in the figure
    "tiny-names": (ROOT / "recipes" / "tiny-names.log.jsonl", "no repeats"),
    "tiny-names-short": (ROOT / "recipes" / "tiny-names-short.log.jsonl", "half repeat\na passage"),
    "tiny-names-on": (ROOT / "checkpoints" / "tiny-names" / "log.jsonl", "a quarter repeat a passage"),
}
NAMES = {"firsts": ("first occurrences", "#24292F"), "hits": ("repeats", "#0072B2")}


def draw(path: Path) -> None:
    """Windows of another length hold other pairs, so the lines do not join where a training begins."""
    begun, last = 0.0, dict.fromkeys(NAMES, 0.0)
    with plotting.drawing(path, height=3.2, width=7.0) as (_, axes):
        axis = axes[0, 0]
        for name, (log, title) in TRAININGS.items():
            corpus = read_pretrain_recipe(ROOT / "recipes" / f"{name}.yaml").corpus
            assert corpus is not None
            millions = corpus.tokens * corpus.batch_size / 1e6
            entries = [entry for line in log.read_text().splitlines() if "hits" in (entry := json.loads(line))]
            for what, (_, color) in NAMES.items():
                points = [(begun + entry["step"] * millions, entry[what]) for entry in entries]
                axis.plot(*zip(*points, strict=True), "-o", ms=3, color=color)
                last[what] = points[-1][1]
            if begun:
                axis.axvline(begun, color=plotting.CHANCE, lw=0.8)
            axis.text(begun + 0.1, 8.35, f"windows of {corpus.tokens},\n{title}", fontsize=8, va="top", color=plotting.CHANCE)
            begun += entries[-1]["step"] * millions
        for what, (title, color) in NAMES.items():
            axis.annotate(title, (begun, last[what]), (5, 0), textcoords="offset points", color=color, va="center")
        axis.set(xlabel="million tokens seen", ylabel="nats per token", ylim=(3, 8.4), xlim=(0, begun * 1.2))
        axis.set_title("Loss on rare bigrams of unread novels:\nrepeats are recalled after short windows that repeat passages")
