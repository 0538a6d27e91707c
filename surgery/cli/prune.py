"""surgery prune"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.console import show, table
from surgery.cli.options import ModelArgument, Out, RecipeOption, Settings, Trust, check_writable, recipe_of


def prune(
    model: ModelArgument,
    ranking: Annotated[
        Path | None, typer.Option("--ranking", help="Of locate: keep only its gather and aggregate heads.")
    ] = None,
    recipe: RecipeOption = None,
    settings: Settings = None,
    out: Out = None,
    trust_remote_code: Trust = False,
) -> None:
    """Find the smallest model that still retrieves.

    Also measures what each of its layers is worth. Writes pruning.json into --out (runs/prune-<model>).

    Examples:
      surgery prune checkpoints/tiny-mamba2 --ranking runs/located/ranking.json
    """
    from surgery.jobs.opening import open_checkpoint
    from surgery.locating.prune import prune as cut_down
    from surgery.locating.questions import check_questions
    from surgery.locating.ranking import Ranking
    from surgery.locating.subject import Subject
    from surgery.probes.knowledge import Knowledge
    from surgery.runtime.processes import on_main

    options = recipe_of("prune", recipe, settings, model=model)
    ranked = Ranking.read(ranking) if ranking else None
    base = open_checkpoint(options, trust_remote_code)
    check_questions(base.tokenizer, options.locate, options.seed)
    out = out or Path("runs") / f"prune-{Path(model).name}"
    check_writable(out)
    critical = {r: [s.site for s in ranked.heads if s.role == r] if ranked else [] for r in ("gather", "aggregate")}
    pruning = cut_down(
        Subject.of(base, known_fingerprint=base.fingerprint), options.locate, Knowledge(options.data.facts), **critical,
        seed=options.seed, recipe=options.model_dump(mode="json"),
    )  # fmt: skip
    on_main(partial(pruning.write, out / "pruning.json"))
    cuts = [pruning.base, *pruning.shortened, *pruning.left_out, *pruning.kept.values(), *pruning.last_row.values()]
    table(
        ["what is left", "retrieval", "knowledge"],
        [[cut.what, str(cut.retrieval.accuracy), str(cut.knowledge.accuracy)] for cut in cuts],
    )
    show(f"Layers: {pruning.kinds}. Minimal model: the first {pruning.minimal}. All of it: {out / 'pruning.json'}")
