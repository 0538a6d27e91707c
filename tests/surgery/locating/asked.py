"""Questions made of random tokens, for random models."""

import torch

from surgery.probes.encoded import Encoded


def ask_tokens(rows: torch.Tensor, vocabulary: int, choices: int = 4, seed: int = 0) -> Encoded:
    """A question a row, about its last token but one: which of some tokens follows. Its spans are three stretches of tokens."""
    rng, (count, length) = torch.Generator().manual_seed(seed), rows.shape
    tokens = torch.stack([torch.randperm(vocabulary, generator=rng)[:choices] for _ in range(count)])
    query = length - 2
    terms = [(q, c, q, int(tokens[q, c])) for q in range(count) for c in range(choices)]
    return Encoded(
        rows=rows.tolist(),
        points=torch.tensor([(q, query) for q in range(count)]),
        terms=torch.tensor(terms),
        choices=torch.full((count,), choices),
        answers=torch.randint(choices, (count,), generator=rng),
        owners=torch.arange(count),
        query=torch.full((count,), query),
        ends=[[[3, 4, 5], [7, 8], [10, 11, 12]] for _ in range(count)],
        evidence=[q % 3 for q in range(count)],
    )
