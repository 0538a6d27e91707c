"""A recipe: one YAML file, one run. Unknown keys are refused by name; defaults are those of the demo's scale.

Sources of data ("facts", "train_text", "held_out_text") are "world" (the small world of the built-in models), "capitals" (facts
only: real ones, for real models), or a file; text to train on can also be a mixture of these and of datasets.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import yaml
from pydantic import Field

from surgery.errors import UserError
from surgery.records.record import Record, first_line, read_text
from surgery.records.site import SitesText, SiteText


class Text(Record):
    """A source of text, and its share `weight` of a mixture: "world", a text file, a .jsonl, .json, .csv or .parquet file, a
    folder of such files, or a dataset's id on the Hub. All but the first two hold documents, in `column`. `subset` and `split`
    are a dataset's; streaming: read in order, not loaded first."""

    source: str
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    column: str = "text"
    subset: str | None = None
    split: str = "train"
    streaming: bool = False


def _mixture(given: Any) -> Any:
    return ({"source": given},) if isinstance(given, str) else given


class Data(Record):
    """train_text feeds the KL term of tuning: one source, or a mixture of Texts. held_out_text is for perplexity and must be
    other text: contents are compared, and at most 5% may be shared."""

    train_text: Annotated[tuple[Text, ...], pydantic.BeforeValidator(_mixture), Field(min_length=1)] = (Text(source="world"),)
    held_out_text: str = "world"
    facts: str = "world"


class ProbeChoice(Record):
    """A probe by name (surgery/probes/), and its options. For kv, 32 pairs unless it says otherwise."""

    probe: str = "kv"
    options: dict[str, Any] = Field(default_factory=lambda given: {"pairs": 32} if given["probe"] == "kv" else {})


class Locate(ProbeChoice):
    """probe, options: such that the base is neither perfect nor at chance. exact: measure heads exactly, not only by
    attribution; confirm: only this share of them, the leading ones; layers: whole layers, too. ablation: what comes instead of
    an ablated head (nothing, its mean, or its values on another example). seeds, also: repeat the ranking with the questions of
    so many seeds in all, and of other probes, and say how well the rankings agree."""

    examples: int = Field(default=256, ge=2)
    exact: bool = True
    confirm: float | None = Field(default=None, gt=0, le=1)
    layers: bool = True
    ablation: Literal["zero", "mean", "resample"] = "zero"
    batch_size: int = Field(default=32, ge=1)
    seeds: int = Field(default=1, ge=1, le=100)
    also: tuple[ProbeChoice, ...] = ()


class PlanOptions(Record):
    """kind: head or layer. heads, layers: how many leading ones to graft, unless sites names them. The rest as in plan.Plan."""

    kind: Literal["head", "layer"] = "head"
    heads: int = Field(default=1, ge=1)
    layers: int = Field(default=1, ge=1)
    sites: SitesText | None = None
    donor: str | None = None
    donor_heads: dict[str, SiteText] = {}
    donor_layers: dict[str, int] = {}
    mlp: bool = False
    width: int | None = Field(default=None, ge=1)
    shared: bool = False
    blend: float | None = Field(default=None, ge=0, le=1)


class Lesson(Record):
    """A probe's questions to learn from, drawn with weight `weight`. An option given as [smallest, largest] is drawn anew for
    every batch. queries: how many questions follow one dictionary (kv only, 8 by default); other probes ask one."""

    probe: str = "kv"
    options: dict[str, Any] = {}
    queries: int | None = Field(default=None, ge=1)
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @pydantic.field_validator("options")
    @classmethod
    def _ordered(cls, options: dict[str, Any]) -> dict[str, Any]:
        ranges = {name: tuple(value) for name, value in options.items() if isinstance(value, list | tuple)}
        for name, ends in ranges.items():
            if len(ends) != 2 or not all(type(end) is int for end in ends) or ends[0] > ends[1]:
                raise ValueError(f"{name} is {list(ends)}; a range needs whole numbers, smallest <= largest")
        return options | ranges


class Align(Record):
    """Before the end-to-end steps, each graft learns alone to do what the base does in its place: on `batches` batches, whose
    states are computed once (and no more of them than `cache_bytes` of Tune hold)."""

    steps: int = Field(default=60, ge=1)
    batches: int = Field(default=4, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)


