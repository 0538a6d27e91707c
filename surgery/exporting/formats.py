"""The formats of an export, for help texts; export.py has the modules that write them."""

from surgery.errors import UserError

DESCRIPTIONS = {
    "hf": "a complete Hugging Face folder, with the modeling code for where this package is not installed",
    "patch": "the grafts alone, and what identifies their base",
    "nemotron_h": "transformers' and vLLM's Nemotron-H; for layer grafts",
    "mamba_ssm": "the original state-spaces folder, for the package mamba_ssm; for layer grafts",
    "gguf": "a file for llama.cpp; for layer grafts of Mamba-2, and for bases",
}
OF_BASES = ("gguf",)  # formats in which a base can be written too, to be served beside its hybrid

# How an export is verified; verify.py does.
VERIFICATIONS = {
    "auto": "full where that takes no more than half of the memory that is free, else layers",
    "full": "logits and 64 greedy tokens, with the whole model in float32 in memory",
    "layers": "logits and 3 greedy tokens, with a few layers in memory at a time",
    "tensors": "the tensors alone, bit for bit; nothing is computed with them",
}


def check_way(verify: str) -> None:
    """Raise UserError for what is not in VERIFICATIONS."""
    if verify not in VERIFICATIONS:
        raise UserError(f"cannot verify by '{verify}'; there are {', '.join(VERIFICATIONS)}")
