"""Laws: each finds a fault that was planted for it, and none is found in a model that is right."""

import random

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, StaticCache
from transformers.cache_utils import Cache, LinearAttentionLayer

from surgery.checking import shrink as shrink_module
from surgery.checking.check import all_laws, check, check_laws
from surgery.checking.law import subject_of
from surgery.checking.shrink import first_of_each_kind, random_model, read_config, shrink
from surgery.exporting.proof import QUICK
from surgery.modeling.bamba import BambaHybridForCausalLM
from surgery.modeling.mamba2 import Mamba2HybridForCausalLM
from surgery.models.anatomy import anatomy
from surgery.records.plan import Plan, Start
from surgery.splicing.splice import adopt, splice
from tests.surgery.modeling.bases import BASES, make_hybrid
from tests.surgery.modeling.stock_bases import make_hybrid as make_stock_hybrid


class Faulty:
    """A mixin before a hybrid's class. plant(forward, ids, named) computes in place of forward(input_ids=ids, **named)."""

    plant = None

    def forward(self, input_ids=None, **named):
        if type(self).plant is None:
            return super().forward(input_ids=input_ids, **named)
        return type(self).plant(self, super().forward, input_ids, named)


class FaultyMamba2(Faulty, Mamba2HybridForCausalLM):
    pass


class FaultyBamba(Faulty, BambaHybridForCausalLM):
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **named):
        told = {"attention_mask": attention_mask, "position_ids": position_ids, "past_key_values": past_key_values}
        return super().forward(input_ids, **named | {name: value for name, value in told.items() if value is not None})


def make(kind, seed=0):
    """A small hybrid that is right in all laws: all its mixers are ours."""
    base = random_model(shrink(read_config({FaultyMamba2: "mamba2", FaultyBamba: "bamba"}[kind])), seed=seed)
    adopted = adopt(base)
    model = kind(adopted.config).eval()
    model.load_state_dict(adopted.state_dict())
    return model


@pytest.fixture
def plant(monkeypatch):
    def planted(kind, fault):
        monkeypatch.setattr(kind, "plant", fault)
        return make(kind)

    return planted


def changed(output, logits):
    output.logits = logits
    return output


def cached(named):
    return next((named[name] for name in ("cache_params", "past_key_values") if named.get(name) is not None), None)


def without_cache(named):
    return {name: value for name, value in named.items() if name not in ("cache_params", "past_key_values")}


def sees_other_rows(self, forward, ids, named):
    output = forward(input_ids=ids, **named)
    return changed(output, output.logits + 0.1 * output.logits.mean(0, keepdim=True) * (len(output.logits) > 1))


def drops_the_mask(self, forward, ids, named):
    named.pop("attention_mask", None)
    return forward(input_ids=ids, **named)


def forgets_the_last_token(self, forward, ids, named):
    """A mixer that leaves the last token of several out of its state."""
    if named.get("use_cache") and ids.shape[1] > 1:
        output = forward(input_ids=ids[:, :-1], **short(named))
        return changed(output, forward(input_ids=ids, **without_cache(named) | {"use_cache": False}).logits)
    return forward(input_ids=ids, **named)


def forgets_a_long_prompt(self, forward, ids, named):
    """A scan whose last state is that of its last chunk, of prompts of several."""
    if not named.get("use_cache") or ids.shape[1] < 140:
        return forward(input_ids=ids, **named)
    output = forward(input_ids=ids[:, -64:], **{name: value for name, value in named.items() if name == "use_cache"})
    return changed(output, forward(input_ids=ids, use_cache=False).logits)


def takes_the_first_rows_documents(self, forward, ids, named):
    told = {name: named[name][:1].expand_as(named[name]) for name in ("seq_idx", "position_ids") if name in named}
    return forward(input_ids=ids, **named | told)


def short(named):
    return {name: value[:, :-1] if name in ("attention_mask", "position_ids") else value for name, value in named.items()}


def begins_anew_with_several_tokens(self, forward, ids, named):
    if cached(named) is not None and ids.shape[1] > 1:
        named = without_cache(named) | {"attention_mask": torch.ones_like(ids)}
        named.pop("position_ids", None)
    return forward(input_ids=ids, **named)


def restarts_positions(self, forward, ids, named):
    return forward(input_ids=ids, **named | {"position_ids": torch.arange(ids.shape[1]).expand_as(ids)})


