"""A smaller state: what a plan keeps of it, what is shared, and how much each dimension counts."""

from dataclasses import replace

import pytest
import torch
from transformers import BambaConfig, BambaForCausalLM, FalconMambaConfig, FalconMambaForCausalLM, MambaConfig, MambaForCausalLM

from surgery.commands.hybrid_folder import holds_base
from surgery.costs.counts import planning
from surgery.costs.models import uniform_ranking
from surgery.errors import UserError
from surgery.evaluation import markdown
from surgery.exporting.export import export
from surgery.exporting.formats.patch import write
from surgery.jobs.entries import entries_of
from surgery.records.plan import Plan
from surgery.records.recipe import read_recipe
from surgery.splicing.joining import Patch, join
from surgery.splicing.load import load
from surgery.splicing.splice import graft_parameters, splice, unsplice
from surgery.splicing.state import state_size
from surgery.studies import Findings
from surgery.tuning.state_sizes import shrink_state, state_scores
from tests.models import ROOT, random_base, random_llamba, random_selective

IDS = torch.randint(1, 99, (2, 20), generator=torch.Generator().manual_seed(0))


def grouped():
    return random_base(n_groups=2)


def selective():
    return random_selective(MambaConfig, MambaForCausalLM)


def falcon():
    return random_selective(FalconMambaConfig, FalconMambaForCausalLM)


