"""What is evidence, at a token of prose, that the next one completes a rare bigram which stood in the text before?

    python recipes/evidence/prose/evidence_of_recall.py BOOKS      a folder with train/ and valid/ of public-domain novels

Of checkpoints/tiny-names, without any tuning, on six novels by authors that it has not read. A statistic is computed at every
token from what comes up to it, and its AUC tells the tokens before a repeated rare bigram (probes/bigrams.py) from all others:

- log-sum-exp: of the scores of a dual graft at a located head, as today's null key compares it;
- cosine: of queries and keys (or of embeddings) of length 1, the log-sum-exp of 32 cos over earlier tokens, so that a threshold
  has one meaning for all tokens; over 2, 3 or 4 tokens: of the mean cosine of as many neighbours;
- rarity: minus the log of the token's frequency in other text, which is what a match by chance costs; fitted: as far as it is a
  linear function of the embedding, which a null key that reads the query can add;
- copy cache: the length of the longest match that ends here, in tokens, and the sum of its tokens' rarity.

Writes evidence-of-recall.json and evidence-of-recall.png beside this file.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import surgery
from surgery.evaluation.statistics import estimate
from surgery.locating.attribution import tapped
from surgery.probes.bigrams import NONE, PairCounts, find_repeats
from surgery.records.record import installed_version
from surgery.runtime.files import read_text, write_text
from surgery.runtime.progress import bar
from surgery.splicing.splice import adopt
from surgery.tuning.text import open_text, text_rows

HERE, BASE = Path(__file__).parent, Path(__file__).parents[3] / "checkpoints" / "tiny-names"
AUTHORS, LEFT_OUT = ("Thomas Hardy", "Stephen Crane"), ("The Blue Hotel", "The Open Boat")  # as in recall-places.json
HEADS = {2: (2, 11), 3: (8, 9)}  # located on four other novels (recall-places.json)
TAU, SHARPNESS, RARE, MOST = 2.0, 32.0, 10.0, 4
ROWS = {512: 8, 2048: 2}  # tokens of a row -> rows of each novel
COUNTED = 512  # rows of 256 tokens of train/, in which tokens and pairs are counted
FALSE = 0.01  # the share of other tokens at which hits are counted


def cosine_statistics(name: str, q: Tensor, k: Tensor, rarity: Tensor) -> dict[str, np.ndarray]:
    """Name -> (t,): of queries and keys (t, n) of one row, over one to four neighbours."""
    shifted, found = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).T, {}
    total, later = torch.zeros_like(shifted), torch.ones_like(shifted, dtype=torch.bool).triu()
    for tokens in range(1, MOST + 1):
        total = total + shifted
        lse = (SHARPNESS / tokens * total).masked_fill(later, -torch.inf).logsumexp(-1).clamp_min(-SHARPNESS)
        full = name + (f", {tokens} tokens" if tokens > 1 else "")
        found |= {full: lse.numpy(), f"{full}, rarity": (lse + rarity).numpy()}
        shifted = F.pad(shifted, (1, 0, 1, 0))[:-1, :-1]  # the neighbours one token earlier
    return found


def fit_rarity(base, price: np.ndarray) -> Tensor:
    """(vocabulary,): the least-squares fit of each token's rarity by a linear function of its embedding of length 1, in which
    tokens count as often as they occur. It is what a null key can know that reads the query."""
    embeddings = F.normalize(base.get_input_embeddings().weight.detach().double(), dim=-1)
    embeddings = F.pad(embeddings, (0, 1), value=1.0)
    weights = torch.tensor(np.exp(-price / 2))[:, None]
    return embeddings @ torch.linalg.lstsq(weights * embeddings, weights * torch.tensor(price)[:, None]).solution[:, 0]


def model_statistics(base, ids: Tensor, rarity: Tensor, fitted: Tensor) -> dict[str, np.ndarray]:
    """Name -> (t,), for one row of token ids."""
    embedded = base.get_input_embeddings().weight.detach()[ids].float()
    found = cosine_statistics("cosine, embeddings", embedded, embedded, rarity)
    found["cosine, embeddings, fitted rarity"] = found["cosine, embeddings"] + fitted[ids].numpy()
    later = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)

    def tap(mixer, streams, y, _):
        q, k = (m[0, :, 0].float() for m in (streams.q, streams.k))
        for head in HEADS[mixer.layer_idx]:
            scores = TAU * q @ k.T + streams.log_write[0, :, head].float()
            found[f"log-sum-exp, L{mixer.layer_idx}.H{head}"] = scores.masked_fill(later, -torch.inf).logsumexp(-1).numpy()
        found.update(cosine_statistics(f"cosine, L{mixer.layer_idx}", q, k, rarity))
        return y

    with torch.no_grad(), tapped({layer: base.mixer_at(layer) for layer in HEADS}, tap):
        base(input_ids=ids[None], use_cache=False, logits_to_keep=1)
    return found


def token_statistics(ids: np.ndarray, rarity: np.ndarray) -> dict[str, np.ndarray]:
    """Name -> (t,), from the tokens alone. Matches of any length: each token's with every earlier one go on from the last."""
    lengths, sums = np.zeros((2, len(ids), len(ids) + 1))
    for t in range(len(ids)):
        same = (ids[t] == ids) & (np.arange(len(ids)) < t)
        lengths[t, 1:] = np.where(same, lengths[t - 1, :-1] + 1, 0)
        sums[t, 1:] = np.where(same, sums[t - 1, :-1] + rarity[t], 0)
    return {
        "rarity alone": rarity,
        "same token before": (lengths.max(1) > 0).astype(float),
        "same token before, rarity": np.where(lengths.max(1) > 0, rarity, 0),
        "copy cache: longest match": lengths.max(1),
        "copy cache: longest match, rarity": sums.max(1),
    }


