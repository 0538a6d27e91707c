"""Several processes that do one job together, started by accelerate or torchrun; alone, nothing here does anything.

    accelerate launch --multi_gpu --num_processes 2 -m surgery locate MODEL

Every process holds the model and takes a share of the work; the results are gathered, so that all of them go on with the same.
The main process alone prints and writes. Without a GPU the same command starts processes that talk over gloo (accelerate's
own `--cpu` starts one process only, unless there is MPI).
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from surgery.errors import UserError

if TYPE_CHECKING:
    from accelerate import PartialState

T = TypeVar("T")
of_the_command_line = False  # whether nobody's program but ours runs in this process
# How many processes there are, as the launchers that accelerate knows say it: torchrun and its own, and those of MPI.
WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def state() -> "PartialState":
    """accelerate's view of the processes; the first call connects them."""
    import torch
    from accelerate import PartialState

    return PartialState(cpu=not torch.cuda.is_available())


def several_processes() -> bool:
    """Whether a launcher started this process beside others; known without asking accelerate."""
    return any(os.environ.get(name, "1") != "1" for name in WORLD_SIZES)


def on_this_machine() -> int:
    """How many of the processes run on this machine; known without asking accelerate."""
    return max([1, *(int(size) for name in LOCAL_SIZES if (size := os.environ.get(name, "")).isdigit())])


def is_main() -> bool:
    """Whether this process is the one that prints and writes. A process on its own is, and need not ask accelerate."""
    return not several_processes() or state().is_main_process


def own_device() -> str | None:
    """The device of one of several processes; None if there is only one, which may choose."""
    return str(state().device) if state().num_processes > 1 else None


def share(items: Sequence[T]) -> list[T]:
    """This process's share: every n-th item, so that neighbours, which cost about the same, go to different processes."""
    return list(items[state().process_index :: state().num_processes])


def gather(items: list[T]) -> list[T]:
    """The items of all processes, those of the first one first. Every process has to call it, as often as the others."""
    from accelerate.utils import gather_object

    return gather_object(items)


def on_main(action: Callable[[], T]) -> T:
    """Do something in the main process alone, and hand its result, or its UserError, to all."""
    outcome: list[Any] = [None, None]
    if is_main():
        try:
            outcome[0] = action()
        except UserError as error:
            outcome[1] = str(error)
    if state().num_processes > 1:
        from accelerate.utils import broadcast_object_list

        broadcast_object_list(outcome)
    result, complaint = outcome
    if complaint is not None:
        raise UserError(complaint)
    return result
