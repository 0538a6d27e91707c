"""`surgery run MODEL`: a recipe chosen from a first look, and what a recipe takes in time and memory."""

import json
import shlex
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from surgery.errors import UserError
from surgery.evaluation.controls import CONTROLS
from surgery.locating.locate import BLOCK, CHOSEN
from surgery.locating.roles import DEEP, OTHERS, PLACES, SCREENED
from surgery.look import Look, cache_folder
from surgery.records.recipe import TOY, Recipe, Tune, apply_settings, make_recipe
from surgery.records.report import Report
from surgery.runtime.files import file_digest, read_text, write_text
from surgery.runtime.progress import duration, size
from surgery.tuning.loop import STATE, checkpoints
from surgery.tuning.stopping import PATIENCE

HELD_OUT = 10  # the last tenth of a text is measured on
LARGEST = 64  # pairs of a dictionary in training examples and in bench
TOKENS_PER_PAIR = 4  # of a dictionary
BACKWARD = 3  # forward passes that a training step costs
RATE = 0.1  # a learning rate times the root of the hidden size: Adam then moves every weight by about a tenth of itself a step


def choose_recipe(seen: Look, model: str, text: Path | None, settings: list[str]) -> Recipe:
    """The recipe for a model, by what was seen of it; `settings` (key=value) go before what is chosen.

    text: is divided into a part that tuning sees and one that is measured on. Raises UserError where a text is needed and there
    is none.
    """
    pairs = seen.pairs or 4
    low = max(4, pairs // 2)
    tree: dict[str, Any] = {
        "model": model,
        "data": {"facts": seen.facts},
        "locate": {"options": {"pairs": pairs}, "examples": 128},
        "plan": {"heads": "auto"},
        "tune": {
            "steps": "auto",
            "max_steps": 400,
            "learning_rate": round(RATE / seen.hidden_size**0.5, 5),
            "examples": [{"probe": "kv", "options": {"pairs": [low, LARGEST]}}],
            "batch_size": 8,
            "text_batch_size": 4,
            "kl_weight": 4.0,
            "skill_weight": 1.0,
            "hints": {},
        },
        "bench": {"pairs": sorted({low, pairs, LARGEST}), "limit": 300, "windows": 32, "contexts": [256, 1024]},
    }
    given = {setting.partition("=")[0].strip() for setting in settings}
    if text is not None:
        tree = apply_settings(tree, text_settings(text))
    elif seen.facts != TOY and "data.train_text" not in given:
        raise UserError(f"{seen.model} does not know the built-in toy data; give text of the kind that it knows, --text FILE")
    return make_recipe(apply_settings(tree, settings), "--set")


def text_settings(text: Path) -> list[str]:
    """The settings (key=value) by which a text is tuned and measured on."""
    train, held_out = map(str, divide_text(text))
    return [f"data.train_text={json.dumps([train])}", f"data.held_out_text={json.dumps(held_out)}"]


def divide_text(text: Path) -> tuple[Path, Path]:
    """A text's first part and its last, in files of the user's cache folder; divided between paragraphs, lines or words."""
    whole = read_text(text)
    middle = len(whole) - len(whole) // HELD_OUT
    for between in ("\n\n", "\n", " "):
        if (place := whole.rfind(between, len(whole) // 2, middle)) > 0:
            middle = place + len(between)
            break
    folder = cache_folder("text") / file_digest(text)[:16]
    train, held_out = folder / "train.txt", folder / "held_out.txt"
    write_text(train, whole[:middle])
    write_text(held_out, whole[middle:])
    return train, held_out


def go_on(recipe: Recipe, report: Report, out: Path, trust_remote_code: bool = False) -> str:
    """The command that goes on from a finished run in `out`, and why: at a lower rate where the loss rose, longer where it
    still fell when tuning ended, of the hybrid or of a control, with more heads where little was gained; nothing otherwise."""
    plan, heads, main = recipe.plan, sum(len(site.heads) for site in report.main.sites), report.verdict.model
    most = plan.max_heads * (BLOCK if "channel" in report.main.description else 1)
    folders = {name: folder for name in report.models if (folder := out / "tuning" / name).is_dir()}
    undone = any(model.back_to is not None for model in report.models.values())
    saved = {name: checkpoints(folder) for name, folder in folders.items() if recipe.tune.steps == "auto"}
    ends = {name: found[-1] / STATE for name, found in saved.items() if found}
    # Looks since the held-out loss was least.
    fell = [name for name, end in ends.items() if json.loads(read_text(end))["watcher"]["since"] < PATIENCE]
    if undone or report.verdict.remedy == "lower rate":
        rate = min(recipe.tune.learning_rate / 10, Tune().learning_rate)
        why = f"{'The loss rose in tuning' if undone else 'Tuning did harm'}; a lower rate"
        setting = f"tune.learning_rate={rate:.1g}"
    elif fell:  # they had taken the most steps
        whose = f"The loss of a control ({report.models[fell[0]].description})"
        if main in fell:
            whose = "The loss" if len(fell) == 1 else "The loss, and that of controls,"
        why, setting = f"{whose} still fell when tuning ended; more steps", f"tune.max_steps={2 * recipe.tune.max_steps}"
    elif report.verdict.remedy == "more heads" and heads and plan.sites is None and (plan.heads != "auto" or heads >= most):
        setting = f"plan.max_heads={2 * plan.max_heads}" if plan.heads == "auto" else f"plan.heads={2 * plan.heads}"
        why = "There is more to gain, maybe with more heads"
    else:
        return ""
    place = out if out.name not in ("", "..") else out.resolve()
    other = next(path for number in count(2) if not (path := place.with_name(f"{place.name}-{number}")).exists())
    words = ["surgery", "run", str(out / "recipe.yaml"), "--set", setting, "--out", str(other)]
    return f"{why}: {shlex.join([*words, *(['--trust-remote-code'] if trust_remote_code else [])])}"


class Estimate(NamedTuple):
    """What a recipe takes: seconds by stage, and bytes of memory."""

    seconds: dict[str, float]
    memory: int

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {duration(each)}" for stage, each in self.seconds.items())
        return f"about {duration(sum(self.seconds.values()))} ({stages}), {size(self.memory)} of memory"


def estimate(recipe: Recipe, seen: Look) -> Estimate:
    """By counts of tokens and the speed of a forward pass that the look measured; by a formula for bytes.

    Weights are shared by all models of a run; what is trained is small beside them. A step of training holds, for each of its
    tokens, about 40 numbers of the hidden size a layer, and the logits three times.
    """
    plan, tune, bench = recipe.plan, recipe.tune, recipe.bench
    pairs = [max(_numbers(entry.options.get("pairs"), 32)) for entry in tune.examples] or [0]
    example = TOKENS_PER_PAIR * max(pairs) // 2
    steps = tune.max_steps if tune.steps == "auto" else tune.steps
    trained = 1 + sum(CONTROLS[control].trained for control in bench.controls)
    step = BACKWARD * tune.batch_size * example + (BACKWARD + 1) * tune.text_batch_size * tune.text_tokens
    question, locating = TOKENS_PER_PAIR * max(_numbers(recipe.locate.options.get("pairs"), 32)), recipe.locate
    # Units by places; what is ablated in a layer runs from there on. 15: what is ablated to describe the circuit, and in a deep
    # model, where a part of the questions tells which units may be needed, as many units are then measured at all places.
    units = len(PLACES) * locating.roles + 1.5 * min(OTHERS, len(seen.editable) * seen.units) + 4 * seen.layers
    units = units / SCREENED + 15 * len(PLACES) if seen.layers > DEEP else units + 15
    ablated = 0.7 * units * min(CHOSEN, locating.examples) if locating.roles else 0
    asked = bench.limit * TOKENS_PER_PAIR * (sum(bench.pairs) + bench.pairs[-1]) + bench.windows * bench.window
    tokens = {
        "locate": question * (BACKWARD * locating.examples + ablated),
        "plan": locating.examples * TOKENS_PER_PAIR * max(bench.pairs) * (plan.max_heads + 2) if plan.heads == "auto" else 0,
        "tune": steps * step * trained,
        "bench": asked * (2 + trained),
        "export": 0,
    }
    seconds = {stage: count / max(1.0, seen.tokens_per_second) for stage, count in tokens.items()}
    seconds["export"] = 15 + seen.parameters * 4 / 2**28
    width = 2 if seen.dtype in ("float16", "bfloat16") else 4
    batch = tune.batch_size // tune.gradient_accumulation_steps * example + tune.text_batch_size * tune.text_tokens
    activations = (
        batch * width * (40 * seen.hidden_size * (1 if tune.gradient_checkpointing else seen.layers) + 3 * seen.vocabulary)
    )
    return Estimate(seconds, int(2**29 + seen.parameters * width + activations))


def _numbers(value: Any, default: int) -> list[int]:
    """The numbers of an option (one, or a range); the default where the probe will refuse it."""
    given = list(value) if isinstance(value, list | tuple) else [value]
    return given if given and all(type(number) is int for number in given) else [default]
