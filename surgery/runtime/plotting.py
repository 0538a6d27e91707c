"""How the project's figures look: one place for colours, sizes and saving."""

from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

matplotlib.use("Agg")

# Okabe and Ito's palette, safe for colour-blind readers; the base is grey, controls are dashed.
COLORS = {"base": "#555555", "spliced": "#E69F00", "tuned": "#0072B2", "control_tuned": "#D55E00",
          "control_random_site": "#009E73", "control_random_site_tuned": "#CC79A7", "control_random_site_2": "#56B4E9",
          "control_same_layer": "#B8A800", "control_same_layer_tuned": "#8C564B"}  # fmt: skip
STYLE: dict[Any, Any] = {
    "figure.dpi": 130,
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "legend.frameon": False,
    "savefig.bbox": "tight",
}


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, under its final name only when complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, format="png", metadata={"Software": None})
    temporary.replace(path)
    plt.close(figure)
