"""The mixing matrices as report.html shows them: images with ticks, and the example's tokens below each."""

from dataclasses import dataclass

import numpy as np
from PIL import Image

from surgery.figures.atlas_page import as_png
from surgery.figures.example import window
from surgery.figures.mixing_figure import PALETTE, printed
from surgery.figures.views.mixing import Mixing


@dataclass(frozen=True)
class Tick:
    """at: percent of the image's side. answer: whether it belongs to the answer."""

    at: float
    label: str
    answer: bool


@dataclass(frozen=True)
class Picture:
    """One matrix of one model. what: what of the model it is. rows: as in Weights. last: what the last row puts on every token;
    heads: of how many heads the matrix is the mean, None for a single head."""

    name: str
    what: str
    png: str
    rows: str
    answer: float | None
    last: list[float]
    heads: int | None


@dataclass(frozen=True)
class MixingPage:
    """panels: (site, its pictures). down, across: ticks of rows and of columns."""

    tokens: list[str]
    answer: tuple[int, ...]
    down: list[Tick]
    across: list[Tick]
    panels: list[tuple[str, list[Picture]]]


def mixing_page(mixing: Mixing) -> MixingPage:
    """Every matrix as an image, with what a script needs to say what a row draws on."""
    import matplotlib

    palette = (matplotlib.colormaps[PALETTE](np.arange(256))[:, :3] * 255).astype(np.uint8).tobytes()
    panels = []
    for panel in mixing.panels:
        pictures = []
        for name, what, weights in panel.views():
            last = [round(float(share), 4) for share in weights.shares()[-1]]
            image = Image.fromarray(np.round(255 * np.sqrt(weights.shares())).astype(np.uint8), mode="P")
            image.putpalette(palette)
            pictures.append(Picture(name, what, as_png(image), weights.rows, weights.answer, last, panel.heads.get(name)))
        panels.append((str(panel.site), pictures))
    down, across = _ticks(mixing)
    return MixingPage([printed(token) for token in mixing.tokens], mixing.answer, down, across, panels)


def _ticks(mixing: Mixing) -> tuple[list[Tick], list[Tick]]:
    """Rows: the token after every span, and the last. Columns: the spans, at their middle."""
    part, scale = window(mixing.tokens, mixing.spans, mixing.answer), 100 / len(mixing.tokens)
    down = [Tick(round((row + 0.5) * scale, 2), label, False) for row, label in zip(part.rows, part.labels, strict=True)]
    across = []
    for span in mixing.spans:
        text = "".join(mixing.tokens[i] for i in span).replace("\\n", "").strip()
        across.append(Tick(round((float(np.mean(span)) + 0.5) * scale, 2), text, {*span} == {*mixing.answer}))
    return (down, across) if len(mixing.spans) <= 12 else ([], [])
