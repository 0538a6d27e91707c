"""surgery locate"""

from functools import partial
from pathlib import Path

from surgery.cli.console import show, table
from surgery.cli.options import ModelArgument, Out, RecipeOption, Resume, Settings, Trust, recipe_of

SCORES = ("splice_gain", "splice_loss", "attribution", "ablation_drop", "ablation_loss", "answer_mass")


def locate(
    model: ModelArgument,
    recipe: RecipeOption = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    trust_remote_code: Trust = False,
) -> None:
    """Rank every head of a model.

    Writes ranking.json, atlas.png and mixing.png into --out (runs/locate-<model>). Settings: locate.examples=512,
    locate.seeds=3 (is the ranking stable?), ... Processes started by `accelerate launch` share the work.

    Examples:
      surgery locate checkpoints/tiny-mamba2 --out runs/located
      surgery locate checkpoints/tiny-mamba2 --set locate.probe=mqar
    """
    from surgery.jobs.locating_stage import located
    from surgery.jobs.opening import advise_base, open_checkpoint
    from surgery.jobs.preparing import prepare
    from surgery.locating.locate import check_locatable
    from surgery.locating.questions import check_questions
    from surgery.models.anatomy import anatomy
    from surgery.runtime.processes import on_main

    options = recipe_of("locate", recipe, settings, model=model)
    base = open_checkpoint(options, trust_remote_code)
    advise_base(base)
    check_locatable(base.model, options.locate.exact)
    out = out or Path("runs") / f"locate-{Path(model).name}"
    check_questions(base.tokenizer, options.locate, options.seed)
    on_main(partial(prepare, out, options, resume))
    ranking = located(options, base, out, resume=resume)
    leading = ranking.heads[:10]
    fields = [field for field in SCORES if any(getattr(score, field) is not None for score in leading)]
    if "splice_gain" in fields and "ablation_drop" in fields:
        fields.remove("ablation_drop")  # too wide a table
    body = [[str(s.site), s.kind or "", s.role or "", *(str(getattr(s, field) or "") for field in fields)] for s in leading]
    names = ("attribution (a slope)" if field == "attribution" else field.replace("_", " ") for field in fields)
    table(["site", "kind", "role", *names], body)
    if ranking.stability is not None:
        table(*ranking.stability.table())
        show(ranking.stability.summary())
    accuracy = str(ranking.base_accuracy).replace("+", "")  # signs are for differences
    show(f"Layers: {anatomy(base.model).kinds()}. Base accuracy {accuracy}.")
    show(f"Ranking: {out / 'ranking.json'}, maps: {out / 'atlas.png'}")
