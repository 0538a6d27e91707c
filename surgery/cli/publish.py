"""surgery publish"""

from pathlib import Path
from typing import Annotated

import typer

from surgery.runtime.progress import show, size


def publish(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder that `surgery export` wrote.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository on the Hub.")],
    send: Annotated[bool, typer.Option("--send", help="Send it; without this, only say what would be sent.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is new.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Also replace a model that is no export of ours.")] = False,
) -> None:
    """Send an export to the Hub, as it was verified.

    Without --send it shows the card and the files that would go.

    Examples:
      surgery publish runs/demo/hybrid me/my-hybrid
    """
    from surgery.exporting.publish import publish as publish_folder

    done = publish_folder(folder, repo, private=private, dry_run=not send, overwrite=overwrite)
    for name, count in done.files.items():
        show(f"{size(count):>10}  {name}")
    if done.url is None:
        show(f"\n{done.card}\nNothing was sent; --send sends it to {repo}.")
    else:
        show(f"Sent: {done.url}")
