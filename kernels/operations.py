"""All operations of the project. A module registers its operation when it is imported, and an export carries only those that
its model needs: whoever asks about all of them asks here."""

from surgery.kernels import attention, conv, delta, divergence, lightning, mlstm, norm, selective, ssd  # noqa: F401
from surgery.kernels.dispatch import OPERATIONS, Operation


def operations() -> dict[str, Operation]:
    """Name -> operation, in the order of OPERATIONS."""
    return {name: Operation.registry[name] for name in OPERATIONS}
