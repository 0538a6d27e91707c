"""Windows: heads of a model's own attention that read the first tokens and the latest ones, and keep no others."""

import importlib.util
import sys
from itertools import pairwise

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import surgery
from surgery.choosing.windows import plan_windows
from surgery.errors import UserError
from surgery.evaluation.judgement import judge
from surgery.evaluation.report import Report
from surgery.hybrids import windows
from surgery.hybrids.windows import AttentionWindow, WindowedLayer, with_windows
from surgery.kernels.attention import graft_attention
from surgery.locating.matrices import mixing_matrices
from surgery.locating.ranking import Ranking
from surgery.models.anatomy import anatomy
from surgery.models.cache import cache_after, cache_bytes, cache_parts, prefilled
from surgery.records.plan import Plan, PlanWindows
from surgery.records.recipe import Data, PlanOptions, Tune
from surgery.records.record import provenance
from surgery.records.site import Site
from surgery.splicing.load import load
from surgery.splicing.splice import adopt, graft_parameters, splice, unsplice
from surgery.splicing.windows import attention_groups, random_windows
from surgery.studies import Findings
from surgery.tuning.distil import Distillation
from tests.models import ROOT, but_slow, subject
from tests.surgery.stock_bases import CONFIGURATIONS, base_of

FIRST, LENGTH = 2, 5
NEAR = {"rtol": 1e-4, "atol": 1e-4}  # in float32
WITH = [name for name in CONFIGURATIONS if name.partition("_")[0] not in ("kimi", "bailing", "glm5", "qwen4", "xlstm")]
HYBRID = ROOT / "checkpoints" / "tiny-hybrid"


def plan_of(*sites, first=FIRST, length=LENGTH, **fields):
    return Plan(kind=fields.pop("kind", "window"), windows=PlanWindows(sites=sites, first=first, length=length), **fields)


def attentive(name):
    """As initialised, attention does next to nothing."""
    base = base_of(name)
    for place in anatomy(base).mixers:
        if place.kind == "attention":
            for part in (place.module.q_proj, place.module.k_proj, place.module.v_proj, place.out):
                torch.nn.init.normal_(part.weight, std=0.3)
    return base


def windowed(base, count=1, **fields):
    """The hybrid whose first groups of attention heads have a window."""
    return splice(base, plan_of(*attention_groups(base)[:count], **fields))


def in_steps(model, ids, positions, mask=None, first=20):
    """The logits of a prompt, and of single tokens that follow, from one cache."""
    cache, parts, t = None, [], ids.shape[1]
    for begin, end in pairwise([0, first, *range(first + 1, t + 1)]):
        seen = None if mask is None else mask[:, :end]
        given = {"position_ids": positions[:, begin:end], "attention_mask": seen, "past_key_values": cache}
        output = model(ids[:, begin:end], use_cache=True, **given)
        cache, parts = output.past_key_values, [*parts, output.logits]
    return torch.cat(parts, 1)