def among_others():
    """Mamba-2 mixers in a stock model."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3, "attn_layer_indices": [1]}
    mixer = {"mamba_n_heads": 4, "mamba_d_head": "auto", "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    return BambaForCausalLM(BambaConfig(**sizes, **mixer, **heads)).eval()


# What makes a base, its layers with an SSM, and its B/C groups.
BASES = {"mamba2": (random_base, (0, 1, 2), 1), "groups": (grouped, (0, 1, 2), 2), "mamba": (selective, (0, 1, 2), 1),
         "bamba": (among_others, (0, 2), 1)}  # fmt: skip


def keeping(layers, groups, kept=(0, 2, 5), **more):
    return Plan(sites=(f"L{layers[-1]}.H1",), kept_state={f"L{layer}": (kept,) * groups for layer in layers}, **more)


def without(model, layers, groups, kept):
    """The model with nothing read from the other dimensions of the state."""
    dead = [n for n in range(8) if n not in kept]
    for layer in layers:
        mixer = next(m for m in model.base_model.layers[layer].modules() if hasattr(m, "A_log"))
        rows = torch.tensor(dead)
        with torch.no_grad():
            if hasattr(mixer, "x_proj"):
                mixer.x_proj.weight[mixer.time_step_rank + 8 + rows] = 0
                continue
            rows = (rows + 8 * torch.arange(groups)[:, None]).flatten()
            first = mixer.intermediate_size + groups * 8  # of C, among what the convolution takes
            mixer.conv1d.weight[first + rows] = 0
            if mixer.conv1d.bias is not None:
                mixer.conv1d.bias[first + rows] = 0
    return model


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("blend", [None, 0.5])
def test_what_nothing_is_read_from_can_go(name, blend):
    """Without the dimensions a hybrid computes what it computes where they are never read. Its graft has all of them."""
    make, layers, groups = BASES[name]
    plan = keeping(layers, groups, blend=blend)
    cut = splice(make(), plan)
    whole = splice(make(), plan.model_copy(update={"kept_state": {}}))
    assert state_size(cut) == 3
    assert {n: p.shape for n, p in graft_parameters(cut).items()} == {n: p.shape for n, p in graft_parameters(whole).items()}
    expected = without(whole, layers, groups, (0, 2, 5))(IDS, use_cache=False).logits
    torch.testing.assert_close(cut(IDS, use_cache=False).logits, expected, atol=1e-10, rtol=0)
    assert not torch.allclose(splice(make(), plan.model_copy(update={"kept_state": {}}))(IDS, use_cache=False).logits, expected)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", BASES)
def test_the_cache_holds_less_and_gives_the_same(name):
    make, layers, groups = BASES[name]
    cut = splice(make(), keeping(layers, groups))
    whole, places = cut(IDS, use_cache=False).logits, torch.arange(20).expand(2, 20)
    read = cut(IDS[:, :17], position_ids=places[:, :17], use_cache=True)
    kept = "cache_params" if name in ("mamba2", "groups", "mamba") else "past_key_values"
    cache = getattr(read, kept)
    assert {cache.layers[layer].recurrent_states[0].shape[-1] for layer in layers} == {3}
    parts = [read.logits]
    for t in range(17, 20):
        at = slice(t, t + 1)
        parts.append(cut(IDS[:, at], position_ids=places[:, at], use_cache=True, **{kept: cache}).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", BASES)
def test_unsplice_gives_the_base_back(name):
    make, layers, groups = BASES[name]
    base = make()
    expected = base(IDS, use_cache=False).logits
    learned = {n: p.requires_grad for n, p in base.named_parameters()}
    cut = splice(base, keeping(layers, groups))
    assert [n for n, p in cut.named_parameters() if p.requires_grad] == list(graft_parameters(cut))
    back = unsplice(cut)
    assert all(p is q for p, q in zip(back.parameters(), base.parameters(), strict=True))
    assert {p.dtype for p in unsplice(splice(make(), keeping(layers, groups)).double()).parameters()} == {torch.float64}
    assert {n: p.requires_grad for n, p in base.named_parameters()} == learned
    assert torch.equal(back(IDS, use_cache=False).logits, expected)
    shared = {p.data_ptr() for p in base.parameters()}
    own = [n for n, p in cut.named_parameters() if p.data_ptr() not in shared and ".graft." not in n]
    assert all(
        n.endswith(("in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias", "x_proj.weight", "A_log")) for n in own
    )


def test_a_patch_that_speaks_of_another_size_is_refused(tmp_path):
    base, plan = load(ROOT / "checkpoints" / "tiny-mamba2"), keeping(range(4), 1)
    write(splice(base, plan), tmp_path, tokenizer=base.tokenizer, plan=plan, base=base.name)
    spoilt = Patch.read(tmp_path / "patch.json").model_copy(update={"config": {"state_size": 5}})
    (tmp_path / "patch.json").write_text(spoilt.text())
    with pytest.raises(UserError, match=r"does not fit patch\.json: the tensor '.*' has another shape"):
        join(base.model, tmp_path)


def test_a_hybrid_with_less_state_is_never_its_base(tmp_path):
    """Neither with its grafts off, nor loaded again."""
    cut = splice(random_base(), keeping((0, 1, 2), 1))
    cut.save_pretrained(tmp_path)
    assert not holds_base(str(tmp_path))  # so that tuning opens the base for a teacher
    for hybrid in (cut, type(cut).from_pretrained(tmp_path)):
        with pytest.raises(UserError, match="the state of this hybrid is smaller than its base's"), hybrid.disable_grafts():
            pass


@pytest.mark.parametrize(
    ("plan", "options", "message"),
    [
        (Plan(kind="layer", sites=("L0",)), {}, "is for head grafts"),
        ("plan.json", {}, "surgery.shrink_state takes a plan, not its name"),
        (Plan(sites=("L0.H2",)), {"windows": 0}, "windows is a whole number from 1, not 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(plan, options, message):
    with pytest.raises(UserError, match=message):
        shrink_state(load(ROOT / "checkpoints" / "tiny-mamba2"), plan, 4, **options)


def test_a_state_is_measured_where_nothing_records_gradients():
    base, plan = load(ROOT / "checkpoints" / "tiny-mamba2"), Plan(sites=("L0.H2",))
    expected = shrink_state(base, plan, 4, text_tokens=16, windows=1)
    with torch.no_grad():
        assert shrink_state(base, plan, 4, text_tokens=16, windows=1) == expected


@pytest.mark.parametrize("format", ["hf", "patch"])
def test_it_is_exported_and_tuned_on_like_any_hybrid(tmp_path, format):
    base = load(ROOT / "checkpoints" / "tiny-mamba2")
    plan = shrink_state(base, Plan(sites=("L0.H2,7",)), 4, text_tokens=32, windows=2)
    hybrid = splice(base, plan)
    export(hybrid, tmp_path / "cut", format=format, verify="tensors")
    assert "Heads that stay an SSM keep the 4 dimensions of their state" in (tmp_path / "cut" / "README.md").read_text()
    loaded = load(tmp_path / "cut").model
    assert state_size(loaded) == 4
    ids = torch.arange(40).view(2, 20)
    torch.testing.assert_close(loaded(ids).logits, hybrid(ids).logits, atol=1e-5, rtol=0)
    assert loaded.surgery.plan.kept_state == plan.kept_state
    with pytest.raises(UserError, match="does not hold what its state was cut from; load the base instead"):
        unsplice(loaded)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", ["mamba2", "groups", "mamba"])
def test_a_dimension_counts_by_the_derivative_of_its_gate(name):
    """And one from which nothing is read does not."""
    make, layers, groups = BASES[name]
    hybrid = splice(
        without(make(), layers, groups, (0, 1, 2, 4, 6)), keeping(layers, groups).model_copy(update={"kept_state": {}})
    )
    real = torch.ones_like(IDS, dtype=torch.bool)
    real[1, 12:] = False
    scores = state_scores(hybrid, IDS, real)
    assert {layer: score.shape for layer, score in scores.items()} == dict.fromkeys(layers, (groups, 8))
    for score in scores.values():
        assert (score[:, [3, 5, 7]] == 0).all()
        assert (score[:, [0, 1, 2, 4, 6]] > 0).all()
    assert [n for n, p in hybrid.named_parameters() if p.requires_grad] == list(graft_parameters(hybrid))

    def loss(row, end, gate):
        mixer = hybrid.base_model.layers[layers[0]].mixer
        own = mixer.project

        def project(*args, **kwargs):
            projected = own(*args, **kwargs)
            scale = torch.ones_like(projected.queries[0, 0])
            scale.view(-1, 8)[0, 4] = gate
            return replace(projected, queries=projected.queries * scale)

        vars(mixer)["project"] = project
        try:
            logits = hybrid(row[None, :end], use_cache=False).logits[0, :-1]
        finally:
            vars(mixer).pop("project")
        return torch.nn.functional.cross_entropy(logits, row[1:end]).item()

    slopes = [(loss(row, end, 1 + 1e-4) - loss(row, end, 1 - 1e-4)) / 2e-4 for row, end in ((IDS[0], 20), (IDS[1], 12))]
    assert scores[layers[0]][0, 4].item() == pytest.approx(sum(slope**2 for slope in slopes) / 2, rel=1e-4)


@pytest.mark.parametrize(
    ("make", "groups", "message"),
    [
        (random_llamba, 8, "the state of a llamba stays as large as it is; that of mamba and mamba2 can be cut"),
        (falcon, 1, "the state of a falcon_mamba stays as large as it is: B and C are normalised over all of it"),
    ],
)
def test_what_cannot_be_cut_is_refused(make, groups, message):
    base = make()
    plan = keeping(range(len(base.base_model.layers)), groups, (0,))
    with pytest.raises(UserError, match=message):
        splice(base, plan)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"L0": ((0,),), "L1": ((0,),)}, "L2 is missing"),
        ({f"L{i}": ((0,),) for i in range(4)}, "L3 is no layer with an SSM"),
        ({f"L{i}": ((8,),) for i in range(3)}, "L0 has 1 B/C groups, each with the dimensions 0 to 7"),
        ({f"L{i}": ((0,), (1,)) for i in range(3)}, "L0 has 1 B/C groups"),
    ],
)
def test_dimensions_that_are_not_there_are_refused(kept, message):
    with pytest.raises(UserError, match=message):
        splice(random_base(), Plan(sites=("L1.H1",), kept_state=kept))


@pytest.mark.parametrize("kept", [{"L0": ((1, 0),)}, {"L0": ((0,), (1, 2))}, {"L0": ((),)}])
def test_a_plan_keeps_as_many_everywhere_in_order(kept):
    with pytest.raises(ValueError, match="every group keeps as many dimensions, one at least, in ascending order"):
        Plan(sites=("L1.H1",), kept_state=kept)


RECIPE = """
model: checkpoints/tiny-mamba2
seed: 3
locate: {options: {pairs: 4}, examples: 8, exact: false, layers: false}
plan: {sites: "L0.H3,5"}
tune: {steps: 1, batch_size: 2, text_batch_size: 2, text_tokens: 32, skill_batch_size: 2, lessons: [{options: {pairs: 4}}]}
bench: {pairs: [4], unseen_pairs: [], limit: 10, windows: 2, contexts: [64]}
"""


def test_what_it_costs_is_known_before_and_every_hybrid_of_a_run_is_cut():
    base = load(ROOT / "checkpoints" / "tiny-mamba2")
    settings = [f"model={ROOT}/checkpoints/tiny-mamba2", "plan={sites: L0.H3, state_size: 4}", "tune.text_tokens=16"]
    recipe = read_recipe(None, settings)
    assert planning(recipe, base.tokenizer, 32).tokens == 3 * 32 * 16  # forwards and backwards of windows of text
    cut = keeping(range(4), 1)
    entries = entries_of(base.model, recipe, uniform_ranking(4, 8), cut, None, lambda name, model, *_: model)
    sizes = {name: state_size(entry.model) for name, entry in entries.items()}
    whole = {"base", "control_tuned"}
    assert sizes == {name: 16 if name in whole else 3 for name in sizes}
    assert {"control_random_site_tuned", "control_same_layer"} < set(sizes)


def test_the_verbs_cut_alike(surgery, tmp_path):
    """plan.state_size while planning, and --state-size of a plan that is there."""
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for arguments in (
        ("locate", "checkpoints/tiny-mamba2", "--recipe", "recipe.yaml", "--out", "ranked"),
        ("plan", "ranked/ranking.json", "--recipe", "recipe.yaml", "--out", "whole.json"),
        ("plan", "ranked/ranking.json", "--recipe", "recipe.yaml", "--set", "plan.state_size=4", "--base",
         "checkpoints/tiny-mamba2", "--out", "cut.json"),
        ("splice", "checkpoints/tiny-mamba2", "whole.json", "--recipe", "recipe.yaml", "--state-size", "4", "--verify",
         "tensors", "--out", "spliced"),
    ):  # fmt: skip
        status, _, error = surgery(*arguments)
        assert status == 0, error
    cut, whole = (Plan.read(tmp_path / name) for name in ("cut.json", "whole.json"))
    assert Plan.read(tmp_path / "spliced" / "plan.json").kept_state == cut.kept_state
    assert {name: [len(group) for group in groups] for name, groups in cut.kept_state.items()} == {
        f"L{i}": [4] for i in range(4)
    }
    assert cut.sites == whole.sites
    assert markdown.sites_text(cut) == f"{markdown.sites_text(whole)}, the state cut to 4 dimensions"
    assert not whole.kept_state
    for refused, complaint in (
        (("--state-size", "16"), "16 is not 1 to 15"),
        (("--set", "plan.heads=2"), "has no use for plan.heads"),
    ):
        status, _, error = surgery("splice", "checkpoints/tiny-mamba2", "whole.json", *refused, "--out", "refused")
        assert (status, complaint in error, (tmp_path / "refused").exists()) == (2, True, False), error


@pytest.mark.slow  # a whole study
def test_the_study_measures_every_size(surgery, tmp_path, painted):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "recipe.yaml").write_text(RECIPE + "study: {name: state_size, sizes: [4]}\n")
    status, printed, error = surgery("run", "recipe.yaml", "--out", "out")
    assert status == 0, error
    findings = Findings.read(tmp_path / "out" / "findings.json")
    kinds = ("base", "grafted, not trained", "tuned")
    assert [row.what for row in findings.rows] == [f"{kind}, state of {size}" for size in (16, 4) for kind in kinds]
    assert all("kv.4" in row.figures for row in findings.rows)
    cache = findings.about["cache bytes"]
    for kind in kinds:
        assert cache[f"{kind}, state of 4"]["64"] < cache[f"{kind}, state of 16"]["64"]
    assert "A state of 4 of 16: KV 4" in " ".join(printed.split())
    assert (tmp_path / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    for refused in ("plan.state_size=4", "bench.contexts=[]"):
        status, _, error = surgery("run", "recipe.yaml", "--set", refused, "--out", "refused")
        assert (status, "the study 'state_size'" in error, (tmp_path / "refused").exists()) == (2, True, False), error
