"""The tables of docs/reference/costs.md, from recipes/full-size.json (tools/full_size.py), recipes/estimates.json
(tools/estimate_check.py) and the published configurations."""

from collections.abc import Callable

from surgery.evaluation import markdown
from surgery.records.recipe import read_recipe
from surgery.runtime.progress import duration
from tools.estimate_check import MEMORY, TIME, Check
from tools.full_size import RECORD, ROOT, recipe_of
from tools.full_size_record import GIB, FullSize, Stage
from tools.published import Published, names, published

ESTIMATES = ROOT / "recipes" / "estimates.json"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
NOT_DONE = "not measured"
# What the page is about -> whether a stage was measured on such a machine.
MACHINES: dict[str, Callable[[str], bool]] = {
    "laptop": lambda device: device == "cpu",
    "GPU of 24 GB": lambda device: device != "cpu" and 20 <= int(device) <= 26,
    "GPU of 80 GB": lambda device: device != "cpu" and 70 <= int(device) <= 90,
}


def recorded() -> FullSize:
    return FullSize.read(RECORD) if RECORD.exists() else FullSize()


def recipes(record: FullSize | None = None) -> str:
    """A row for every model: what its recipe takes, as it is."""
    record = recorded() if record is None else record
    body = [_row(published(name), record) for name in names()]
    return markdown.table(["recipe", "weights", "disk", "time and memory of the recipe"], body)


def _row(model: Published, record: FullSize) -> list[str]:
    recipe = read_recipe(recipe_of(model.name))
    weights = model.parameters * BYTES[recipe.dtype]
    grafted = "plan" in recipe.model_fields_set
    disk = model.parameters * BYTES[model.stored] + (weights if grafted else 0)
    known = []
    for machine, fits in MACHINES.items():
        here = {stage.stage: stage for stage in record.stages if _whole(stage, model) and fits(stage.device)}
        if (run := here.get("recipe")) is not None:
            known.append(f"{machine}: {duration(run.seconds)}, {_gib(run.peak)} (measured)")
        elif (run := here.get("estimate")) is not None and run.foretold is not None:
            known.append(f"{machine}: {duration(run.foretold.seconds)}, {_gib(run.foretold.memory)} (extrapolated)")
    return [f"`{model.name}`", _gb(weights), _gb(disk), "; ".join(known) or NOT_DONE]


def stages(record: FullSize | None = None) -> str:
    """A row for every stage that was measured at full size."""
    record = recorded() if record is None else record
    body = [
        [
            stage.model, stage.stage, duration(stage.seconds), duration(stage.cpu_seconds), _gib(stage.peak),
            _gib(stage.anonymous), _gib(stage.limit) if stage.limit else "", "yes" if stage.passed else "**no**",
        ]
        for stage in record.stages
        if stage.failure is None and stage.stage != "estimate" and _whole(stage, published(stage.model))
    ]  # fmt: skip
    if not body:
        return "Nothing has been measured at full size yet."
    header = ["model", "stage", "time", "CPU time", "peak memory", "of its own", "limit", "within it"]
    first = record.stages[0].environment
    versions = " and ".join(dict.fromkeys(stage.environment.toolkit for stage in record.stages))
    where = (
        f"Measured from {first.created[:10]} on, {first.machine}, {first.threads} threads, version {versions} "
        "(`recipes/full-size.json`)."
    )
    return f"{markdown.table(header, body)}\n\n{where}"


def estimates() -> str:
    """How near `--dry-run` came to what then happened: a row for every run."""
    record = Check.read(ESTIMATES)
    body = []
    for name, case in record.cases.items():
        whole = case.whole
        seconds, memory = map(duration, whole.seconds), map(_gib, whole.memory)
        made = case.environment or record.environment
        body.append(
            [
                name,
                *seconds,
                f"{whole.seconds_ratio:.2f}",
                *memory,
                f"{whole.memory_ratio:.2f}",
                duration(case.took),
                f"{made.created[:10]}, version {made.toolkit}" + ", processor time" * ((case.clock or record.clock) == "cpu"),
            ]
        )
    header = ["run", "time, estimated", "then", "ratio", "peak memory, estimated", "then", "ratio", "the estimate took", "on"]
    where = record.environment
    return f"""{markdown.table(header, body)}

Each is to be within a factor of {TIME:g} in time, either way, and {MEMORY:.0%} in memory. Measured on {where.machine} \
(`recipes/estimates.json`, with every stage). Processor time: with one thread, while other programs ran."""


def _whole(stage: Stage, model: Published) -> bool:
    """Whether a stage is of a model that was not cut."""
    return stage.model == model.name and (stage.layers, stage.vocabulary) == (model.layers, model.config["vocab_size"])


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"
