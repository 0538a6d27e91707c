"""What is the most that attention at heads of an SSM saves on prose, if it always knows where to look?

    python recipes/evidence/prose/ceiling.py BOOKS      a folder with train/ and valid/ of public-domain novels

Of checkpoints/tiny-names, untuned, on the six novels of evidence_of_recall.py. An oracle takes the place of queries, keys and
null key: at the token before a repeated rare bigram is completed (probes/bigrams.py), attention is 1 on the token that
completed it before, and the graft is open; at every other token it is closed. So nothing is lost by looking in a wrong place,
and what is left is what the heads' values say: y_t <- y_t + g (x_s + D x_t - y_t).

Writes ceiling.json beside this file, and prints it.
"""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from evidence_of_recall import BASE, COUNTED, HEADS, RARE, ROWS, read_novels
from torch import Tensor

import surgery
from surgery.evaluation.statistics import estimate
from surgery.locating.attribution import tapped
from surgery.probes.bigrams import NONE, PairCounts, find_repeats
from surgery.records.record import installed_version
from surgery.runtime.files import write_text
from surgery.splicing.splice import adopt
from surgery.tuning.text import open_text, text_rows

HERE = Path(__file__).parent
LENGTH = 512  # tokens of a row
GATES = (0.1, 0.25, 0.5, 1.0)
SETS = {  # layer -> heads; None: all
    "one located head, L3.H9": {3: (9,)},
    "four located heads": HEADS,
    "the two of layer 2": {2: HEADS[2]},
    **{f"all heads of layer {layer}": {layer: None} for layer in range(4)},
    "all heads of all layers": dict.fromkeys(range(4)),
}


@torch.no_grad()
def losses(base: Any, heads: dict, g: float, ids: Tensor, before: Tensor) -> np.ndarray:
    """(hits,): of the tokens that complete a repeated rare bigram, in ids (b, t); before (b, t): of find_repeats."""
    look = torch.full_like(before, NONE)
    look[:, :-1] = before[:, 1:]  # from the token before
    hit, source = (look != NONE)[..., None, None], look.clamp_min(0)[..., None, None]

    def tap(mixer, streams, y, _):
        places = list(heads[mixer.layer_idx] or range(mixer.num_heads))
        x, own = streams.x[:, :, places], y[:, :, places]
        new = own + g * (x.gather(1, source.expand_as(x)) + mixer.D[places, None] * x - own)
        return y.clone().index_copy(2, torch.tensor(places), torch.where(hit, new, own))

    with tapped({layer: base.mixer_at(layer) for layer in heads}, tap):
        logits = base(input_ids=ids, use_cache=False).logits.float()
    loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return loss[before[:, 1:] != NONE].numpy()


def main(folder: str) -> None:
    books = Path(folder)
    model, tokenizer = surgery.load(str(BASE), dtype="float32")
    base = adopt(model).eval().requires_grad_(False)
    counted, _ = text_rows(open_text([str(books / "train")]), tokenizer, 256, range(COUNTED), 0)
    pairs = PairCounts(counted.numpy())
    novels = [
        (torch.from_numpy(rows), torch.from_numpy(find_repeats(rows, pairs, RARE, within=False)))
        for rows in read_novels(books, tokenizer, LENGTH, ROWS[LENGTH])
    ]
    plain = [losses(base, {3: (0,)}, 0.0, *novel) for novel in novels]
    record = {
        "version": installed_version("mamba-surgery"),
        "base": BASE.name,
        "rare_per_million": RARE,
        "novels": len(novels),
        "tokens": sum(ids.numel() for ids, _ in novels),
        "hits": sum(map(len, plain)),
        "loss_of_base": estimate(np.array([each.mean() for each in plain]), decisions=False).model_dump(),
        "saved": {},
    }
    for name, g in itertools.product(SETS, GATES):
        after = [losses(base, SETS[name], g, *novel) for novel in novels]
        saved = np.array([a.mean() - b.mean() for a, b in zip(plain, after, strict=True)])
        record["saved"][f"{name}, g {g:g}"] = found = estimate(saved, decisions=False).model_dump()
        print(f"{name}, g {g:g}: {found['mean']:+.2f} [{found['low']:+.2f}, {found['high']:+.2f}]", flush=True)
    write_text(HERE / "ceiling.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
