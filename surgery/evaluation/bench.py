"""Measure models side by side: the same questions for all, paired differences to the base, one verdict.

Which model and which measurement the verdict is about is decided before anything is measured. What a measurement gave is kept
in a folder, by what it depends on: the model as it is, what is asked, and the precision. So nothing is measured twice, and
nothing old is shown after a model, a text or a fact was replaced.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.evaluation.controls import PREFIX, describe_model, fit_copy_cache, is_control
from surgery.evaluation.costs import measure_costs
from surgery.evaluation.lm_eval import harness_measurements
from surgery.evaluation.statistics import corrected, detectable, difference, estimate, p_value, share_closed
from surgery.evaluation.suites import TEXT_SHARE, Given, Measurement, digest, measurements, twice
from surgery.evaluation.texts import measure_on_text, open_held_out
from surgery.evaluation.verdict import judge, main_measurement
from surgery.modeling import family_of
from surgery.models.digests import fingerprint
from surgery.records import report as records
from surgery.records.recipe import Bench, Data
from surgery.records.record import installed_version, provenance
from surgery.records.site import Site
from surgery.runtime.files import read_text, settings_digest, write_text
from surgery.runtime.progress import bar, say
from surgery.splicing.splice import adopt, changed_since_splice, measuring
from surgery.tuning.text import check_known, open_text, text_rows

COPY_ROWS = 32  # windows of training text on which a copy cache chooses its shares
Values = dict[str, dict[str, np.ndarray]]


def bench(
    models: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    options: Bench | None = None,
    *,
    data: Data | None = None,
    seed: int = 0,
    main: str = "tuned",
    folder: Path | None = None,
    base_name: str = "",
    recipe: dict[str, Any] | None = None,
    trained: Mapping[str, int] | None = None,
    back_to: Mapping[str, int] | None = None,
) -> records.Report:
    """Measure models on the same questions and say whether the main one is better than the first, the base.

    models: by name; names of a run are told in plain words (controls.describe_model), others are the user's. main: the model
    that the verdict is about; where it is not there, the last that is no control. folder: keeps each finished measurement.
    base_name: an id or folder, for the report's provenance; recipe: likewise. trained: how many numbers of a model were
    trained. back_to: the step whose weights came back, of models whose loss rose.

    Raises UserError for a suite whose data or package is missing, and for models that cannot be measured.
    """
    options, data = options or Bench(), data or Data()
    if not models:
        raise UserError("bench takes models by name, the base first, and there is none")
    if "copy_cache" in options.controls:
        check_known(data.train_text, tokenizer)
    given = Given(tokenizer, options, data, seed)
    asked = {each.name: each for each in [*measurements(given), *harness_measurements(given)]}
    base = next(iter(models))
    others = [name for name in models if name != base and not is_control(name)]
    main = main if main in others else (others or [base])[-1]
    about = main_measurement(list(asked))
    kept = Kept(folder)
    theirs = {id(parameter) for parameter in models[base].parameters()}
    for name, model in models.items():
        own = {part: id(parameter) for part, parameter in model.named_parameters()}
        if changed := [part for part in changed_since_splice(model) if own.get(part) in theirs]:
            what = f"{len(changed)} tensors that it shares with {name} were changed since the splice ('{changed[0]}')"
            say(f"bench: {base} is measured as it is now, not as it was loaded: {what}")
    with measuring(models.values()):
        prints = {name: fingerprint(model) for name, model in models.items()}
        costs = _costs(models, given)
        # A stock base in its hybrid's class, with the same modules: the code that its hybrids run in, so that equal numbers are
        # equal bit for bit. Other models as they are.
        families = {name: family_of(model.config) for name, model in models.items()}
        alike = {name: adopt(m) if (f := families[name]) and type(m) is f.base else m for name, m in models.items()}
        values: Values = {}
        for name, model in alike.items():
            values[name] = _answers(model, prints[name], name, asked, kept)
        family = about.partition(".")[0]  # of its smaller sizes, controls that nobody trained are not asked
        enough = {name: each for name, each in asked.items() if name.partition(".")[0] != family or name == about}
        values |= _untrained_controls(alike[base], prints[base], given, enough, kept)
        on_text = _on_text(alike, prints, given, kept)
    reports = {
        name: records.ModelReport(
            description=describe_model(name, models.get(name)) + " (undone)" * ((back_to or {}).get(name) == 0),
            role="base" if name == base else "control" if is_control(name) else "hybrid",
            fingerprint=prints.get(name, prints[base]),
            sites=_sites(models.get(name)),
            trained=(trained or {}).get(name),
            back_to=(back_to or {}).get(name),
            results={
                each: estimate(found, decisions=None if asked[each].metric == "accuracy" else False)
                for each, found in values[name].items()
            },
            changes=changes,
            behind=_change(values[name][about], values[main][about]) if is_control(name) and about in values[name] else None,
            costs=tuple(costs.get(name, ())),
            on_text=on_text.get(name),
        )
        for name, changes in _changes(values, main, about).items()
    }
    described = {
        name: records.Measurement(**{field: getattr(each, field) for field in records.Measurement.model_fields})
        for name, each in asked.items()
    }
    share = None
    if asked[about].metric == "accuracy":
        share = share_closed(values[base][about], values[main][about], np.ones(len(values[base][about])))
    return records.Report(
        verdict=judge(described, reports, main, about, share),
        measurements=described,
        models=reports,
        settings=options.model_dump(mode="json"),
        provenance=provenance(base_name or models[base].name_or_path or base, prints[base], seed, recipe),
    )


@dataclass(frozen=True)
class Kept:
    """A folder of finished measurements, each in a file named by a digest of what it depends on; without a folder, nothing."""

    folder: Path | None

    def load_or_measure(self, key: dict[str, Any], measure: Callable[[], Any]) -> Any:
        """A measurement, from its file or made now; JSON can hold it. key: all that it depends on, but for this package's
        version, which is added here."""
        if self.folder is None:
            return measure()
        key = json.loads(json.dumps({**key, "toolkit": installed_version("mamba-surgery")}))
        path = self.folder / f"{settings_digest(key)[:32]}.json"
        if path.exists():
            try:
                held = json.loads(read_text(path))
                if held["key"] == key:
                    return held["value"]
            except (ValueError, KeyError, TypeError, UserError):
                pass  # a file that is damaged is written again
        value = measure()
        write_text(path, json.dumps({"key": key, "value": value}) + "\n")
        return value


def _answers(model: Any, print: str, name: str, asked: Mapping[str, Measurement], kept: Kept) -> dict[str, np.ndarray]:
    """Measurement -> one value a question, (n,)."""
    found = {}
    for each in bar(asked.values(), f"bench: {name}", len(asked)):
        key = {"model": print, "device": model.device.type, "asked": each.digest, "measurement": each.name}
        found[each.name] = np.array(kept.load_or_measure(key, partial(_ask, each, model)))
    return found


def _ask(measurement: Measurement, model: Any) -> list[float]:
    return measurement.ask(model).tolist()


def _untrained_controls(base: Any, print: str, given: Given, asked: Mapping[str, Measurement], kept: Kept) -> Values:
    """The controls of bench.controls that nothing has to be trained for: model -> measurement -> values."""
    found: Values = {}
    if "prompt_twice" in given.options.controls:
        again = {name: each for name, measurement in asked.items() if (each := twice(measurement, given)) is not None}
        if again:
            found[f"{PREFIX}prompt_twice"] = _answers(base, print, "the prompt read twice", again, kept)
    if "copy_cache" in given.options.controls:
        sources = open_text(given.data.train_text, given.data.column)
        rows, _ = text_rows(sources, given.tokenizer, given.options.window, range(COPY_ROWS), given.seed)
        cache = fit_copy_cache(base, rows, given.options.batch_size)
        asked = {name: each for name, each in asked.items() if not name.startswith("task.")}  # a harness takes models alone
        found[f"{PREFIX}copy_cache"] = _answers(cache, f"{print} {sorted(cache.shares.items())}", "copy cache", asked, kept)
    return found


def _costs(models: Mapping[str, Any], given: Given) -> dict[str, list[records.Cost]]:
    """What a token costs at every length and batch size, all models in turn. It belongs to this machine and moment, so it is
    measured anew. A control without grafts costs what the base costs; of a window, the cache here holds all tokens."""
    left = [name for name, model in models.items() if is_control(name) and not _sites(model)] + [f"{PREFIX}window"]
    models = {name: model for name, model in models.items() if name not in left}
    costs: dict[str, list[records.Cost]] = {name: [] for name in models}
    batches = sorted(given.options.batches, reverse=True)  # the price is the last: of one row, or the fewest, at the longest
    places = [(context, batch) for batch in batches for context in sorted(given.lengths)]
    for context, batch in bar(places, "bench: timing"):
        reading = "speed" in given.options.suites
        for name, cost in measure_costs(models, context, batch, reading=reading).items():
            costs[name].append(cost)
    return costs


def _on_text(models: Mapping[str, Any], prints: Mapping[str, str], given: Given, kept: Kept) -> dict[str, records.OnText]:
    """How every other model differs from the base on held-out text; nothing where the base does not know the text."""
    if not given.knows(given.data.held_out_text):
        return {}
    options = given.options
    held = open_held_out(given.tokenizer, given.data, options.windows * options.window, given.question_seed)
    rows, owner = held.rows(options.windows, options.window)
    (base, reference), *others = models.items()
    found, batch = {}, max(1, options.batch_size // TEXT_SHARE)

    def measure(model: Any) -> dict[str, Any]:
        return measure_on_text(reference, model, rows, owner, batch).model_dump(mode="json")

    for name, model in others:
        key = {"on_text": prints[name], "base": prints[base], "device": model.device.type}
        key["asked"] = digest([rows.tolist(), owner.tolist()])
        found[name] = records.OnText.model_validate(kept.load_or_measure(key, partial(measure, model)))
    return found


def _changes(values: Values, main: str, about: str) -> dict[str, dict[str, records.Change]]:
    """Model -> measurement -> its difference to the base, with p-values as a report gives them."""
    base, *others = values
    pairs = {(name, each): (values[base][each], values[name][each]) for name in others for each in values[name]}
    p = corrected({key: p_value(*pair) for key, pair in pairs.items()}, (main, about))
    return {base: {}} | {name: {each: _change(*pairs[name, each], p[name, each]) for each in values[name]} for name in others}


def _change(base: np.ndarray, model: np.ndarray, p: float | None = None) -> records.Change:
    found = difference(base, model)
    return records.Change(**found.model_dump(), p=p_value(base, model) if p is None else p, detectable=detectable(base, model))


def _sites(model: Any) -> tuple[Site, ...]:
    grafts = getattr(getattr(model, "config", None), "grafts", None) or ()
    return tuple(Site(entry["layer"], tuple(entry.get("heads") or ())) for entry in grafts)