def by_definition(window, q, k, v, exist):
    """Every head's mask by itself."""
    b, heads, t, _ = q.shape
    total, each = k.shape[2], heads // k.shape[1]
    exist = torch.ones(b, total, dtype=torch.bool) if exist is None else exist
    numbers, at = torch.arange(total), torch.arange(total - t, total)[:, None]
    causal = exist[:, None] & (numbers <= at)
    first = exist & (exist.cumsum(-1) <= window.first)
    cut = causal & ((numbers > at - window.length) | first[:, None])
    return torch.cat([
        graft_attention(q[:, [head]], k[:, [head // each]], v[:, [head // each]],
                        (cut if head // each in window.groups else causal)[:, None], backend="reference")
        for head in range(heads)
    ], 2)  # fmt: skip


@pytest.mark.parametrize("groups", [(0,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("t", [1, 3, 300])
def test_attention_is_what_its_definition_says(groups, t, monkeypatch):
    """Of fewer tokens than are read, of many blocks, with padding before, behind and among them."""
    torch.manual_seed(0)
    monkeypatch.setattr("surgery.hybrids.windows.BLOCK", 64)
    window, total = AttentionWindow(groups, 3, 9), t + 2
    q, k, v = (torch.randn(3, heads, n, 8, dtype=torch.float64) for heads, n in ((6, t), (3, total), (3, total)))
    some = torch.ones(3, total, dtype=torch.bool)
    some[0, : t // 2], some[1, 1::7], some[2, max(1, t - 2) :] = False, False, False
    for exist in (None, some):
        full = lambda *of: graft_attention(of[0], *(m.repeat_interleave(2, 1) for m in of[1:]), exist)  # noqa: B023, E731
        found = with_windows(window, q, k, v, exist, full)
        assert torch.allclose(found, by_definition(window, q, k, v, exist), atol=1e-10)


@pytest.mark.parametrize("name", but_slow(WITH, "bamba", "zamba2", "qwen3_next"))
@torch.no_grad()
@pytest.mark.usefixtures("in_float64")
def test_the_laws_of_windows_in_every_family(name, tokens, tmp_path):
    """Cached is uncached, padded is single, saved is live, and what is taken out or switched off is the base bit for bit; a
    window that is longer than the prompt changes nothing."""
    base, positions = attentive(name).double(), torch.arange(tokens.shape[1])[None].expand_as(tokens)
    stock = base(tokens).logits
    wide, hybrid = windowed(base, length=999), windowed(base)
    assert torch.allclose(wide(tokens).logits, stock, atol=1e-9)
    logits = hybrid(tokens).logits
    assert (logits - stock).abs().max() > 1e-4
    assert not graft_parameters(hybrid)
    assert torch.allclose(in_steps(hybrid, tokens, positions), logits, atol=1e-9)
    padding = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(tokens)], 1)
    padded = in_steps(hybrid, torch.cat([padding, tokens], 1), (mask.cumsum(1) - 1).clamp_min(0), mask)[:, 3:]
    assert torch.allclose(padded, logits, atol=1e-8)
    hybrid.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    again.set_experts_implementation("eager")
    assert torch.allclose(again.double()(tokens).logits, logits, atol=1e-9)
    with hybrid.disable_grafts():
        assert torch.equal(hybrid(tokens).logits, stock)
    assert torch.equal(hybrid(tokens).logits, logits)
    taken_out = unsplice(hybrid)
    assert type(taken_out) is type(base)
    assert torch.equal(taken_out(tokens).logits, stock)


@pytest.mark.parametrize(
    ("name", "why"), [("kimi_linear", "MLA"), ("bailing_hybrid", "MLA"), ("glm5_next_text", "MLA"), ("qwen4_exp_text", "index")]
)
def test_an_attention_that_cannot_forget_by_head_is_refused_by_name(name, why):
    with pytest.raises(UserError, match=rf"L0 in a {name} can have no windows.*{why}"):
        attention_groups(base_of(name))


@torch.no_grad()
def test_a_cache_holds_what_was_said(tokens):
    """Of the heads without a window all keys, of the others FIRST + LENGTH - 1; also static, in a beam, and cropped."""
    base = attentive("granitemoehybrid")
    hybrid, wide = windowed(base), windowed(base, length=999)
    kept, all_of_them = FIRST + LENGTH - 1, 40
    row = 2 * 8 * 4  # keys and values of a token in one group of 8 dimensions, in float32
    whole = cache_after(base, all_of_them)
    assert cache_after(wide, all_of_them) == whole
    assert cache_after(hybrid, 150) == cache_bytes(prefilled(hybrid, 150))  # counted from shorter prompts
    assert cache_after(hybrid, all_of_them) == whole - row * (all_of_them - kept)
    cache = hybrid(tokens, use_cache=True).past_key_values
    assert isinstance(cache.layers[0], WindowedLayer)
    tensors = [value for layer in cache.layers for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    states = [part for layer in cache.layers for name in ("conv_states", "recurrent_states")
              for part in getattr(layer, name, {}).values()]  # fmt: skip
    assert cache_bytes(cache) == sum(t.nbytes for t in (*tensors, *states) if t.dim() > 1) == sum(cache_parts(cache).values())
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    greedy = hybrid.generate(tokens, **options)
    static = StaticCache(config=hybrid.config, max_cache_len=64)
    assert torch.equal(hybrid.generate(tokens, past_key_values=static, **options), greedy)
    assert static.layers[0].keys.shape[1] == 1  # of two groups
    assert torch.equal(hybrid.generate(tokens, num_beams=3, **options)[:, : tokens.shape[1]], tokens)
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.layers[0].crop(-1)
    with pytest.raises(ValueError, match="filled by a model without windows"):
        hybrid(tokens[:, :1], past_key_values=base(tokens, use_cache=True).past_key_values)


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is made meanwhile."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for part in made if isinstance(made, tuple | list) else (made,):
            self.seen = max(self.seen, part.numel() if isinstance(part, torch.Tensor) else 0)
        return made


def test_a_prompt_of_8192_tokens_takes_the_memory_that_was_said():
    """The cache is said by shorter prompts; and no window's scores of all pairs of tokens exist at once."""
    base, tokens = load(str(HYBRID)).model, 8192
    one, both = (splice(base, plan_of(sites, length=16)) for sites in ("L2.H1", "L2.H0,1"))
    held = {model: cache_bytes(prefilled(model, tokens)) for model in (base, one)}
    with Largest() as largest:
        held[both] = cache_bytes(prefilled(both, tokens))
    assert largest.seen < tokens**2 / 8
    assert [*held.values()] == [cache_after(model, tokens) for model in held]
    forgotten = 2 * 64 * 4 * (tokens - FIRST - 16 + 1)  # bytes of the keys and values of one head
    assert held[base] - held[one] == held[one] - held[both] == forgotten


def test_windows_are_tuned_by_adapters_against_a_teacher_that_forgets_nothing():
    base = load(str(HYBRID))
    few = {"steps": 1, "batch_size": 2, "text_batch_size": 1, "lessons": [{"probe": "kv", "options": {"pairs": 2}}]}
    hybrid = splice(base, plan_of("L2.H1"))
    with pytest.raises(UserError, match="windows have no weights; adapters would learn beside them"):
        surgery.tune(hybrid, base.tokenizer, Tune(**few))
    teacher = adopt(base.model)
    assert Distillation(hybrid, teacher).different == [2]
    ids = torch.arange(40)[None] * 7 % 1600
    with Distillation(hybrid, teacher).as_teacher() as whole:
        assert torch.equal(whole(ids).logits, base.model(ids).logits)
    before = hybrid(ids).logits
    surgery.tune(hybrid, base.tokenizer, Tune(**few, learning_rate=0.01, lora={"target_modules": ["q_proj", "v_proj"]}))
    assert not torch.equal(hybrid(ids).logits, before)
    assert torch.equal(unsplice(hybrid)(ids).logits, base.model(ids).logits)


@torch.no_grad()
def test_eager_attention_and_a_crop_before_anything_is_forgotten(tokens):
    hybrid = windowed(attentive("bamba"), length=999)
    before = hybrid(tokens).logits
    hybrid.set_attn_implementation("eager")
    assert torch.allclose(hybrid(tokens).logits, before, **NEAR)
    cache = DynamicCache(config=hybrid.config)
    hybrid(tokens, past_key_values=cache)
    cache.layers[0].crop(-4)
    assert cache.get_seq_length() == cache.layers[0].recent_keys.shape[2] == tokens.shape[1] - 4


@torch.no_grad()
def test_windows_beside_grafts_and_in_a_hybrid_that_is_a_base():
    """Grafts in and windows out are one plan; a layer graft of the base keeps fewer keys, and stays the base's."""
    base = attentive("falcon_h1")  # attention and SSM in every block
    ids = torch.arange(30)[None] % 99
    both = splice(base, plan_of("L0.H4,5", kind="head", sites=("L0.H1",)))
    assert {name.split(".graft.")[0][-5:] for name in graft_parameters(both)} == {"mamba"}
    assert torch.equal(unsplice(both)(ids).logits, base(ids).logits)
    opened = load(str(HYBRID))
    model, ids = opened.model, torch.arange(50)[None] * 7 % 1600
    hybrid = splice(opened, plan_of("L2.H1"))
    assert not any(p.requires_grad for p in hybrid.parameters())
    logits = hybrid(ids).logits
    assert (logits - model(ids).logits).abs().max() > 1e-4
    assert cache_after(model, 50) - cache_after(hybrid, 50) == 2 * 64 * 4 * (50 - FIRST - LENGTH + 1)
    cut, whole = (mixing_matrices(subject(each), ids[0], sites=[Site(2, (1,))])[Site(2, (1,))] for each in (hybrid, model))
    assert (cut[-1] != 0).sum() == FIRST + LENGTH
    assert torch.allclose(cut[-1, -LENGTH:] / cut[-1, -1], whole[-1, -LENGTH:] / whole[-1, -1], **NEAR)
    assert torch.equal(unsplice(hybrid)(ids).logits, model(ids).logits)


def test_as_many_windows_as_cost_nothing_and_as_a_budget_takes():
    """In tiny-hybrid each of two heads can retrieve, and one has to."""
    base = load(str(HYBRID))
    probe = {"name": "kv", "options": {"pairs": 12}, "examples": 2, "seed": 0}
    ranking = Ranking.model_construct(provenance=provenance("tiny-hybrid", base.fingerprint, 0, {}), probe=probe)

    def planned(window, **more):
        few = {"examples": 16, "windows": 4, "accuracy_bound": 0.1, "text_bound": 0.1}
        options = PlanOptions.model_validate({"kind": "window", "window": window, "auto": few, **more})
        return plan_windows(base, ranking, options, data=Data(skills=()), tuning=Tune(text_tokens=64))

    chosen = planned({"length": 16})
    assert chosen.windows.sites == (Site(2, (1,)),)
    assert [bool(candidate.beyond) for candidate in chosen.growth.candidates] == [False, True]
    whole, most = cache_after(base.model, 1000), cache_after(splice(base, chosen), 1000)
    within = planned({"length": 16}, cache_budget={"bytes": most, "tokens": 1000})
    assert within.windows == chosen.windows
    assert planned({"groups": 1, "length": 16}).windows == chosen.windows
    for window, bytes, why in (
        ({"length": 16}, most - 1, "windows for 2 of 2 groups, which cost more than the bounds"),
        ({"length": 16}, 99, "with windows for all heads of attention the cache takes"),
        ({"length": 16}, whole, "nothing has to be done"),
        ({"length": 16, "groups": 1}, most - 1, f"takes {most:,} bytes"),
        ({"length": 16, "groups": 3}, whole, "has 2 groups"),
        ({"length": 999}, most, "tokens at most, and a window of 999 reads all of them"),
    ):
        with pytest.raises(UserError, match=why):
            planned(window, cache_budget={"bytes": bytes, "tokens": 1000})
    for fields, why in (
        ({"kind": "window", "heads": 2}, "heads: is for grafts"),
        ({"kind": "layer", "window": {}}, "window: is for"),
    ):
        with pytest.raises(ValueError, match=why):
            PlanOptions(**fields)


def test_what_cannot_have_a_window_is_named():
    base = base_of("bamba")
    for plan, why in (
        (plan_of("L1.H0"), "only heads of an attention"),
        (plan_of("L0.H1"), "every 2 heads of that layer share keys"),
        (plan_of("L0.H9"), "has no site"),
    ):
        with pytest.raises(UserError, match=why):
            splice(base, plan)
    with pytest.raises(UserError, match="already holds grafts"):
        splice(windowed(base), plan_of("L0.H2,3"))


@pytest.mark.slow  # a whole study
def test_the_study_compares_the_ranking_with_random_heads_at_the_same_bytes(surgery, tmp_path, painted):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    few = ["locate.examples=8", "bench.limit=16", "bench.windows=4", "study.healed=[]", "study.draws=2", "study.tokens=1000"]
    status, _, error = surgery("run", ROOT / "recipes" / "windows.yaml", *(f"--set={each}" for each in few), "--out", "out")
    assert status == 0, error
    about = Findings.read(tmp_path / "out" / "findings.json").about
    plans, whole = about["plans"], 2 * 128 * 4 * 1000
    assert plans["base"]["attention"] == whole
    random = plans["windows at random, 1 of 2 groups, draw 1"]  # of two heads, there is one other choice
    assert "windows at random, 1 of 2 groups, draw 2" not in plans
    assert random["attention"] == plans["windows, 1 of 2 groups"]["attention"] == whole // 2 + 2 * 64 * 4 * (4 + 16 - 1)
    assert sorted(random["windows"] + plans["windows, 1 of 2 groups"]["windows"]) == ["L2.H0", "L2.H1"]
    assert plans["windows, 2 of 2 groups"]["windows"] == ["L2.H0,1"]
    status, _, error = surgery("run", ROOT / "recipes" / "windows.yaml", "--set=tune.lora=null", "--out", "other")
    assert (status, "study.healed: adapters are tuned: set tune.lora" in error) == (2, True)


def test_grafts_go_beside_attention_layers_that_the_base_brought(tmp_path):
    """Behind a closed gate they add nothing, and taken out they leave the base bit for bit. Attention itself takes none."""
    opened = load(str(HYBRID))
    model, ids = opened.model, torch.arange(50)[None] * 7 % 1600
    logits = model(ids).logits
    assert torch.equal(splice(opened, Plan(sites=("L1.H3",), blend=0.0))(ids).logits, logits)
    windows = PlanWindows(sites=("L2.H1",), first=FIRST, length=LENGTH)
    hybrid = splice(opened, Plan(sites=("L1.H3",), windows=windows))
    assert {name.partition(".graft.")[0] for name in graft_parameters(hybrid)} == {"backbone.layers.1.mixer"}
    assert (hybrid(ids).logits - logits).abs().max() > 1e-3
    assert torch.equal(unsplice(hybrid)(ids).logits, logits)
    for format in ("hf", "patch"):
        surgery.export(hybrid, tmp_path / format, format=format)
        assert torch.allclose(load(str(tmp_path / format)).model(ids).logits, hybrid(ids).logits, **NEAR)
    with pytest.raises(UserError, match=r"L2\.H0 cannot be grafted: layer 2 holds no SSM"):
        splice(opened, Plan(sites=("L2.H0",)))
    with pytest.raises(UserError, match="already holds grafts"):
        splice(opened, Plan(kind="layer", sites=("L1",)))


def test_random_windows_are_another_choice_of_as_many_groups():
    base = attentive("falcon_h1")
    groups = attention_groups(base)
    chosen = plan_of(*groups[:1])
    drawn = [random_windows(base, chosen, seed).windows.sites for seed in range(20)]
    assert chosen.windows.sites not in drawn
    assert {site for (site,) in drawn} == {*groups[1:]}
    assert random_windows(base, plan_of(*groups), 0) is None
    assert random_windows(base, Plan(sites=("L0.H1",)), 0) is None


RUN = """
model: checkpoints/tiny-hybrid
seed: 5
data: {skills: []}
locate: {options: {pairs: 8}, examples: 8, exact: false, layers: false}
plan: {kind: window, window: {groups: 1, length: 16}}
tune:
  {steps: 2, batch_size: 2, text_batch_size: 1, lora: {target_modules: [q_proj, v_proj]}, lessons: [{options: {pairs: 8}}]}
bench: {pairs: [8], unseen_pairs: [], limit: 6, windows: 2, window: 32, contexts: [64]}
"""


@pytest.mark.slow  # a whole run
def test_a_run_with_windows_asks_what_is_kept(surgery, tmp_path):
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "recipe.yaml").write_text(RUN)
    status, _, error = surgery("run", "recipe.yaml", "--set", "tune.lora=null", "--out", "out")
    assert (status, "windows have no weights; adapters are tuned beside them: set tune.lora" in error) == (2, True)
    for setting, why in (("groups=3", "the model has 2 groups"), ("length=999", "a window of 999 reads all of them")):
        status, _, error = surgery("run", "recipe.yaml", "--set", f"plan.window.{setting}", "--out", "out")
        assert (status, why in error, (tmp_path / "out").exists()) == (2, True, False)
    status, _, error = surgery("run", "recipe.yaml", "--out", "out", "--verify", "tensors")
    assert status == 0, error
    report = Report.read(tmp_path / "out" / "report.json")
    assert [*report.models] == [
        "base", "spliced", "tuned", "control_lora_tuned", "control_random_windows", "control_random_windows_tuned",
    ]  # fmt: skip
    windows = [report.models[name].plan.windows.sites for name in ("tuned", "control_random_windows_tuned")]
    assert sorted(windows) == [(Site(2, (0,)),), (Site(2, (1,)),)]
    (judgement,) = judge(report)
    assert any("Windows at random heads (control_random_windows_tuned) answer" in detail for detail in judgement.details)
    assert any("After 64 tokens its cache takes" in detail for detail in judgement.details)


def test_a_second_copy_of_the_code_takes_nothing_from_the_first():
    """An export loaded with trust_remote_code brings one into the process."""
    spec = importlib.util.spec_from_file_location("elsewhere_windows", windows.__file__)
    other = importlib.util.module_from_spec(spec)
    sys.modules["elsewhere_windows"] = other  # dataclasses look there
    spec.loader.exec_module(other)
    del sys.modules["elsewhere_windows"]
    assert ALL_ATTENTION_FUNCTIONS[windows.NAME] is windows.attend
    assert ALL_ATTENTION_FUNCTIONS[other.NAME] is other.attend
