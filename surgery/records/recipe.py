"""A recipe: one YAML file, one run. Unknown keys are refused by name; defaults are those of the demo's scale.

The text below a field says what the setting means; `surgery list settings` prints it.
"""

import copy
import re
import types
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

import pydantic
import yaml
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from surgery.errors import UserError, did_you_mean
from surgery.records.record import Record, is_elsewhere
from surgery.records.site import SitesText
from surgery.runtime.files import read_text
from surgery.runtime.listing import list_modules, list_table
from surgery.runtime.yaml import parse_yaml

TOY = "toy"
"""The name of the built-in toy data, where a text or facts are named."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""OWNER/NAME, of a model or of a set of data."""


def _several(value: Any) -> Any:
    """`16` as (16,), `kv,text` as ("kv", "text")."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",")) if value.strip() else ()
    return (value,) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _number(value: Any) -> Any:
    """Whatever pydantic takes for a number, but true and false."""
    if isinstance(value, bool):
        raise ValueError(f"{str(value).lower()} is no number")
    return value


Number = Annotated[float, BeforeValidator(_number)]
Tracker = Literal["aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio", "wandb"]
Count = Annotated[int, Field(ge=1, le=10**9, strict=True)]
Rows = Annotated[int, Field(ge=1, le=2**20, strict=True)]
Tokens = Annotated[int, Field(ge=2, le=2**24, strict=True)]
Weight = Annotated[Number, Field(ge=0, le=1e6)]
Share = Annotated[Number, Field(ge=0, le=1)]
Counts = Annotated[tuple[Annotated[int, BeforeValidator(_number), Field(ge=1, le=10**9)], ...], BeforeValidator(_several)]
Names = Annotated[tuple[str, ...], BeforeValidator(_several)]
OFF = (False, "no", "off", "none")
AUTO: Any = Field(union_mode="left_to_right")


def check_probe(name: str) -> str:
    """The name. Raises ValueError for a probe that there is not."""
    _check_known(name, "probe", list_modules("probes", "PROBE"))
    return name


def _check_known(name: str, kind: str, known: dict[str, str], key: str = "") -> None:
    if name not in known:
        raise ValueError(f"{key}there is no {kind} '{name}'{did_you_mean(name, known)}; `surgery list {kind}s` has them")


class Locate(Record):
    """How the heads of a model are ranked. Choose a probe at which the base is neither perfect nor at chance."""

    probe: Annotated[str, AfterValidator(check_probe)] = "kv"
    """A probe by name (`surgery list probes`)."""
    options: dict[str, Any] = Field(default_factory=lambda fields: {"pairs": 32} if fields.get("probe") == "kv" else {})
    """The probe's options. For kv: 32 pairs."""
    examples: Annotated[int, Field(ge=2, le=10**6, strict=True)] = 256
    """Questions that the model answers."""
    exact: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of all heads, the leading ones by attribution, whose gain is measured by splicing each in turn. 1: all."""
    roles: Annotated[int, Field(ge=0, le=10**6, strict=True)] = 8
    """How many leading heads are ablated by position in the text, which tells gather heads from aggregate heads."""
    batch_size: Rows = 32
    """Questions in a forward pass."""


class PlanOptions(Record):
    """Which sites become attention, and how the attention starts."""

    kind: Literal["head", "layer"] = "head"
    """`head`: attention at some heads inside the SSM mixer. `layer`: attention in the place of the whole mixer."""
    heads: Annotated[Count | Literal["auto"], AUTO] = 2
    """How many of the leading heads are grafted. auto: heads are added while the next one is worth its cache. For kind head."""
    max_heads: Count = 4
    """At most this many heads, where heads is auto."""
    least_gain: Weight = 0.02
    """Where heads is auto: another head is worth its cache if it saves this many nats a question, or if it answers more
    questions, by a difference beyond chance."""
    layers: Count = 1
    """How many of the leading layers are grafted. For kind layer."""
    sites: SitesText | None = None
    """These sites instead of the leading ones, e.g. L1.H3,5;L2.H0."""
    gate: Share = 0.5
    """g, the share of attention where a graft is open, at the start; it is trained. For kind head."""
    share: Annotated[Number, Field(gt=0, lt=1)] | None = 0.01
    """The mean open share of an untrained graft on data.train_text, by which its null key is set. null: no null key; attention
    acts at every token, as up to version 0.30. For kind head."""
    keep_skills: bool = False
    """Null keys read the query: they are fitted to be open at the answers that locate.probe asks for, and closed on text and on
    questions about the other skills (data.skills). For kind head."""
    closed_below: Annotated[Number, Field(ge=0, lt=1)] = 0.02
    """In inference a graft whose open share is below this value leaves its head exactly as the base has it. For kind head."""
    width: Annotated[int, Field(ge=1, le=2**14, strict=True)] | None = None
    """Width of queries and keys; by default the state size, and at least 32; for kind layer, of a head."""
    donor: str | None = None
    """A Transformer whose attention weights a layer graft starts from: a folder or a Hub id. For kind layer."""
    donor_layers: dict[Annotated[str, Field(pattern=r"^L\d{1,9}$")], Annotated[int, Field(ge=0, strict=True)]] = {}
    """Layer of the model -> number of the donor's layer, e.g. {L3: 7}; the same number where a layer is not named."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sites is not None and not self.sites:
            raise ValueError("sites: is empty; leave it out to take the leading ones")
        for site in self.sites or ():
            if bool(site.heads) != (self.kind == "head"):
                raise ValueError(f"sites: {site} {'names' if site.heads else 'needs'} heads, and plan.kind is {self.kind}")
        if self.keep_skills and (self.share is None or self.kind != "head"):
            raise ValueError("keep_skills: is for heads with null keys, which plan.share sets")
        if self.donor is not None and self.kind != "layer":
            raise ValueError("donor: is for plan.kind=layer; heads start from their own weights")
        return self


