"""surgery look"""

from pathlib import Path
from typing import Annotated

import typer

from surgery.cli.console import prose, starting
from surgery.cli.options import ModelArgument, Settings, TextOption, Trust, recipe_of
from surgery.records.reading import check_name


def look(
    model: ModelArgument,
    text: TextOption = None,
    settings: Settings = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the JSON to this file.", callback=check_name)] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Take a quick look at a model: is editing worth trying?

    In about a minute it shows family and size, what can be edited, retrieval (dictionaries of 4 to 64 entries, against chance),
    other skills, the loss on --text against log(vocabulary), and the bytes of the cache at 4,096 to 131,072 tokens. The last
    line is the verdict. Nothing is written unless --out is given.

    Examples:
      surgery look checkpoints/tiny-mamba2
      surgery look checkpoints/tiny-mamba2 --json > look.json
    """
    options = recipe_of("look", None, settings, model=model)
    with starting():
        from surgery.commands.look import ModelLook
        from surgery.commands.look import look as look_at
        from surgery.jobs.opening import open_checkpoint
        from surgery.kernels.dispatch import use
        from surgery.runtime.progress import busy

        if out:
            ModelLook.check_place(out)
    with busy("opening the model"):
        opened = open_checkpoint(options, trust_remote_code)
    facts = options.data.facts if "facts" in options.data.model_fields_set else None
    with use(**options.kernels):
        seen = look_at(opened, text=text, facts=facts, seed=options.seed)
    if out:
        seen.write(out)
    if as_json:
        print(seen.model_dump_json(indent=2))
        return
    for line in seen.lines():
        prose(line)
