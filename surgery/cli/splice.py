"""surgery splice"""

from surgery.cli.options import BaseArgument, Dtype, OutFolder, Overwrite, PlanArgument, Trust, open_model, read_record
from surgery.errors import UserError
from surgery.records.plan import Plan
from surgery.runtime.files import open_output
from surgery.runtime.progress import show


def splice(
    model: BaseArgument,
    plan: PlanArgument,
    out: OutFolder,
    dtype: Dtype = "auto",
    overwrite: Overwrite = False,
    trust_remote_code: Trust = False,
) -> None:
    """Put the attention of a plan into a model; nothing is trained yet.

    Examples:
      surgery splice checkpoints/tiny-mamba2 runs/mine/plan.json --out runs/mine/spliced
    """
    chosen = read_record(plan, Plan)
    with open_output(out, [model, plan], overwrite=overwrite) as output:
        from surgery.exporting.export import write_export
        from surgery.models.digests import fingerprint
        from surgery.splicing.splice import splice as splice_model

        base, tokenizer = open_model(model, trust_remote_code=trust_remote_code, dtype=dtype)
        made = chosen.provenance
        if made is not None and made.is_of_other(fingerprint(base)):
            stored = None if dtype == "auto" else open_model(model, trust_remote_code=trust_remote_code)[0]
            if stored is None or made.is_of_other(fingerprint(stored)):
                raise UserError(f"{plan} was made from {made.base} with other weights than {model} has; locate and plan again")
        hybrid = splice_model(base, chosen)
        with output.new_folder(".") as folder:
            proof = write_export(hybrid, tokenizer, folder, out, plan=chosen, base=model)
    show(f"Hybrid: {out}, {proof}")
