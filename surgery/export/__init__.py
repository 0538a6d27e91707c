"""Export: a hybrid as a folder that others can load, verified before it is called done."""

from surgery.export.hf import export

__all__ = ["export"]
