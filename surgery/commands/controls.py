"""The cheapest control of hybrids that are tuned: their base, tuned alike without a graft. `surgery bench` trains it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from surgery.costs.rehearsal import rehearse
from surgery.errors import UserError
from surgery.evaluation.entries import Entry
from surgery.jobs.entries import without_graft
from surgery.jobs.opening import is_hybrid
from surgery.jobs.tuning_stage import record_of, steps_of, take_over, tuned
from surgery.loading.opened import Checkpoint
from surgery.records.names import CONTROL_TUNED, is_control
from surgery.records.plan import PLAN, Plan
from surgery.records.recipe import Data, Recipe, read_recipe
from surgery.runtime.processes import on_main
from surgery.runtime.progress import duration, say
from surgery.splicing.splice import adopt
from surgery.tuning.plateau import taken
from surgery.tuning.state import state_of
from surgery.tuning.trainable import with_own_mixers

LEAVES_OUT = "--set bench.controls=false leaves it out"
UNMEASURED = "no control is measured, so no gain will count"


@dataclass(frozen=True)
class Control:
    """A control to be trained. plan: of the hybrid, whose layers are tuned; the recipe is what the hybrid was tuned by, with as
    many steps as it took. earlier: where the run that made the hybrid keeps its own control."""

    plan: Plan
    recipe: Recipe
    earlier: Path = field(compare=False)


def controls_of(recipe: Recipe, base: Checkpoint, hybrids: Mapping[str, str]) -> list[Control]:
    """What `surgery bench` has to train: one control for every way in which the hybrids (label -> folder) were tuned. None
    where the recipe of the comparison says so, or one of the models is a control already."""
    if not recipe.bench.has("tuned") or any(map(is_control, hybrids)) or is_hybrid(base):
        return []
    controls: list[Control] = []
    for label, name in hybrids.items():
        if not (Path(name) / PLAN).exists() or (learnt := _learnt_by(Path(name), recipe)) is None:
            continue  # not a hybrid, or never tuned
        control = Control(Plan.read(Path(name) / PLAN), learnt, Path(name).parent / "tuning" / CONTROL_TUNED)
        if not control.plan.sites:  # windows: without them nothing is lost that could be kept
            continue
        if (other := _other_base(control.plan, base)) is not None:
            say(f"{label} was made from another base ({other}): {UNMEASURED}")
        elif control not in controls:
            controls.append(control)
    return controls


def trained(controls: Iterable[Control], base: Checkpoint, out: Path, *, resume: bool) -> dict[str, Entry]:
    """The controls by name, tuned in out/tuning; with `resume`, what is there is not tuned again, nor is what the run of the
    hybrid has tuned already. What each takes is said first. One whose text or facts are not here is left out, and a line says
    so."""
    entries: dict[str, Entry] = {}
    for name, control in names_of(controls).items():
        layers, description = without_graft(control.plan)
        options = control.recipe.tune
        model, teacher = with_own_mixers(base, layers), adopt(base.model)
        place = out / "tuning" / name
        try:
            there = resume and place.exists()
            if not there and on_main(partial(take_over, control.earlier, place, record_of(base, control.recipe, None, layers))):
                say(f"{name}: {description}: taken from {control.earlier}")
                there = True
            elif not there:
                takes = duration(seconds_of(control, base))
                say(f"{name}: {description}: {steps_of(options)}, about {takes}; {LEAVES_OUT}")
            tuned(
                model, base, control.recipe, place, plan=None, layers=layers, teacher=teacher, resume=there, description=name,
            )  # fmt: skip
        except UserError as error:
            say(f"{name} cannot be tuned ({error}): {UNMEASURED}; --set data.train_text=FILE names the text")
            continue
        entries[name] = Entry(model, description)
    return entries


def names_of(controls: Iterable[Control]) -> dict[str, Control]:
    """By the name that the report gives them."""
    return {CONTROL_TUNED + (f"_{number}" if number > 1 else ""): each for number, each in enumerate(controls, start=1)}


def seconds_of(control: Control, base: Checkpoint) -> float:
    """What tuning a control will take on this machine as busy as it is, from a few steps of it. Raises UserError where its text
    or facts are not here."""
    layers, _ = without_graft(control.plan)
    options, model = control.recipe.tune, with_own_mixers(base, layers)
    cost = rehearse(
        model, base.tokenizer, options, data=control.recipe.data, seed=control.recipe.seed, layers=layers,
        teacher=adopt(base.model),
    )  # fmt: skip
    return cost.costs[0].seconds * cost.pace.slowed * options.most_steps


def _learnt_by(hybrid: Path, recipe: Recipe) -> Recipe | None:
    """What a hybrid was tuned by, with as many steps as it took; None if there is no record of that. An export names no folder
    of the machine that it was made on, so what lies next to it is taken first: the recipe of its run, or of `surgery tune`.
    Text and facts that the comparison itself names go before both."""
    places = (hybrid.parent / f"{hybrid.name}-tuning", hybrid.parent)
    own = _read(hybrid)
    if own is None:
        return None
    beside = next((each for each in map(_read, places) if each is not None and each.tune == own.tune), own)
    given = recipe.data.model_dump(include=recipe.data.model_fields_set)
    data = Data.model_validate(beside.data.model_dump() | given)
    states = map(state_of, (places[0], hybrid.parent / "tuning" / "tuned"))
    log = next((state.log for state in states if state is not None), [])
    return beside.model_copy(update={"data": data, "kernels": recipe.kernels, "tune": taken(beside.tune, log)})


def _read(folder: Path) -> Recipe | None:
    try:
        return read_recipe(folder / "recipe.yaml") if (folder / "recipe.yaml").exists() else None
    except UserError:  # of another version, or another verb's
        return None


def _other_base(plan: Plan, base: Checkpoint) -> str | None:
    """The base of a plan, if that is another one. In another dtype a base has another fingerprint."""
    origin = plan.provenance
    same_dtype = plan.dtype == str(base.model.dtype).removeprefix("torch.")
    if origin is None or not same_dtype or origin.base_fingerprint == base.fingerprint:
        return None
    return origin.base
