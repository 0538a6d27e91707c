"""What the export costs: writing, digests, and the proof in a fresh process."""

from collections.abc import Callable

import psutil
from transformers import PreTrainedModel

from surgery.exporting.fresh_process import KERNELS
from surgery.exporting.verify import NEW_BY_LAYERS, chosen, in_float32, whole_size
from surgery.jobs.costs.sample import Patient, Sample, sampled
from surgery.kernels.dispatch import use
from surgery.loading.digests import model_digest
from surgery.models.answers import NEW, answers

READINGS = 5  # of all weights: digests of the live model (two), of its tensors, of the files, and the fresh process's
WRITING = 1  # counted as another


def weights_of(model: PreTrainedModel) -> int:
    """The bytes of a model's weights, tied ones once."""
    tensors = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())}
    return sum(tensors.values())


def export_cost(
    patient: Patient, make: Callable[[int], PreTrainedModel], start: float, process: int, verify: str, quick: bool = False
) -> tuple[Sample, int]:
    """(here, memory of the fresh process). make: from a number of layers to a hybrid. start: seconds that a process takes to
    import what it needs; process: bytes that it holds then. verify: how the export is. quick: fewer tokens are written."""
    way = chosen(verify, patient.model)
    written = {"full": NEW, "layers": NEW_BY_LAYERS, "tensors": 0}[way]
    new = max(1, written // 8) if quick and way == "full" else written  # by layers, the prompts cost more than the tokens

    def answering(depth: int) -> Sample:
        def work() -> None:
            with use(**KERNELS):
                answers(in_float32(make(depth), way), len(patient.tokenizer), new)

        tried = sampled(work, repeat=False)
        return Sample(tried.seconds * written / new, tried.bytes)

    def digesting(depth: int) -> Sample:
        return sampled(lambda: model_digest(make(depth)), repeat=False)

    proof, digest = patient.along(answering) if written else Sample(), patient.along(digesting)
    here = Sample(2 * proof.seconds + (READINGS + WRITING) * digest.seconds + start, max(proof.bytes, digest.bytes))
    largest = max(p.nbytes for p in patient.model.parameters())
    return here, int(process + {"full": whole_size(patient.model), "layers": proof.bytes, "tensors": largest}[way])


def started() -> float:
    """The CPU seconds that this process has taken so far: for its imports, and to open the model, which another would take
    again."""
    times = psutil.Process().cpu_times()
    return times.user + times.system
