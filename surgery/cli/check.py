"""surgery check, and surgery doctor"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from surgery.cli.options import AsJson, Trust, check_model
from surgery.errors import UserError
from surgery.runtime.listing import list_modules, list_table

DTYPES = ("float32", "bfloat16", "float16")


def check(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="A folder, a Hub id, or a patch.")] = None,
    architecture: Annotated[
        str | None,
        typer.Option("--architecture", help="Instead: a model type, a config.json, or a model whose weights are not read."),
    ] = None,
    law: Annotated[list[str], typer.Option("--law", help="Only this law; may be given again.")] = [],  # noqa: B006
    full: Annotated[bool, typer.Option("--full", help="Ask the slow laws, too.")] = False,
    lora: Annotated[
        str | None,
        typer.Option("--lora", metavar="TARGETS", help='Modules to adapt: "in_proj,out_proj", or an adapter folder.'),
    ] = None,
    show_bytes: Annotated[bool, typer.Option("--bytes", help="Bytes of the cache by length, here and in engines.")] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="With --bytes: what the model computes in.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, help="With --bytes: how many sequences.")] = 1,
    engine: Annotated[str | None, typer.Option("--engine", help="Compare with vllm, llama.cpp or mlx-lm.")] = None,
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
    if ((dtype or batch > 1) and not show_bytes) or (engine_python and not engine):
        raise UserError("--dtype and --batch are for --bytes, and --engine-python is for --engine")
    if dtype not in (None, *DTYPES):
        raise UserError(f"--dtype is '{dtype}'; take one of {', '.join(DTYPES)}")
    engines = list_table("checking/engines.py", "SCRIPTS")
    if engine is not None and engine not in engines:
        raise UserError(f"--engine is '{engine}'; take one of {', '.join(engines)}")
    if engine is not None and (engine_python is None or model is None):
        raise UserError("--engine needs a MODEL, and --engine-python ENVIRONMENT/bin/python, which has the engine")
    from transformers.utils import logging

    from surgery.checking.check import check as check_state
    from surgery.checking.check import open_model, open_source

    logging.disable_progress_bar()
    check_config(architecture, trust_remote_code)
    shown: list[tuple[str, Any, bool]] = []  # text, JSON, whether something is wrong
    if lora is not None:
        from surgery.checking.adapters import check_adapters

        rows = check_adapters(open_source(model, architecture, trust_remote_code), lora, trust_remote_code)
        shown.append(("\n".join(map(str, rows)), [vars(row) for row in rows], any(row.is_wrong for row in rows)))
    if show_bytes:
        from surgery.checking.bytes import count_cache_bytes, table_of_bytes

        sizes = count_cache_bytes(open_source(model, architecture, trust_remote_code), dtype, trust_remote_code)
        shown.append((table_of_bytes(sizes, batch), sizes.rows(batch), False))
    if engine is not None and model is not None and engine_python is not None:
        from surgery.checking.engines import compare_engine
        from surgery.models.load import find_folder

        live = open_model(model, trust_remote_code).float()
        found = compare_engine(live, find_folder(model), engine, engine_python)
        shown.append((str(found), vars(found), not found.holds))
    if not shown or law or full:
        report = check_state(model, architecture=architecture, full=full, only=tuple(law), trust_remote_code=trust_remote_code)
        shown.append((report.table(), json.loads(report.to_json()), bool(report.wrong)))
    told = [each for _, each, _ in shown]
    print(json.dumps(told[0] if len(told) == 1 else told, indent=2) if as_json else "\n\n".join(text for text, _, _ in shown))
    if any(wrong for _, _, wrong in shown):
        raise typer.Exit(1)


def check_config(source: str | None, trust_remote_code: bool) -> None:
    """Raise UserError for a folder or a config.json of this machine that is no model's, as load does."""
    path = Path(source or "")
    if source is not None and (path.is_dir() or (path.is_file() and path.name == "config.json")):
        from surgery.models.load import read_config

        folder = path if path.is_dir() else path.parent
        check_model(str(folder))
        read_config(folder, trust_remote_code)


def doctor(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="At its sizes: a folder, a Hub id, a model type or a config.json.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="What the model computes in.")] = "auto",
    trust_remote_code: Trust = False,
) -> None:
    """Say which kernels serve a model on this machine, and what would make it faster.

    For every operation, at the model's sizes: which kernel serves, and why those that are preferred do not.
    It tries them, which takes minutes where one is compiled for the first time. No weights are read.

    Examples:
      surgery doctor
      surgery doctor checkpoints/tiny-mamba2
    """
    if dtype not in ("auto", *DTYPES):
        raise UserError(f"--dtype is '{dtype}'; take auto, or one of {', '.join(DTYPES)}")
    import platform

    import torch

    from surgery.checking.check import read_sizes
    from surgery.kernels.explain import explain
    from surgery.models.load import check_device, choose_dtype

    check_device(device)
    check_config(model, trust_remote_code)
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    sizes, stored = (None, torch.float32) if model is None else read_sizes(model, trust_remote_code)
    chosen = choose_dtype(dtype, stored, place)
    card = f"{torch.cuda.get_device_name(place)}, CUDA {torch.version.cuda}" if place.startswith("cuda") else platform.machine()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {place} ({card})")
    print(f"at the sizes of {model or 'mamba2-2.7b and Falcon-Mamba-7B'}, in {str(chosen).removeprefix('torch.')}\n")
    rows, advice = explain(place, chosen, sizes)
    print("\n".join(map(str, rows)))
    print("\n" + "\n".join(advice or ["nothing to install would make it faster here"]))
