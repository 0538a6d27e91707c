"""Head grafts: equal to transformers where nothing is spliced, and to their formula. Their laws stand in test_laws.py."""

import re
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surgery.errors import UserError
from surgery.families.mamba2 import Mamba2HybridForCausalLM
from surgery.hybrids.sources import IMPORT, write_sources
from surgery.kernels.dispatch import OPERATIONS, use
from surgery.records.plan import Plan, Start
from surgery.records.site import Site
from surgery.splicing.splice import adopt, splice
from tests.models import BASES, SAME, random_base

STOCK = {name: "stock" for name in OPERATIONS if name != "graft_attention"}
PLANS = {
    "one head": Plan(sites=("L1.H3",)),
    "negative sign and small scale": Plan(sites=("L1.H3,5",), starts={"L1.H3": Start(sign=-1, tau=0.5)}),
    "no time step": Plan(sites=("L1.H3",), time_step=False),
    "shared pairs, two layers, one complete": Plan(sites=("L1.H3,6", "L2.H0,1,2,3,4,5,6,7"), shared=True),
    "first layer, half blended": Plan(sites=("L0.H1,2,7",), blend=0.5),
    "uneven groups, width of the state": Plan(sites=("L0.H1,2,7",), shared=True, width=8),
    "copying": Plan(sites=("L0.H1,2,7", "L2.H3"), init="copy", blend=0.5),
}


def test_nothing_spliced_equals_transformers_with_our_kernels(family_base, tokens, request):
    """The kernels of float64 bit for bit almost, those of float32 up to their rounding."""
    logits = adopt(family_base)(tokens).logits.double()
    request.getfixturevalue("in_float64")
    exact = family_base.double()(tokens).logits
    assert (logits - exact).norm() < 1e-5 * exact.norm()
    torch.testing.assert_close(adopt(family_base)(tokens).logits, exact, **SAME)


@torch.inference_mode()
def test_what_blocks_pass_on_is_not_held(family_base, tokens):
    """Of a deep model it would be more than the rest of a forward."""
    model, outputs, alive = adopt(family_base), [], []
    for block in model.backbone.layers:
        block.register_forward_hook(lambda block, inputs, output: outputs.append(weakref.ref(output)))
    norm = getattr(model.backbone, model.backbone.last_norm)
    norm.register_forward_pre_hook(lambda *_: alive.append(sum(output() is not None for output in outputs)))
    model(tokens)
    assert len(outputs) > 1
    assert alive == [1]
    assert len(model(tokens, output_hidden_states=True).hidden_states) == len(model.backbone.layers) + 1


def test_without_grafts_gradients_equal_those_of_transformers(family_base, tokens, request):
    def gradients(model):
        model.zero_grad()
        model.train()(tokens, labels=tokens).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    own = gradients(adopt(family_base))
    request.getfixturevalue("in_float64")
    exact = gradients(family_base.double())
    # A gradient is a sum of about a thousand numbers of either sign, some of which cancel.
    for name, gradient in exact.items():
        assert (own[name] - gradient).norm() < 1e-5 * max(gradient.norm(), 1e-2), name
    torch.testing.assert_close(gradients(adopt(family_base)), exact, **SAME)


def test_padded_batch_without_grafts_equals_transformers_exactly(family_base, tokens):
    mask = torch.ones_like(tokens)
    mask[0, :6] = 0
    with use(**STOCK):
        ours, stock = (m(tokens, attention_mask=mask).logits for m in (adopt(family_base), family_base))
    assert torch.equal(ours, stock)


heads = st.sets(st.integers(0, 7), min_size=1).map(tuple)
sites = st.dictionaries(st.integers(0, 2), heads, min_size=1).map(lambda d: tuple(Site(k, v) for k, v in d.items()))
starts = st.builds(Start, sign=st.sampled_from([1, -1]), tau=st.sampled_from([0.25, 1.0, 2.0]))


def with_own_starts(sites, starts, **options):
    """The plan with those of the starts that are of its heads."""
    planned = {str(head) for site in sites for head in site.each()}
    return Plan(sites=sites, starts={head: start for head, start in starts.items() if head in planned}, **options)


plans = st.builds(
    with_own_starts,
    sites=sites,
    starts=st.dictionaries(st.sampled_from(["L0.H0", "L1.H3", "L2.H7"]), starts),
    time_step=st.booleans(),
    width=st.sampled_from([None, 8, 11, 32]),
    shared=st.booleans(),
    blend=st.sampled_from([None, 0.0, 0.3]),
    seed=st.integers(0, 3),
)
few = settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


FAMILIES = ("groups", "mamba", "falcon mamba", "llamba")