class Data(Record):
    """The text that tuning sees, and the text, facts and skills that a model is measured on."""

    train_text: Annotated[Names, Field(min_length=1)] = (TOY,)
    """Text on which tuning holds the model to its base: files (.txt, .md, .jsonl, .csv, .parquet), folders of them, or ids of
    data sets on the Hub, in equal parts. toy: the built-in toy data, which only the built-in models know."""
    held_out_text: str = TOY
    """Text on which the loss is measured; other text than train_text."""
    column: str = "text"
    """The field of a document that holds its text."""
    facts: str = TOY
    """Facts that are asked: toy (the built-in toy data), capitals (real ones), or a .jsonl file."""
    skills: Annotated[Literal["auto"] | Names, AUTO] = "auto"
    """Skills that an edit must not cost: choice (multiple choice) and knowledge (facts). auto: both, choice where
    facts have four choices. []: none."""
    rare: Weight = 10.0
    """Repeated rare bigrams: how often, per million tokens of train_text, such a bigram may occur."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for skill in () if self.skills == "auto" else self.skills:
            if skill not in ("choice", "knowledge"):
                raise ValueError(f"skills: there is no skill '{skill}'; there are choice and knowledge")
        return self


class Examples(Record):
    """Training examples: a probe's questions with their answers."""

    probe: str = "kv"
    """A probe by name (`surgery list probes`)."""
    options: dict[str, Any] = {}
    """The probe's options. An option given as [smallest, largest] is drawn anew for each batch."""
    queries: Count | None = None
    """How many questions follow one dictionary, 8 by default. For kv only; other probes ask one."""
    weight: Annotated[Number, Field(gt=0, le=1e6)] = 1.0
    """How often this probe is drawn, relative to the others."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_probe(self.probe)
        for name, value in self.options.items():
            if isinstance(value, list | tuple) and not (
                len(value) == 2 and all(type(end) is int for end in value) and value[0] <= value[1]
            ):
                raise ValueError(f"options.{name}: {value} is no range; give [smallest, largest]")
        return self


class Hints(Record):
    """A loss that shows the grafts where the answer of a training example, or a repeated bigram (tune.bigram_weight), stood
    before: minus the log of the attention paid to that place."""

    weight: Annotated[Number, Field(gt=0, le=1e6)] = 0.3
    """Weight of the hints in the loss."""


class Lora(Record):
    """Adapters on the base that learn together with the grafts, by peft."""

    target_modules: Annotated[Names, Field(min_length=1)]
    """Names of modules within the blocks, or how they end (in_proj, out_proj)."""
    r: Annotated[int, Field(ge=1, le=2**14, strict=True)] = 8
    """The rank."""
    lora_alpha: Annotated[Number, Field(gt=0, le=1e6)] = 16.0
    """Adapters are scaled by lora_alpha / r."""
    lora_dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.0
    """Dropout on an adapter's input."""


