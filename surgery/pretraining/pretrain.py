"""Trains a model from scratch: the built-in reference models on the small world, or a base on text of one's own (corpus.py).

In the small world the loss covers three kinds of sequence: dictionaries of a growing number of pairs, documents (facts among
narrative), and lettered questions. Retrieval appears only if the curriculum starts with two pairs and adds more when these are
learnt. It is learnt before there is any text, which decides where in the model it is located; otherwise that is left to chance.
A Mamba learns it with its first layer alone, before the others exist, which is several times cheaper. A mixer without
a convolution needs two layers for it (first_layers), and in xLSTM, as in a Transformer, hints as well (hints.py).
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from surgery.errors import UserError
from surgery.families import families
from surgery.hybrids.spliced import without_code, written
from surgery.models.tokens import tokenizers_errors
from surgery.pretraining.checkpoint_card import card
from surgery.pretraining.corpus import prepared
from surgery.pretraining.corpus_card import corpus_card
from surgery.pretraining.corpus_measuring import measure_on_corpus
from surgery.pretraining.corpus_training import train_on_corpus
from surgery.pretraining.fresh_model import check_architecture, fresh_model
from surgery.pretraining.layer_alignment import align_layers
from surgery.pretraining.lessons import batches_of_all_kinds
from surgery.pretraining.measuring import measure
from surgery.pretraining.recipe import CorpusOptions, PretrainRecipe, read_pretrain_recipe
from surgery.pretraining.training import train
from surgery.runtime.ownership.complaints import reason
from surgery.runtime.ownership.files import check_free, writing
from surgery.runtime.ownership.replacing import building
from surgery.splicing.load import load
from surgery.splicing.splice import adopt, unsplice
from surgery.tuning.state import differences
from surgery.world.tokenizer import build_tokenizer

BESIDE_THE_TRAINING = {"eval_steps", "eval_windows", "save_steps", "about", "dtype"}  # settings of the text


def pretrain(recipe: PretrainRecipe, out: Path, *, finish: bool = False, overwrite: bool = False) -> dict[str, Any]:
    """Train, measure on held-out examples, and write the checkpoint folder `out`, whole or not at all. Returns the
    measurements. An earlier pretraining with this recipe is replaced. Raises UserError for a folder of anything else.

    finish: of a training on text of one's own, let the learning rate fall from where it has come to, and end.
    overwrite: replace a pretraining with another recipe as well."""
    check_place(out)
    if not overwrite:
        _check_recipe(out, recipe)
    check_architecture(recipe)
    if recipe.corpus is not None:
        return _pretrain_on_corpus(recipe, recipe.corpus, out, finish=finish)
    if finish:
        raise UserError("--finish is for text of one's own (corpus); lessons of the small world take as many steps as they do")
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer()
    model = adopt(fresh_model(recipe, len(tokenizer), tokenizer.eos_token_id)).train()
    start = time.monotonic()
    if recipe.teacher is None:
        log = train(model, tokenizer, recipe)
    else:
        teacher = load(recipe.teacher)
        log = align_layers(
            model,
            teacher.model,
            batches_of_all_kinds(tokenizer, recipe),
            steps=recipe.steps,
            learning_rate=recipe.learning_rate,
        )
    seconds = time.monotonic() - start
    base = unsplice(model.eval()) if model.config.model_type in families() and not recipe.attention else model.eval()
    measured = measure(base, tokenizer, recipe.examples, recipe.seed)
    _write(out, base, tokenizer, recipe, log, measured, card(recipe, base, measured, seconds, out.name))
    return measured


def _pretrain_on_corpus(recipe: PretrainRecipe, options: CorpusOptions, out: Path, *, finish: bool) -> dict[str, Any]:
    """As pretrain. What it goes on with is in the folder <out>-pretraining, and stays there."""
    work = out.parent / f"{out.name}-pretraining"
    if finish and not any(work.glob("checkpoint-*")):
        raise UserError("--finish lets the learning rate fall from where the training has come to, and no step was taken yet")
    if recipe.start is not None and options.tokenizer is None:
        options = options.model_copy(update={"tokenizer": recipe.start})
    with writing(work):
        return _train_and_write(recipe, options, out, work, finish=finish)


def _train_and_write(recipe: PretrainRecipe, options: CorpusOptions, out: Path, work: Path, *, finish: bool) -> dict[str, Any]:
    corpus = prepared(options, work)
    torch.manual_seed(recipe.seed)
    fresh: Any = fresh_model(recipe, len(corpus.tokenizer), corpus.tokenizer.eos_token_id)
    model: Any = adopt(fresh.to("cuda" if torch.cuda.is_available() else "cpu"))
    state = train_on_corpus(model, corpus, recipe, work, finish=finish)
    model = model.eval().to(getattr(torch, options.dtype))
    base = unsplice(model) if model.config.model_type in families() and not recipe.attention else model
    # The weights as they are written, but in float32: in 16 bits a processor without such instructions is several times slower.
    measured = measure_on_corpus(base.float(), corpus, options, recipe.examples, recipe.seed)
    base = base.to(getattr(torch, options.dtype))
    # As many steps as it took, so that the recipe makes this checkpoint again.
    taken = recipe.model_copy(update={"steps": state.more["steps"]})
    text = corpus_card(taken, options, base, corpus, measured, state.more["seconds"], out.name)
    _write(out, base, corpus.tokenizer, taken, state.log, measured, text)
    return measured


def _write(
    out: Path, base: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: PretrainRecipe, log: list[dict[str, Any]],
    measured: dict[str, Any], text: str,
) -> None:  # fmt: skip
    """text: of the card."""
    try:
        with building(out) as new:
            with new.filling() as folder, tokenizers_errors():
                written(base)(folder)
                _without_code(folder)
                without_code(tokenizer).save_pretrained(folder)
                (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.written(), sort_keys=False))
                (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
                (folder / "measured.json").write_text(json.dumps(measured, indent=2) + "\n")
                (folder / "README.md").write_text(text)
            new.replace()
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write {out}: {reason(error)}") from error


def check_place(out: Path) -> None:
    """Raise UserError unless a checkpoint may be written to `out`: it is free, empty, or holds an earlier pretraining alone."""
    check_free(out, what="an earlier pretraining")


def _check_recipe(out: Path, recipe: PretrainRecipe) -> None:
    """Raise UserError if the checkpoint in `out`, where there is one, was made with a recipe that would not make it again."""
    if not (made := out / "recipe.yaml").exists():
        return
    try:
        other = " and another ".join(differences(_making(read_pretrain_recipe(made)), _making(recipe)))
    except UserError:
        other = "recipe, which cannot be read"
    if other:
        raise UserError(f"{out} holds a pretraining with another {other}; choose another --out, or remove that folder")


def _making(recipe: PretrainRecipe) -> dict[str, Any]:
    """The settings on which a checkpoint depends. On text, training goes on with another number of steps."""
    fields = recipe.model_dump(mode="json", exclude={"examples": True, "corpus": BESIDE_THE_TRAINING})
    changed: dict[str, Any] = {"corpus": {}} if recipe.corpus is None else {"steps": None}
    return fields | changed


def _without_code(folder: Path) -> None:
    """A checkpoint of this repository needs no copy of its modeling code, which is exported with a hybrid."""
    for file in folder.glob("*.py"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
