"""`surgery run MODEL`: looks at a model, chooses a recipe for it, and does what the recipe says.

What is chosen is a recipe like any other, written beside the report with a reason in each line (chosen.yaml): `surgery run` of
that file does the same again. Heads, gate and steps are left to what measures them (plan.heads, plan.by, tune.steps). Heads are
chosen by what they gain untrained; where none is worth its cache, or none keeps the base's skills, by what a perfect choice
would save, with hints and adapters: what bases need that were not prepared for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from torch import nn

from surgery.choosing.bounded import NoPlan
from surgery.choosing.gain import NoGain
from surgery.commands.look import ModelLook, look
from surgery.costs.run import run
from surgery.errors import UserError
from surgery.evaluation.report import Report
from surgery.jobs.opening import open_base
from surgery.jobs.output_folder import CHOSEN, LOOK, check_folder
from surgery.kernels.dispatch import use
from surgery.loading.opened import Checkpoint
from surgery.models.anatomy import anatomy, mixer_at
from surgery.records.names import display_name
from surgery.records.recipe import Recipe, read_recipe, recipe_from, with_settings
from surgery.records.record import read_text, write_text
from surgery.runtime.ownership.files import writing
from surgery.runtime.progress import busy, say

HELD_OUT = 10  # of a text, the last part of so many is measured on
LARGEST = 64  # entries of a dictionary in training examples and in bench
CHANNELS = 48  # of a Mamba-1, taken where no block of them gains alone
HEAD = "# Chosen by `surgery run {model}`. `surgery run` of this file does the same again; change what you like.\n"


class Choice(NamedTuple):
    """A setting of a recipe, and why."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Chosen:
    """What is to be done with a model. seen: None where an earlier run is resumed. choices: none there, nor for a model that is
    declined. adapted: the modules that adapters are for, where heads are chosen by a perfect choice; none where they
    cannot be."""

    recipe: Recipe
    seen: ModelLook | None
    choices: tuple[Choice, ...] = ()
    settings: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()

    @property
    def declined(self) -> bool:
        """Whether nothing is to be done."""
        return self.seen is not None and not self.choices

    @property
    def papers(self) -> dict[str, str]:
        """What is beside the report."""
        return {CHOSEN: self.text(), LOOK: self.seen.text()} if self.seen is not None else {}

    def text(self) -> str:
        """The recipe as YAML, a line and its reason for each setting."""
        plain = _tree(self.choices)
        reasons = {choice.key: choice.why for choice in self.choices}
        lines = [HEAD.format(model=display_name(str(plain["model"])))]
        for section, content in with_settings(plain, self.settings).items():
            inner = content if isinstance(content, dict) else {"": content}
            if isinstance(content, dict):
                lines.append(f"{section}:\n")
            before = plain.get(section, {})
            for name, value in inner.items():
                same = (before.get(name) if name and isinstance(before, dict) else before) == value
                why = reasons.get(f"{section}.{name}" if name else section, "") if same else "by --set"
                shown = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n").removesuffix("\n...")
                lines.append(f"{f'  {name}' if name else section}: {shown}{f'  # {why}' if why else ''}\n")
        return "".join(lines)


def chosen_for(
    model: str, out: Path, *, text: Path | None = None, settings: Sequence[str] = (), resume: bool = False,
    overwrite: bool = False, parts: Path | None = None, trust_remote_code: bool = False, anyway: bool = False,
) -> Chosen:  # fmt: skip
    """Look at a model, and choose its recipe. With `resume`, that of the run in `out`, if there is one, with its text.

    text: a file that is divided into what tuning sees and what is measured on, in the folder `parts` (<out>-text). settings:
    key=value, as --set takes them; they go before what is chosen. A model that is not worth editing has the recipe by which it
    was opened; with `anyway`, one is chosen if it can be edited at all. Raises UserError for a text that cannot be read, and
    where a model that the built-in world is foreign to comes without one."""
    check_folder(out, "run", resume=resume, overwrite=overwrite)
    if resume and (out / CHOSEN).exists():
        if text is not None:
            say(f"note: --text is not read: {out / CHOSEN} says which text this run uses (--overwrite begins anew)")
        return Chosen(read_recipe(out / CHOSEN, [*settings]), None)
    opening = recipe_from(with_settings({"model": model}, settings), settings)
    with use(**opening.kernels):
        with busy("opening the model"):
            base = open_base(opening, trust_remote_code)
        facts = opening.data.facts if "facts" in opening.data.model_fields_set else None
        seen = look(base, text=text, facts=facts, seed=opening.seed)
    if not (seen.worth or (anyway and not seen.why_not)):
        return Chosen(opening, seen)
    choices = [*_data(base, seen, opening, text, parts or out.parent / f"{out.name}-text"), *_settings(base, seen)]
    return _chosen(Chosen(opening, seen, settings=tuple(settings), adapted=_adapted(base)), choices)


