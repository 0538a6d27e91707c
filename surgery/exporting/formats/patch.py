"""The grafts alone, with what else of the base was changed, and what identifies it.

One safetensors and one JSON; splicing/joining.py joins base and patch again.
"""

import copy
import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.fresh_process import OURS
from surgery.exporting.verify import Reader
from surgery.families import family_of
from surgery.families.dual_start import OWN
from surgery.hybrids.spliced import without_code
from surgery.loading.checkpoint import DISK, brings_tokenizer, load_base
from surgery.loading.digests import fingerprint
from surgery.loading.origin import origin
from surgery.loading.streamed import Live
from surgery.models.answers import held, held_names, tensor_digest
from surgery.models.quantised import is_quantised
from surgery.records.plan import PATCH, Plan, published
from surgery.records.record import environment
from surgery.splicing.joining import WEIGHTS, Patch, config_texts
from surgery.splicing.splice import check_base, graft_parameters
from surgery.splicing.windows import grafts_beneath

USE = """\
import surgery
hybrid = surgery.load("NAME")
model, tokenizer = hybrid.model, hybrid.tokenizer"""
READER = Reader(OURS, "this package")
QUANTISED = True

# Fields of a configuration that differ though the model does not.
BOOKKEEPING = {*OWN, "transformers_version", "dtype", "torch_dtype", "name_or_path", "_name_or_path"}


def write(hybrid: PreTrainedModel, folder: Path, *, tokenizer: PreTrainedTokenizerBase, plan: Plan, base: str) -> None:
    """The tokenizer goes along where the base does not bring it."""
    # The hybrid has most of the base's tensors already: they are read from the base's files one after the other. The files of
    # some stock models hold them in another form (experts one by one), and are read whole.
    whole = is_quantised(hybrid) or family_of(hybrid.config).fields is None
    original = load_base(base, device="cpu" if whole else DISK)
    if (getattr(original.config, "grafts", None) or []) != grafts_beneath(hybrid.config):
        raise UserError(f"{base} holds grafts: it is no base that a patch could be made for; say which is (--base)")
    if is_quantised(hybrid) and not is_quantised(original):
        raise UserError(
            f"{base} is not quantised, and the hybrid's base is: save that with save_pretrained, and name its folder (--base)"
        )
    check_base(plan, fingerprint(original, plan.dtype))
    after, live = held_names(hybrid), Live(hybrid)
    before, unchanged = {}, set()
    for name, tensor in held(original):
        before[name] = tensor_digest(tensor)
        kept = tensor if is_quantised(original) else tensor.to(hybrid.dtype)
        if name in after and _same(kept, live[name]):
            unchanged.add(name)
    changed = {name: live[name].contiguous().clone() for name in after if name not in unchanged}
    save_file(changed, folder / WEIGHTS, metadata={"format": "pt"})
    if not brings_tokenizer(base, tokenizer):
        without_code(tokenizer).save_pretrained(folder)
    config, fields = original.config.to_dict(), hybrid.config.to_dict()
    Patch(
        **environment().model_dump(exclude={"schema_version"}),
        base=origin(base, folder),
        plan=published(plan),
        dtype=str(hybrid.dtype).removeprefix("torch."),
        grafts=fields["grafts"],
        config={name: value for name, value in fields.items() if name not in BOOKKEEPING and config.get(name) != value},
        removed=tuple(name for name in before if name not in after),
        base_tensors=before,
        weights=hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest(),
        base_config=config_texts(original.config),
    ).write(folder / PATCH)
    _write_config(hybrid, folder)


def space(hybrid: PreTrainedModel) -> int:
    """Bytes, at least: tuning with adapters changes more than the grafts."""
    return sum(tensor.nbytes for tensor in graft_parameters(hybrid).values())


def _write_config(hybrid: PreTrainedModel, folder: Path) -> None:
    """By config.json an engine knows what to build (serving/patches.py). It names no code: there is none in a patch."""
    config = copy.deepcopy(hybrid.config)
    config.architectures = [type(hybrid).__name__]
    if hasattr(config, "auto_map"):
        del config.auto_map
    config.to_json_file(folder / "config.json")


def _same(first: Tensor, second: Tensor) -> bool:
    """Bit for bit."""
    if first is second:
        return True
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    return torch.equal(*(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (first, second)))
