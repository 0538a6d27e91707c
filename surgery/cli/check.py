"""surgery check"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli.options import AsJson, Trust, check_model
from surgery.errors import UserError
from surgery.runtime.listing import list_modules

DTYPES = ("float32", "bfloat16", "float16")
ENGINES = ("vllm", "llama.cpp", "mlx-lm")


def check(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A folder, a Hub id, or a patch.")] = None,
    architecture: Annotated[
        str | None, typer.Option("--architecture", help="A model type, a config.json, or a folder: a small random model of it.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Slow laws, too.")] = False,
    law: Annotated[list[str], typer.Option("--law", help="Only this law; may be given several times.")] = [],  # noqa: B006
    lora: Annotated[
        str | None, typer.Option("--lora", help="What LoRA would train: in_proj,out_proj, or an adapter's folder.")
    ] = None,
    bytes: Annotated[bool, typer.Option("--bytes", help="Bytes of the cache by length.")] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="Of the bytes: float32, bfloat16 or float16.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Of the bytes: sequences.")] = 1,
    engine: Annotated[str | None, typer.Option("--engine", help="Compare with an engine: vllm, llama.cpp or mlx-lm.")] = None,
    engine_python: Annotated[Path | None, typer.Option("--engine-python", help="The Python that has the engine.")] = None,
    as_json: AsJson = False,
    trust_remote_code: Trust = False,
) -> None:
    """Is a recurrent model's state right, however it is run?

    Asks laws that hold for any weights (caches, padding, packing, batches, precision, saving) of a model in float64, on a CPU,
    and says which are broken. Exits with 1 where something is wrong. Nothing is written.

    Examples:
      surgery check checkpoints/tiny-mamba2
      surgery check --architecture jamba
      surgery check --architecture path/to/config.json --lora in_proj,out_proj
      surgery check --architecture falcon_h1 --bytes --dtype bfloat16
    """
    if (model is None) == (architecture is None):
        raise UserError("name a MODEL, or an --architecture: one of them")
    if model is not None:
        check_model(model)
    known = list_modules("checking/laws", "LAW")
    if unknown := [name for name in law if name not in known]:
        raise UserError(f"there is no law '{unknown[0]}'; there are {', '.join(known)}")
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype is '{dtype}'; take one of {', '.join(DTYPES)}")
    if engine is not None and engine not in ENGINES:
        raise UserError(f"--engine is '{engine}'; take one of {', '.join(ENGINES)}")
    if engine is not None and (engine_python is None or model is None):
        raise UserError(
            "--engine asks an engine for a MODEL's folder, by the Python that has it: --engine-python ENV/bin/python"
        )
    from transformers.utils import logging

    logging.disable_progress_bar()
    from surgery.checking.check import check as check_state
    from surgery.checking.check import open_source

    shown: list[Any] = []  # (its text, its JSON, whether something is wrong)
    if lora is not None:
        from surgery.checking.adapters import check_adapters

        rows = check_adapters(open_source(model, architecture, trust_remote_code), lora)
        shown.append(("\n".join(map(str, rows)), [vars(row) for row in rows], any(row.is_wrong for row in rows)))
    if bytes:
        from surgery.checking.bytes import LENGTHS, count_cache_bytes, table_of_bytes

        sizes = count_cache_bytes(open_source(model, architecture, trust_remote_code), dtype)
        each = {name: {n: getattr(sizes, name)(n, batch) for n in LENGTHS} for name in ("transformers", "llama_cpp", "vllm")}
        shown.append((table_of_bytes(sizes, batch), each, False))
    if engine is not None and model is not None and engine_python is not None:
        from surgery.checking.engines import check_engine

        found = check_engine(model, engine, engine_python, trust_remote_code)
        shown.append((str(found), vars(found), not found.holds))
    if not shown:
        report = check_state(model, architecture=architecture, full=full, only=tuple(law), trust_remote_code=trust_remote_code)
        shown.append((report.table(), json.loads(report.to_json()), bool(report.wrong)))
    told = [content for _, content, _ in shown]
    print(json.dumps(told[0] if len(told) == 1 else told, indent=2) if as_json else "\n\n".join(text for text, _, _ in shown))
    if any(wrong for _, _, wrong in shown):
        raise typer.Exit(1)
