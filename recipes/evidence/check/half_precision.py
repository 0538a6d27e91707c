"""xLSTM cannot be run in 16 bits: its chunkwise kernel multiplies matrices of two dtypes.

Right are logits. Exits with 1 while the fault is there.
"""

import torch
from plain import ids, judge, make

CELLS = {"precision": ("xlstm",)}


def run(name: str, dtype: torch.dtype) -> float | str:
    try:
        make(name).to(dtype)(input_ids=ids(1, 20), use_cache=False)
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return 0.0


if __name__ == "__main__":
    judge("logits differ", {f"xlstm in {dtype}": run("xlstm", dtype) for dtype in (torch.bfloat16, torch.float16)})
