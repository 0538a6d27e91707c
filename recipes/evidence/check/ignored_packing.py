"""What says where documents begin that share a row is taken without a word, and read by no recurrent layer.

Right are documents apart, or a ValueError, as several models raise it for seq_idx. Exits with 1 while the fault is there.
"""

import torch
from plain import ARCHITECTURES, ids, judge, make

CELLS = {"packed documents": tuple(ARCHITECTURES)}
BOUNDS = torch.tensor([0, 20, 41], dtype=torch.int32)
WAYS = {
    "position_ids": {"position_ids": torch.cat([torch.arange(20), torch.arange(21)])[None]},
    "seq_idx": {"seq_idx": torch.tensor([0] * 20 + [1] * 21, dtype=torch.int32)[None]},
    "cu_seq_lens": {"cu_seq_lens_q": BOUNDS, "cu_seq_lens_k": BOUNDS, "max_length_q": 21, "max_length_k": 21},
}


def differences(name: str) -> dict[str, float]:
    model, text, found = make(name), ids(1, 41), {}
    alone = model(input_ids=text[:, 20:], use_cache=False).logits
    for way, told in WAYS.items():
        try:
            found[f"{name}, {way}"] = (model(input_ids=text, use_cache=False, **told).logits[:, 20:] - alone).abs().max().item()
        except (ValueError, TypeError, NotImplementedError) as error:
            print(f"{name}, {way} is refused: {str(error).splitlines()[0]}")
    return found


if __name__ == "__main__":
    found = [differences(name) for name in CELLS["packed documents"]]
    judge("the second document differs from itself alone", {way: value for each in found for way, value in each.items()})
