"""The suite length: needles in prompts of each length."""

from surgery.evaluation.asking import NEEDLE, Asking
from surgery.evaluation.results import MIDDLE, NEEDLES
from surgery.evaluation.suites import measured
from surgery.evaluation.task import TaskFamily
from surgery.records.recipe import Bench, Data

PLACE = 20
SUITES = {
    "length": "Retrieval against the length of the prompt (bench.contexts), hidden in held-out text: a needle in its middle, "
    "one of eight needles (key-value pairs with text between them), and the same after three of them were asked for."
}
LENGTHS = "only"
# How many needles are hidden and asked for; needle.1024.50 has one, in the middle.
SEVERAL = dict(zip(NEEDLES, ({"needles": 8}, {"needles": 8, "queries": 4}), strict=True))
TITLES = dict(zip(NEEDLES, ("One of several needles", "Several needles, one after the other"), strict=True))
FAMILIES = {
    f"needle.{MIDDLE}": TaskFamily("A needle in the middle of a text", "tokens", "tokens of the prompt"),
    **{name: TaskFamily(title, "tokens", "tokens of the prompt") for name, title in TITLES.items()},
}


def probes(options: Bench, data: Data) -> dict[str, Asking]:
    if "length" not in measured(options):
        return {}
    asked = {f"needle.{length}.{MIDDLE}": Asking(NEEDLE, {"depth": MIDDLE / 100}, length) for length in options.lengths}
    for name, several in SEVERAL.items():
        asked |= {f"{name}.{length}": Asking(NEEDLE, {**several}, length) for length in options.lengths}
    return asked