class Tune(Record):
    """How the grafts are trained. A step sees a batch of training examples and a batch of text, on which the hybrid is held to
    its base by a KL term."""

    steps: Annotated[Annotated[int, Field(ge=1, le=10**7, strict=True)] | Literal["auto"], AUTO] = 150
    """Training steps. auto: until the loss on examples that are kept back is flat."""
    max_steps: Count = 1000
    """The most steps, where steps is auto."""
    examples: tuple[Examples, ...] = (Examples(options={"pairs": (4, 64)}),)
    """The training examples (section tune.examples): each step draws one entry, by weight. []: none; then bigram_weight
    teaches."""
    batch_size: Rows = 16
    """Training examples in a step."""
    text_batch_size: Annotated[int, Field(ge=0, le=2**20, strict=True)] = 4
    """Rows of text in a step."""
    text_tokens: Tokens = 192
    """Tokens of a row of text. Shorter documents share a row."""
    kl_weight: Weight = 1.0
    """Weight of the KL divergence from the base on text."""
    skill_weight: Weight = 0.0
    """Weight of the KL divergence from the base on the answers to questions about its other skills (data.skills)."""
    bigram_weight: Weight = 0.0
    """Weight of the loss on repeated rare bigrams of the text: tokens that complete a bigram seen before in their document and
    rare in data.train_text."""
    learning_rate: Annotated[Number, Field(gt=0, le=1e6)] = 3e-3
    """The largest learning rate. It falls to 0 along a cosine; with steps=auto, only once the loss is flat."""
    warmup_steps: Annotated[int, Field(ge=0, le=10**9, strict=True)] = 10
    """Steps over which the learning rate rises."""
    save_steps: Count = 50
    """Steps between two checkpoints, from which --resume continues."""
    hints: Hints | None = None
    """What shows the grafts where the answers are (section tune.hints). {} for its defaults."""
    lora: Lora | None = None
    """Adapters on the base that learn together with the grafts (section tune.lora)."""
    gradient_checkpointing: bool = False
    """Compute activations again on the backward pass: less memory, more time, the same result."""
    gradient_accumulation_steps: Count = 1
    """Divide a batch into this many parts that go through the model one after the other: less memory, the same result."""
    mixed_precision: Annotated[Literal["bf16"] | None, BeforeValidator(lambda value: None if value in OFF else value)] = None
    """bf16: compute in bfloat16, keep what is trained in float32."""
    report_to: Annotated[tuple[Tracker, ...], BeforeValidator(lambda value: () if value in OFF else _several(value))] = ()
    """Trackers that the log also goes to, by accelerate (tensorboard, wandb, ...); none or []: no tracker."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gradient_accumulation_steps > self.batch_size:
            raise ValueError("gradient_accumulation_steps: is more than batch_size")
        if self.bigram_weight and not self.text_batch_size:
            raise ValueError("bigram_weight: bigrams are found in text, and text_batch_size is 0")
        if self.steps == "auto" and not self.examples:
            raise ValueError("steps: auto asks for the loss on examples, and there are none; give a number")
        if not (self.examples or self.bigram_weight):
            raise ValueError("examples: is empty, so that nothing teaches retrieval; set bigram_weight, or leave examples out")
        return self


class Bench(Record):
    """What models are measured on, all of them on the same questions."""

    suites: Annotated[Names, Field(min_length=1)] = ("quick",)
    """What is measured (`surgery list suites`)."""
    pairs: Annotated[Counts, Field(min_length=1)] = (4, 8, 16, 32, 64)
    """Sizes of the dictionaries, with keys that tuning may use. The verdict is about the largest."""
    unseen_pairs: Counts | None = None
    """Sizes of the dictionaries with keys not used in tuning; by default the last of pairs."""
    between: Annotated[int, Field(ge=0, le=100, strict=True)] = 0
    """Words between a key and its value in these dictionaries."""
    limit: Annotated[int, Field(ge=2, le=10**6, strict=True)] = 500
    """Questions for each size and probe; of a file of facts at most one about each."""
    windows: Count = 64
    """Windows of text for the loss."""
    window: Tokens = 256
    """Tokens of a window."""
    contexts: Counts = (256, 1024, 4096)
    """Lengths in tokens at which decoding is timed and the cache is counted. []: none."""
    batches: Annotated[tuple[Rows, ...], BeforeValidator(_several)] = (1,)
    """Batch sizes at which decoding is timed."""
    batch_size: Rows = 64
    """Sequences in a forward pass. The scores do not depend on it."""
    tasks: Names = ()
    """Tasks of lm-evaluation-harness, by name."""
    include_path: str | None = None
    """A folder of task files (YAML) for lm-evaluation-harness."""
    task_limit: Count | None = None
    """Examples of each task of lm-evaluation-harness; all by default."""
    controls: Names = ("tuned", "same_layer", "prompt_twice")
    """What a gain has to beat, on the same questions (`surgery list controls`). []: none. Whole layers have no same_layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for suite in self.suites:
            _check_known(suite, "suite", list_table("evaluation/suites.py", "SUITES"), "suites: ")
        for control in self.controls:
            _check_known(control, "control", list_table("evaluation/controls.py", "CONTROLS"), "controls: ")
        return self


