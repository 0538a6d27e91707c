"""surgery bench"""

import re
from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import (
    ModelArgument,
    OutFolder,
    Overwrite,
    RecipeOption,
    Resume,
    Settings,
    Trust,
    check_data,
    check_model,
    open_model,
    own_grafts,
)
from surgery.errors import UserError
from surgery.records.recipe import read_recipe
from surgery.records.report import Report
from surgery.runtime.files import open_output
from surgery.runtime.progress import show

REQUIREMENT = re.compile(r"([\w.-]+)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+))")


def bench(
    base: ModelArgument,
    models: Annotated[list[str], typer.Argument(metavar="HYBRID...", help="What is compared with it.")],
    out: OutFolder,
    recipe: RecipeOption = None,
    settings: Settings = [],  # noqa: B006
    require: Annotated[
        list[str], typer.Option("--require", metavar="NAME>=VALUE", help="Exit with 1 unless this holds, e.g. kv.64>=0.8.")
    ] = [],  # noqa: B006
    resume: Resume = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Compare models on the same questions, with intervals, and say whether the edit helped.

    Controls that need tuning are made by `surgery run`; this command measures those that need none.

    Examples:
      surgery bench checkpoints/tiny-mamba2 runs/mine/tuned --out runs/mine/bench
      surgery bench BASE HYBRID --set bench.pairs=[64] --require "kv.64>=0.8" --out bench
    """
    for each in models:
        check_model(each)
    options = read_recipe(recipe, settings, model=base)
    check_data(options.data)
    required = [_parse(each) for each in require]
    if own_grafts(base) and not own_grafts(models[0]):
        raise UserError(f"{base} is a hybrid and {models[0]} is none; the base comes first")
    with open_output(out, [base, *models, *options.data_files()], resume=resume, overwrite=overwrite) as output:
        from surgery.evaluation.bench import bench as bench_models
        from surgery.pipeline import check_bench
        from surgery.report.page import write_report

        opened = {"base": open_model(base, options, trust_remote_code)}
        opened |= {_name(each, models): open_model(each, options, trust_remote_code) for each in models}
        names = check_bench(opened["base"][1], options)
        for name, *_ in required:
            if name not in names:
                raise UserError(f"--require: '{name}' is not measured; there are {', '.join(names)}")
        if overwrite:  # not before it is known that the settings fit
            output.clear()
        with output.folder("measured") as folder:
            report = bench_models(
                {name: model for name, (model, _) in opened.items()},
                opened["base"][1],
                options.bench,
                data=options.data,
                seed=options.seed,
                main=_name(models[0], models),
                folder=folder,
                base_name=base,
                recipe=options.public(),
            )
        with output.new_folder(".", keep=True) as folder:
            write_report(report, folder)
    show(report.summary())
    show(f"\nReport: {out / 'report.html'}")
    if failed := [said for each in required if (said := _check(report, *each))]:
        show("\n".join(failed))
        raise typer.Exit(1)


def _name(model: str, models: list[str]) -> str:
    """A model's name in the report: its folder's, or all of it where two are alike."""
    short = Path(model).absolute().name
    return short if [Path(each).absolute().name for each in models].count(short) == 1 and short != "base" else model


def _parse(text: str) -> tuple[str, str, float]:
    match = REQUIREMENT.fullmatch(text.strip())
    if match is None:
        raise UserError(f"--require takes NAME>=VALUE or NAME<=VALUE, e.g. kv.64>=0.8, not '{text}'")
    name, sign, value = match.groups()
    return name, sign, float(value)


def _check(report: Report, name: str, sign: str, value: float) -> str:
    """What is wrong with the main model's result; nothing where the requirement holds."""
    found = report.main.results[name]
    holds = found.mean >= value if sign == ">=" else found.mean <= value
    return "" if holds else f"required {name}{sign}{value:g}; it is {found.mean:.3f}, off by {abs(found.mean - value):.3f}"