def answers_otherwise_from_a_static_cache(self, forward, ids, named):
    output = forward(input_ids=ids, **named)
    return changed(output, output.logits * 1.1) if isinstance(cached(named), StaticCache) else output


def answers_otherwise_from_a_cache(self, forward, ids, named):
    output = forward(input_ids=ids, **named)
    return changed(output, output.logits.flip(-1)) if cached(named) is not None else output


def ignores_documents(self, forward, ids, named):
    told = ("seq_idx", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    return forward(input_ids=ids, **{name: value for name, value in named.items() if name not in told})


def scales_embeddings(self, forward, ids, named):
    if (embedded := named.get("inputs_embeds")) is not None:
        named["inputs_embeds"] = embedded * 1.01
    return forward(input_ids=ids, **named)


def is_noisy_in_training(self, forward, ids, named):
    output = forward(input_ids=ids, **named)
    return changed(output, output.logits * 1.01) if self.training else output


def loses_a_gradient(self, forward, ids, named):
    if not any(getattr(module, "gradient_checkpointing", False) for module in self.modules()):
        return forward(input_ids=ids, **named)
    embedded = self.get_input_embeddings()(ids).detach()
    return forward(inputs_embeds=embedded, **named)


def overflows_in_float16(self, forward, ids, named):
    output = forward(input_ids=ids, **named)
    return changed(output, output.logits.to(self.dtype) * 1e6 / 1e6)


def asks_for_a_number(self, forward, ids, named):
    output = forward(input_ids=ids, **named)
    return output if output.logits.sum().item() else None


def ends_with_its_training_length(self, forward, ids, named):
    output = forward(input_ids=ids, **named)
    return changed(output, output.logits / (torch.arange(ids.shape[1]) < self.config.max_position_embeddings)[:, None])


FORWARDS = {
    "batch": (FaultyMamba2, sees_other_rows),
    "left_padding": (FaultyMamba2, drops_the_mask),
    "right_padding": (FaultyMamba2, drops_the_mask),
    "cache_tokens": (FaultyMamba2, forgets_the_last_token),
    "cache_chunks": (FaultyMamba2, begins_anew_with_several_tokens),
    "generate": (FaultyBamba, restarts_positions),
    "second_turn": (FaultyBamba, begins_anew_with_several_tokens),
    "prefill_chunks": (FaultyBamba, begins_anew_with_several_tokens),
    "beams": (FaultyMamba2, answers_otherwise_from_a_cache),
    "static_cache": (FaultyMamba2, answers_otherwise_from_a_static_cache),
    "packed": (FaultyMamba2, ignores_documents),
    "inputs_embeds": (FaultyMamba2, scales_embeddings),
    "train_mode": (FaultyMamba2, is_noisy_in_training),
    "checkpointing": (FaultyMamba2, loses_a_gradient),
    "precision": (FaultyMamba2, overflows_in_float16),
    "compiled": (FaultyMamba2, asks_for_a_number),
    "longer": (FaultyBamba, ends_with_its_training_length),
}
MORE = [("cache_tokens", FaultyMamba2, forgets_a_long_prompt), ("packed", FaultyMamba2, takes_the_first_rows_documents)]
SLOW = {"compiled"}
MARKED = [pytest.param(name, *how, marks=pytest.mark.slow if name in SLOW else ()) for name, how in FORWARDS.items()]


@pytest.mark.parametrize(("name", "kind", "fault"), [*MARKED, *MORE])
def test_a_fault_of_the_forward_is_found(plant, name, kind, fault):
    law = all_laws()[name]
    assert law.run(subject_of(make(kind))).verdict == "right"
    found = law.run(subject_of(plant(kind, fault)))
    assert found.verdict == "wrong"
    assert not found.difference <= found.bound


def test_rounding_that_a_model_amplifies_is_no_fault():
    config = shrink(read_config("mamba2"))
    config.num_hidden_layers = 12
    model = random_model(config)
    for tensor in (each for each in model.parameters() if each.dim() == 2):
        nn.init.normal_(tensor, std=2)
    found = all_laws()["cache_tokens"].run(subject_of(model, wide=False))
    assert found.verdict == "right"
    assert found.difference > 1e-3  # 1e-13 in float64


def keeps_its_rows(self, *_):
    pass


def is_the_same(self, memo):
    return self


@pytest.mark.parametrize(
    ("name", "owner", "method", "fault"),
    [
        ("cache_reordered", LinearAttentionLayer, "reorder_cache", keeps_its_rows),
        ("beams", LinearAttentionLayer, "reorder_cache", keeps_its_rows),
        ("cache_copied", LinearAttentionLayer, "__deepcopy__", is_the_same),
        ("cache_cropped", Cache, "crop", keeps_its_rows),
    ],
)
def test_a_fault_of_the_cache_is_found(monkeypatch, name, owner, method, fault):
    subject = subject_of(make(FaultyMamba2))
    assert all_laws()[name].run(subject).verdict in ("right", "refused")
    monkeypatch.setattr(owner, method, fault, raising=False)
    assert all_laws()[name].run(subject).verdict == "wrong"


def test_a_weight_that_is_lost_in_saving_is_found():
    model = adopt(random_model(shrink(read_config("mamba2"))))
    assert all_laws()["save_load"].run(subject_of(model)).verdict == "right"
    model._keys_to_ignore_on_save = ["lm_head.weight"]
    assert all_laws()["save_load"].run(subject_of(model)).verdict == "wrong"


def test_every_law_has_a_planted_fault():
    others = {"cache_reordered", "cache_copied", "cache_cropped", "save_load"}
    assert set(all_laws()) == set(FORWARDS) | others


def test_a_refusal_is_no_fault_and_a_crash_is_one(plant):
    def refuses(self, forward, ids, named):
        if "seq_idx" in named or "cu_seq_lens_q" in named or "position_ids" in named:
            raise ValueError("packed documents are not supported")
        return forward(input_ids=ids, **named)

    def crashes(self, forward, ids, named):
        return forward(input_ids=ids, **named) if "seq_idx" not in named else ids @ ids  # "mat1 and mat2 cannot be ..."

    law = all_laws()["packed"]
    assert law.run(subject_of(plant(FaultyMamba2, refuses))).verdict == "refused"
    assert law.run(subject_of(plant(FaultyMamba2, crashes))).verdict == "wrong"


def test_what_a_folder_asks_of_generate_is_no_fault():
    model = make(FaultyMamba2)
    model.generation_config.num_beams = 4
    assert all_laws()["generate"].run(subject_of(model)).verdict == "right"


@pytest.mark.parametrize("name", ["zaya", "xlstm", "qwen3_next"])
def test_no_weight_of_a_random_model_is_zero(name):
    assert all(p.any() for p in random_model(shrink(read_config(name))).parameters())


# Faults of transformers 5.23, each at its place.
UPSTREAM = [
    ("mamba", "cache_chunks", "after 20 tokens, plain"),
    ("falcon_mamba", "cache_chunks", "after 20 tokens, plain"),
    ("jamba", "cache_chunks", "after 20 tokens, with both"),
    ("minimax", "cache_chunks", "after 20 tokens, with both"),
    ("bamba", "cache_tokens", "plain"),
    ("minimax", "cache_tokens", "with a mask"),
    ("minimax", "second_turn", "the conversation and the cache"),
    ("recurrent_gemma", "beams", "4 beams"),
    *((name, "packed", "all three") for name in ("mamba", "mamba2", "falcon_mamba", "jamba", "minimax", "recurrent_gemma")),
    ("xlstm", "packed", "all three"),
    ("rwkv", "packed", "all three"),
    ("xlstm", "left_padding", "in generate"),
    ("rwkv", "left_padding", "in generate"),
    ("nemotron_h", "cache_tokens", "with both"),
    ("zamba2", "cache_tokens", "with both"),
    ("rwkv", "cache_tokens", "2 rows"),
]


@pytest.mark.parametrize(("architecture", "law", "case"), UPSTREAM)
def test_faults_of_transformers_are_found(architecture, law, case):
    (found,) = check(architecture=architecture, only=(law,)).findings
    assert found.verdict == "wrong"
    assert case in [each.name for each in found.cases if each.verdict == "wrong"]


@pytest.mark.parametrize(
    ("architecture", "law"),
    [(name, law) for name in ("mamba2", "falcon_h1", "qwen3_next") for law in ("cache_chunks", "cache_tokens", "left_padding")],
)
def test_what_is_right_in_transformers_is_right(architecture, law):
    (found,) = check(architecture=architecture, only=(law,)).findings
    assert found.verdict == "right"


KINDS = (
    "mamba mamba2 falcon_mamba bamba falcon_h1 zamba2 nemotron_h granitemoehybrid jamba qwen3_next qwen3_5_text olmo_hybrid "
    "kimi_linear"
).split()


def random_hybrid(seed):
    """A hybrid of random shape: without grafts, with a layer of attention, or with grafts at two heads."""
    draw = random.Random(seed)
    kind = draw.choice(KINDS)
    config = shrink(read_config(kind))
    changes = {**dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), (4, 8, 16)), "vocab_size": (40, 97)}
    changes |= {
        **dict.fromkeys(("conv_kernel", "mamba_d_conv", "linear_conv_kernel_dim"), (2, 3, 4)),
        "chunk_size": (8, 16, 32),
    }
    changes |= {
        "mamba_chunk_size": (8, 16),
        **dict.fromkeys(("use_conv_bias", "use_bias", "tie_word_embeddings"), (True, False)),
    }
    for name, values in changes.items():
        if hasattr(config, name):
            setattr(config, name, draw.choice(values))
    base = random_model(config, seed=seed)
    if seed % 3 == 0:
        return adopt(base)
    place = draw.choice(anatomy(base).ssms)
    if seed % 3 == 1:
        return splice(base, Plan(kind="layer", sites=(f"L{place.layer}",), width=16)).eval()
    heads = [f"L{place.layer}.H{place.first + head}" for head in draw.sample(range(place.heads), 2)]
    starts = {head: Start(sign=draw.choice((1, -1)), tau=0.8, null=draw.choice((None, 0.5))) for head in heads}
    return splice(base, Plan(sites=tuple(heads), starts=starts, gate=0.7)).eval()


