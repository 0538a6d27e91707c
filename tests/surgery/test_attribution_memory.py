"""What attribution keeps: as much as fits, nothing when it is done, and the same result however much that is."""

import copy

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import FalconMambaConfig, FalconMambaForCausalLM

from surgery.locating import attribution_memory, prefilter
from surgery.locating.attribution import STARTS, attribute_starts
from surgery.locating.attribution_memory import WHOLE, Activations, Step, activations, parted
from surgery.locating.locate import locate
from surgery.locating.subject import Subject
from surgery.locating.walk import fully_gated
from surgery.probes.encoded import encode
from surgery.probes.kv import KVRetrieval
from surgery.probes.question import Question
from tests.models import VOCABULARY, random_base, random_selective

FALCON = (FalconMambaConfig, FalconMambaForCausalLM)


def model(name, tokenizer, **changes):
    words = {"vocab_size": VOCABULARY}
    return random_base(**words, **changes) if name == "mamba2" else random_selective(*FALCON, **words, **changes)


def gated(name, tokenizer, dtype=torch.float32, **changes):
    return fully_gated(Subject.of(model(name, tokenizer, **changes).to(dtype), tokenizer))


def several_rows(tokenizer):
    """Questions of one row and of several, of different lengths."""
    texts = [
        ("the cat is", (" one", " two")),
        ("a dog is one of", (" one two", " one one", " two")),
        ("it is", (" two", " one two")),
    ]
    return encode(tokenizer, [Question(prompt, choices, 1) for prompt, choices in texts])


def allocated(work):
    """(the most that was allocated at once, what is left of it), in bytes; also what no Python object holds."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most, held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["mamba2", "falcon"])
def test_computing_blocks_again_changes_no_bit(name, dtype, tokenizer):
    subject, encoded = gated(name, tokenizer, dtype), several_rows(tokenizer)
    whole = attribute_starts(subject, encoded)
    assert whole.abs().sum() > 0
    assert torch.equal(attribute_starts(subject, encoded, step=Step(checkpointed=True)), whole)


@pytest.mark.parametrize("name", ["mamba2", "falcon"])
def test_the_number_of_rows_at_a_time_changes_rounding_alone(name, tokenizer):
    subject, encoded = gated(name, tokenizer, torch.float64), several_rows(tokenizer)
    whole = attribute_starts(subject, encoded)
    for rows in (1, 2, 3):
        # What is read is rounded to float32, as it is kept.
        torch.testing.assert_close(attribute_starts(subject, encoded, step=Step(rows, True)), whole, rtol=3e-6, atol=1e-9)


def test_parts_of_a_batch_hold_its_questions_in_order(tokenizer):
    encoded = several_rows(tokenizer)
    sizes = encoded.owners().bincount().tolist()
    assert len(sizes) == 3
    assert min(sizes) > 1
    assert [len(part.rows) for part in parted(encoded, sizes[0] + sizes[1])] == [sizes[0] + sizes[1], sizes[2]]
    assert [len(part.rows) for part in parted(encoded, 1)] == sizes  # a question is not divided
    assert parted(encoded, None)[0] is parted(encoded, len(encoded.rows))[0] is encoded
    parts = parted(encoded, 1)
    assert [row for part in parts for row in part.rows] == encoded.rows


def test_nothing_is_left_of_a_batch(tokenizer):
    """A hook on a tensor that holds the tensor is a cycle that Python's garbage collector does not see."""
    encoded = encode(tokenizer, KVRetrieval(4).questions(2, seed=0))
    for name in ("mamba2", "falcon"):
        subject = gated(name, tokenizer)
        for step in (WHOLE, Step(1, checkpointed=True)):
            attribute_starts(subject, encoded, step=step)
            most, left = allocated(lambda: attribute_starts(subject, encoded, step=step))  # noqa: B023
            assert most > 10_000
            assert left == 0
    with pytest.raises(ZeroDivisionError):  # nor where something fails on the way back
        attribute_starts(subject, encoded, [*STARTS, Broken()])
    assert all("attend" not in vars(m.module) and "blend" not in vars(m.module.graft) for m in subject.anatomy.mixers)


class Broken:
    sign = 1

    @property
    def tau(self):
        return 1 / 0


