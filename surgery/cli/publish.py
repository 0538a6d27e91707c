"""surgery publish"""

from typing import Annotated

import typer

from surgery.cli.console import prose, show, table
from surgery.cli.options import PlaceArgument


def publish(
    folder: PlaceArgument, repo: Annotated[str, typer.Argument(help="Where to, e.g. name/model.")],
    private: Annotated[bool, typer.Option("--private", help="Make a repository that only you can see.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; print what would be sent.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model there that is no export of this toolkit.")
    ] = False,
) -> None:  # fmt: skip
    """Send a verified export to the Hub.

    Sends it with its card, in one commit, and compares what arrived. Files of an earlier export there that this one lacks are
    deleted; other files stay.

    Examples:
      surgery publish tuned me/my-hybrid --dry-run
    """
    from surgery.commands import publish as publishing

    done = publishing.publish(folder, repo, private=private, dry_run=dry_run, overwrite=overwrite)
    prose(done.proof.line())
    table(["file", "bytes"], [[name, f"{size:,}"] for name, size in done.files.items()])
    if done.url is None:
        show(f"{done.card}\nNothing was sent to {repo}: {sum(done.files.values()):,} bytes and this card would be.")
        return
    if done.deleted:
        show(f"Deleted there, from an earlier export: {', '.join(done.deleted)}.")
    if done.others:
        show(f"The repository also holds {', '.join(done.others)}, which are not of this export.")
    show(f"Sent and compared: {done.url} (commit {done.commit})")
