"""Small hybrids with a tokenizer, and a reader that answers in this process in the place of a fresh one."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from surgery.exporting import fresh
from surgery.exporting.patch import join_patch
from surgery.models.load import load
from surgery.records.plan import Plan, Start
from surgery.splicing.splice import splice
from tests.surgery.modeling.bases import VOCABULARY, make_base

PLAN = Plan(sites=("L0.H0", "L1.H1,3"), starts={"L1.H1": Start(sign=-1, tau=1.5, null=0.5)}, gate=0.7, closed_below=0.02)


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w0")


def write_base(folder: Path, name: str = "mamba2", dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A folder of transformers' with a random base and a tokenizer."""
    make_base(name, seed=seed, dtype=dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def hybrid_of(folder: Path, plan: Plan = PLAN) -> tuple[Any, Any]:
    """(hybrid, tokenizer) of a base's folder, with grafts that are no longer as they began."""
    base, tokenizer = load(folder)
    hybrid = splice(base, plan)
    generator = torch.Generator().manual_seed(1)
    for parameter in hybrid.graft_parameters().values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return hybrid, tokenizer


class InProcess:
    """Reads and answers as fresh.py does, in this process."""

    def send(self, request: dict[str, Any]) -> None:
        self.request = request

    def receive(self) -> bytes:
        request = self.request
        if request["reader"] == "surgery":
            model, tokenizer = join_patch(request["folder"], request["base"])
        else:
            model, tokenizer = load(request["folder"], dtype="stored")
        sums = fresh.checksums(model)
        answers = fresh.answer(model.to(getattr(torch, request["dtype"])), len(tokenizer), request["verify"])
        return save({name: value.contiguous() for name, value in answers.items()}, metadata=sums)

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *error: object) -> None:
        pass
