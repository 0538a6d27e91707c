"""Logits in float32 and in 16 bits differ from those of float64 by no more than the rounding of weights explains."""

import re

import torch

from surgery.checking.law import TIMES, Law, Subject, prepared

FIRST = {4: 2, 2: 10}  # by a number's bytes: one in so many tokens is compared where rounding may turn what is chosen


def cases(s: Subject):
    def run(dtype):
        with torch.no_grad():
            found = narrowed(s.model, dtype)(input_ids=s.ids[:1], use_cache=False).logits.double()
        right = s.right
        if compares(s.model.config) and found.isfinite().all():  # the tokens that are nearest: no turn has reached them
            nearest = (found - right).abs().amax(dim=(0, 2)).argsort()[: s.length // FIRST[dtype.itemsize]]
            found, right = found[:, nearest], right[:, nearest]
        rounded, generator, eps = prepared(s.model), torch.Generator().manual_seed(0), torch.finfo(dtype).eps
        with torch.no_grad(), s.precision():
            for tensor in rounded.parameters():
                tensor.mul_(1 + eps * (torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) - 0.5))
            off_by_one = (rounded(input_ids=s.ids[:1], use_cache=False).logits - s.right).abs().max().item()
        return found, right, s.rounding + TIMES * off_by_one

    dtypes = (torch.float32, torch.bfloat16, torch.float16) if s.exact else (torch.bfloat16, torch.float16)
    return {str(dtype).removeprefix("torch."): lambda dtype=dtype: run(dtype) for dtype in dtypes}


def narrowed(model, dtype):
    """A copy as from_pretrained(dtype=...) gives it: some models keep some weights in float32."""
    copied = prepared(model).to(dtype)
    kept = set(model._keep_in_fp32_modules_strict or ()) | set(
        model._keep_in_fp32_modules or () if dtype is torch.float16 else ()
    )
    for name, tensor in (*copied.named_parameters(), *copied.named_buffers()):
        if dtype is not torch.float32 and any(re.search(rf"(^|\.){pattern}(\.|$)", name) for pattern in kept):
            tensor.data = tensor.data.float()
    return copied


def compares(config) -> bool:
    """Whether experts, keys or open grafts are chosen by comparing numbers."""
    names = ("num_experts_per_tok", "num_experts_per_token", "index_topk")
    grafts = getattr(config, "grafts", None) or []
    return any(getattr(config, name, None) for name in names) or any(each.get("closed_below") for each in grafts)


LAW = Law(
    "precision",
    "in 16 bits the state overflows, or is rounded at every token",
    "keep the model or its state in float32, or take bfloat16, not float16",
    cases,
)
