"""What is said of a machine."""

import torch

from surgery.kernels.explain import SMALL, advise, explain, make_calls


def test_every_kind_of_call_is_served_on_a_cpu():
    lines = explain("cpu", torch.float32, SMALL)
    assert len(lines) == len([*make_calls(torch.device("cpu"), torch.float32, SMALL)])


def test_one_command_for_what_is_missing():
    cuda = torch.device("cuda")
    assert "mamba-ssm" in advise(cuda, {"mamba_ssm", "causal_conv1d"})[0]
    assert "SURGERY_KERNELS" in advise(cuda, {"causal_conv1d"})[0]
    assert advise(cuda, set()) == []
