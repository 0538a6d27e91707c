"""What is said of a machine."""

import pytest
import torch

from surgery.kernels.explain import SMALL, Sizes, advise, explain, make_calls


@pytest.mark.parametrize("sizes", [SMALL, Sizes(2, 8, 8, delta=True, channels=0, tokens=40), Sizes(0, channels=32, tokens=40)])
def test_every_kind_of_call_is_served_on_a_cpu(sizes):
    rows, _ = explain("cpu", torch.float32, sizes)
    calls = [*make_calls(torch.device("cpu"), torch.float32, sizes)]
    assert [row.call for row in rows] == [call for call, *_ in calls]
    assert all(row.alone == row.call.endswith("packed") for row in rows)  # on a GPU they are one call
    assert all(row.forward != "reference" for row in rows if row.call.startswith("ssd"))
    names = {operation.name for _, operation, _ in calls}
    assert ("ssd_scan" in names) == (sizes.heads > 0 and not sizes.delta)
    assert ("selective_scan" in names) == (sizes.channels > 0)


def test_one_command_for_what_is_missing():
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert "mamba-ssm" in advise(cuda, {"mamba_ssm", "causal_conv1d"})[0]
    assert "SURGERY_KERNELS" in advise(cuda, {"causal_conv1d"})[0]
    assert "selective_scan=hub" in advise(cuda, {"selective_scan", "causal_conv1d"})[0]
    assert advise(cuda, set()) == advise(cpu, {"mamba_ssm"}) == []
    assert len(advise(cpu, {"native"})) == 1
