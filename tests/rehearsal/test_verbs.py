"""A verb on a GPU that is none, whose tensors have values: nothing meets on two devices, what comes out is what comes out on a
CPU, and inside a model the host does not wait."""

import pytest

from tests.rehearsal.conftest import rehearse

DTYPES = ["float32", "float16", "bfloat16"]
STEPS = 3  # of tuning
ENDED = (
    "mamba", "falcon_mamba", "llamba", "locate exact", "locate attribution", "locate mean, layers", "plan", "tune",
    "tune early stopping", "tune checkpointing", "tune bf16", "tune lora", "bench", "export", "prune", "sweep",
)  # fmt: skip


def check(lines: list[dict]) -> None:
    """torch's attention has other kernels on a CPU, and where a gradient is next to nothing, Adam makes a whole step of
    rounding (a learning rate's worth, in each of three steps). In 16 bits it is enough that a verb comes to its end."""
    assert lines
    for line in lines:
        assert line["outcome"] == "ok", line
        bound = 1e-2 if line["verb"].startswith("tune") else 1e-4
        assert line["dtype"] != "float32" or line["apart"] < bound, line


def looks(line: dict) -> int:
    """How often the host waited to learn where documents begin."""
    return sum(number for what, number in line["counted"].items() if what.startswith("sync surgery/hybrids/packed.py"))


def test_splicing_and_all_that_verbs_ask_of_a_model_run_and_end(quick):
    check([line for line in quick if "verb" in line])


def test_the_host_waits_once_to_learn_where_documents_begin(quick):
    assert [looks(line) for line in quick if line.get("verb") == "packed rows"] == [1, 1]


@pytest.mark.slow  # a process each
@pytest.mark.parametrize("verb", ENDED)
def test_another_verb_runs_and_ends(verb):
    lines = [line for line in rehearse(*DTYPES, verb) if "verb" in line]
    assert [line["dtype"] for line in lines] == DTYPES
    check(lines)
    if verb == "tune":
        assert [looks(line) for line in lines] == [STEPS] * len(lines)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("list", "sends a tensor of the host to the device"),
        ("cpu", "_to_copy waits for the device"),
        ("elsewhere", "Expected all tensors to be on the same device"),
        ("sync", "_local_scalar_dense waits for the device"),
        ("float32", "computes in float32 in a model of 16 bits"),
    ],
)
def test_what_is_planted_is_found(quick, fault, message):
    (found,) = [line["outcome"] for line in quick if line.get("planted") == fault]
    assert message in found