class Recipe(Record):
    """Everything that a run depends on. Output goes to runs/<the recipe's file name> unless --out says otherwise."""

    model: str
    """The base: an id on the Hub, a folder, or a patch."""
    tokenizer: str | None = None
    """Another tokenizer than the model's: an id on the Hub or a folder."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What the model is computed in; auto: as it is stored."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU if there is one."""
    seed: Annotated[int, Field(ge=0, lt=2**32, strict=True)] = 0
    """The seed of everything that is drawn at random."""
    data: Data = Data()
    """Section data: texts, facts and skills."""
    locate: Locate = Locate()
    """Section locate: how the heads are ranked."""
    plan: PlanOptions = PlanOptions()
    """Section plan: which sites become attention, and how it starts."""
    tune: Tune = Tune()
    """Section tune: how the grafts are trained."""
    bench: Bench = Bench()
    """Section bench: what models are measured on."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if "adapters" in self.bench.controls and self.tune.lora is None:
            raise ValueError("bench.controls: adapters are those of tune.lora, and there are none")
        if self.plan.kind == "layer":
            if "controls" not in self.bench.model_fields_set:
                self.__dict__["bench"] = self.bench.model_copy(update={"controls": ("tuned", "prompt_twice")})
            if wrong := {"same_layer", "window", "whole_layer"} & set(self.bench.controls):
                raise ValueError(f"bench.controls: {min(wrong)} is for plan.kind=head")
        return self

    def public(self) -> dict[str, Any]:
        """The recipe as records hold it: names of files without the folders they lie in."""

        def shorten(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: shorten(each) for key, each in value.items()}
            if isinstance(value, list):
                return [shorten(each) for each in value]
            return Path(value).name if isinstance(value, str) and is_elsewhere(value) else value

        return shorten(self.model_dump(mode="json"))

    def input_files(self) -> list[str]:
        """Everything on this machine that a run reads; an output may not be, or hold, any of it."""
        names = [self.model, self.tokenizer, self.plan.donor, self.bench.include_path]
        return [name for name in names if name and Path(name).exists()] + [str(path) for path in self.data_files()]

    def data_files(self) -> list[Path]:
        """The texts, facts and questions that are read; their contents are part of the settings."""
        options = [self.locate.options, *(entry.options for entry in self.tune.examples)]
        given = [value for each in options for value in each.values()]
        values = [each for value in given for each in (value if isinstance(value, list | tuple) else [value])]
        facts = [name for name in (self.data.facts, *values) if isinstance(name, str) and name != "capitals"]
        names = {*self.data.train_text, self.data.held_out_text, *facts} - {TOY, ""}
        found = set[Path]()
        for path in map(Path, names):
            with suppress(OSError):  # an option that is a long text is no file
                found |= {path} if path.exists() else set()
        return sorted(found)


# Settings of 0.30 that went, by section, and where their work is done now.
GONE = {
    "": "kernels study",
    "locate": "init layers ablation seeds also",
    "plan": "by init mlp shared blend state_size window cache_budget auto",
    "tune": "lessons skill_batch_size hit_weight rare decay rename early_stopping",
    "bench": "seeds data_path rare words concurrencies random_sites",
}
INSTEAD = {
    "plan.blend": "set plan.gate, and plan.share",
    "plan.auto": "set plan.max_heads and plan.least_gain",
    "tune.lessons": "set tune.examples",
    "tune.hit_weight": "set tune.bigram_weight",
    "tune.rare": "set data.rare",
    "bench.rare": "set data.rare",
    "bench.random_sites": "name random_site in bench.controls",
}


def list_settings(section: type[Record] = Recipe, place: str = "") -> Iterator[tuple[str, pydantic.fields.FieldInfo]]:
    """(dotted key, field) of every setting; a field that holds a section is no setting itself."""
    for name, field in section.model_fields.items():
        key = f"{place}.{name}".lstrip(".")
        inner = _section_in(field.annotation)
        if inner is None:
            yield key, field
        else:
            yield from list_settings(inner, key)


def _section_in(annotation: Any) -> type[Record] | None:
    """The section that a field of this type holds, or a list of."""
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, Annotated):
        return next((found for part in get_args(annotation) if (found := _section_in(part)) is not None), None)
    return None


def read_recipe(path: str | Path | None, settings: Sequence[str] = (), model: str | None = None) -> Recipe:
    """Read a recipe, change it by `key=value` settings (dotted keys, values in YAML), and its model.

    Raises UserError, in one line, for a file that is no recipe and for settings that do not fit.
    """
    tree = {} if path is None else parse_yaml(read_text(path), str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path} is no recipe: it holds no keys")
    tree = apply_settings(tree, settings)
    return make_recipe(tree if model is None else tree | {"model": model}, str(path or "--set"))


def make_recipe(tree: dict[str, Any], source: str) -> Recipe:
    """The recipe of a tree. source: names it in the message. Raises UserError where it does not fit."""
    try:
        return Recipe.model_validate(tree)
    except pydantic.ValidationError as error:
        raise UserError(f"{source}: {_complaint(error)}") from error


def recipe_text(recipe: Recipe) -> str:
    """A recipe as YAML, without what is at its default."""
    return yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


def apply_settings(tree: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of a recipe's tree, changed by `key=value` settings. Raises UserError for what is none."""
    tree = copy.deepcopy(tree)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise UserError(f"--set takes KEY=VALUE, e.g. tune.steps=300, not '{setting[:80]}'")
        if not value.strip():
            raise UserError(f"--set {key}: there is no value behind '='; null stands for none, [] for an empty list")
        *parents, leaf = key.strip().split(".")
        branch = tree
        for name in parents:
            branch[name] = {} if branch.get(name) is None else branch[name]
            branch = branch[name]
            if not isinstance(branch, dict):
                raise UserError(f"--set {key}: '{name}' has no keys of its own")
        branch[leaf] = parse_yaml(value, f"--set {key}: the value")
    return tree


