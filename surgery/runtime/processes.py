"""Several processes of one run, as accelerate starts them, and a fresh Python process."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from surgery.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")
SMALL = 5_000_000  # parameters of a model that one thread serves


def is_main() -> bool:
    """Whether this is the process that writes files and prints; true where there is only one."""
    return os.environ.get("RANK", "0") == "0"


def is_distributed() -> bool:
    """Whether `accelerate launch` or torchrun started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def over_gloo() -> bool:
    """Whether several processes run on CPUs; accelerate has to be told."""
    import torch

    return is_distributed() and not torch.cuda.is_available()


def on_main(work: Callable[P, T]) -> Callable[P, T]:
    """`work`, done in the main process alone; all others wait, and get its result. An error is raised in all of them."""
    if not is_distributed():
        return work
    from accelerate import PartialState
    from accelerate.utils import broadcast_object_list

    def done(*args: P.args, **named: P.kwargs) -> T:
        told: list[tuple[T | None, BaseException | None] | None] = [None]
        if PartialState(cpu=over_gloo()).is_main_process:
            try:
                told = [(work(*args, **named), None)]
            except Exception as error:
                told = [(None, error)]
        result, failure = broadcast_object_list(told)[0]
        if failure is not None:
            raise failure
        return result

    return done


@contextmanager
def threads_for(parameters: int) -> Iterator[None]:
    """One thread of torch for a small model: its operations are so short that several threads take eight times the time of one
    where the machine has other work, and little less where it has none."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1 if parameters <= SMALL else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class FreshPython(AbstractContextManager["FreshPython"]):
    """A script in a Python process of its own, which imports nothing from the current folder and does not ask the Hub.

    It starts at once, so that its imports run beside other work; within a `with`, at whose end it is ended.
    """

    def __init__(self, script: Path, *, gpu: bool = False):
        self._modules = tempfile.TemporaryDirectory()  # where transformers copies the code of a folder
        settings = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "0", "TOKENIZERS_PARALLELISM": "false"}
        settings |= {"HF_MODULES_CACHE": self._modules.name} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        dropped = ("PYTHONPATH", "PYTHONSTARTUP", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        environment = {name: value for name, value in os.environ.items() if name not in dropped} | settings
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)], stdin=pipe, stdout=pipe, stderr=pipe, env=environment
        )

    def send(self, request: dict[str, Any]) -> None:
        """Give the script its one request, a JSON on its standard input, and do not wait."""
        pipe, self._process.stdin = self._process.stdin, None
        assert pipe is not None
        with suppress(BrokenPipeError), pipe:  # where it has failed, receive() says why
            pipe.write(json.dumps(request).encode())

    def receive(self) -> bytes:
        """What the script prints. Raises UserError, with the last line of its errors, if it fails."""
        output, errors = self._process.communicate()
        if self._process.returncode:
            lines = errors.decode(errors="replace").strip().splitlines()
            raise UserError(f"a fresh Python process failed: {lines[-1] if lines else f'status {self._process.returncode}'}")
        return output

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._modules.cleanup()
