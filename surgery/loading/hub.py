"""Folders of models: here, or fetched from the Hub; and in one line why one cannot be had."""

from pathlib import Path

from surgery.errors import UserError
from surgery.records.names import on_hub

# What of a Hub repository is fetched; the card says under which licence it is.
PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.py", "README.md"]
# The same weights once more, in the layout of their maker: Codestral-Mamba's and Llama's repositories hold them twice.
IGNORED = ["consolidated*", "original/*"]


def local_folder(name: str, revision: str | None = None) -> Path:
    """The local folder of a model: itself, or the Hub's snapshot. Raises UserError if there is none."""
    if Path(name).is_dir():
        return Path(name)
    if not on_hub(name):
        raise UserError(f"no such folder: {name}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=PATTERNS, ignore_patterns=IGNORED))
    except Exception as error:
        raise UserError(f"no such folder: {name}, and {why_not_fetched(error)}") from error


def why_not_fetched(error: Exception) -> str:
    """What keeps something from being fetched from the Hub, in words that say what to do."""
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    if is_offline_mode():
        return "the Hub may not be asked (HF_HUB_OFFLINE is set) and its cache here does not hold it"
    if isinstance(error, GatedRepoError):
        return "the Hub gives it only to those who accepted its terms: do that on its page, then `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return "the Hub has no such repository, or it is private (`hf auth login`)"
    if isinstance(error, RevisionNotFoundError):
        return "its repository on the Hub has no such revision"
    if isinstance(error, LocalEntryNotFoundError | ConnectionError) or "couldn't connect" in str(error):
        return "the Hub cannot be reached and its cache here does not hold it; is there a network?"
    return one_line(error)


def one_line(error: Exception) -> str:
    """An exception's type and the first line of its message."""
    message = str(error).strip()
    return f"{type(error).__name__}: {message.splitlines()[0] if message else 'no message'}"
