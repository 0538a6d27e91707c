"""Which settings a verb uses. One that is set by --set and not used is refused; a recipe may hold settings for all verbs."""

from collections.abc import Sequence

from surgery.errors import UserError

OPENING = ("tokenizer", "dtype", "device", "kernels")  # how a model is opened
# Verb -> the keys and sections that it uses. `surgery run` uses all.
USED: dict[str, tuple[str, ...]] = {
    "look": (*OPENING, "seed", "data.facts"),
    "locate": (*OPENING, "seed", "locate", "data.skills", "data.facts", "data.train_text"),
    "prune": (
        *OPENING, "seed", "locate.probe", "locate.options", "locate.examples", "locate.batch_size", "data.facts",
    ),
    "plan": (
        *OPENING, "plan", "seed", "data.skills", "data.facts", "data.train_text", "tune", "locate.batch_size",
    ),  # tune: by which the last candidates are tuned for a few steps
    "splice": (*OPENING, "seed", "data.train_text", "tune.text_tokens"),  # the text by which --state-size measures
    "tune": (*OPENING, "seed", "data", "tune", "bench.windows", "bench.window"),
    "export": OPENING,
    # locate: the question whose mixing matrices are drawn.
    "bench": (
        *OPENING, "seed", "data", "locate.probe", "locate.options",
        *(f"bench.{name}" for name in (
            "suites", "tasks", "include_path", "data_path", "task_limit", "pairs", "unseen_pairs", "limit", "seeds", "windows",
            "window", "contexts", "rare", "words", "batches", "concurrencies", "batch_size", "controls",
        )),
    ),
}  # fmt: skip


def refuse_unused(verb: str, settings: Sequence[str]) -> None:
    """Raise UserError for the first of `key=value` that the verb would read and pass over."""
    used = USED.get(verb)
    if used is None:
        return
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key == "model":
            raise UserError(f"surgery {verb} takes the model as an argument, not by --set {setting}")
        if not any(f"{key}.".startswith(f"{name}.") or name.startswith(f"{key}.") for name in used):
            section = key.partition(".")[0]
            beside = [name for name in used if name.startswith(f"{section}.")]  # it uses others of this section
            whole = list(dict.fromkeys(name if "." not in name else f"{name.partition('.')[0]}.*" for name in used))
            raise UserError(f"surgery {verb} has no use for {key}; it uses {', '.join(beside or whole)}")
