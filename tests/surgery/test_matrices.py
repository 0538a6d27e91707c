"""Mixing matrices against what the models themselves compute."""

import sys

import pytest
import torch
import torch.nn.functional as F

from surgery.hybrids import ssd_mixer
from surgery.locating.matrices import mixing_matrices
from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan
from surgery.records.site import Site
from surgery.splicing.splice import adopt, splice
from tests.models import SAME, random_base, subject
from tests.surgery.test_anatomy import ARCHITECTURES
from tests.surgery.test_replay import draw, untouched, wide

IDS = draw(1, 11, seed=4)
SSD = ("mamba2", "zamba2", "nemotron_h", "bamba", "granitemoehybrid", "falcon_h1")
# Attention, or a value projection of its own.
WITHOUT = ("mamba", "mamba2", "falcon_mamba", "gpt_neox", "xlstm", "mpt")
pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.fixture
def read(monkeypatch):
    """What the mixers' output projections read, in order, and what the scans of a model's own file were given and gave."""
    projected, scans = [], []

    def watch(model, found, scan):
        for mixer in found.mixers:
            mixer.out.register_forward_pre_hook(lambda _, args: projected.append(args[0]))
        module = sys.modules[type(model).__module__]
        if hasattr(module, scan):
            own = getattr(module, scan)

            def call(*args, **kwargs):
                result = own(*args, **kwargs)
                scans.append((args, kwargs, result))
                return result

            monkeypatch.setattr(module, scan, call)

    return watch, projected, scans


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in WITHOUT])
@torch.inference_mode()
def test_attention_times_values_is_what_the_projection_reads(name):
    model = wide(name)
    found, implementation = anatomy(model), model.config._attn_implementation  # "eager" in Gemma-2
    entering, projected = {}, {}
    hooks = []
    for i, mixer in enumerate(found.mixers):
        note = lambda _, args, kwargs, i=i: entering.update({i: args[0] if args else kwargs["hidden_states"]})  # noqa: E731
        hooks.append(mixer.module.register_forward_pre_hook(note, with_kwargs=True))
        hooks.append(mixer.out.register_forward_pre_hook(lambda _, args, i=i: projected.update({i: args[0]})))
    before = model(IDS).logits
    for hook in hooks:
        hook.remove()
    attention = [(i, mixer) for i, mixer in enumerate(found.mixers) if mixer.kind == "attention"]
    chosen = [Site(m.layer, (head,)) for _, m in attention for head in range(m.first, m.first + m.heads)]
    matrices = mixing_matrices(subject(model), IDS[0], sites=chosen)
    assert list(matrices) == chosen
    rows = torch.tensor([10, 3])
    some = mixing_matrices(subject(model), IDS[0], rows, sites=chosen[1:2])
    torch.testing.assert_close(some[chosen[1]], matrices[chosen[1]][rows], **SAME)
    for i, mixer in attention:
        module = mixer.module
        projection = module.qkv_proj if name == "phi3" else module.v_proj
        values = projection(entering[i])[0, :, -2 * mixer.width if name == "phi3" else 0 :]
        if name == "zamba2":  # shared weights, and every use's own adapter
            values = values + module.linear_v_adapter_list[module.layer_dic[mixer.layer]](entering[i])[0]
        values = values.view(11, -1, mixer.width).transpose(0, 1)
        values = values.repeat_interleave(mixer.heads // len(values), 0)
        matrix = torch.stack([matrices[Site(mixer.layer, (mixer.first + head,))] for head in range(mixer.heads)])
        torch.testing.assert_close(matrix.sum(-1), torch.ones(mixer.heads, 11), **SAME)
        mixed = (matrix @ values).transpose(0, 1).reshape(11, -1)
        if name == "qwen3_next":  # its output is gated before the projection
            gate = module.q_proj(entering[i]).view(1, 11, mixer.heads, -1).chunk(2, dim=-1)[1]
            mixed = mixed * gate.reshape(11, -1).sigmoid()
        torch.testing.assert_close(mixed, projected[i][0], **SAME)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(IDS).logits, before)
    assert untouched(model)


@pytest.mark.parametrize("name", SSD)
@torch.inference_mode()
def test_ssd_matrices_times_x_are_the_scan(name, read):
    model = wide(name)
    found = anatomy(model)
    watch, _, scans = read
    watch(model, found, "mamba2_chunk_scan")
    ssm = [mixer for mixer in found.mixers if mixer.kind == "ssm"]
    matrices = mixing_matrices(subject(model), IDS[0])
    assert len(scans) == len(ssm)
    for mixer, (args, _, y) in zip(ssm, scans, strict=True):
        x = args[0][0]  # t h p
        matrix = torch.stack([matrices[Site(mixer.layer, (head,))] for head in range(mixer.heads)])
        mixed = torch.einsum("hts,shp->thp", matrix, x) + mixer.module.D[:, None] * x
        torch.testing.assert_close(mixed, y[0].view_as(mixed), **SAME)


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba", "jamba"])
@torch.inference_mode()
def test_selective_matrices_times_x_are_the_scan(name, read):
    model = wide(name)
    found = anatomy(model)
    watch, projected, scans = read
    watch(model, found, "mamba_selective_scan")
    chosen = [Site(layer, (channel,)) for layer in (0, 2) for channel in (0, 7, 31)]
    matrices = mixing_matrices(subject(model), IDS[0], sites=chosen)
    assert list(matrices) == chosen
    x_of = {0: scans[0], 2: scans[-1]}
    for site, matrix in matrices.items():
        (channel,) = site.heads
        args, kwargs, _ = x_of[site.layer]
        x, gate = args[0][0, channel], kwargs["z"][0, channel]
        y = (matrix @ x + found.mixer_of(site).module.D[channel] * x) * F.silu(gate)
        torch.testing.assert_close(y, projected[site.layer][0, :, channel], **SAME)


@pytest.mark.parametrize("name", ["recurrent_gemma", "qwen3_next"])
def test_where_no_matrix_can_be_had_there_is_none(name):
    model = wide(name)
    found = anatomy(model)
    attention = {site for site in found.sites() if found.mixer_of(site).kind == "attention"}
    assert mixing_matrices(subject(model), IDS[0]).keys() == attention


@torch.inference_mode()
def test_only_the_heads_that_are_named_are_computed():
    """In any order, and as they are among all. So of other mixers: test_mixers.py."""
    hybrid = splice(random_base(), Plan(kind="layer", sites=("L0",)))
    mixer = anatomy(hybrid).mixers_of(0)[0].module
    hidden = torch.randn(1, 13, hybrid.config.hidden_size, generator=torch.Generator().manual_seed(5))
    rows = torch.tensor([12, 4])
    whole = mixer.matrices(hidden, rows)
    for numbers in ([6, 0, 3], [2], [1]):
        heads = [number % len(whole) for number in numbers]
        some = mixer.matrices(hidden, rows, heads)
        assert some.shape == (len(heads), 2, 13)
        torch.testing.assert_close(some, whole[heads], **SAME)


def test_one_head_costs_no_more_than_one_head(monkeypatch):
    """Of 8 heads the matrices of the others are not made on the way."""
    asked = []
    own = ssd_mixer.ssd_matrix
    monkeypatch.setattr(ssd_mixer, "ssd_matrix", lambda *args, **kwargs: asked.append(own(*args, **kwargs)) or asked[-1])
    mixing_matrices(subject(adopt(random_base())), IDS[0], sites=[Site(1, (4,))])
    assert [matrix.shape[1] for matrix in asked] == [1]
