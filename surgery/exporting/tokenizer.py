"""Saving a tokenizer so that older versions of transformers, and engines built on them, can read it."""

import json
from pathlib import Path

from transformers import PreTrainedTokenizerBase
from transformers.utils import cached_file

from surgery.runtime.files import write_text

CONFIG = "tokenizer_config.json"
# transformers 5 writes this for a tokenizer without a class of its own; version 4 does not know it.
UNKNOWN = "TokenizersBackend"
COMMON = "PreTrainedTokenizerFast"  # the same, and both know it


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer under the class that the base's file names."""
    tokenizer.save_pretrained(folder)
    path = folder / CONFIG
    if not path.exists():
        return
    settings = json.loads(path.read_text(encoding="utf-8"))
    named = settings.get("tokenizer_class")
    try:  # the file that it was read from, if that is here
        name = tokenizer.name_or_path
        source = cached_file(name, CONFIG, local_files_only=True, _raise_exceptions_for_missing_entries=False)
        named = (source and json.loads(Path(source).read_text(encoding="utf-8")).get("tokenizer_class")) or named
    except (OSError, ValueError, AttributeError):
        pass
    settings["tokenizer_class"] = COMMON if named in (None, UNKNOWN) else named
    write_text(path, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