def _complaint(error: pydantic.ValidationError) -> str:
    """What does not fit, in one line; a key that does not exist is compared with those that do, of today and of 0.30."""
    detail = error.errors()[0]
    names = [part for part in detail["loc"] if isinstance(part, str) and re.fullmatch(r"\w+", part) and part != "int"]
    if detail["type"] != "extra_forbidden":
        message = detail["msg"].removeprefix("Value error, ").replace("a valid tuple", "a list")
        others = [each["ctx"]["expected"] for each in error.errors()[1:] if each["type"] == "literal_error"]
        message += f", or {others[0]}" if others and detail["loc"][-1] == "int" else ""
        message = re.sub(r"a valid dictionary or instance of \w+", "a section, which has keys of its own", message)
        field, colon, rest = message.partition(": ")  # a check of a whole section names the field itself
        if colon and field.isidentifier():
            return f"{'.'.join([*names, field])}: {rest}"
        return f"{'.'.join(names)}: {message}".removeprefix(": ")
    key = ".".join([*names[: len(detail["loc"]) - 1], str(detail["loc"][-1])])
    section, _, name = key.rpartition(".")
    if name in GONE.get(section, "").split():
        instead = f"; {INSTEAD[key]}" if key in INSTEAD else ""
        return f"there is no setting '{key}' any more: version 0.30.0 was the last that had it{instead}"
    known = {setting for setting, _ in list_settings()}
    known |= {setting.rpartition(".")[0] for setting in known} - {""}
    return f"there is no setting '{key}'{did_you_mean(key, known)}; `surgery list settings` has them"