def assert_no_false_alarm(seed, **options):
    findings, dtype = check_laws(random_hybrid(seed), **options)
    assert dtype == "float64"
    assert [f for f in findings if f.verdict == "wrong"] == []


@pytest.mark.parametrize("seed", range(3))
def test_no_false_alarm(seed):
    assert_no_false_alarm(seed, only=(*QUICK, "save_load"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(50))
def test_no_false_alarm_on_fifty_configurations(seed):
    assert_no_false_alarm(seed)


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba"])
def test_a_second_turn_is_right_without_grafts(name):
    """Their caches hold states alone, which count no tokens."""
    hybrid = adopt(random_model(shrink(read_config(name))))
    found = all_laws()["second_turn"].run(subject_of(hybrid))
    assert {case.verdict for case in found.cases} == {"right"}


@pytest.mark.parametrize("name", BASES)
def test_hybrids_keep_every_law_or_refuse_it(name):
    """Also where the stock base is wrong: Mamba-1 and Falcon-Mamba do not continue a cache by chunks."""
    findings, dtype = check_laws(make_hybrid(name))
    assert dtype == "float64"
    assert [f for f in findings if f.verdict == "wrong"] == []
    refused = {"cache cropped", "prefill by chunks", "longer than the training length"}
    assert {f.law for f in findings if f.verdict != "right"} <= refused


@pytest.mark.parametrize("name", [*BASES, "granitemoehybrid", "zamba2", "qwen3_next"])
def test_a_hybrid_of_a_few_of_its_layers_keeps_them(monkeypatch, name):
    monkeypatch.setattr(shrink_module, "SMALL", 0)
    hybrid = make_hybrid(name) if name in BASES else make_stock_hybrid(name)
    few = first_of_each_kind(hybrid)
    assert few.config.num_hidden_layers < max(3, hybrid.config.num_hidden_layers)
    assert few.config.grafts
    assert {p.dtype for p in few.parameters()} == {p.dtype for p in hybrid.parameters()}
    findings, _ = check_laws(few, only=(*QUICK, "save_load"))
    assert [f for f in findings if f.verdict == "wrong"] == []


def test_dropout_and_few_positions_are_no_faults():
    config = GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=2, vocab_size=3, bos_token_id=0, eos_token_id=0)
    findings, _ = check_laws(GPT2LMHeadModel(config).eval(), only=("batch", "left_padding", "checkpointing", "train_mode"))
    verdicts = {finding.law: finding.verdict for finding in findings}
    assert verdicts.pop("train mode") == "not applicable"
    assert set(verdicts.values()) == {"right"}


def test_the_model_that_is_checked_stays_as_it_was():
    model = random_model(shrink(read_config("mamba2"))).train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    report = check(model, only=("batch", "train_mode", "save_load"))
    assert not report.wrong
    assert model.training
    assert all(p.dtype == torch.float32 and p.equal(before[name]) for name, p in model.named_parameters())
    assert not any(isinstance(module, nn.Module) and module.__dict__.get("forward") for module in model.modules())
