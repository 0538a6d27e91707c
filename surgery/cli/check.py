"""surgery check"""

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.options import AsJson, Trust, check_model
from surgery.errors import UserError
from surgery.runtime.listing import list_modules


def check(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A folder, a Hub id, or a patch.")] = None,
    architecture: Annotated[
        str | None,
        typer.Option("--architecture", help="Instead: a model type, a config.json, or a model whose weights are not read."),
    ] = None,
    law: Annotated[list[str], typer.Option("--law", help="Only this law; may be given again.")] = [],  # noqa: B006
    full: Annotated[bool, typer.Option("--full", help="Slow laws, too.")] = False,
    lora: Annotated[
        str | None,
        typer.Option("--lora", metavar="TARGETS", help='What adapters reach: "in_proj,out_proj", or an adapter folder.'),
    ] = None,
    show_bytes: Annotated[bool, typer.Option("--bytes", help="Bytes of the cache by length, here and in engines.")] = False,
    engine: Annotated[str | None, typer.Option("--engine", help="Compare with vllm, llama_cpp or mlx_lm.")] = None,
    engine_python: Annotated[Path | None, typer.Option("--engine-python", help="The Python that has the engine.")] = None,
    as_json: AsJson = False,
    trust_remote_code: Trust = False,
) -> None:
    """Ask whether a recurrent model's state is right: caches, padding, packing, batches.

    Every law computes the same logits in two ways. Exit status 1 where something is wrong.

    Examples:
      surgery check checkpoints/tiny-mamba2
      surgery check --architecture mamba2
      surgery check MODEL --lora "in_proj,out_proj"
    """
    if (model is None) == (architecture is None):
        raise UserError("surgery check takes a MODEL or --architecture, one of them")
    if model is not None:
        check_model(model)
    if unknown := [each for each in law if each not in list_modules("checking/laws", "LAW")]:
        raise UserError(f"there is no law '{unknown[0]}'; `surgery list laws` has them")
    if engine is not None and (engine_python is None or model is None):
        raise UserError("--engine needs a MODEL, and --engine-python ENVIRONMENT/bin/python, which has the engine")
    if lora is not None or show_bytes:
        from surgery.checking.adapters import check_adapters
        from surgery.checking.bytes import count_cache_bytes, table_of_bytes
        from surgery.checking.check import open_source

        source = open_source(model, architecture, trust_remote_code)
        reached = [] if lora is None else check_adapters(source, lora)
        for each in reached:
            print(each)
        if show_bytes:
            print(table_of_bytes(count_cache_bytes(source)))
        wrong = any(each.is_wrong for each in reached)
    elif engine is not None:
        from surgery.checking.engines import check_engine

        compared = check_engine(str(model), engine, Path(str(engine_python)), trust_remote_code)
        print(compared)
        wrong = not compared.holds
    else:
        from surgery.checking.check import check as check_state

        report = check_state(model, architecture=architecture, full=full, only=tuple(law), trust_remote_code=trust_remote_code)
        print(report.to_json() if as_json else report.table())
        wrong = bool(report.wrong)
    if wrong:
        raise typer.Exit(1)
