"""What the export costs: writing, digests, and the proof in a fresh process."""

from collections.abc import Callable

import psutil
import torch
from transformers import PreTrainedModel

from surgery.exporting.verify import KERNELS, in_float32
from surgery.jobs.costs.sample import Patient, Sample, sampled
from surgery.kernels.dispatch import use
from surgery.loading.digests import model_digest
from surgery.models.answers import answers

READINGS = 5  # of all weights: digests of the live model (two), of its tensors, of the files, and the fresh process's
WRITING = 1  # counted as another


def weights_of(model: PreTrainedModel) -> int:
    """The bytes of a model's weights, tied ones once."""
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def export_cost(patient: Patient, make: Callable[[int], PreTrainedModel], start: float, process: int) -> tuple[Sample, int]:
    """(here, memory of the fresh process). make: from a number of layers to a hybrid. start: seconds that a process takes to
    import what it needs; process: bytes that it holds then."""

    def answering(depth: int) -> Sample:
        def work() -> None:
            with use(**KERNELS):
                answers(in_float32(make(depth)), len(patient.tokenizer))

        return sampled(work, repeat=False)

    def digesting(depth: int) -> Sample:
        return sampled(lambda: model_digest(make(depth)), repeat=False)

    proof, digest = patient.along(answering), patient.along(digesting)
    weights = weights_of(patient.model)
    copied = 0 if patient.model.dtype == torch.float32 else weights * 4 // patient.model.dtype.itemsize
    here = Sample(2 * proof.seconds + (READINGS + WRITING) * digest.seconds + start, max(proof.bytes, digest.bytes, copied))
    return here, int(process + weights + copied + proof.bytes)


def started() -> float:
    """The CPU seconds that this process has taken so far: for its imports, and to open the model, which another would take
    again."""
    times = psutil.Process().cpu_times()
    return times.user + times.system
