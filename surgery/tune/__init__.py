"""Training: of grafts (tune) and of the built-in base models (pretrain), on the same data."""

from surgery.tune.loop import tune

__all__ = ["tune"]
