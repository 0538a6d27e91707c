"""Perplexity on held-out text.

exp of the mean negative log-likelihood per predicted token. The text is cut into windows of `window` tokens (the first token of
a window is context only), which suits comparing a base with its hybrids; it is not the sliding-window figure of papers.
"""

import random
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.models.finite import checked, explained
from surgery.models.pieces import logits_in_pieces
from surgery.records.record import read_text
from surgery.world.text import document


@dataclass(frozen=True)
class TextWindows:
    """`source`: "world" (held-out documents of the small world) or a text file; `windows` of `window` tokens are read."""

    source: str = "world"
    windows: int = 64
    window: int = 256

    def token_windows(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> torch.Tensor:
        """(windows, window) token ids; fewer windows where the text is short."""
        ids = self.token_ids(tokenizer, seed)
        count = min(len(ids) // self.window, self.windows)
        if count == 0:
            raise UserError(f"{self.source} has {len(ids)} tokens; perplexity needs at least {self.window}")
        return torch.tensor(ids[: count * self.window]).view(count, self.window)

    def token_ids(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> list[int]:
        """The text that windows are cut from: all of a file; of the world, at least as much as the windows need."""
        if self.source == "world":
            rng = random.Random(f"perplexity {seed}")
            ids: list[int] = []
            while len(ids) < self.windows * self.window:
                ids += tokenizer((tokenizer.eos_token or "") + document(rng, held_out=True), add_special_tokens=False)[
                    "input_ids"
                ]
        else:
            text = read_text(self.source, "the text in")
            ids = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
        return ids

    def losses(self, model: PreTrainedModel, windows: torch.Tensor, batch_size: int = 16) -> np.ndarray:
        """Mean negative log-likelihood (nats) per predicted token, for every window."""
        return text_losses(model, windows, 1, batch_size)


def text_losses(model: PreTrainedModel, rows: torch.Tensor, first: int, batch_size: int) -> np.ndarray:
    """Mean negative log-likelihood (nats) of the tokens from the place `first` on, for every row of token ids (rows, t)."""
    out = []
    for ids in rows.to(model.device).split(batch_size):
        losses = token_losses(model, ids, first)
        with explained(model, ids):
            out.append(checked(losses.mean(1).cpu(), "the losses"))
    return torch.cat(out).numpy()


@torch.inference_mode()
def token_losses(model: PreTrainedModel, ids: torch.Tensor, first: int = 1) -> torch.Tensor:
    """The negative log-likelihood (nats) of each token from the place `first` on, (b, t - first); ids (b, t), on the model's
    device."""
    predicting = torch.arange(first - 1, ids.shape[1] - 1, device=ids.device)
    nll = [
        -logits.float().log_softmax(-1).gather(-1, ids[:, first:][:, piece, None])[..., 0]
        for piece, logits in logits_in_pieces(model, ids, predicting)
    ]
    return torch.cat(nll, 1)