class Calibrate(Record):
    """A search for what all tau are multiplied by, and for the gate of all heads, on `examples` lessons and as many batches of
    text as that makes; each is a grid, refined around its best point in at most `evaluations` evaluations."""

    examples: int = Field(default=16, ge=1)
    tau: tuple[float, ...] = Field(default=(0.5, 1.0, 2.0, 4.0, 8.0), min_length=1)
    gate: tuple[float, ...] = Field(default=(0.0, 0.1, 0.25, 0.5, 1.0), min_length=1)
    evaluations: int = Field(default=6, ge=0)


class Keep(Record):
    """Every so many steps: is the knowledge at most so much (accuracy) below the base's, and the perplexity at most so much
    (share) above it? If not, the steps end. The weights that retrieve best within both bounds are kept. Of a file of facts a
    quarter is asked about here, and bench asks about the rest."""

    every: int = Field(default=25, ge=1)
    knowledge: float = Field(default=0.01, ge=0)
    perplexity: float = Field(default=0.01, ge=0)
    examples: int = Field(default=256, ge=1)
    windows: int = Field(default=32, ge=1)


class Lora(Record):
    """Adapters on the base, beside the grafts: of `rank`, scaled by alpha / rank (rslora: by alpha / sqrt(rank); dora: beside a
    learned size of every row). targets: names of modules within the blocks, or how they end (in_proj, 3.mixer.in_proj), or
    those with a rank each."""

    kind: Literal["lora", "rslora", "dora"] = "lora"
    targets: Annotated[tuple[str, ...] | dict[str, Annotated[int, Field(ge=1)]], Field(min_length=1)]
    rank: int = Field(default=8, ge=1)
    alpha: float = Field(default=16.0, gt=0, allow_inf_nan=False)
    dropout: float = Field(default=0.0, ge=0, lt=1)


class Tune(Record):
    """A step sees `batch_size` sequences of one of the `lessons`, drawn by weight, and `text_batch_size` rows of at most
    `text_tokens` tokens of text, on which the model is held to its base with weight `kl_weight`; shorter documents share a row.
    curriculum: the share of the steps over which the lessons' ranges and the text grow to their full size.

    align, calibrate: stages before the steps (`steps: 0`: instead of them). keep: what ends the steps early. lora: adapters
    on the base that learn beside the grafts. repeat: so many distinct batches, again and again; what the fixed weights make of
    them is kept, up to `cache_bytes`. checkpointing: states within blocks are computed again on the way back, which saves
    memory. weight_decay: of matrices and convolution filters alone. accumulate: a batch goes through in so many parts.
    precision: bf16 computes in bfloat16 and keeps what is trained in float32, as is always done with a model in bfloat16
    or float16.
    trackers: where the log also goes, by accelerate (tensorboard, wandb, ...). Several processes divide every batch."""

    steps: int = Field(default=150, ge=0)
    batch_size: int = Field(default=16, ge=1)
    lessons: tuple[Lesson, ...] = Field(default=(Lesson(options={"pairs": (4, 64)}),), min_length=1)
    curriculum: float = Field(default=0.0, ge=0, le=1)
    text_batch_size: int = Field(default=4, ge=0)
    text_tokens: int = Field(default=192, ge=2)
    kl_weight: float = Field(default=1.0, ge=0)
    learning_rate: float = Field(default=3e-3, gt=0)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup: int = Field(default=10, ge=0)
    save_every: int = Field(default=50, ge=1)
    align: Align | None = None
    calibrate: Calibrate | None = None
    keep: Keep | None = None
    lora: Lora | None = None
    repeat: int | None = Field(default=None, ge=1)
    cache_bytes: int = Field(default=2**30, ge=0)
    checkpointing: bool = False
    accumulate: int = Field(default=1, ge=1)
    precision: Literal["bf16"] | None = None
    trackers: tuple[str, ...] = ()

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        if not (self.steps or self.align or self.calibrate):
            raise ValueError("steps: 0 leaves nothing to do without align or calibrate")
        if self.batch_size < self.accumulate:
            raise ValueError(f"accumulate: a batch of {self.batch_size} has no {self.accumulate} parts")
        if self.curriculum and self.repeat is not None:
            raise ValueError("curriculum: with repeat it would begin again each time that the batches do; leave out one")
        return self


