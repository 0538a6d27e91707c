"""Recall in running text: what a hit is, by the plain definition, in words and in tokens."""

import random
from itertools import pairwise

import pytest

from surgery.errors import UserError
from surgery.more.probes.recall import GAP
from surgery.probes import make


def prose(seed: int, count: int, vocabulary: int = 300) -> list[str]:
    """Words of which few are frequent, as in a language."""
    rng = random.Random(seed)
    words = [f"w{i}" for i in range(vocabulary)]
    return rng.choices(words, [1 / (i + 1) for i in range(vocabulary)], k=count)


def by_definition(words: list[str], window: int, rare: float) -> set[int]:
    """The places of the words that end a rare pair which stood before, one after the other."""
    pairs = [None, *pairwise(words)]
    hits = set()
    for place in range(window, len(words)):
        earlier = [i for i in range(place - window + 1, place) if pairs[i] == pairs[place]]
        total = sum(pair == pairs[place] for pair in pairs)
        if earlier and place - earlier[-1] >= GAP and total - len(earlier) - 1 <= rare * len(words) / 1e6:
            hits.add(place)
    return hits


@pytest.mark.parametrize(("window", "rare"), [(32, 3000.0), (64, 1500.0), (200, 0.0)])
def test_hits_are_those_of_the_definition(tmp_path, window, rare):
    words = prose(window, 1500)
    (tmp_path / "text.txt").write_text("\n".join(words))
    questions = make("recall", source=str(tmp_path / "text.txt"), words=window, rare=rare).questions(10**6, seed=1)
    hits = by_definition(words, window, rare)
    assert len(hits) > 5
    prompts = {" ".join(words[place - window : place]): place for place in hits}
    assert {prompts[question.prompt] for question in questions} == hits  # and no other prompt
    for question in questions:
        place = prompts[question.prompt]
        cue, answer = words[place - 1], question.choices[question.answer].removeprefix(" ")
        assert answer == words[place]
        assert len({*question.choices}) == 4
        spans = [question.prompt[a:b] for a, b in question.spans]
        assert spans[question.evidence] == f"{cue} {answer}"
        pairs = {*pairwise(question.prompt.split())}
        for choice, span in zip(question.choices, spans, strict=True):
            assert span.split()[1] == choice.removeprefix(" ")
            assert choice == question.choices[question.answer] or (cue, choice.removeprefix(" ")) not in pairs


def test_no_candidate_ends_the_prompt(tmp_path):
    """Roles are read from the token behind a candidate."""
    (tmp_path / "text.txt").write_text("\n".join(prose(3, 1500, vocabulary=60)))
    for seed in range(20):
        for question in make("recall", source=str(tmp_path / "text.txt"), words=16, rare=3000.0).questions(60, seed=seed):
            assert max(end for _, end in question.spans) < len(question.prompt)


def test_a_text_without_hits_is_refused(tmp_path):
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in range(500)))
    with pytest.raises(UserError, match="no rare pair of words comes again within 256 words"):
        make("recall", source=str(tmp_path / "text.txt")).questions(1, 0)
    (tmp_path / "empty.txt").write_text("one")
    with pytest.raises(UserError, match="has 1 words"):
        make("recall", source=str(tmp_path / "empty.txt")).questions(1, 0)
    with pytest.raises(UserError, match="at least 16 words"):
        make("recall", source="x", words=8)


def test_questions_follow_from_the_seed_and_the_text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(" ".join(prose(1, 2000)))
    probe = make("recall", source=str(file), words=64, rare=1000.0)
    assert probe.questions(20, 1) == probe.questions(20, 1) != probe.questions(20, 2)
    first = probe.questions(20, 1)
    file.write_text(" ".join(prose(2, 2100)))
    assert probe.questions(20, 1) != first  # a file that changed is read again
