"""The doctor: what it says is what the dispatcher does."""

import json

import torch

from surgery.doctor.diagnosis import Diagnosis, diagnose
from surgery.kernels.dispatch import OPERATIONS, Operation


def test_every_operation_is_diagnosed_and_every_backend_accounted_for():
    found = diagnose().verdicts
    assert {verdict.operation for verdict in found} == set(OPERATIONS)
    for verdict in found:
        operation = Operation.registry[verdict.operation]
        assert {verdict.serves, *verdict.idle, *verdict.refused} == set(operation.backends)
        args = operation.example(torch.device(verdict.device), getattr(torch, verdict.dtype))
        for m in args if operation.differentiable else ():
            if isinstance(m, torch.Tensor) and m.is_floating_point():
                m.requires_grad_()  # a diagnosis counts gradients
        assert operation.choose(*args).name == verdict.serves
        for name, reason in verdict.refused.items():
            assert reason == operation.why_not(operation.backends[name], *args)
            assert "\n" not in reason


def test_the_command_prints_tables_and_json(surgery, tmp_path):
    status, out, _ = surgery("doctor")
    assert status == 0
    for operation in OPERATIONS:
        assert operation in out
    status, out, _ = surgery("doctor", "--json", "--out", tmp_path / "doctor.json")
    assert status == 0
    assert Diagnosis.model_validate(json.loads(out)).verdicts == Diagnosis.read(tmp_path / "doctor.json").verdicts
