"""Keys of dictionaries: some may stand in lessons, the others are for bench alone."""

import pytest

from surgery.errors import UserError
from surgery.evaluation import suites
from surgery.jobs.preparing import check
from surgery.locating.questions import choice_probe
from surgery.probes import make, without_unseen
from surgery.probes.kv import KVRetrieval
from surgery.records.recipe import Bench, Data, Lesson, Recipe, Tune
from surgery.tuning import batches
from surgery.world.words import KEYS, key_words

LESSONS, UNSEEN = set(key_words("lessons", 64)), set(key_words("unseen", 64))


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return tiny.tokenizer


# Every probe that asks about words, at its largest size for lessons, with its other options.
PROBES = {
    "kv": {"pairs": 64}, "mqar": {"pairs": 32}, "copying": {"length": 64}, "selective_copying": {"count": 32, "length": 64},
}  # fmt: skip


def words_of(text: str) -> set[str]:
    """The keys that occur in a text as words of their own."""
    return set("".join(c if c.isalpha() else " " for c in text).split()) & set(KEYS)


def test_the_two_halves_share_no_word_and_are_all_words():
    assert not LESSONS & UNSEEN
    assert set(KEYS) == LESSONS | UNSEEN


@pytest.mark.parametrize("name", PROBES)
def test_lessons_hold_no_key_that_is_for_bench_alone(name, tokenizer):
    lesson = Lesson(probe=name, options=PROBES[name])
    lessons = batches.Lessons(tokenizer, Tune(steps=3, batch_size=4, lessons=(lesson,)), seed=0)
    held = set().union(*(words_of(text) for index in range(len(lessons)) for text, _ in lessons[index]))
    assert held
    # The fixed words of the prompts are no keys.
    assert held <= LESSONS


def test_the_needle_of_a_lesson_is_a_word_for_lessons(tokenizer):
    probe = make("needle", tokenizer=tokenizer, **without_unseen("needle", {"length": 200}))
    asked = {question.prompt.rsplit("of ", 1)[1].split()[0] for question in probe.questions(20, 0)}
    assert len(asked) > 5
    assert asked <= LESSONS


def test_locate_asks_for_keys_of_lessons_unless_told_otherwise(tokenizer):
    assert choice_probe(tokenizer, "kv", {"pairs": 8}) == KVRetrieval(8, keys="lessons")
    assert choice_probe(tokenizer, "kv", {"pairs": 8, "keys": "all"}) == KVRetrieval(8, keys="all")


def test_bench_asks_for_both(tokenizer):
    options = Bench(pairs=(4, 8), limit=20)
    todo = {task.name for task in suites.tasks(options, tokenizer, Data(), 0)}
    assert {"kv.4", "kv.8", "kv_unseen.8"} <= todo
    assert "kv_unseen.4" not in todo
    for name, keys in (("kv.8", LESSONS), ("kv_unseen.8", UNSEEN)):
        asking = suites.probes(options, Data())[name]
        for question in make(asking.probe, **asking.options).questions(20, 0):
            assert words_of(question.prompt) <= keys


def test_lessons_may_not_ask_for_what_is_for_bench_alone(tokenizer):
    for keys in ("all", "unseen"):
        lesson = Lesson(options={"pairs": 8, "keys": keys})
        with pytest.raises(UserError, match="for bench alone"):
            batches.check(tokenizer, Tune(lessons=(lesson,)), Data())


def test_more_pairs_than_there_are_keys_are_refused(tiny):
    with pytest.raises(UserError, match="65 different words are needed, and keys 'unseen' are 64"):
        KVRetrieval(65, keys="unseen")
    with pytest.raises(UserError, match=r"bench, kv\.100: 100 different words are needed"):  # before the work begins
        check(Recipe(model="tiny", bench=Bench(pairs=(100,))), tiny)


def test_the_published_protocol_draws_from_all_words():
    assert set().union(*(words_of(q.prompt) for q in KVRetrieval(100).questions(5, 0))) == set(KEYS)
