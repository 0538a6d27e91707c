"""Proving an export: a process of its own reads it back as its users will, and answers as the live model does.

Equal tensors do not give equal logits to the last bit: the product of a matrix and a single vector is summed in another order
where the matrix lies at another place in memory (up to 2e-5 in the logits of the built-in model). So tensors are compared bit
for bit, and logits within a tolerance (tolerance.py). What is compared is an export, and no kernels: compiled ones, which a
folder does not carry, differ by more (up to 7e-5), so both sides run the ones in Python. Both compute in float32.

There are three ways (verifications.py): with the whole model in float32 in memory; layer by layer, where both sides
convert one weight after the other, and the fresh process reads it from its file when its module is called; and by the tensors
alone, with which nothing is computed. The second one takes a pass over all weights for the prompts together, alone and in the
batch, and one for every further token, so it asks for fewer. The sides take turns: each uses all processors, and both at once
would hold the largest weight in float32 twice.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.exporting.fresh_process import KERNELS, NO_MEMORY, OURS, Answers, OutOfMemory, ask
from surgery.exporting.tolerance import tolerance
from surgery.exporting.verifications import check_way
from surgery.kernels.dispatch import use
from surgery.loading.streamed import by_layers, emptied, take_buffers
from surgery.models import answers as script
from surgery.models.answers import LENGTHS, NEW, answers, held, named_values, tensor_digest, tensors
from surgery.models.quantised import is_quantised
from surgery.records.record import Record
from surgery.runtime.memory import available, size
from surgery.runtime.progress import say

NEW_BY_LAYERS = 3  # greedy tokens: of the prompts, of their cache, and of a cache that has been decoded with
COMFORTABLE = 0.5  # of the memory that is free: what the whole model in float32 may take before it is read layer by layer
Way = Literal["full", "layers", "tensors"]


@dataclass(frozen=True)
class Reader:
    """What reads a format back.

    package: whose classes do; if they are not this package's, it is as if that were not installed. how: by which function of
    models/answers.py (READ). tensors: those of a hybrid as the reader has them, by name. why: if the format
    is for another program, the reason why that one does not read it here.
    """

    package: str
    how: str
    tensors: Callable[[PreTrainedModel], Iterator[tuple[str, Tensor]]] = held
    why: str | None = None


class Proof(Record):
    """How an export was verified, in a fresh process and in float32.

    verify: which of VERIFICATIONS it was. reader, version: what read it. why: the reason why the program that the format is for
    did not. tensors: how many were compared, bit for bit. difference: the largest one of
    logits to the live model; None if nothing was computed. tolerance: that of the longest text. prompts: their lengths in
    tokens. tokens: how many were then chosen greedily after each prompt of a left-padded batch, the same ones as the live
    model's.
    """

    verify: Way = "full"
    reader: str
    version: str
    why: str | None
    tensors: int | None = None
    difference: float | None
    tolerance: float
    prompts: tuple[int, ...]
    tokens: int

    def holds(self) -> bool:
        """Whether the folder is the live model, as far as it was compared."""
        if self.verify == "tensors":
            return self.tensors is not None and self.difference is None
        return self.difference is not None and self.difference <= self.tolerance

    def line(self) -> str:
        hidden = "" if self.reader == OURS else f" without {OURS}"
        instead = f" ({self.why})" if self.why else ""
        by = f"in a fresh process by {self.reader} {self.version}{hidden}{instead}"
        if self.verify == "tensors":
            return (
                f"read back {by}: all {self.tensors} tensors are the live model's, bit for bit; nothing was computed with "
                "them, so the code and the configuration that use them are not verified"
            )
        *lengths, last = map(str, self.prompts)
        return (
            f"read back {'layer by layer ' if self.verify == 'layers' else ''}{by}: logits differ by at most "
            f"{self.difference:.2g} after prompts of {', '.join(lengths)} and {last} tokens, alone and in a padded batch; all "
            f"{self.tokens} greedy tokens of each are the same"
        )


def prove(
    reader: Reader,
    hybrid: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    verify: str = "auto",
    digests: Mapping[str, str] | None = None,
) -> Proof:
    """verify: one of VERIFICATIONS. digests: of the live model's tensors, if they are known.

    Raises UserError if the folder cannot be read, is another model than the live one, or takes more memory than there is.
    """
    way = chosen(verify, hybrid)
    new = {"full": NEW, "layers": NEW_BY_LAYERS, "tensors": 0}[way]
    how = reader.how + (":disk" if way != "full" and not is_quantised(hybrid) else "")
    with _memory_or(way):
        (read_back,) = ask(reader.package, {folder: how}, new)
        return compare(reader, hybrid, len(tokenizer), read_back, way=way, digests=digests)


def chosen(verify: str, hybrid: PreTrainedModel) -> Way:
    """How a hybrid is verified. What "auto" becomes, if not "full", is said. Raises UserError for a way that does not exist, or
    not for this hybrid."""
    check_way(verify)
    if verify == "layers" and is_quantised(hybrid):
        raise UserError(
            "quantised weights cannot be read layer by layer; verify by 'full', which takes their size twice, or by 'tensors'"
        )
    if verify != "auto":
        return verify  # type: ignore[return-value]
    needed, free = whole_size(hybrid), available()
    if needed <= COMFORTABLE * free:
        return "full"
    way: Way = "tensors" if is_quantised(hybrid) else "layers"
    say(
        f"verifying by '{way}': 'full' takes up to {size(needed)} of memory beside the model, and {size(free)} are free "
        "(--verify chooses)"
    )
    return way


def whole_size(hybrid: PreTrainedModel) -> int:
    """Bytes that "full" takes beside the model. The fresh process holds the weights in float32, and while it converts them, as
    they are stored; after it has ended, this one holds a copy in float32."""
    each = tensors(hybrid).values()
    stored = sum(tensor.nbytes for tensor in each)
    if is_quantised(hybrid):
        return 2 * stored
    wide = 4 * sum(tensor.numel() for tensor in each)
    return wide if stored >= wide else wide + stored


def compare(
    reader: Reader, hybrid: PreTrainedModel, vocabulary: int, read_back: Answers, *, way: Way = "full",
    digests: Mapping[str, str] | None = None,
) -> Proof:  # fmt: skip
    """Raises UserError if what was read back is not the live model: by the name of a tensor that differs, or by how much the
    logits do."""
    logits, theirs = read_back
    known = digests is not None and reader.tensors is held
    live = digests if known else {name: tensor_digest(tensor) for name, tensor in reader.tensors(hybrid)}
    assert live is not None
    for name in sorted({*live, *theirs}):
        if live.get(name) != theirs.get(name):
            raise UserError(f"what was read back is not what was written: the tensor '{name}' differs; nothing was written")
    worst, allowed = None, {}
    if way != "tensors":
        with use(**KERNELS):
            live_logits = answers(in_float32(hybrid, way), vocabulary, _tokens(logits))
        worst, allowed = difference(live_logits, logits), tolerances(live_logits, hybrid)
        if any(not difference(live_logits, logits, name) <= most for name, most in allowed.items()):
            how = f"its logits differ by {worst:.3g}" if math.isfinite(worst) else "it chooses other tokens"
            raise UserError(f"what {reader.package} reads back is not the live model: {how}; nothing was written")
    return Proof(
        verify=way, reader=reader.package, version=version(reader.package), why=reader.why, tensors=len(live), difference=worst,
        tolerance=max(allowed.values(), default=0.0), prompts=() if worst is None else LENGTHS,
        tokens=0 if worst is None else _tokens(logits),
    )  # fmt: skip


def _tokens(logits: dict[str, Tensor]) -> int:
    return logits["tokens"].shape[1]


@contextmanager
def _memory_or(way: Way) -> Iterator[None]:
    """Where memory runs out, say what takes less of it."""
    hint = {
        "full": "--verify layers takes less, --verify tensors the least", "layers": "--verify tensors takes less",
        "tensors": "end other programs, or export on a machine with more",
    }[way]  # fmt: skip
    try:
        yield
    except OutOfMemory as error:
        raise UserError(f"{error}, as it does where memory runs out: {hint}; nothing was written") from error
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(text in str(error) for text in NO_MEMORY):
            raise
        raise UserError(f"memory ran out while the live model answered: {hint}; nothing was written") from error


def tolerances(logits: dict[str, Tensor], hybrid: PreTrainedModel) -> dict[str, float]:
    """Of the live model's answers, by name."""
    longest, layers = max(LENGTHS) + _tokens(logits), hybrid.config.num_hidden_layers
    return {
        name: tolerance(each, len(each) if name.startswith("prompt") else longest, layers)
        for name, each in logits.items()
        if name != "tokens"
    }


