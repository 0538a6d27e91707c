"""What choosing costs: how many sequences go through the model forward and backward, and the processor's seconds.

A pass is one sequence through all mixers. What runs a part of the layers, as an exact scan does, counts as that part."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from surgery.hybrids.patching import hooked
from surgery.locating.subject import Subject
from surgery.locating.substitution import tensor_of
from surgery.locating.walk import fully_gated
from surgery.records.record import Record


class Passes(Record):
    """seconds: of the processor, in this process."""

    forwards: float
    backwards: float
    seconds: float


class PassCounter:
    """Filled in while `counted` runs. A forward of a hybrid counts as one of its base."""

    def __init__(self, subject: Subject):
        mixers = (*subject.anatomy.mixers, *fully_gated(subject).anatomy.mixers)
        self.kinds = tuple({type(mixer.module) for mixer in mixers})
        self.depth = len(subject.anatomy.mixers)
        self.forwards = self.backwards = 0
        self.seconds = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """All mixers of these kinds count, of whichever model."""

        def count(module: nn.Module, _: Any, returned: Any) -> None:
            if not isinstance(module, self.kinds):
                return
            output = tensor_of(returned)
            self.forwards += len(output)
            if output.requires_grad:
                output.register_hook(backward)

        def backward(gradient: Tensor) -> None:
            self.backwards += len(gradient)

        start = time.process_time()
        with hooked(lambda: [register_module_forward_hook(count)]):
            yield
        self.seconds += time.process_time() - start

    def passes(self) -> Passes:
        return Passes(
            forwards=round(self.forwards / self.depth, 1), backwards=round(self.backwards / self.depth, 1),
            seconds=round(self.seconds, 1),
        )  # fmt: skip
