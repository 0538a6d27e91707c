"""The weights of an original state-spaces folder: one file, or shards and their index.

Nothing is copied: tensors are mapped from their file, privately. Changing them leaves the file alone, but it must stay whole
while they are used.
"""

import json
import pickle
import zipfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from surgery.errors import UserError

INDEX = ".index.json"
# In the order of preference: safetensors before pickles, as transformers does.
NAMES = [base + kind for base in ("model.safetensors", "pytorch_model.bin") for kind in ("", INDEX)]


def read_weights(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """The file of the weights, or their index, and all tensors by name.

    Raises UserError in one line if there is no such file, if one is damaged or holds anything but tensors, and if index and
    shards disagree.
    """
    for path in (folder / name for name in NAMES):
        if path.exists():
            return path, _read_shards(path) if path.name.endswith(INDEX) else _read(path)
    raise UserError(f"{folder} holds neither model.safetensors nor pytorch_model.bin, nor an index of either")


def _read_shards(index: Path) -> dict[str, torch.Tensor]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"cannot read {index}: it is no index, it has no weight_map") from error
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise UserError(f"cannot read {index}: its weight_map does not map tensors to files")
    suffix = Path(index.name.removesuffix(INDEX)).suffix
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        # A path would reach other folders, and an index of safetensors must not lead to a pickle.
        if Path(shard).name != shard or Path(shard).suffix != suffix:
            raise UserError(f"{index}: {shard!r} is not the name of a {suffix} file in the same folder")
        if not (index.parent / shard).exists():
            raise UserError(f"{index}: the shard {shard!r} is missing")

    tensors: dict[str, torch.Tensor] = {}
    for shard in shards:
        in_shard = _read(index.parent / shard)
        in_index = {name for name, holder in weight_map.items() if holder == shard}
        if missing := sorted(in_index - set(in_shard)):
            raise UserError(f"{index}: the tensor {missing[0]!r} is missing in its shard {shard!r}")
        if extra := sorted(set(in_shard) - in_index):
            raise UserError(f"{index}: the tensor {extra[0]!r} in the shard {shard!r} is unexpected, the index does not say so")
        tensors |= in_shard
    return tensors


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            state = load_file(path)
        else:
            # Files from before torch 1.6 are no zip archives and cannot be mapped.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:  # torch's own text advises to load it without the protection
        raise UserError(f"cannot read {path}: it is damaged, or a pickle of more than tensors; it was not run") from error
    except Exception as error:  # a damaged file raises whatever its bytes lead to
        text = str(error).strip() or type(error).__name__
        raise UserError(f"cannot read {path}: it is damaged ({text.splitlines()[0]})") from error
    if not isinstance(state, dict):
        raise UserError(f"cannot read {path}: it holds a {type(state).__name__}, not a dict of tensors")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise UserError(f"cannot read {path}: its entry {name!r} is a {type(tensor).__name__}, not a tensor")
    return dict(state)