def test_with_checkpointing_a_layer_costs_what_enters_it(tokenizer):
    """The peak without it grows by a block's activations with each layer; with it, by what enters the block."""
    encoded = encode(tokenizer, KVRetrieval(4).questions(4, seed=0))
    most = {}
    for layers in (2, 6):
        subject = gated("falcon", tokenizer, num_hidden_layers=layers)
        for step in (WHOLE, Step(checkpointed=True)):
            attribute_starts(subject, encoded, step=step)
            most[layers, step.checkpointed] = allocated(lambda: attribute_starts(subject, encoded, step=step))[0]  # noqa: B023
        kept = activations(subject, encoded.rows[0])
    tokens = len(encoded.rows) * max(map(len, encoded.rows))
    with_all, without = (most[6, checkpointed] - most[2, checkpointed] for checkpointed in (False, True))
    assert with_all == pytest.approx(4 / 6 * kept.all_blocks * tokens, rel=0.25)
    scores = 4 * len(STARTS) * len(encoded.rows) * 64 * 4  # of 4 layers
    assert without <= 1.2 * (4 / 6 * kept.entering * tokens + 2 * scores)
    assert without < with_all / 5


@pytest.mark.parametrize("name", ["mamba2", "falcon"])
def test_a_step_takes_what_was_foreseen(name, tokenizer):
    encoded = encode(tokenizer, KVRetrieval(8).questions(4, seed=0))
    subject = gated(name, tokenizer, num_hidden_layers=6)
    kept = activations(subject, min(encoded.rows, key=len))
    tokens = max(map(len, encoded.rows))
    for step in (Step(2, checkpointed=True), WHOLE):
        most, _ = allocated(lambda: attribute_starts(subject, encoded, [None], step))  # noqa: B023
        assert kept.step(encoded, int(most * 0.9 / attribution_memory.SHARE), whole=False) != step  # it says that it needs more
        rows = step.rows or len(encoded.rows)
        a_row = kept.entering + 3 * kept.block if step.checkpointed else kept.all_blocks + 2 * kept.block
        assert most < rows * tokens * a_row < 3 * most


def test_what_fits_is_taken_whole_then_checkpointed_then_divided(tokenizer):
    encoded = encode(tokenizer, KVRetrieval(4).questions(8, seed=0))
    tokens, kept = max(map(len, encoded.rows)), Activations(entering=10, all_blocks=1000, block=100)
    a_row, share = tokens * (10 + 3 * 100), attribution_memory.SHARE
    whole = 8 * tokens * (1000 + 2 * 100) / share
    assert kept.step(encoded, int(whole) + 1, whole=False) == WHOLE
    assert kept.step(encoded, int(whole) - 1, whole=False) == Step(8, checkpointed=True)
    assert kept.step(encoded, int(3.5 * a_row / share), whole=False) == Step(3, checkpointed=True)
    assert kept.step(encoded, 0, whole=False) == Step(1, checkpointed=True)
    assert kept.step(encoded, 0, whole=True) == Step(None, checkpointed=True)


def test_where_memory_is_short_a_ranking_is_the_same(tokenizer, monkeypatch):
    """And a batch size that the recipe names is taken, however little memory there is."""
    steps = []
    own = prefilter.attribute_starts

    def watched(subject, encoded, starts=STARTS, step=WHOLE):
        steps.append(step)
        return own(subject, encoded, starts, step)

    monkeypatch.setattr(prefilter, "attribute_starts", watched)
    base = model("falcon", tokenizer).double()
    few = {"options": {"pairs": 4}, "examples": 6, "exact": False, "seeds": 2}
    plenty = locate(copy.deepcopy(base), tokenizer, **few)
    assert set(steps) == {WHOLE}
    monkeypatch.setattr(prefilter.memory, "spare", lambda _device: 0)
    for given, expected in (({}, {Step(1, True)}), ({"batch_size": 32}, {Step(None, True)})):
        steps.clear()
        short = locate(copy.deepcopy(base), tokenizer, **few, **given)
        assert set(steps) == expected
        order = [str(score.site) for score in plenty.heads]
        values = {str(score.site): score.attribution.value for score in short.heads}
        for i, site in enumerate(order):
            assert values[site] == pytest.approx(plenty.heads[i].attribution.value, rel=1e-5, abs=1e-9)
    assert [str(score.site) for score in short.heads] == order  # bit for bit the same scores


def test_attribution_in_bfloat16_sums_in_float32(tokenizer):
    """Of the same bfloat16 gradients and changes, sums over 64 tokens and more are as exact as float32 is."""
    encoded = encode(tokenizer, KVRetrieval(16).questions(2, seed=0))
    base = model("falcon", tokenizer).to(torch.bfloat16)
    exact = attribute_starts(fully_gated(Subject.of(copy.deepcopy(base).double(), tokenizer)), encoded)
    half = attribute_starts(fully_gated(Subject.of(base, tokenizer)), encoded)
    assert half.dtype == torch.float32
    assert not torch.equal(half, half.bfloat16().float())
    error = (half - exact).norm() / exact.norm()
    assert error < 0.05