def auc(values: np.ndarray, positive: np.ndarray) -> float:
    """The probability that one of the positive tokens has more than one of the others; ties count half."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[place]
    n = positive.sum()
    return float((ranks[positive].sum() - n * (n + 1) / 2) / (n * (len(values) - n)))


def read_novels(books: Path, tokenizer: Any, length: int, rows: int) -> list[np.ndarray]:
    """Of each novel so many rows of token ids, (rows, length)."""
    novels = []
    for path in sorted((books / "valid").glob("*.txt")):
        if path.name.startswith(AUTHORS) and not any(title in path.name for title in LEFT_OUT):
            ids = np.array(tokenizer(read_text(path), add_special_tokens=False, verbose=False)["input_ids"])
            begins = np.linspace(0, len(ids) - length, rows).astype(int)
            novels.append(np.stack([ids[begin : begin + length] for begin in begins]))
    return novels


def measure(books: Path, length: int, rows: int) -> dict:
    """Statistic -> AUC, and the share of positive tokens above 99% of the others, means over novels with their intervals."""
    model, tokenizer = surgery.load(str(BASE), dtype="float32")
    base = adopt(model).eval()
    other, _ = text_rows(open_text([str(books / "train")]), tokenizer, 256, range(COUNTED), 0)
    pairs = PairCounts(other.numpy())
    counts = np.bincount(other.numpy().ravel(), minlength=base.config.vocab_size) + 1.0
    price = -np.log(counts / counts.sum())
    fitted = fit_rarity(base, price)
    each: dict[str, list[tuple[float, float]]] = {}
    tokens = hits = 0
    for texts in bar(read_novels(books, tokenizer, length, rows), f"rows of {length}"):
        before = find_repeats(texts, pairs, RARE, within=False)
        positive = (before[:, 1:] != NONE).ravel()  # of the token before
        values: dict[str, list[np.ndarray]] = {}
        for row in texts:
            rarity = price[row]
            found = token_statistics(row, rarity) | model_statistics(base, torch.from_numpy(row), torch.tensor(rarity), fitted)
            for name, value in found.items():
                values.setdefault(name, []).append(value[:-1])
        for name, parts in values.items():
            value = np.concatenate(parts)
            border = np.quantile(value[~positive], 1 - FALSE)
            each.setdefault(name, []).append((auc(value, positive), float((value[positive] > border).mean())))
        tokens, hits = tokens + len(positive), hits + int(positive.sum())
    means = {
        name: {
            what: estimate(np.array(parts), decisions=False).model_dump()
            for what, parts in zip(("auc", "found_at_1%"), zip(*values, strict=True), strict=True)
        }
        for name, values in each.items()
    }
    return {"tokens": tokens, "before_repeated_rare_bigrams": hits, "statistics": means}


def draw(record: dict) -> None:
    """AUC of every statistic, best first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = record["rows"]
    figure, axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 7), layout="constrained", squeeze=False)
    for axis, (length, found) in zip(axes[0], panels.items(), strict=True):
        order = sorted(found["statistics"].items(), key=lambda item: item[1]["auc"]["mean"])
        low, mean, high = ([values["auc"][what] for _, values in order] for what in ("low", "mean", "high"))
        axis.barh(range(len(order)), mean, xerr=np.abs(np.array([low, high]) - mean), color="#0072b2")
        axis.set_yticks(range(len(order)), [name for name, _ in order], fontsize=8)
        axis.axvline(0.9, color="black", linestyle="--", linewidth=1)
        axis.set(xlim=(0.5, 1), xlabel="AUC, mean of six novels, 95% interval", title=f"rows of {length} tokens")
    figure.savefig(HERE / "evidence-of-recall.png", dpi=130)


def main(books: str) -> None:
    record = {"version": installed_version("mamba-surgery"), "base": BASE.name, "rare_per_million": RARE}
    record["rows"] = {str(length): measure(Path(books), length, rows) for length, rows in ROWS.items()}
    write_text(HERE / "evidence-of-recall.json", json.dumps(record, indent=1) + "\n")
    draw(record)


if __name__ == "__main__":
    main(sys.argv[1])
