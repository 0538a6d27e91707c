"""mamba_ssm's own Triton sources in Triton's interpreter (TRITON_INTERPRET=1), called as this package calls them on a GPU."""

import contextlib
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from surgery.kernels.choose import import_alone
from surgery.kernels.selective import SELECTIVE_STEP
from surgery.kernels.ssd import SSD_SCAN, SSD_STEP
from tests.kernels.inputs import distance, randn, selective, ssd, with_gradients


def main() -> None:
    torch.cuda.device = lambda *_: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=4)  # type: ignore[assignment]
    import_alone("mamba_ssm.utils.determinism").autotune_configs = lambda configs: configs[:1]
    for documents in (None, (torch.arange(70) > 31).int().expand(1, -1).contiguous()):
        x, dt, A, B, C, D, state = ssd(b=1, t=70, h=2, g=1)
        args = [x, dt, A, B, C, D, None if documents is not None else state]
        own, truths = (
            with_gradients(lambda *each: SSD_SCAN.backends[name].run(*each, documents, 64)[0], args, exact=name == "reference")  # noqa: B023
            for name in ("mamba_ssm", "reference")
        )
        errors = [distance(m, truth) for m, truth in zip(own, truths, strict=True)]
        print("ssd_scan", "documents" if documents is not None else "", [f"{error:.1e}" for error in errors])
        assert max(errors) < 3e-6
    for operation, make in ((SSD_STEP, ssd), (SELECTIVE_STEP, selective)):
        for with_D in (True, False):
            x, dt, A, B, C, D, state = make(t=1)
            args = [x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D if with_D else None]
            own_state, state = state.clone(), state + 0 * randn(1)
            own, truth = operation.backends["mamba_ssm"].run(own_state, *args), operation.backends["torch"].run(state, *args)
            print(operation.name, distance(own, truth), distance(own_state, state))
            assert max(distance(own, truth), distance(own_state, state)) < 3e-6


if __name__ == "__main__":
    main()
