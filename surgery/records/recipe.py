"""A recipe: one YAML file, one run. Unknown keys are refused by name; defaults are those of the demo's scale."""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import pydantic
from pydantic import Field

from surgery.errors import UserError
from surgery.records.complaints import complaint, place_of
from surgery.records.reading import shown
from surgery.records.record import read_text
from surgery.records.sections.benching import Bench, Suite
from surgery.records.sections.data import Data, Skill, Text
from surgery.records.sections.locating import Auto, CacheBudget, Locate, PlanOptions, ProbeChoice, WindowOptions
from surgery.records.sections.section import Name, Section
from surgery.records.sections.tuning import EarlyStopping, Hints, Lesson, Lora, Rename, Tune
from surgery.records.yaml_text import parse_yaml

__all__ = [
    "Auto", "Bench", "CacheBudget", "Data", "EarlyStopping", "Hints", "Lesson", "Locate", "Lora", "PlanOptions", "ProbeChoice",
    "Recipe", "Rename", "Skill", "Suite", "Text", "Tune", "WindowOptions", "changed", "read_recipe",
]  # fmt: skip


def _named(study: Any) -> Any:
    """A study by its name alone, or with options; the name is text."""
    study = {"name": study} if isinstance(study, str) else study
    if isinstance(study, dict) and not isinstance(study.get("name"), str):
        raise ValueError("needs the name of a study; `surgery list studies` has them")
    return study


class Recipe(Section):
    """Everything that a run depends on. Output goes to runs/<the recipe's file name> unless --out says otherwise."""

    model: Name
    """The base: an id of the Hub, a folder, or a patch."""
    tokenizer: Name | None = None
    """Another tokenizer than the model's: an id of the Hub or a folder."""
    dtype: str = "auto"
    """What the model is computed in (float32, bfloat16, float16); auto: as it is stored."""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto: a GPU if there is one."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """The seed of everything that is drawn at random."""
    kernels: dict[str, str] = {}
    """Operation -> backend, where it is not to be the preferred one (`surgery list kernels`)."""
    data: Data = Data()
    """Section data: the text that tuning sees, and the text and facts that a model is measured on."""
    locate: Locate = Locate()
    """Section locate: how the heads are ranked."""
    plan: PlanOptions = PlanOptions()
    """Section plan: which sites become attention, and how it starts."""
    tune: Tune = Tune()
    """Section tune: how the grafts are trained."""
    bench: Bench = Bench()
    """Section bench: what models are measured on."""
    study: Annotated[dict[str, Any] | None, pydantic.BeforeValidator(_named)] = None
    """Instead of the main job a study: its name (`surgery list studies`) and its options."""

    @pydantic.field_validator("device")
    @classmethod
    def _has_memory(cls, device: str) -> str:
        if device == "meta":
            raise ValueError("nothing can be computed on meta, which holds no numbers; take cpu, cuda or auto")
        return device

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> Self:
        """Refuse sections that contradict each other."""
        if self.plan.kind == "layer" and self.plan.sites is None and not self.locate.layers:
            raise ValueError("plan.kind=layer takes the leading layers, and locate.layers=false ranks none; name plan.sites")
        return self


def read_recipe(path: str | Path | None, settings: list[str] | None = None, **fixed: Any) -> Recipe:
    """Read a recipe, change it by `key=value` settings (dotted keys, values in YAML), and fix some of its fields."""
    if not isinstance(path, str | Path | None):
        raise UserError(f"read_recipe takes the name of a file, not {type(path).__name__}")
    if not (settings is None or (isinstance(settings, list | tuple) and all(isinstance(each, str) for each in settings))):
        raise UserError(f"read_recipe takes a list of settings, such as ['tune.steps=40'], not {settings!r}")
    tree = with_settings({} if path is None else _tree(path), settings or ())
    tree |= {key: value for key, value in fixed.items() if value is not None}
    return recipe_from(tree, settings or (), "recipe" if path is None else f"recipe {path}")


def with_settings(tree: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of a recipe's tree, changed by `key=value` settings."""
    tree = copy.deepcopy(tree)
    for setting in settings:
        _apply(tree, setting)
    return tree


def _tree(path: str | Path) -> dict[str, Any]:
    """What a recipe's file holds."""
    tree = parse_yaml(read_text(path, "the recipe"), str(path))
    if not isinstance(tree, dict):
        raise UserError(f"{path} is not a recipe: it holds no keys")
    if "architecture" in tree and "model" not in tree:
        raise UserError(f"{path} is a recipe for `surgery pretrain`; one for `surgery run` has the key model")
    return tree


def _apply(tree: dict[str, Any], setting: str) -> None:
    """Change a recipe's tree by one `key=value`."""
    key, equals, value = setting.partition("=")
    if not equals:
        raise UserError(f"--set takes key=value, not '{shown(setting)}'")
    branch = tree
    *parents, leaf = key.strip().split(".")
    for name in parents:
        branch[name] = {"name": branch[name]} if name == "study" and isinstance(branch.get(name), str) else branch.get(name)
        if branch[name] is None:
            branch[name] = {}
        branch = branch[name]
        if not isinstance(branch, dict):
            raise UserError(f"--set {shown(setting)}: '{shown(name, 40)}' has no keys of its own")
    branch[leaf] = parse_yaml(value, f"--set {shown(setting)}: the value")


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with some other values; those of a section leave the rest of it. Raises UserError if they do not fit."""
    tree = recipe.model_dump(mode="json")
    for key, value in changes.items():
        tree[key] = tree[key] | value if isinstance(value, dict) else value
    return recipe_from(tree, source="recipe, changed")


def recipe_from(tree: dict[str, Any], settings: Sequence[str] = (), source: str = "recipe") -> Recipe:
    """The recipe of a tree. settings: those of --set that are in it; a complaint about one of them does not name the source."""
    try:
        return Recipe.model_validate(tree)
    except pydantic.ValidationError as error:
        place = f"{place_of(error)}."
        keys = [f"{setting.partition('=')[0].strip()}." for setting in settings]
        if any(place.startswith(key) or key.startswith(place) for key in keys):
            source = "--set"
        raise UserError(f"{source}: {complaint(error, Recipe)}") from error
