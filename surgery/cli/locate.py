"""surgery locate"""

from pathlib import Path
from typing import TYPE_CHECKING

from surgery.cli.console import prose, show, starting, table
from surgery.cli.options import ModelArgument, Out, Overwrite, RecipeOption, Resume, Settings, Trust, recipe_of

if TYPE_CHECKING:
    from surgery.locating.ranking import Ranking, Score

# Score -> the head of its column, in a table for a terminal of 80 columns; ranking.json has all scores with all intervals.
SCORES = {
    "splice_gain": "accuracy gained",
    "splice_loss": "loss saved (nats)",
    "attribution": "attribution",
    "ablation_drop": "accuracy lost",
    "ablation_loss": "loss added (nats)",
    "answer_mass": "attention to answer",
}
SHOWN = 2  # scores

LEGEND = (
    "The leading heads. Gained, saved: the head spliced, untrained. Lost, added: the head ablated. Attribution: the slope of "
    "the loss. Brackets: 95% interval over questions. Signs: of differences to the unchanged base."
)


def locate(
    model: ModelArgument,
    recipe: RecipeOption = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Rank every head of a model.

    Writes ranking.json, atlas.png and mixing.png into --out (runs/locate-<model>). Settings: locate.examples=512,
    locate.seeds=3 (is the ranking stable?), ... Processes started by `accelerate launch` share the work.

    Examples:
      surgery locate checkpoints/tiny-mamba2 --out runs/located
      surgery locate checkpoints/tiny-mamba2 --set locate.options.pairs=16
    """
    options = recipe_of("locate", recipe, settings, model=model)
    with starting():
        from surgery.jobs.locating_stage import locate_model
        from surgery.models.anatomy import anatomy
    out = out or Path("runs") / f"locate-{Path(model).name}"
    ranking, base = locate_model(options, out, resume=resume, overwrite=overwrite, trust_remote_code=trust_remote_code)
    leading = ranking.heads[:10]
    fields = [field for field in SCORES if any(getattr(score, field) is not None for score in leading)][:SHOWN]
    order = next((field for field in ("splice_loss", "attribution", "ablation_loss") if field in fields), None)
    body = [
        [str(s.site), s.role or "", *(_cell(s, field, full=field == order) for field in fields), *_also(ranking, s)]
        for s in leading
    ]
    table(["site", "role", *(SCORES[field] for field in fields), *(["also for"] if ranking.skills else [])], body)
    prose(LEGEND)
    if ranking.skills:
        prose(_of_skills(ranking))
    if ranking.stability is not None:
        table(*ranking.stability.table())
        prose(ranking.stability.summary())
    chance = "" if ranking.chance is None else f", chance {ranking.chance:.3f}"
    prose(f"Layers: {anatomy(base.model).kinds()}. Accuracy of the base: {ranking.base_accuracy}{chance}.")
    show(f"Ranking: {out / 'ranking.json'}, maps: {out / 'atlas.png'}")


def _also(ranking: "Ranking", score: "Score") -> list[str]:
    """The last cell of a row, where other skills were measured."""
    return [", ".join(ranking.also_for(score.site))] if ranking.skills else []


def _of_skills(ranking: "Ranking") -> str:
    """What else the base can do, and how many heads that needs."""
    said = []
    for skill in ranking.skills:
        accuracy = "" if skill.base_accuracy is None else f" (accuracy {skill.base_accuracy.accuracy:.3f})"
        said.append(f"{skill.name}{accuracy}: {len(skill.serving)} heads serve it, {len(skill.at_risk)} cost it when grafted")
    return f"Other skills of the base. {'; '.join(said)}."


def _cell(score: "Score", field: str, *, full: bool) -> str:
    """Its estimate, with its interval or without; a share of attention is no difference and has no sign."""
    estimate = getattr(score, field)
    if estimate is None:
        return ""
    if not full:
        return f"{estimate.value:{'' if field == 'answer_mass' else '+'}.3f}"
    return estimate.unsigned() if field == "answer_mass" else str(estimate)
