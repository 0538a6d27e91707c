"""surgery look"""

from typing import Annotated

import typer

from surgery.cli.options import AsJson, ModelArgument, TextOption, Trust, open_model
from surgery.records.recipe import make_recipe
from surgery.runtime.files import read_text
from surgery.runtime.progress import show


def look(
    model: ModelArgument,
    text: TextOption = None,
    dtype: Annotated[str, typer.Option("--dtype", help="What it is computed in; auto: as it is stored.")] = "auto",
    as_json: AsJson = False,
    trust_remote_code: Trust = False,
) -> None:
    """Take a first look at a model: is editing worth trying?

    Prints what the model is, what can be edited, what it retrieves (dictionaries of 4 to 64 pairs), which layers gather and
    aggregate, its other skills, the loss on the text, the bytes of its cache, and a verdict.

    Examples:
      surgery look checkpoints/tiny-mamba2
    """
    options = make_recipe({"model": model, "dtype": dtype}, "--dtype")
    if text is not None and text.suffix != ".parquet":  # said before the model is read
        read_text(text)
    from surgery.look import look as look_at

    opened, tokenizer = open_model(model, options, trust_remote_code)
    seen = look_at(opened, tokenizer, text=text, name=model)
    show(seen.text() if as_json else seen)
