"""Models without values in their tensors (on the meta device): what a configuration alone says. No weight is read."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.errors import UserError
from surgery.families import register
from surgery.loading.checkpoint import check_depth, content_of
from surgery.loading.hub import CONFIGURATION, local_folder, one_line
from surgery.loading.readers import reader_of
from surgery.records.reading import shown


def load_empty(name: str) -> PreTrainedModel:
    """A language model without values, by its Hub id, or its folder. Of the Hub, the configuration alone
    is fetched. Raises UserError in one line if that cannot be."""
    folder = local_folder(name, patterns=CONFIGURATION)
    return empty_model(read_config(folder), name)


def read_config(folder: Path, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration in a folder, as transformers has it. Raises UserError in one line for what is no
    model's, and for a model that only code of its own could read, unless that may run."""
    content = content_of(folder / "config.json")
    if (reader := reader_of(content)) is not None:
        return reader.config_of(content)
    register()
    model_type, own_code = content.get("model_type"), "auto_map" in content
    if not isinstance(model_type, str):
        raise UserError(f"{folder / 'config.json'} is no model's: it names no model_type")
    if model_type not in CONFIG_MAPPING and not (own_code and trust_remote_code):
        raise UserError(
            f"transformers {transformers.__version__} knows no model of the type '{shown(model_type)}'"
            + ("; the code in its folder does, and runs only with --trust-remote-code" if own_code else "")
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever a wrong value raises
        raise UserError(f"cannot read {folder / 'config.json'}: {one_line(error)}") from error
    if reason := _impossible(config):
        raise UserError(f"{folder / 'config.json'}: {reason}")
    return config


def _impossible(config: PreTrainedConfig) -> str:
    """What no model can have, and transformers takes: it shows in a forward pass alone. Empty where nothing is wrong."""
    own: Any = config.get_text_config(decoder=True)
    for name in ("chunk_size", "mamba_chunk_size"):
        size = getattr(own, name, 1)
        if not isinstance(size, int) or size < 1:
            return f"{name} is {size!r}, and is to be a number from 1 on"
    grafts = getattr(own, "grafts", None) or []
    listed = isinstance(grafts, list) and all(isinstance(each, dict) and isinstance(each.get("layer"), int) for each in grafts)
    if not listed:
        return f"grafts is {shown(repr(grafts), 40)}, and is to be a list of grafts, each with its layer"
    heads = getattr(own, "num_heads", None)
    for graft in grafts:
        if not 0 <= graft["layer"] < own.num_hidden_layers:
            return f"a graft is in layer {graft['layer']}, and there are {own.num_hidden_layers} layers"
        chosen = graft.get("heads") or []
        inside = all(isinstance(head, int) and 0 <= head < (heads or head + 1) for head in chosen)
        if own.model_type == "mamba2_hybrid" and not inside:
            return f"a graft in layer {graft['layer']} is at heads {chosen}, and there are {heads} heads"
    return ""


def empty_model(config: PreTrainedConfig, name: str, trust_remote_code: bool = False) -> PreTrainedModel:
    """The language model of a configuration. name: the model's, for messages. Raises UserError in one line if transformers
    cannot make one of it."""
    check_depth(name, getattr(config.get_text_config(decoder=True), "num_hidden_layers", None))
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever sizes that do not fit together raise
        raise UserError(f"cannot make the model of {name}: {one_line(error)}") from error
