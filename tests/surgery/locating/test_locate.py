"""locate and the ranking that it returns."""

import pytest
import torch

from surgery.errors import UserError
from surgery.locating.attribution import graft_mixers
from surgery.locating.locate import locate
from surgery.locating.nulls import null_logits
from surgery.models.load import load
from surgery.probes import make_probe
from surgery.probes.scoring import answer
from surgery.probes.toy_tokenizer import build_tokenizer
from surgery.records.plan import Plan
from surgery.records.ranking import Ranking
from surgery.records.recipe import Locate
from surgery.splicing.splice import adopt, splice
from tests.surgery.modeling import bases, stock_bases

TOKENIZER = build_tokenizer()
WORDS = -(-len(TOKENIZER) // 16) * 16
QUESTIONS = make_probe("kv", pairs=4, keys="seen").questions(8, 1)


@pytest.mark.parametrize("family", bases.STOCK)
def test_a_ranking_holds_every_head_once(family):
    base = bases.make_base(family, vocab_size=WORDS, dtype=torch.float32)
    ranking = locate(base, TOKENIZER, QUESTIONS, Locate(roles=2, options={"pairs": 4}))
    heads = [(each.site.layer, head) for each in ranking.heads for head in each.site.heads]
    mixers = [adopt(base).mixer_at(layer) for layer in range(2)]
    assert sorted(heads) == [(layer, head) for layer, mixer in enumerate(mixers) for head in range(mixer.num_heads)]
    slopes = [each.slope for each in ranking.heads]
    assert slopes == sorted(slopes, reverse=True)
    assert ranking == Ranking.model_validate_json(ranking.text())
    asked = answer(base, TOKENIZER, QUESTIONS)
    assert ranking.accuracy.mean == asked.correct.mean()
    assert ranking.loss == pytest.approx(float(asked.loss.mean()), rel=1e-4)
    assert ranking.questions == len(QUESTIONS)
    assert ranking.chance == 1 / 4


def test_channels_come_in_blocks():
    base = bases.make_base("mamba", vocab_size=WORDS, dtype=torch.float32)
    ranking = locate(base, TOKENIZER, QUESTIONS, Locate(roles=0))
    assert {len(each.site.heads) for each in ranking.heads} == {16}
    assert len({each.start for each in ranking.heads if each.site.layer == 0}) == 1


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_the_heads_is_measured(share):
    base = bases.make_base("mamba2", vocab_size=WORDS, dtype=torch.float32)
    ranking = locate(base, TOKENIZER, QUESTIONS, Locate(roles=0, exact=share))
    assert [each.gain is not None for each in ranking.heads] == [place < share * 12 for place in range(12)]
    if share:
        first = ranking.heads[0]
        plan = Plan(sites=(first.site,), starts={str(first.site): first.start})
        saved = answer(base, TOKENIZER, QUESTIONS).loss - answer(splice(base, plan).eval(), TOKENIZER, QUESTIONS).loss
        assert first.gain.mean == pytest.approx(float(saved.mean()), abs=1e-4)


def test_heads_of_attention_have_roles_and_no_slope():
    base, tokenizer = load("checkpoints/tiny-llama")
    ranking = locate(base, tokenizer, make_probe("kv", tokenizer, pairs=4).questions(12, 1), Locate(roles=3))
    assert {each.kind for each in ranking.heads} == {"attention"}
    assert {each.slope for each in ranking.heads} == {0.0}
    assert sum(each.roles is not None for each in ranking.heads) >= 3


def test_a_hybrid_has_heads_of_both_kinds():
    base = stock_bases.make_base("bamba", torch.float32)
    base.resize_token_embeddings(WORDS)
    ranking = locate(base, TOKENIZER, QUESTIONS, Locate(roles=0))
    assert {each.kind for each in ranking.heads} == {"ssm", "attention"}
    hybrid = splice(base, Plan(sites=(ranking.heads[0].site,)))
    ranking = locate(hybrid, TOKENIZER, QUESTIONS, Locate(roles=0, exact=1))
    assert {each.site.layer for each in ranking.heads if each.gain} == set(graft_mixers(hybrid))


def test_questions_without_spans_are_ranked_without_roles():
    base = bases.make_base("mamba2", vocab_size=WORDS, dtype=torch.float32)
    assert locate(base, TOKENIZER, make_probe("knowledge").questions(4, 1)).circuit is None


def test_training_mode_comes_back():
    base = bases.make_base("mamba2", vocab_size=WORDS, dtype=torch.float32).train()
    locate(base, TOKENIZER, QUESTIONS, Locate(roles=0))
    assert base.training


@pytest.mark.parametrize("family", [*bases.BASES, "bamba", "kimi_linear"])
def test_null_keys_open_on_their_share(family):
    """Of a head's real graft, with the null key that was solved for it. Those of channels are solved for the mean channel."""
    module = bases if family in bases.BASES else stock_bases
    base, rows = module.make_base(family), module.make_rows(4, 40)
    nulls, seen = null_logits(adopt(base), rows, 0.05, batch_size=3), []
    layer = min(nulls)
    start = {"sign": -1, "tau": 1.0, "null": float(nulls[layer][6, 1])}
    hybrid = splice(base, Plan(sites=(f"L{layer}.H1",), starts={f"L{layer}.H1": start}, gate=0.0)).eval()
    hybrid.mixer_at(layer).graft.watch = lambda _, m: seen.append(m[:, 8:])
    with torch.no_grad():
        hybrid(input_ids=rows)
    assert float(seen[0].mean()) == pytest.approx(0.05, rel=0.01 if family not in ("mamba", "falcon_mamba") else 0.9)


def test_a_single_question_is_refused():
    with pytest.raises(UserError):
        locate(bases.make_base("mamba2", vocab_size=WORDS), TOKENIZER, QUESTIONS[:1])