@pytest.mark.usefixtures("in_float64")
@few
@given(name=st.sampled_from(FAMILIES), plan=plans, width=st.integers(9, 40))
def test_extra_width_adds_exactly_nothing_at_the_start(name, plan, width):
    base, ids = BASES[name](), torch.arange(1, 41)[None]
    narrow, wide = (splice(base, plan.model_copy(update={"width": w}))(ids).logits for w in (8, width))
    torch.testing.assert_close(wide, narrow, **SAME)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("time_step", [True, False])
def test_dual_graft_is_the_formula(tokens, sign, time_step):
    """Against the equation, written out for one head in float64."""
    base = random_base(n_groups=2).double()
    hybrid = splice(base, Plan(sites=("L0.H5",), starts={"L0.H5": Start(sign=sign, tau=0.7)}, time_step=time_step))
    mixer = hybrid.backbone.layers[0].mixer
    u = hybrid.backbone.layers[0].norm(hybrid.backbone.embeddings(tokens))
    projected = mixer.project(u)
    x, B, C, dt = projected.values, projected.keys, projected.queries, projected.dt
    scores = sign * 0.7 * torch.einsum("btn,bsn->bts", C[:, :, 1], B[:, :, 1])  # head 5 of 8 is in group 1 of 2
    if time_step:
        scores = scores + dt[:, None, :, 5].log()
    causal = torch.ones(37, 37, dtype=torch.bool).tril()
    mixed = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ x[:, :, 5]
    wanted = sign * mixed + mixer.D[5] * x[:, :, 5]
    torch.testing.assert_close(mixer.mix(projected)[:, :, 5], wanted, **SAME)


def test_grafted_heads_are_not_scanned(monkeypatch, tokens):
    seen = []
    import surgery.hybrids.dual as module

    original = module.ssd_scan
    monkeypatch.setattr(module, "ssd_scan", lambda x, *rest, **named: (seen.append(x.shape[2]), original(x, *rest, **named))[1])
    splice(random_base(), Plan(sites=("L1.H0,2,4", "L2.H0,1,2,3,4,5,6,7")))(tokens)
    assert seen == [8, 5]  # all heads of L0, five of L1, none of L2


@pytest.mark.usefixtures("in_float64")
def test_a_channel_is_the_attention_of_its_formula(tokens):
    """surgery/hybrids/mamba.py: one softmax a channel, log dt in its scores, written out."""
    plan = Plan(sites=("L1.H3,7,9",), starts={"L1.H3": Start(sign=-1, tau=0.5), "L1.H9": Start(sign=-1, tau=0.5)})
    mixer = splice(BASES["mamba"](), plan).backbone.layers[1].mixer
    u = torch.randn(2, 11, 32, generator=torch.Generator().manual_seed(2))
    projected = mixer.project(u)
    x, B, C, dt = projected.values[..., 0], projected.keys[:, :, 0], projected.queries[:, :, 0], projected.dt
    assert mixer.graft.pairs == [[0, 2], [1]]
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    y = mixer.mix(projected)[..., 0]
    for channel, sign, tau in ((3, -1, 0.5), (7, 1, 1.0), (9, -1, 0.5)):
        scores = sign * tau * C @ B.transpose(1, 2) + dt[:, None, :, channel].log()
        attention = sign * scores.masked_fill(~causal, -torch.inf).softmax(-1)
        wanted = (attention @ x[..., channel, None])[..., 0] + mixer.D[channel] * x[..., channel]
        torch.testing.assert_close(y[..., channel], wanted, **SAME)
        matrix = mixer.matrices(u[:1], heads=[channel])
        torch.testing.assert_close(matrix[0], attention[0], **SAME)


@pytest.mark.parametrize("site", ["L3.H0", "L0.H8"])
def test_a_site_that_the_model_lacks_is_refused(site):
    with pytest.raises(UserError, match=f"no site {site}: it has layers 0-2 with heads 0-7"):
        splice(random_base(), Plan(sites=(site,)))


def test_too_narrow_a_graft_is_refused():
    with pytest.raises(UserError, match="at least the state size, 8"):
        splice(random_base(), Plan(sites=("L0.H0",), width=7))


def test_sources_import_nothing_but_torch_and_transformers(tmp_path):
    write_sources(tmp_path, Mamba2HybridForCausalLM)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"mamba2.py", "ssm_model.py", "mixer.py", "sources.py", "ssd.py", "native.py", "conv_norm_native.py"} <= names
    assert "selective.py" not in names  # what another family needs stays at home
    for path in tmp_path.iterdir():
        assert not re.search(r"^\s*(from|import) surgery", path.read_text(), flags=re.M)
        assert {name for *_, name in IMPORT.findall(path.read_text())} <= {n[:-3] for n in names}
