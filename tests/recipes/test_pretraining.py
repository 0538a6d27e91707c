"""The script that makes built-in bases: recipes fit, a training goes on where it stopped, what is written was measured."""

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from surgery.errors import UserError
from surgery.runtime.yaml import parse_yaml

FOLDER = Path(__file__).parents[2] / "recipes" / "pretraining"
SPEC = importlib.util.spec_from_file_location("train", FOLDER / "train.py")
assert SPEC is not None
assert SPEC.loader is not None
train: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(train)

SMALL = {
    "architecture": {"model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16}
    | {"state_size": 8, "n_groups": 1, "chunk_size": 16, "tie_word_embeddings": True},
    **{"steps": 60, "alone_steps": 60, "targets": 8, "documents": 1, "sentences": 2, "choice": 1, "examples": 8},
}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_recipe_makes_a_model(path: Path) -> None:
    recipe = train.BaseRecipe.model_validate(parse_yaml(path.read_text(), str(path)))
    tokenizer = train.build_tokenizer()
    model = train.fresh_model(recipe, tokenizer)
    part = train.encode_examples(tokenizer, train.retrieval(recipe, random.Random(0), recipe.curriculum.first + 1)[:2])
    assert train.loss_of(model, part).isfinite()
    assert all(p.requires_grad for p in model.parameters())


def test_an_interrupted_training_goes_on_alike(tmp_path: Path) -> None:
    recipe = train.BaseRecipe.model_validate(SMALL | {"steps": 60})
    tokenizer = train.build_tokenizer()
    whole = train.Training(recipe, tokenizer, tmp_path / "whole")
    whole.run()
    part = train.Training(recipe, tokenizer, tmp_path / "part")
    take_step, left = part.step, [100]

    def stop(*given: Any) -> bool:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return take_step(*given)

    part.step = stop
    with pytest.raises(KeyboardInterrupt):
        part.run()
    state = torch.load(tmp_path / "part" / "state.pt", weights_only=True)
    fields = json.loads(state["recipe"])
    del fields["embedding_std"]  # as if it had been written before there was this field, which is at its default
    torch.save(state | {"recipe": json.dumps(fields)}, tmp_path / "part" / "state.pt")
    again = train.Training(recipe, tokenizer, tmp_path / "part")
    again.restore()
    assert again.at["alone"] + again.at["all"] == 50
    again.run()
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), again.model.parameters(), strict=True))
    assert again.log == whole.log
    other = train.Training(recipe.model_copy(update={"seed": 1}), tokenizer, tmp_path / "part")
    with pytest.raises(UserError):
        other.restore()


def test_a_checkpoint_is_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(train.yaml.safe_dump(SMALL | {"steps": 2, "alone_steps": 0}))
    train.main([str(tmp_path / "small.yaml"), "--out", str(tmp_path / "small")])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert type(model).__name__ == "Mamba2ForCausalLM"
    names = {path.name for path in (tmp_path / "small").iterdir()}
    assert {"README.md", "recipe.yaml", "log.jsonl", "measured.json", "tokenizer.json"} <= names
    written = train.BaseRecipe.model_validate(parse_yaml((tmp_path / "small" / "recipe.yaml").read_text(), ""))
    assert written.steps == 2
    tokenizer = train.build_tokenizer()
    measured = parse_yaml((tmp_path / "small" / "measured.json").read_text(), "")
    with pytest.raises(UserError, match="holds files"):
        train.main([str(tmp_path / "small.yaml"), "--out", str(tmp_path / "small")])
    again = train.measure(train.adopt(model).eval(), tokenizer, written)
    assert again.pop("perplexity") == pytest.approx(measured.pop("perplexity"))
    assert again == measured


def test_a_base_and_its_twins_see_the_same_tokens(tmp_path: Path) -> None:
    """Where the curriculum goes by the step, whatever the models learn."""
    tokenizer = train.build_tokenizer()
    by_step = SMALL | {"steps": 10, "alone_steps": 5, "alone_layers": 0, "curriculum": {"first": 2, "last": 8, "over": 12}}
    seen, counts = set(), set()
    for attention in ([], ["L1.H0,2"], ["L1"]):
        recipe = train.BaseRecipe.model_validate(by_step | {"attention": attention})
        training = train.Training(recipe, tokenizer, tmp_path / str(attention))
        training.run()
        assert training.at["records"] == 8
        assert set(training.at["tokens"]) == {"kv", "text", "choice"}
        assert all(p.requires_grad for p in training.model.parameters())
        seen.add(training.at["digest"])
        counts.add(training.model.num_parameters())
    assert len(seen) == 1
    assert len(counts) == 3
    other = train.Training(train.BaseRecipe.model_validate(by_step | {"seed": 1}), tokenizer, tmp_path / "other")
    other.run()
    assert other.at["digest"] not in seen


def test_options_grow_while_they_are_learnt(tmp_path: Path) -> None:
    grows = {"choice_length": "growing", "curriculum": {"threshold": 1e9}, "alone_steps": 0, "steps": 30}
    training = train.Training(train.BaseRecipe.model_validate(SMALL | grows), train.build_tokenizer(), tmp_path)
    training.run()
    assert training.at["words"] == 2  # the second after 23 steps, in which the running loss falls to a third
    rng = random.Random(0)
    prompts = [train.lettered(rng, "?", "a", tuple("abcdef"), length=words).prompt for words in range(train.LONG + 1)]
    lengths = [[len(line.split()) - 1 for line in prompt.splitlines()[1:5]] for prompt in prompts]
    assert all(set(found) <= {words, words + 1} for words, found in enumerate(lengths))  # "at noon" is a word less than others
    assert [max(found) for found in lengths] == list(range(1, train.LONG + 2))
