"""The fingerprint of a model: a digest of what it computes, taken of the model as it is at the moment of asking.

It is the same for a live hybrid and when its folder is loaded again, for a base and the same base adopted, and for one file and
several shards. In another dtype it is another model. A model whose weights were changed in place, by merging a LoRA for
example, has another fingerprint from then on.
"""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from surgery.modeling import family_of
from surgery.runtime.files import settings_digest

THREADS = 4  # hashing lets other threads run
# Fields of a configuration about files, generation, training from scratch, or the classes around the model.
UNRELATED = frozenset(
    """
    model_type architectures auto_map grafts transformers_version dtype torch_dtype name_or_path _name_or_path
    bos_token_id eos_token_id pad_token_id use_cache return_dict output_hidden_states output_attentions initializer_range
    rescale_prenorm_residual time_step_min time_step_max time_step_floor time_step_init_scheme use_mambapy surgery
    """.split()
)
OF_GRAFTS = ("of_base", "blend", "gated", "null", "closed_below")  # that say the same in several ways, or nothing


def fingerprint(model: Any) -> str:
    """sha256 of a model's configuration and of the names, dtypes, shapes and bytes of its tensors; tied ones count once."""
    total = hashlib.sha256(json.dumps(function_of(model.config), sort_keys=True, default=str).encode())
    # What a folder of the model holds, tied parameters once. Those that accelerate keeps elsewhere are on the meta device.
    once = dict(model.named_parameters())
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - set(once)
    held = sorted(model.state_dict().items())
    tensors = {name: t.detach() for name, t in held if name not in tied and isinstance(t, Tensor)}
    with ThreadPoolExecutor(THREADS) as threads:
        for line in threads.map(lambda name: describe(name, tensors[name], model), tensors):
            total.update(line.encode())
    return total.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """sha256 of how a tokenizer divides text: vocabulary, normaliser, special tokens. What a call may set and leave, truncation
    and padding, is no part of it."""
    if not tokenizer.is_fast:
        return settings_digest(tokenizer.get_vocab())
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    return settings_digest({name: value for name, value in settings.items() if name not in ("truncation", "padding")})


def function_of(config: Any) -> dict[str, Any]:
    """The fields of a configuration that the model's function depends on."""
    fields = {name: value for name, value in config.to_dict().items() if name not in UNRELATED and value is not None}
    family = family_of(config)
    fields["base"] = config.model_type if family is None else family.model_type
    if fields["base"] in ("nemotron_h", "zamba2") and config.time_step_min != type(config)().time_step_min:
        fields["time_step_min"] = config.time_step_min  # by which these clamp every time step
    grafts = sorted(getattr(config, "grafts", None) or [], key=lambda entry: entry["layer"])
    if grafts:
        fields["grafts"] = [
            {name: value for name, value in entry.items() if name not in OF_GRAFTS}
            | {"closed_below": entry.get("closed_below", 0.0)}
            for entry in grafts
        ]
    return fields


def describe(name: str, tensor: Tensor, model: Any) -> str:
    """Name, dtype, shape and digest of a tensor in a line."""
    if tensor.is_meta:
        owner, _, leaf = name.rpartition(".")
        hook = getattr(model.get_submodule(owner), "_hf_hook", None)
        maps = [getattr(each, "weights_map", None) for each in getattr(hook, "hooks", [hook])]
        tensor = next(weights[leaf] for weights in maps if weights is not None)
    content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()}\n"
