"""Folders of models: here, or fetched from the Hub; and in one line why one cannot be had."""

from pathlib import Path

from surgery.errors import UserError
from surgery.records.names import on_hub
from surgery.records.reading import check_name, check_plain, parse_json
from surgery.records.record import read_text

# What of a Hub repository is fetched; the card says under which licence it is.
PATTERNS = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.py", "README.md"]
# What says what a model is, and of a patch, on what.
CONFIGURATION = ["config.json", "patch.json", "plan.json", "*.py"]
# Of a folder, what may be read of a model; a configuration's keys must be distinct; the largest tokenizer has 40 MB.
READ = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja"}
DISTINCT = {"config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
            "model.safetensors.index.json", "pytorch_model.bin.index.json"}  # fmt: skip
MOST_JSON = 2**30
# The same weights once more, in the layout of their maker: Codestral-Mamba's and Llama's repositories hold them twice.
IGNORED = ["consolidated*", "original/*"]


def check_model(name: str) -> str:
    """The name of a model, which may be in a folder or on the Hub. Raises UserError where it can be in neither."""
    check_name(name)
    if not (Path(name).is_dir() or on_hub(name)):
        raise UserError(f"no such folder: {name}")
    return name


def check_hybrid(name: str) -> str:
    """The name of a hybrid's folder or patch. Raises UserError where there is none."""
    if not Path(check_name(name)).is_dir():
        raise UserError(f"no such folder: {name}; a hybrid is a folder that `surgery splice`, `tune` or `export` wrote")
    return name


def is_model(name: str) -> bool:
    """Whether what `surgery run` is given is a model, and not a recipe's file."""
    return Path(name).is_dir() or (on_hub(name) and not Path(name).exists() and Path(name).suffix not in (".yaml", ".yml"))


def local_folder(name: str, revision: str | None = None, patterns: list[str] | None = None) -> Path:
    """The local folder of a model: itself, or the Hub's snapshot. patterns: what is fetched, PATTERNS unless given. Raises
    UserError if there is none."""
    check_model(name)
    if Path(name).is_dir():
        check_files(Path(name))
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns or PATTERNS, ignore_patterns=IGNORED))
    except Exception as error:
        raise UserError(f"no such folder: {name}, and {why_not_fetched(error)}") from error


def check_files(folder: Path) -> None:
    """Raise UserError for a file of a model's folder that cannot be one: a pipe would be waited for, a device has no end, and
    of a key that occurs twice in a configuration, the last would be taken in silence."""
    for path in sorted(folder.iterdir()):
        if path.suffix not in READ or path.is_dir():
            continue
        size = check_plain(path)
        if path.suffix == ".json" and size > MOST_JSON:
            raise UserError(f"cannot read {path}: it has {size:,} bytes, more than any tokenizer or configuration")
        if path.name in DISTINCT:
            parse_json(read_text(path), str(path))


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
    """An exception's type and the first line of its message; the next one, too, where the first one ends with a colon."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or ["no message"]
    return f"{type(error).__name__}: {' '.join(lines[: 2 if lines[0].endswith(':') else 1])}"
