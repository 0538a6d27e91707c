"""Attention at an SSM head that finds the same token where it stood before: fitted without training, and then tuned.

    python recipes/evidence/prose/copying.py BOOKS      a folder with train/ and valid/ of public-domain novels

Of checkpoints/tiny-names, at the two heads of layer 2 that ceiling.py finds to carry the next token, on six novels by authors
that nothing was fitted on:

- Queries and keys: a ridge regression from the layer's input to the token's embedding (centred, of length 1, turned to WIDTH
  dimensions at random). The graft's convolution hands keys on by one token, so that a query meets the token behind its like.
  Behind SiLU the score is a monotonic function of the cosine; tau makes it SHARPNESS for the same token.
- The null key reads the query: the logistic regression of planning/calibrate.py, open before a repeated rare bigram is
  completed (probes/bigrams.py), closed at all other tokens.
- Tuned: queries, keys, gate and null key, on the repeated bigrams of train/ with hints (tune.hints), held to the base at all
  other tokens. With a KL weight of 60 a bigram and another token weigh about alike.

Writes copying.json beside this file, and prints it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from evidence_of_recall import BASE, COUNTED, RARE, ROWS, auc, read_novels
from torch import Tensor

import surgery
from surgery.evaluation.statistics import estimate
from surgery.modeling.graft import NATS
from surgery.planning.calibrate import fit_logistic
from surgery.probes.bigrams import NONE, PairCounts, find_repeats
from surgery.records.plan import Plan, Start
from surgery.records.recipe import Data, Hints
from surgery.records.record import provenance
from surgery.records.site import Site
from surgery.runtime.files import write_text
from surgery.splicing.splice import adopt
from surgery.tuning.text import open_text, text_rows

HERE = Path(__file__).parent
LAYER, HEADS, WIDTH = 2, (2, 11), 256
SHARPNESS, LARGE, RIDGE = 50.0, 8.0, 1e-4  # nats of a match; how far out SiLU works; of the mean square of the inputs
FITTED, LENGTH = 128, 512  # rows of train/, and their tokens
TUNE: dict[str, Any] = {"steps": 80, "batch_size": 4, "text_batch_size": 4, "text_tokens": LENGTH, "learning_rate": 1e-3}
TUNE |= {"bigram_weight": 1.0, "hints": Hints(weight=0.1), "examples": ()}
KL_WEIGHTS = (10.0, 60.0)


@torch.no_grad()
def start_copying(hybrid: Any, ids: Tensor, hits: Tensor) -> float:
    """Set the graft's weights on rows of text (b, t), in which `hits` (b, t) tells the tokens before a repeated rare bigram is
    completed. The AUC of the null key's logit on these rows."""
    mixer = hybrid.mixer_at(LAYER)
    graft, inputs = mixer.graft, []
    table = F.normalize(hybrid.get_input_embeddings().weight.detach(), dim=-1)
    table = F.normalize(table - table[ids].mean((0, 1)), dim=-1)
    turned = torch.linalg.qr(torch.randn(*table.shape[1:] * 2, generator=torch.Generator().manual_seed(0)))[0][:, :WIDTH]
    target = table @ turned * (table.shape[1] / WIDTH) ** 0.5

    def note(_: Any, args: tuple, named: dict) -> None:
        inputs.append(args[0] if args else named["hidden_states"])

    handle = mixer.register_forward_pre_hook(note, with_kwargs=True)
    with hybrid.disable_grafts():
        for some in ids.split(8):
            hybrid(input_ids=some, use_cache=False, logits_to_keep=1)
    handle.remove()
    read, wanted = torch.cat(inputs).flatten(0, 1).double(), target[ids].flatten(0, 1).double()
    square = read.T @ read
    square += RIDGE * square.trace() / len(square) * torch.eye(len(square), dtype=torch.float64)
    weight = LARGE * torch.linalg.solve(square, read.T @ wanted).T.float()
    pairs, taps = len(graft.signs), graft.qk_conv
    for proj in (graft.q_proj, graft.k_proj):
        proj.weight.copy_(weight.repeat(pairs, 1))
        if proj.bias is not None:
            proj.bias.zero_()
    taps.weight.zero_()
    taps.bias.zero_()
    taps.weight[: len(taps.weight) // 2, 0, -1] = 1.0  # queries: this token
    taps.weight[len(taps.weight) // 2 :, 0, -2] = 1.0  # keys: the one before
    graft.log_tau.fill_(float(np.log(SHARPNESS / F.silu(LARGE * target).square().sum(-1).mean().item())))
    scores, queries = [], []

    def look(_: Any, args: tuple) -> None:
        q, k = graft.queries_and_keys(args[0](), *args[1:3], None, None, None)
        later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        scores.append((q[:, 0] @ k[:, 0].mT).masked_fill(later, -torch.inf).logsumexp(-1))
        queries.append(q[:, 0])

    handle = graft.register_forward_pre_hook(look)
    for some in ids.split(8):
        hybrid(input_ids=some, use_cache=False, logits_to_keep=1)
    handle.remove()
    lse, q, wanted = torch.cat(scores).flatten().double(), torch.cat(queries).flatten(0, 1).double(), hits.flatten().double()
    w, b = fit_logistic(lse, q, wanted, torch.full_like(wanted, 1 / len(wanted)))
    graft.null.fill_(b / NATS)
    graft.null_query.copy_(w.float().repeat(pairs, 1))
    return auc((lse - q @ w).numpy(), hits.flatten().numpy())


def repeated(rows: np.ndarray, pairs: PairCounts, within: bool = False) -> Tensor:
    """Where in rows (b, t) a repeated rare bigram is completed, (b, t)."""
    return torch.from_numpy(find_repeats(rows, pairs, RARE, within=within) != NONE)


@torch.no_grad()
def losses(model: Any, novels: list[tuple[Tensor, Tensor]]) -> np.ndarray:
    """(novels, 3): the mean loss on repeated rare bigrams, on all tokens, and on the others."""
    found = []
    for ids, hits in novels:
        logits = model(input_ids=ids, use_cache=False).logits.float()
        loss = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        found.append([loss[hits[:, 1:]].mean(), loss.mean(), loss[~hits[:, 1:]].mean()])
    return np.array(found)


def main(folder: str) -> None:
    books = Path(folder)
    torch.manual_seed(0)
    base, tokenizer = surgery.load(str(BASE), dtype="float32")
    counted, _ = text_rows(open_text([str(books / "train")]), tokenizer, 256, range(COUNTED), 0)
    pairs = PairCounts(counted.numpy())
    ids, _ = text_rows(open_text([str(books / "train")]), tokenizer, LENGTH, range(FITTED), 7)
    hits = F.pad(repeated(ids.numpy(), pairs, within=True)[:, 1:], (0, 1))
    texts = {length: read_novels(books, tokenizer, length, rows) for length, rows in ROWS.items()}
    novels = {length: [(torch.from_numpy(rows), repeated(rows, pairs)) for rows in each] for length, each in texts.items()}
    before = {length: losses(adopt(base), each) for length, each in novels.items()}
    record: dict[str, Any] = {"rare_per_million": RARE, "tune": surgery.Tune(**TUNE).model_dump(mode="json")}
    record["provenance"] = provenance(str(BASE), "", 0).model_dump(mode="json")
    starts = {f"L{LAYER}.H{head}": Start(null=0.0, null_query=(1e-6,)) for head in HEADS}
    plan = Plan(sites=(Site(LAYER, HEADS),), starts=starts, gate=1.0, width=WIDTH)
    for weight in (None, *KL_WEIGHTS):
        hybrid = surgery.splice(base, plan).eval()
        hybrid.mixer_at(LAYER).graft.time_step = False  # a copy does not depend on how strongly the base writes
        record["auc_of_the_null_key"] = start_copying(hybrid, ids, hits)
        if weight is not None:
            options = surgery.Tune(**TUNE, kl_weight=weight)
            surgery.tune(hybrid, tokenizer, options, Data(train_text=(str(books / "train"),), skills=()))
        what = "untrained" if weight is None else f"tuned, KL weight {weight:g}"
        for length, each in novels.items():
            saved = before[length] - losses(hybrid.eval(), each)
            record[f"{what}, {length} tokens"] = found = {
                name: estimate(values, decisions=False).model_dump()
                for name, values in zip(("repeated", "all", "others"), saved.T, strict=True)
            }
            told = [f"{name} {each['mean']:+.3f} [{each['low']:+.3f}, {each['high']:+.3f}]" for name, each in found.items()]
            print(f"{what}, {length} tokens: {', '.join(told)}", flush=True)
        write_text(HERE / "copying.json", json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