def difference(first: dict[str, Tensor], second: dict[str, Tensor], name: str | None = None) -> float:
    """The largest difference of logits (of those of that name); infinity if other tokens were chosen, or a logit is not a
    number."""
    if not torch.equal(first["tokens"], second["tokens"]):
        return float("inf")
    each = [(first[one] - second[one]).abs().max() for one in first if one != "tokens" and name in (None, one)]
    worst = torch.stack(each).max().item()  # Python's max() would lose what is not a number
    return float("inf") if math.isnan(worst) else worst


def in_float32(hybrid: PreTrainedModel, way: Way = "full") -> PreTrainedModel:
    """The model itself if it is on the CPU in float32; else, for "layers", one that converts its weights when they are used, or
    a copy of it."""
    target = (torch.device("cpu"), torch.float32)
    if all((p.device, p.dtype) == target for p in hybrid.parameters()) and not hasattr(hybrid, "hf_device_map"):
        return hybrid
    if way == "layers":
        return by_layers(hybrid)
    if is_quantised(hybrid):
        return script.in_float32(copy.deepcopy(hybrid))
    copied = emptied(hybrid)
    state = {name: tensor.detach().to(*target) for name, tensor in named_values(hybrid, list(hybrid.state_dict()))}
    copied.load_state_dict(state, assign=True, strict=False)  # of weights that are tied and were put away there is one
    take_buffers(copied, hybrid)
    copied.tie_weights()
    copied.generation_config = hybrid.generation_config
    return copied
