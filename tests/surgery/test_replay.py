"""The replay against the slow way: hooks on the output projections, and a whole forward for every change."""

from contextlib import ExitStack

import pytest
import torch

from surgery.errors import UserError
from surgery.locating.replay import Replay
from surgery.locating.substitution import ablate_heads, skip_layers
from surgery.models.anatomy import anatomy
from surgery.records.site import Site
from tests.models import but_slow, subject
from tests.surgery.test_anatomy import ARCHITECTURES, build

TOLERANCE = {"rtol": 0, "atol": 1e-10}  # in float64, which every test here computes in


pytestmark = pytest.mark.usefixtures("in_float64")


def wide(name: str):
    """A model in float64. Its experts go one by one: the grouped product of torch has no float64."""
    model = build(name).double()
    model.set_experts_implementation("eager")
    return model


def draw(rows: int, t: int, seed: int) -> torch.Tensor:
    return torch.randint(2, 48, (rows, t), generator=torch.Generator().manual_seed(seed))


IDS, LAST = draw(2, 13, seed=1), torch.tensor([12, 7])
REFERENCE = draw(3, 11, seed=2), torch.tensor([10, 9, 6])


def recorded(model, found, ids):
    """What every mixer's output projection reads, by the slow way."""
    kept = {}
    with ExitStack() as stack:
        for i, mixer in enumerate(found.mixers):
            hook = mixer.out.register_forward_pre_hook(lambda _, args, i=i: kept.update({i: args[0].clone()}))
            stack.callback(hook.remove)
        model(ids, use_cache=False)
    return kept


def instead(how, mixer_number, head_columns, reference):
    """(rows, t, columns): what the head's columns become, written out position by position."""
    _, last = REFERENCE
    values = reference[mixer_number][..., head_columns]
    out = torch.zeros(2, 13, values.shape[-1])
    for row in range(2):
        for t in range(13):
            if how == "mean":
                real = [values[r, s] for r in range(3) for s in range(11) if s <= last[r]]
                out[row, t] = torch.stack(real).mean(0)
            elif how == "resample":
                s = t + last[row] - LAST[row]  # the reference's row `row`, aligned at the last token
                out[row, t] = values[row, min(max(int(s), 0), int(last[row]))]
    return out


def slow(model, found, layer, heads, how, reference):
    """The logits at the last tokens with heads ablated. heads None: the whole layer."""
    with ExitStack() as stack:
        for number, mixer in enumerate(found.mixers):
            if mixer.layer != layer:
                continue
            if heads is None and how == "zero":
                hook = mixer.out.register_forward_hook(lambda _, args, out: torch.zeros_like(out))
            else:
                mine = range(mixer.first, mixer.first + mixer.heads)
                columns = [mixer.columns(head) for head in (mine if heads is None else heads) if head in mine]

                def edit(_, args, number=number, columns=columns):
                    changed = args[0].clone()
                    for part in columns:
                        changed[..., part] = instead(how, number, part, reference)
                    return (changed,)

                hook = mixer.out.register_forward_pre_hook(edit)
            stack.callback(hook.remove)
        return model(IDS, use_cache=False).logits[torch.arange(2), LAST]


# Blocks that are built like those of llama, mamba, granitemoehybrid and qwen3_next; gemma2 has sliding windows, too.
ALIKE = {"qwen2", "qwen3", "mistral", "phi3", "falcon_mamba", "bamba", "minimax"}


