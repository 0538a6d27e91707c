"""No verb removes what it has not written."""

import shutil

import pytest

import surgery
from surgery.commands.tune_hybrid import tune_hybrid
from surgery.errors import UserError
from surgery.figures.views.atlas import grid
from surgery.jobs.output_folder import check_folder
from surgery.locating.ranking import Ranking
from surgery.pretraining.pretrain import check_place, pretrain
from surgery.pretraining.recipe import read_pretrain_recipe
from surgery.records.plan import Plan
from surgery.records.recipe import Recipe
from surgery.runtime.ownership.files import check_free
from surgery.runtime.ownership.replacing import building


def an_export(folder):
    """A folder of ours."""
    with building(folder) as new:
        with new.filling() as place:
            for name in ("config.json", "model.safetensors", "README.md", "export.json"):
                (place / name).write_text("x")
            (place / "plan.json").write_text(Plan(sites=("L1.H3",)).text())
        new.replace()
    return folder


def test_an_export_replaces_nothing_but_an_export(tmp_path, monkeypatch):
    check_free(tmp_path / "free")
    check_free(an_export(tmp_path / "hybrid"))
    with pytest.raises(UserError, match="hybrid holds an earlier export: --overwrite replaces it"):
        check_free(tmp_path / "hybrid", overwrite=False)  # as `surgery splice` and `surgery export` ask
    (tmp_path / "hybrid" / "README.md").unlink()
    check_free(tmp_path / "hybrid")
    (tmp_path / "hybrid" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"hybrid holds 'notes.txt', which this toolkit did not write"):
        check_free(tmp_path / "hybrid")

    # `surgery plan` writes its plan beside the ranking, and the hybrids lie below it.
    (tmp_path / "mine" / "spliced").mkdir(parents=True)
    for name in ("plan.json", "ranking.json"):
        (tmp_path / "mine" / name).write_text("{}")
    with pytest.raises(UserError, match="mine exists and is not an earlier export"):
        check_free(tmp_path / "mine")

    monkeypatch.chdir(an_export(tmp_path / "here"))
    with pytest.raises(UserError, match="is the current folder, or holds it"):
        check_free(tmp_path / "here")


def test_a_tuning_finds_out_before_it_begins(tmp_path):
    """And not when there is a hybrid to be written, hours later."""
    an_export(tmp_path / "hybrid")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    for out in (tmp_path / "thesis", tmp_path.parent / tmp_path.name / ".", tmp_path.parent):
        with pytest.raises(UserError, match=r"is not an earlier export"):
            tune_hybrid(Recipe(model=str(tmp_path / "hybrid")), out, overwrite=True)


def test_what_has_no_record_is_no_run(tmp_path):
    """A user may have written a recipe or a ranking; so may another version, or another program."""
    for name in ("recipe.yaml", "ranking.json", "run.json"):
        (tmp_path / name).write_text("{}")
        for how in ({"overwrite": True}, {"resume": True}):
            with pytest.raises(UserError, match="no earlier run"):
                check_folder(tmp_path, "run", **how)


def test_pretraining_with_another_recipe_is_not_replaced(tmp_path, monkeypatch):
    """A trial in the place of a long training would end it. What training does not depend on may be another."""
    monkeypatch.setattr("surgery.pretraining.pretrain.check_architecture", lambda _: 1 / 0)  # as far as it gets
    world, books = (copied(f"checkpoints/{name}", tmp_path / name) for name in ("tiny-mamba2", "tiny-books"))
    of_world, of_books = (read_pretrain_recipe(folder / "recipe.yaml") for folder in (world, books))

    def with_corpus(**changes):
        return of_books.model_copy(update={"corpus": of_books.corpus.model_copy(update=changes)})

    for folder, recipe in (
        (world, of_world.model_copy(update={"examples": 11})),
        (books, of_books.model_copy(update={"steps": 7})),
        (books, with_corpus(dtype="float32", eval_windows=3)),
    ):
        with pytest.raises(ZeroDivisionError):
            pretrain(recipe, folder)
    for folder, recipe, what in (
        (world, of_world.model_copy(update={"steps": 7, "seed": 3}), "seed and another steps"),
        (books, of_books.model_copy(update={"learning_rate": 1.0}), "learning_rate"),
        (books, with_corpus(train=("elsewhere",)), "corpus.train"),
        (books, with_corpus(vocabulary=300), "corpus.vocabulary"),
        (world, of_books.model_copy(update={"architecture": of_world.architecture}), ".*corpus.train"),
    ):
        with pytest.raises(UserError, match=f"holds a pretraining with another {what}.*; choose another --out, or remove that"):
            pretrain(recipe, folder)
        with pytest.raises(ZeroDivisionError):
            pretrain(recipe, folder, overwrite=True)
    (world / "recipe.yaml").write_text("[")
    with pytest.raises(UserError, match=r"holds .recipe\.yaml., which this toolkit did not write, or which was changed"):
        pretrain(of_world, world, overwrite=True)


def test_what_is_needed_is_named(tmp_path):
    """A folder where a file is needed; a file of another kind."""
    with pytest.raises(UserError, match=r"it is a folder, and what is needed is a file, a plan.json$"):
        Plan.read(tmp_path)
    Plan(sites=("L1.H3",)).write(tmp_path / "plan.json")
    with pytest.raises(UserError, match=r"did you mean .*plan.json\?$"):
        Plan.read(tmp_path)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(UserError, match=r"other.json: a plan needs at least one site$"):
        Plan.read(tmp_path / "other.json")


def copied(source, folder):
    """A checkpoint as this version would have written it."""
    with building(folder) as new:
        with new.filling() as place:
            shutil.copytree(source, place, dirs_exist_ok=True)
        new.replace()
    return folder


def test_pretraining_replaces_nothing_but_a_pretraining(tmp_path):
    check_place(tmp_path)
    check_place(tmp_path / "free")
    check_place(copied("checkpoints/tiny-mamba2", tmp_path / "tiny"))
    shutil.copytree("checkpoints/tiny-mamba2", tmp_path / "theirs")
    with pytest.raises(UserError, match="is not an earlier pretraining"):
        check_place(tmp_path / "theirs")
    (tmp_path / "tiny" / "README.md").write_text("edited")
    with pytest.raises(UserError, match=r"holds .README\.md., which this toolkit did not write, or which was changed"):
        check_place(tmp_path / "tiny")


def test_wrong_types_are_named():
    """In Python, where a name or a number stands for something else."""
    ranking = Ranking.model_construct(heads=())
    for work, complaint in (
        (lambda: surgery.run({}, "out"), "surgery.run takes a recipe, as surgery.read_recipe returns it, not a dict"),
        (lambda: surgery.read_recipe(None, "a=b"), "read_recipe takes a list of settings, such as"),
        (lambda: surgery.unsplice(None), "surgery.unsplice takes a model as surgery.load returns it, not None"),
        (lambda: ranking.top("a"), "Ranking.top takes a number of heads from 1 on, not a"),
        (lambda: grid(ranking), "the ranking holds no heads"),
    ):
        with pytest.raises(UserError, match=complaint):
            work()