Suite = Literal["quick", "retrieval", "language", "knowledge", "paper", "speed"]


class Bench(Record):
    """suites: what is measured (see surgery/evaluation/suites.py); tasks: more tasks of lm-evaluation-harness,
    tasks_path: a folder of its YAML files, which come first; data_path: a folder of data sets by their Hub ids (owner/name/),
    which come before the Hub; task_examples: of each such task, all where it is not said.

    pairs: dictionary sizes, asked with keys that lessons may hold; unseen_pairs: with keys that no lesson holds (by default
    the last of pairs); examples: per size and probe, for each of `seeds` seeds; windows of window tokens: for perplexity;
    contexts: lengths at which decoding is timed and needles are hidden, at `depths`; batches: for the suite speed; batch_size:
    what is measured at once, the scores do not depend on it.

    Of a run: controls: also measure the base tuned without a graft, grafts at `random_sites` random sites of other layers (the
    first also tuned), and one at other heads of the plan's own layers (also tuned); doses: also measure so many of the leading
    heads, spliced without training."""

    suites: tuple[Suite, ...] = Field(default=("quick",), min_length=1)
    tasks: tuple[str, ...] = ()
    tasks_path: str | None = None
    data_path: str | None = None
    task_examples: int | None = Field(default=None, ge=1)
    pairs: tuple[int, ...] = (4, 8, 16, 32, 48, 64)
    unseen_pairs: tuple[int, ...] | None = None
    examples: int = Field(default=500, ge=2)
    seeds: int = Field(default=1, ge=1)
    windows: int = Field(default=64, ge=1)
    window: int = Field(default=256, ge=2)
    contexts: tuple[int, ...] = (256, 1024, 4096)
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = (0.0, 0.5, 1.0)
    batches: tuple[Annotated[int, Field(ge=1)], ...] = (1, 8)
    batch_size: int = Field(default=64, ge=1)
    controls: bool = True
    random_sites: int = Field(default=2, ge=1)
    doses: tuple[Annotated[int, Field(ge=1)], ...] = ()


class Recipe(Record):
    """Everything that a run depends on. Output goes to runs/<the recipe's file name> unless --out says otherwise.

    kernels: operation -> backend, where another than the preferred one is wanted (`surgery doctor` lists them). study: instead
    of the main job, one of surgery/studies/: its name, and its options.
    """

    model: str
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    kernels: dict[str, str] = {}
    data: Data = Data()
    locate: Locate = Locate()
    plan: PlanOptions = PlanOptions()
    tune: Tune = Tune()
    bench: Bench = Bench()
    study: dict[str, Any] | None = None


def read_recipe(path: str | Path | None, settings: list[str] | None = None, **fixed: Any) -> Recipe:
    """Read a recipe, change it by `key=value` settings (dotted keys, values in YAML), and fix some of its fields."""
    tree: Any = {}
    if path is not None:
        try:
            tree = yaml.safe_load(read_text(path, "the recipe"))
        except yaml.YAMLError as error:
            raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
        if not isinstance(tree, dict):
            raise UserError(f"{path} is not a recipe: it holds no keys")
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--set takes key=value, not '{setting}'")
        branch = tree
        *parents, leaf = key.strip().split(".")
        for parent in parents:
            branch = branch.setdefault(parent, {})
            if not isinstance(branch, dict):
                raise UserError(f"--set {setting}: '{parent}' has no keys of its own")
        try:
            branch[leaf] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise UserError(f"--set {setting}: the value is not YAML") from error
    tree |= {key: value for key, value in fixed.items() if value is not None}
    return _valid(tree, "recipe" if path is None else f"recipe {path}")


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with some other values; those of a section leave the rest of it. Raises UserError if they do not fit."""
    tree = recipe.model_dump(mode="json")
    for key, value in changes.items():
        tree[key] = tree[key] | value if isinstance(value, dict) else value
    return _valid(tree, "recipe, changed")


def _valid(tree: dict[str, Any], what: str) -> Recipe:
    try:
        return Recipe.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UserError(f"{what}: {first_line(error)}") from error