def run_chosen(chosen: Chosen, out: Path, *, resume: bool = False, **options: Any) -> Report:
    """Do what the recipe says. Where no head gains untrained, heads are chosen by what a perfect choice would save, and of a
    Mamba-1 the leading channels are taken. options: as run() takes them. Raises UserError as run() does."""
    try:
        return run(chosen.recipe, out, resume=resume, papers=chosen.papers, **options)
    except (NoGain, NoPlan) as error:
        if chosen.recipe.plan.by != "gain" or not chosen.recipe.plan.grows or not chosen.choices:
            raise
        again = _chosen(chosen, _by_choice(chosen) if chosen.adapted else _leading(chosen))
        if again.recipe == chosen.recipe:  # by --set
            raise
        say(f"plan: {error}")
        if chosen.adapted:
            say("plan: so heads are chosen by what a perfect choice would save, and learn with hints and adapters")
        else:
            say(f"plan: so the {CHANNELS} leading channels are taken, under the largest gate within the bounds")
        options["overwrite"] = False
        return run(again.recipe, out, resume=True, papers=again.papers, **options)


def _chosen(chosen: Chosen, choices: Sequence[Choice]) -> Chosen:
    """With these choices."""
    choices = (Choice("model", chosen.recipe.model, ""), *choices)
    recipe = recipe_from(with_settings(_tree(choices), chosen.settings), chosen.settings)
    return replace(chosen, recipe=recipe, choices=choices)


def _adapted(base: Checkpoint) -> tuple[str, ...]:
    """The modules of a mixer that read the states, or write to them. None where a head is a channel, which alone chooses
    nothing."""
    parts = anatomy(base.model)
    if parts.ssms[0].width == 1:
        return ()
    hidden = base.model.config.hidden_size
    mixer = mixer_at(base.model, parts.ssms[0].layer)
    linear = {name: module for name, module in mixer.named_children() if isinstance(module, nn.Linear)}
    return tuple(name for name, module in linear.items() if hidden in (module.in_features, module.out_features))


def _data(base: Checkpoint, seen: ModelLook, opening: Recipe, text: Path | None, folder: Path) -> list[Choice]:
    """Text and facts."""
    given = opening.data.model_fields_set
    choices = [] if "facts" in given else [Choice("data.facts", seen.facts, "what knowledge and letters are asked about")]
    if text is not None:
        train, held_out = _divided(text, folder)
        choices += [
            Choice(
                "data.train_text", str(train), f"the text but its last part of {HELD_OUT}: tuning holds the model to its base"
            ),
            Choice("data.held_out_text", str(held_out), "its last part, on which perplexity is measured"),
        ]
    elif "train_text" not in given and seen.facts != "world":
        raise UserError(
            f"{base.name} does not know the small world of the built-in models: give a text of the kind that it knows, "
            "--text FILE (or --set data.train_text and data.held_out_text)"
        )
    return choices


