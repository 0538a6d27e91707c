"""The Triton kernels of graft attention, compiled for cards that are not here: what a block of each takes of shared memory."""

import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

sys.path.insert(0, str(Path(__file__).parents[2]))
from surgery.kernels import attention_triton
from surgery.kernels.attention_triton import UNSPECIFIC

# Compute capability, and shared memory that a block may have, in bytes.
CARDS = {"RTX 4090": (89, 101_376), "RTX 5090": (120, 101_376), "A100": (80, 166_912), "H100": (90, 232_448)}
TYPES = {torch.bfloat16: "*bf16", torch.int32: "*i32", torch.float32: "*fp32"}


class Compiled:
    """In the place of a kernel: compiles it for the arguments of a launch, as Triton would."""

    def __init__(self, kernel: Any, capability: int):
        self.kernel, self.target, self.shared = kernel, GPUTarget("cuda", capability, 32), 0

    def __getitem__(self, grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int, num_stages: int, **constants: Any) -> None:
        kinds, attributes = {}, {}
        for i, (name, given) in enumerate(zip(self.kernel.arg_names, args, strict=False)):
            kinds[name] = TYPES[given.dtype] if isinstance(given, torch.Tensor) else "i32"
            specific = isinstance(given, int) and name not in UNSPECIFIC
            if given is None or (specific and given == 1):
                constants[name] = given
            elif isinstance(given, torch.Tensor) or (specific and given % 16 == 0):
                attributes[(i,)] = [["tt.divisibility", 16]]
        kinds |= dict.fromkeys(constants, "constexpr")
        source = ASTSource(fn=self.kernel, signature=kinds, constexprs=constants, attrs=attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        self.shared = triton.compile(source, target=self.target, options=options).metadata.shared


def main() -> None:
    kernels = {name: getattr(attention_triton, name) for name in ("_forward_kernel", "_key_kernel", "_query_kernel")}
    q, v = (torch.empty(8, 3, 2048, w, dtype=torch.bfloat16, device="meta", requires_grad=True) for w in (128, 64))
    bias, null = torch.empty(8, 3, 2048, device="meta"), torch.empty(3, device="meta")
    seq_idx = torch.empty(8, 2048, dtype=torch.int32, device="meta")
    for card, (capability, shared) in CARDS.items():
        compiled = {name: Compiled(kernel, capability) for name, kernel in kernels.items()}
        vars(attention_triton).update(compiled, SHARED=shared)
        y, m = attention_triton.attend_triton(q, q, v, bias, null, None, seq_idx)
        torch.autograd.grad([y, m], q, [torch.empty_like(y), torch.empty_like(m)])
        taken = [each.shared for each in compiled.values()]
        print(card, taken, flush=True)
        assert 0 < min(taken) <= max(taken) <= shared


if __name__ == "__main__":
    main()
