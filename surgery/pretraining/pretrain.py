"""Trains the built-in reference models on the small world, from scratch, on a CPU.

One loss over three kinds of sequence: dictionaries of a growing number of pairs, documents (facts among narrative), and
lettered questions. Retrieval appears only where the curriculum starts with two pairs and moves on when they are learnt. It is
learnt before there is text, which settles where it sits; otherwise that is left to chance. A Mamba learns it by its first layer
alone, before the others exist (several times cheaper); a Transformer, which needs two, with hints (hints.py).
"""

import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from surgery.families import families
from surgery.loading.checkpoint import load
from surgery.models.anatomy import anatomy
from surgery.pretraining.hints import hint_loss
from surgery.pretraining.layer_alignment import align_layers
from surgery.probes.knowledge import Knowledge, Letters
from surgery.probes.kv import KVRetrieval
from surgery.probes.perplexity import Perplexity
from surgery.probes.question import Probe
from surgery.probes.scoring import answer
from surgery.records.plan import Plan
from surgery.records.pretrain_recipe import Curriculum, Hints, PretrainRecipe
from surgery.records.record import provenance
from surgery.runtime.progress import Track, say
from surgery.splicing.splice import adopt, install, unsplice
from surgery.statistics import proportion
from surgery.tuning.optimizer import parameter_groups
from surgery.tuning.sequences import IGNORE, Piece, collate, kv_pieces, letter_pieces, text_pieces
from surgery.world.tokenizer import build_tokenizer

SIZES = (4, 8, 16, 32, 64)


