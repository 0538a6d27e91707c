"""surgery tune"""

from pathlib import Path

from surgery.cli.options import (
    HybridArgument,
    OutFolder,
    Overwrite,
    RecipeOption,
    Resume,
    Settings,
    Trust,
    check_data,
    open_model,
)
from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.records.recipe import read_recipe
from surgery.runtime.files import open_output
from surgery.runtime.processes import is_main, on_main
from surgery.runtime.progress import show


def tune(
    hybrid: HybridArgument,
    out: OutFolder,
    recipe: RecipeOption = None,
    settings: Settings = [],  # noqa: B006
    resume: Resume = False,
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Train the attention of a hybrid; the folder then holds the tuned hybrid.

    Examples:
      surgery tune runs/mine/spliced --set tune.steps=100 --out runs/mine/tuned
    """
    options = read_recipe(recipe, settings, model=hybrid)
    check_data(options.data)
    with open_output(out, [hybrid, *options.data_files()], resume=resume, overwrite=overwrite) as output:
        from surgery.cli.export import _base_of
        from surgery.exporting.export import write_export
        from surgery.models.digests import fingerprint
        from surgery.pipeline import check_tuning
        from surgery.tuning.loop import tune as tune_model

        model, tokenizer = open_model(hybrid, options, trust_remote_code)
        plan = Plan.read(Path(hybrid) / "plan.json") if (Path(hybrid) / "plan.json").exists() else None
        base, teacher = _base_of(Path(hybrid)), None
        if any(entry["kind"] == "layer" and not entry.get("of_base") for entry in model.config.grafts):
            if base is None:  # what a layer graft replaced is in no folder of a hybrid
                raise UserError(f"{hybrid} has no export.json that says where its base is; splice the plan again")
            teacher, _ = open_model(base, options, trust_remote_code)
            if plan is not None and plan.provenance is not None and plan.provenance.is_of_other(fingerprint(teacher)):
                raise UserError(f"{base} has other weights than the base of {hybrid}; splice the plan again")
        check_tuning(model, tokenizer, options)
        if overwrite:  # not before it is known that the settings fit
            output.clear()
        with output.folder("tuning") as folder:
            on_main(lambda: None)()  # the others wait until it has made the folder
            log = tune_model(model, tokenizer, options.tune, options.data, seed=options.seed, folder=folder, teacher=teacher)
        if is_main():
            with output.new_folder(".", keep=True) as folder:
                proof = write_export(model, tokenizer, folder, out, plan=plan, base=base)
            show(f"{len(log.steps)} steps; whether they helped, `surgery bench BASE {out}` says\nHybrid: {out}, {proof}")
