"""surgery locate"""

from pathlib import Path
from typing import TYPE_CHECKING

from surgery.cli.console import prose, show, starting, table
from surgery.cli.options import ModelArgument, Out, Overwrite, RecipeOption, Resume, Settings, Trust, recipe_of

if TYPE_CHECKING:
    from surgery.locating.ranking import Ranking, Score

# Score -> the head of its column.
SCORES = {
    "splice_gain": "accuracy gained, spliced",
    "splice_loss": "loss saved, spliced (nats)",
    "attribution": "attribution (a slope)",
    "ablation_drop": "accuracy lost, ablated",
    "ablation_loss": "loss added, ablated (nats)",
    "answer_mass": "attention to the answer (share)",
}

LEGEND = "The leading heads. Brackets: 95% intervals over questions. Signs: of differences to the unchanged base."


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
    fields = [field for field in SCORES if any(getattr(score, field) is not None for score in leading)]
    if "splice_gain" in fields and "ablation_drop" in fields:
        fields.remove("ablation_drop")  # too wide a table
    if ranking.skills and len(fields) > 3:
        fields = fields[:3]  # too wide a table
    body = [
        [str(s.site), s.role or "", *(_cell(s, field) for field in fields), *_also(ranking, s)] for s in leading
    ]  # fmt: skip
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


def _cell(score: "Score", field: str) -> str:
    """Its estimate; a share of attention is no difference and has no sign."""
    estimate = getattr(score, field)
    return "" if estimate is None else estimate.unsigned() if field == "answer_mass" else str(estimate)