def pretrain(recipe: PretrainRecipe, out: Path) -> dict[str, Any]:
    """Train, measure on held-out examples, and write the checkpoint folder. Returns the measurements."""
    torch.manual_seed(recipe.seed)
    tokenizer = build_tokenizer()
    model = adopt(_fresh(recipe, tokenizer)).train()
    start = time.monotonic()
    if recipe.teacher is None:
        log = _train(model, tokenizer, recipe)
    else:
        teacher = load(recipe.teacher)
        log = align_layers(
            model, teacher.model, _every_kind(tokenizer, recipe), steps=recipe.steps, learning_rate=recipe.learning_rate
        )
    seconds = time.monotonic() - start
    base = unsplice(model.eval()) if model.config.model_type in families() and not recipe.attention else model.eval()
    measured = measure(base, tokenizer, recipe.examples, recipe.seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    base.save_pretrained(folder)
    _without_code(folder)
    tokenizer.save_pretrained(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    (folder / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    (folder / "measured.json").write_text(json.dumps(measured, indent=2) + "\n")
    (folder / "README.md").write_text(_card(recipe, base, measured, seconds, out.name))
    folder.chmod(0o755)
    shutil.rmtree(out, ignore_errors=True)
    folder.rename(out)
    return measured


def _without_code(folder: Path) -> None:
    """A checkpoint of this repository needs no copy of its modeling code, which is exported with a hybrid."""
    for file in folder.glob("*.py"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    config.pop("auto_map", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def measure(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: int, seed: int) -> dict[str, Any]:
    """Held-out accuracy and perplexity, with intervals."""
    model = adopt(model).eval()
    probes: dict[str, Probe] = {f"kv.{pairs}": KVRetrieval(pairs) for pairs in SIZES}
    probes |= {"knowledge": Knowledge(), "letters": Letters()}
    out: dict[str, Any] = {
        name: proportion(answer(model, tokenizer, probe.questions(examples, seed + 77)).correct).model_dump(mode="json")
        for name, probe in probes.items()
    }
    text = Perplexity()
    out["perplexity"] = math.exp(text.losses(model, text.token_windows(tokenizer, seed + 77)).mean())
    return out


def _fresh(recipe: PretrainRecipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    fields = dict(recipe.architecture)
    vocabulary = -(-len(tokenizer) // 16) * 16
    special = {f"{name}_token_id": tokenizer.eos_token_id for name in ("pad", "bos", "eos")}
    config = AutoConfig.for_model(fields.pop("model_type"), vocab_size=vocabulary, **special, **fields)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=recipe.embedding_std)
        for mixer in (part for part in model.modules() if hasattr(part, "in_proj") and hasattr(part, "out_proj")):
            for linear in (mixer.in_proj, mixer.out_proj):
                torch.nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5))
            mixer.out_proj.weight /= math.sqrt(config.num_hidden_layers)
            if isinstance(mixer, Mamba2Mixer):  # transformers' own start is 1, 2, 3, ... by head
                mixer.A_log.uniform_(1, 16).log_()
    if recipe.attention:
        return install(model, Plan(kind="layer", sites=recipe.attention, seed=recipe.seed))
    return model


def _train(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: PretrainRecipe) -> list[dict[str, float]]:
    optimizer = torch.optim.AdamW(
        parameter_groups(model.named_parameters(), recipe.weight_decay), lr=recipe.learning_rate, betas=(0.9, 0.95)
    )

    def rate(step: int) -> float:
        left = (recipe.steps - step) / (recipe.steps * (1 - recipe.decay_from))
        return min(1.0, (step + 1) / recipe.warmup_steps) * min(1.0, max(0.05, left))

    rng, lessons = random.Random(recipe.seed), _Curriculum(recipe.curriculum)
    log: list[dict[str, float]] = []

    def step(losses: dict[str, Tensor], progress: Track, number: int) -> None:
        torch.stack(list(losses.values())).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        lessons.saw(losses["kv"].item())
        progress.note = f"pairs {lessons.most}, " + ", ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items())
        if number % 50 == 0:
            rounded = {name: round(loss.item(), 4) for name, loss in losses.items()}
            log.append({"step": number, "pairs": lessons.most, **rounded})

    hints = recipe.hints
    if hints is not None:
        model.set_attn_implementation("eager")  # which returns its weights
    progress, number = Track(range(hints.steps if hints else recipe.first_layer_steps), "pretrain retrieval"), -1
    for number in progress:
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, (number + 1) / recipe.warmup_steps)
        batch = collate(tokenizer, _dictionaries(recipe, rng, lessons.most))
        step(_hinted(model, *batch, hints) if hints else {"kv": _loss(model, *batch, layers=1)}, progress, number + 1)
        if lessons.done:
            break
    say(f"retrieval alone: {number + 1} steps, {lessons.most} pairs")
    if hints is not None:
        model.set_attn_implementation("sdpa")

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    progress = Track(range(recipe.steps), "pretrain")
    for number in progress:
        batches = _lesson(tokenizer, recipe, rng, lessons.most)
        losses = {name: _loss(model, *collate(tokenizer, batch)) for name, batch in batches.items() if batch}
        step(losses, progress, number + 1)
        schedule.step()
        if (number + 1) % 500 == 0:
            say(f"step {number + 1}: {_glance(model, tokenizer)}")
    return log


def _dictionaries(recipe: PretrainRecipe, rng: random.Random, most: int) -> list[list[Piece]]:
    """Of one size, at most `most` pairs."""
    pairs = rng.randint(recipe.curriculum.first, most)
    sequences = max(1, recipe.kv_targets // min(pairs, recipe.queries))
    return [kv_pieces(rng, pairs, recipe.queries, keys="all") for _ in range(sequences)]


def _lesson(
    tokenizer: PreTrainedTokenizerBase, recipe: PretrainRecipe, rng: random.Random, most: int
) -> dict[str, list[list[Piece]]]:
    """The sequences of a step, by kind."""
    return {
        "kv": _dictionaries(recipe, rng, most),
        "text": [text_pieces(rng, tokenizer.eos_token, recipe.text_sentences) for _ in range(recipe.text_sequences)],
        "letters": [letter_pieces(rng, recipe.letter_questions) for _ in range(recipe.letter_sequences)],
    }


def _every_kind(tokenizer: PreTrainedTokenizerBase, recipe: PretrainRecipe) -> Iterator[Tensor]:
    """Batches of token ids: the kinds of sequence in turn."""
    rng = random.Random(recipe.seed)
    while True:
        for batch in _lesson(tokenizer, recipe, rng, recipe.curriculum.last).values():
            if batch:
                yield collate(tokenizer, batch)[0]


class _Curriculum:
    """One pair more whenever the running loss falls below the threshold; done when it does so with the last size."""

    def __init__(self, options: Curriculum):
        self.options, self.most, self.running, self.done = options, options.first, 5.0, False

    def saw(self, loss: float) -> None:
        self.running = 0.95 * self.running + 0.05 * loss
        if self.running < self.options.threshold:
            self.done = self.most == self.options.last
            if not self.done:
                self.most, self.running = self.most + 1, 3 * self.options.threshold


def _loss(model: Any, ids: Tensor, targets: Tensor, layers: int | None = None) -> Tensor:
    """Cross-entropy at the targets; with `layers`, of the model that ends after so many."""
    decoder, wanted = model.base_model, targets != IGNORE
    every = decoder.layers
    try:
        decoder.layers = every[:layers]
        hidden = decoder(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        decoder.layers = every
    return F.cross_entropy(model.lm_head(hidden[wanted]), targets[wanted])


def _hinted(model: Any, ids: Tensor, targets: Tensor, hints: Hints) -> dict[str, Tensor]:
    """The loss of dictionaries, and the hints'."""
    given, wanted = model.base_model(input_ids=ids, use_cache=False, output_attentions=True), targets != IGNORE
    return {
        "kv": F.cross_entropy(model.lm_head(given.last_hidden_state[wanted]), targets[wanted]),
        "hints": hints.weight * hint_loss(given.attentions, ids, targets, hints.gather, hints.aggregate),
    }


def _glance(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    model.eval()
    probes: dict[str, Probe] = {f"KV {pairs}": KVRetrieval(pairs) for pairs in SIZES}
    probes |= {"knowledge": Knowledge(), "letters": Letters()}
    figures = {name: answer(model, tokenizer, probe.questions(200, seed=1)).correct.mean() for name, probe in probes.items()}
    model.train()
    return ", ".join(f"{name} {figure:.2f}" for name, figure in figures.items())


def _card(recipe: PretrainRecipe, model: PreTrainedModel, measured: dict[str, Any], seconds: float, name: str) -> str:
    made = provenance(name, "", recipe.seed)
    found = anatomy(model)
    layers, heads = len(found.blocks), found.heads(0)
    packages = ", ".join(f"{package} {version}" for package, version in made.packages.items())
    names = {f"kv.{pairs}": f"key-value retrieval, {pairs} pairs" for pairs in SIZES}
    names |= {"knowledge": "fact cloze (held-out templates)", "letters": "lettered questions (held-out prompts)"}
    table = "\n".join(
        f"| {label} | {measured[key]['accuracy']:.3f} | [{measured[key]['ci95'][0]:.3f}, {measured[key]['ci95'][1]:.3f}] "
        f"| {measured[key]['n']} |"
        for key, label in names.items()
    )
    return f"""---
library_name: transformers
license: apache-2.0
tags: [{model.config.model_type}, toy, retrieval]
---
# {name}

A {model.config.model_type} language model of {model.num_parameters():,} parameters ({layers} layers of {heads} heads),
{_origin(recipe)} a generated *small world*: narrative sentences, 500 facts about a hundred invented people,
key-value dictionaries in the prompt of arXiv 2504.18574, and lettered questions. It exists to show, on a laptop, what its
architecture is good and bad at, retrieval above all. It is good for nothing else.

Measured on held-out examples when it was made (accuracy, 95% interval, n):

| probe | accuracy | 95% interval | n |
|---|---|---|---|
{table}

Perplexity on held-out documents: {measured["perplexity"]:.3f}.

What is held out: dictionaries and documents are drawn from other seeds; a narrative sentence is in training documents or in
held-out ones, never in both; each fact is asked in a template in which training never states it; lettered prompts are split
like sentences.

Trained {datetime.now(UTC).date()} in {seconds / 60:.0f} minutes on {made.machine}, {made.threads} threads; seed {recipe.seed};
{packages}. The recipe is `recipe.yaml`, the losses `log.jsonl`, the figures above `measured.json`. To make it again:

    surgery pretrain recipes/{name}.yaml --out checkpoints/{name}
"""


def _origin(recipe: PretrainRecipe) -> str:
    if recipe.hints is not None:
        return (
            f"trained from scratch, with hints in the first steps that head {recipe.hints.gather} should gather and head "
            f"{recipe.hints.aggregate} aggregate (`surgery/pretraining/hints.py`), on"
        )
    if recipe.teacher is None:
        return "trained from scratch on"
    return f"its layers aligned one by one with those of `{Path(recipe.teacher).name}` on"
