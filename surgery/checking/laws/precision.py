"""Float32 is float64 rounded, and 16 bits are that rounded coarsely: by no more than the rounding of weights explains."""

import torch

from surgery.checking.law import Law, Subject, prepared, rounding

TIMES = 16  # of what it changes that each weight is off by one rounding


def cases(s: Subject):
    def run(dtype):
        with torch.no_grad():
            found = prepared(s.model).to(dtype)(input_ids=s.ids[:1], use_cache=False).logits.double()
        least = rounding(s.right.abs().max().item(), s.length, s.layers, torch.float32)
        if dtype is not torch.float32 and chooses_experts(s.model.config):
            return found, s.right, s.right.abs().max().item()
        return found, s.right, max(least, TIMES * off_by_one(torch.finfo(dtype).eps))

    def off_by_one(eps):
        rounded, generator = prepared(s.model), torch.Generator().manual_seed(0)
        with torch.no_grad(), s.precision():
            for tensor in rounded.parameters():
                tensor.mul_(1 + eps * (torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) - 0.5))
            return (rounded(input_ids=s.ids[:1], use_cache=False).logits - s.right).abs().max().item()

    dtypes = (torch.float32, torch.bfloat16, torch.float16) if s.exact else (torch.bfloat16, torch.float16)
    return {str(dtype).removeprefix("torch."): lambda dtype=dtype: run(dtype) for dtype in dtypes}


def chooses_experts(config) -> bool:
    """Whether numbers are compared that rounding may turn: then logits may differ as far as they are large."""
    return any(getattr(config, name, None) for name in ("num_experts_per_tok", "num_experts_per_token", "index_topk"))


LAW = Law(
    "precision",
    "in 16 bits the state overflows, or is rounded at every token",
    "keep the model in float32, or its state (bfloat16 in place of float16)",
    cases,
)
