"""How an export is verified; verify.py does. Here without torch, for help texts."""

from surgery.errors import UserError

VERIFICATIONS = {
    "auto": "full where that takes no more than half of the memory that is free, else layers",
    "full": "logits and 64 greedy tokens, with the whole model in float32 in memory",
    "layers": "logits and 3 greedy tokens, with a few layers in memory at a time",
    "tensors": "only the tensors, bit for bit; nothing is computed with them",
}


def check_way(verify: str) -> None:
    """Raise UserError for what is not in VERIFICATIONS."""
    if verify not in VERIFICATIONS:
        raise UserError(f"cannot verify by '{verify}'; there are {', '.join(VERIFICATIONS)}")
