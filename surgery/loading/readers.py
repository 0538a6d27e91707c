"""Folders in other layouts than transformers'. What reads one is found by listing the folders named `readers` around the core
(surgery/serving/readers): a new layout is a new file, which holds what FolderReader says."""

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from surgery.runtime.listing import listed


class FolderReader(Protocol):
    """A module of such a folder. It runs nothing that a model's folder holds. content: of a config.json."""

    LAYERS: str  # the key of config.json that says how many layers there are
    TOKENIZER: str  # where the tokenizer of a folder is that holds none

    def reads(self, content: dict[str, Any]) -> bool:
        """Whether a folder has this layout."""

    def config_of(self, content: dict[str, Any]) -> PreTrainedConfig:
        """The configuration as transformers has it. Raises UserError for what it cannot be."""

    def load_folder(self, folder: Path, content: dict[str, Any], dtype: torch.dtype | None = None) -> PreTrainedModel:
        """The model, in eval mode on the CPU. dtype: None for the one that it is stored in. Raises UserError."""


def reader_of(content: dict[str, Any]) -> FolderReader | None:
    """What reads a folder with this config.json; None where transformers does."""
    readers: list[Any] = [import_module(module) for module in listed("readers").values()]
    return next((reader for reader in readers if reader.reads(content)), None)