def _divided(text: Path, folder: Path) -> tuple[Path, Path]:
    """A text's first part and its last, in files of their own; divided between paragraphs, lines or words."""
    whole = read_text(text, "the text in")
    middle = len(whole) - len(whole) // HELD_OUT
    for between in ("\n\n", "\n", " "):
        if (place := whole.rfind(between, len(whole) // 2, middle)) > 0:
            middle = place + len(between)
            break
    train, held_out = folder / "train.txt", folder / "held_out.txt"
    with writing(folder):  # so that another text can take their place
        write_text(train, whole[:middle])
        write_text(held_out, whole[middle:])
    return train, held_out


def _settings(base: Checkpoint, seen: ModelLook) -> list[Choice]:
    """How heads are located, planned, tuned and measured."""
    pairs = seen.pairs or 4
    right = seen.retrieval[str(pairs)].accuracy.accuracy
    low = max(4, pairs // 2)
    sizes = sorted({low, pairs, LARGEST})
    channels = anatomy(base.model).ssms[0].width == 1
    return [
        Choice("locate.options", {"pairs": pairs}, f"of the sizes asked, answered nearest to half: {right:.2f}"),
        Choice("locate.examples", 128, "intervals of about 0.08"),
        Choice("locate.exact", False, "attribution chooses as well, at a seventh of the passes (docs/evidence/ways.md)"),
        Choice("plan.by", "gain", "by what heads gain untrained; where none does, by what a perfect choice would save"),
        Choice(
            "plan.heads",
            "auto",
            "blocks of 16 channels" if channels else "added while the next is worth its cache, with its gate",
        ),
        Choice(
            "plan.auto", {"max_heads": 4, "skill_examples": 256}, "other skills may fall by .02, text by .01 nats (plan.auto)"
        ),
        Choice("tune.steps", "auto", "until the loss on held-out examples is flat"),
        Choice("tune.max_steps", 300, "the controls take as many as the hybrid"),
        Choice("tune.learning_rate", 2e-3, "as in recipes/letters-kept.yaml"),
        Choice("tune.lessons", [{"probe": "kv", "options": {"pairs": [low, LARGEST]}}], "from half of the located size on"),
        Choice("tune.batch_size", 8, ""),
        Choice("tune.text_batch_size", 4, ""),
        Choice("tune.kl_weight", 8.0, "holds the model to its base on text"),
        Choice("bench.pairs", sizes, "the smallest that is trained on, the located size, the largest"),
        Choice("bench.limit", 300, "intervals of about 0.06"),
        Choice("bench.windows", 32, ""),
        Choice("bench.contexts", [256, 1024], "lengths at which a token is timed; look.json has the cache at longer ones")
        if seen.held
        else Choice("bench.contexts", [], "no token is timed: transformers cannot go on from a cache of this model"),
        Choice("bench.random_sites", 1, "one draw of random heads, and the tuning without a graft"),
    ]


def _leading(chosen: Chosen) -> list[Choice]:
    """What is chosen where no block of channels gains untrained: many gain together what a few do not."""
    changes = {
        "plan.by": Choice("plan.by", "attribution", "no block of channels was worth its cache untrained: those that lead"),
        "plan.heads": Choice("plan.heads", CHANNELS, "as many channels as in recipes/demo-mamba1.yaml"),
    }
    return [changes.get(choice.key, choice) for choice in chosen.choices if choice.key != "model"]


def _by_choice(chosen: Chosen) -> list[Choice]:
    """What is chosen where no head gains untrained."""
    changes = {
        "plan.by": Choice("plan.by", "choice", "no head was worth its cache untrained: by what a perfect choice would save"),
    }
    kept = [changes.get(choice.key, choice) for choice in chosen.choices if choice.key != "model"]
    place = next(i for i, choice in enumerate(kept) if choice.key.startswith("bench."))
    more = [
        Choice("tune.hints", {"weight": 0.3}, "shows the heads where the answers are, which they do not find by themselves"),
        Choice("tune.lora", {"target_modules": [*chosen.adapted]}, "adapters: the gather heads may have to learn, too"),
    ]
    return [*kept[:place], *more, *kept[place:]]


def _tree(choices: Sequence[Choice]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value, _ in choices:
        section, _, name = key.partition(".")
        if name:
            tree.setdefault(section, {})[name] = value
        else:
            tree[section] = value
    return tree
