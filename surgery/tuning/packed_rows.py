"""Documents packed into rows, rows padded to a batch, and where the recall hits of such a batch are."""

import bisect
import heapq
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from surgery.probes.hits import NONE, PairCounts, seen_before
from surgery.tuning.sequences import padded


def pack(lengths: Sequence[int], count: int, most: int) -> list[list[int]]:
    """Pack as many documents as fit into `count` rows of at most `most` tokens: the numbers of every row's documents, in order;
    the rows are ordered by their first document. lengths: of at least `count` documents, none longer than a row."""

    def spread(number: int) -> list[list[int]] | None:
        """The first `number` documents in rows: the longest first, each into the emptiest row. None if one does not fit. A
        document may be empty, a row may not."""
        filled = [(0, 0, row) for row in range(count)]
        rows: list[list[int]] = [[] for _ in filled]
        for i in sorted(range(number), key=lambda i: -lengths[i]):
            tokens, documents, row = heapq.heappop(filled)
            if tokens + lengths[i] > most:
                return None
            heapq.heappush(filled, (tokens + lengths[i], documents + 1, row))
            rows[row].append(i)
        return rows

    # No document behind the first that does not fit: otherwise long documents would be passed over more often than short ones.
    fits = bisect.bisect_left(range(count + 1, len(lengths) + 1), True, key=lambda number: spread(number) is None) + count
    return sorted(sorted(row) for row in spread(fits) or ())


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Token ids, padded with 0 on the right, and which of them are no padding: (rows, longest) each."""
    ids = padded(rows, 0)
    return ids, torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]


def pad_packed(rows: Sequence[Sequence[Sequence[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    """As `pad`, of rows that hold documents, and every token's position in its document: (rows, longest) each. Padding
    continues the positions of the last document."""
    ids, real = pad([[token for document in row for token in document] for row in rows])
    places = [[place for document in row for place in range(len(document))] for row in rows]
    ends = torch.tensor([len(row[-1]) for row in rows]) - real.sum(1)
    return ids, real, torch.where(real, padded(places, 0), torch.arange(ids.shape[1]) + ends[:, None])


def pad_packed_with_hits(
    pairs: PairCounts, rare: float, rows: Sequence[Sequence[Sequence[int]]]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `pad_packed`, and of every recall hit where in its document the same pair ended last before it, counted as positions
    are; NONE of other tokens: (rows, longest)."""
    ids, real, places = pad_packed(rows)
    before = torch.from_numpy(seen_before(ids.numpy(), pairs, rare, within=False, documents=(places == 0).cumsum(1).numpy()))
    begins = torch.arange(places.shape[1]) - places
    return ids, real, places, torch.where(real & (before != NONE), before - begins, NONE)


def padding_share(text: Iterable[tuple[Tensor, ...]]) -> float:
    """The share of padding in batches of text."""
    real_tokens, tokens = torch.tensor([[real.sum(), real.numel()] for _, real, *_ in text]).sum(0).tolist()
    return 1 - real_tokens / tokens