@pytest.mark.parametrize("name", but_slow(ARCHITECTURES, *ARCHITECTURES.keys() - ALIKE))
@torch.inference_mode()
def test_every_ablation_equals_the_slow_way(name):
    model = wide(name)
    found = anatomy(model)
    base = model(IDS, use_cache=False).logits
    before = {key: value.clone() for key, value in model.state_dict().items()}
    reference = recorded(model, found, REFERENCE[0])
    replay, moved = Replay(subject(model), IDS, LAST, reference=REFERENCE), 0.0
    for layer in replay.layers():
        torch.testing.assert_close(layer.base, base[torch.arange(2), LAST], **TOLERANCE)
        heads = found.heads(layer.index)
        if not heads:
            continue
        some = sorted({0, heads // 2, heads - 1})
        for how, changes in (("zero", (some, None)), ("mean", (some,)), ("resample", ([heads - 1], None))):
            for which in changes:
                wanted = slow(model, found, layer.index, which, how, reference)
                torch.testing.assert_close(layer.logits(layer.ablation(which, how)), wanted, **TOLERANCE)
                moved = max(moved, (wanted - layer.base).abs().max().item())
        for i, mixer in enumerate(layer.mixers):  # what it put out anyway
            if name in ("mamba", "mamba2", "jamba") and mixer.kind == "ssm":
                output = mixer.module(layer.entering[i])
                same = layer.logits(layer.replacement(layer.take(output), i))
                torch.testing.assert_close(same, layer.base, **TOLERANCE)
    assert moved > 1e-2  # or the comparisons above say nothing
    assert torch.equal(model(IDS, use_cache=False).logits, base)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert untouched(model)


def untouched(model) -> bool:
    return not any("forward" in m.__dict__ or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_interrupt_leaves_the_model_as_it_was(monkeypatch):
    model = wide("zamba2")
    layers = Replay(subject(model), IDS, LAST).layers()
    layer = next(layers)

    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(model.model.layers[2].mamba.out_proj), "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            layer.logits(layer.ablation([0]))
        with pytest.raises(KeyboardInterrupt):
            next(layers)
    assert untouched(model)


def test_a_layer_that_is_left_out_passes_its_states_on():
    model = wide("bamba")
    with torch.inference_mode():
        base = model(IDS).logits
        with skip_layers(subject(model), [0, 1, 2]):
            skipped = model(IDS).logits
        wanted = model.lm_head(model.model.final_layernorm(model.model.embed_tokens(IDS)))
        torch.testing.assert_close(skipped, wanted)
        assert torch.equal(model(IDS).logits, base)
    assert untouched(model)


@torch.inference_mode()
def test_silencing_heads_everywhere_equals_ablating_them():
    model = wide("falcon_h1")
    found = anatomy(model)
    (layer, *_) = Replay(subject(model), IDS, LAST).layers()
    with ablate_heads(found, [Site(0, (1, 6))]):
        got = model(IDS).logits[torch.arange(2), LAST]
    torch.testing.assert_close(got, layer.logits(layer.ablation([1, 6])), **TOLERANCE)
    with ablate_heads(found, [Site(1, (1, 6))], (torch.arange(2), LAST)):
        here = model(IDS).logits
    with ablate_heads(found, [Site(1, (1, 6))]):
        everywhere = model(IDS).logits
    at = torch.arange(2), LAST
    torch.testing.assert_close(here[at], everywhere[at], **TOLERANCE)  # the last layer: what others do is lost on it
    assert torch.equal(here[0, :12], model(IDS).logits[0, :12])


def test_what_cannot_be_replayed_is_refused():
    model = wide("llama")
    (layer, *_) = Replay(subject(model), IDS, LAST).layers()
    with pytest.raises(UserError, match="'mean' ablation needs a reference batch"):
        layer.ablation([0], "mean")
    attention = model.model.layers[1].self_attn
    own = attention.forward

    def scaled(*args, **kwargs):
        out, weights = own(*args, **kwargs)
        return 2 * out, weights

    attention.forward = scaled
    with pytest.raises(UserError, match="what its LlamaAttention returns is not what its output projection returns"):
        list(Replay(subject(model), IDS, LAST).layers())
    assert attention.forward is scaled
    with pytest.raises(UserError, match="eval mode"):
        Replay(subject(model.train()), IDS, LAST)
