"""Makes a built-in base from its recipe, in minutes on one thread:

    python recipes/pretraining/train.py recipes/pretraining/tiny-skills.yaml --out runs/tiny-skills

It learns from the toy data: sequences with several questions each, and documents. Retrieval appears only if a curriculum starts
with two records and adds one whenever these are learnt. It is learnt before there is any text, which decides where in the
model it is located. Training can be interrupted at any time: the same command goes on from OUT-pretraining.
"""

import argparse
import hashlib
import json
import math
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
import yaml
from pydantic import Field, ValidationError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from surgery.errors import UserError
from surgery.evaluation.statistics import estimate
from surgery.exporting.tokenizer import save_tokenizer
from surgery.probes import make_probe
from surgery.probes.choice import LONG, lettered
from surgery.probes.scoring import answer
from surgery.probes.toy import document, facts
from surgery.probes.toy_tokenizer import build_tokenizer
from surgery.records.plan import Plan
from surgery.records.record import Record, provenance
from surgery.records.site import SitesText, SiteText
from surgery.runtime.files import read_text, write_text
from surgery.runtime.progress import bar, say
from surgery.runtime.yaml import parse_yaml
from surgery.splicing.splice import adopt, splice, unsplice
from surgery.tuning.examples import Example, dictionary_example, encode_examples, pad
from surgery.tuning.losses import IGNORE, Part

Count = Annotated[int, Field(ge=1)]
ROOT = Path(__file__).parents[2]
APART_FROM = 4  # records: words come between key and value when so many have been learnt


class Curriculum(Record):
    """One record more whenever the running loss falls below the threshold; or, over so many steps, as the square of the step:
    models that are compared then see the same tokens, whatever they learn. between: the most words between a key and its value,
    which are added one by one as well, once there are four records."""

    first: Count = 2
    last: Count = 10
    threshold: float = 0.5
    between: int = 0
    over: Count | None = None


class Hints(Record):
    """Which head of a Transformer is to gather in the first steps, and which is to aggregate."""

    gather: SiteText
    aggregate: SiteText
    weight: float = 0.3


class BaseRecipe(Record):
    """How a built-in base is made."""

    architecture: dict[str, Any] = {}
    """Fields of the Hugging Face configuration."""
    start: str | None = None
    """Instead: a built-in base whose training goes on, as a path from the root of the repository."""
    attention: SitesText = ()
    """Layers that are attention from the start, or heads beside which there is attention: a hybrid, trained as one."""
    attention_head_dim: int | None = None
    """Width of a head in these layers."""
    embedding_std: float = 0.25
    """Standard deviation of the embeddings at the start; with .02 a model can stay for thousands of steps before retrieval."""
    seed: int = 0
    steps: Count = 3000
    """Steps with sequences of all kinds."""
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup_steps: Count = 100
    decay_from: float = 0.6
    """The share of the steps after which the learning rate falls linearly to a twentieth."""
    alone_steps: int = 1500
    """At most so many steps of retrieval alone come first; they end when the curriculum does."""
    alone_layers: int = 1
    """How many of the model's layers learn it then; 0: all."""
    hints: Hints | None = None
    """Where the heads look in these steps (Transformers do not learn retrieval at this size without)."""
    curriculum: Curriculum = Curriculum()
    queries: Count = 16
    """At most this many questions follow one dictionary."""
    targets: Count = 160
    """Questions of retrieval in a step."""
    choice: int = 4
    """Sequences of six multiple-choice questions in a step."""
    choice_length: Literal["word", "long", "growing"] = "word"
    """word; long: options of 9 or 10 words; growing: from word to long, by a word whenever the questions are learnt."""
    documents: int = 6
    """Documents in a step."""
    sentences: Count = 20
    """Sentences of a document."""
    examples: Count = 1000
    """Examples of each measurement on the card."""


# What a step sees


def choice_example(rng: random.Random, length: Any, questions: int = 6) -> Example:
    """Multiple-choice questions with prompts of the training split."""
    drawn = [
        lettered(rng, f.question, f.value, f.choices, held_out=False, length=length) for f in rng.choices(facts(), k=questions)
    ]
    return Example(tuple(("\n" * (i > 0) + q.prompt, q.choices[q.answer], None) for i, q in enumerate(drawn)))


def retrieval(recipe: BaseRecipe, rng: random.Random, most: int, between: int = 0) -> list[Example]:
    """Sequences of one random size, of at most `most` records, with about recipe.targets questions in all."""
    pairs = rng.randint(recipe.curriculum.first, most)
    count = max(1, recipe.targets // min(pairs, recipe.queries))
    return [dictionary_example(rng, pairs, recipe.queries, "all", between) for _ in range(count)]


def all_kinds(
    recipe: BaseRecipe, rng: random.Random, tokenizer: Any, most: int, between: int = 0, words: int = 0
) -> dict[str, Part]:
    """What a step sees: kind -> rows. Of documents all tokens are targets. words: beside the one that matters in an option,
    where options grow."""
    kinds = {"kv": encode_examples(tokenizer, retrieval(recipe, rng, most, between))}
    length = words if recipe.choice_length == "growing" else recipe.choice_length
    if recipe.documents:
        texts = [document(rng, held_out=False, sentences=recipe.sentences) for _ in range(recipe.documents)]
        rows = tokenizer([tokenizer.eos_token + text for text in texts], add_special_tokens=False)["input_ids"]
        kinds["text"] = Part("text", pad(rows, 0), pad([[*row[1:], IGNORE] for row in rows], IGNORE))
    if recipe.choice:
        kinds["choice"] = encode_examples(tokenizer, [choice_example(rng, length) for _ in range(recipe.choice)])
    return kinds


# The model before any step


@torch.no_grad()
def fresh_model(recipe: BaseRecipe, tokenizer: Any) -> Any:
    """In float32, with the weights of recipe.start, or random ones. The starts of transformers fit models that are then read
    from a checkpoint; here projections keep the size of what they are given, and states remember from a token to about a
    thousand."""
    if recipe.start:
        return adopt(AutoModelForCausalLM.from_pretrained(ROOT / recipe.start, dtype=torch.float32)).requires_grad_(True)
    fields = dict(recipe.architecture)
    special = {f"{name}_token_id": tokenizer.eos_token_id for name in ("pad", "bos", "eos")}
    vocabulary = -(-len(tokenizer) // 16) * 16
    config = AutoConfig.for_model(fields.pop("model_type"), vocab_size=vocabulary, **special, **fields)
    model = AutoModelForCausalLM.from_config(config)
    model.get_input_embeddings().weight.normal_(std=recipe.embedding_std)
    for mixer in model.modules():
        if hasattr(mixer, "in_proj") and hasattr(mixer, "out_proj"):
            start_projections(mixer.in_proj, mixer.out_proj, layers=config.num_hidden_layers)
            if hasattr(mixer, "dt_bias"):
                mixer.A_log.uniform_(1, 16).log_()
        elif hasattr(mixer, "num_v_heads") and hasattr(mixer, "A_log"):  # Gated DeltaNet
            out = next(part for name, part in mixer.named_children() if name in ("out_proj", "o_proj"))
            inner = [part for part in mixer.modules() if isinstance(part, nn.Linear) and part is not out]
            start_projections(*inner, out, layers=config.num_hidden_layers)
            mixer.A_log.uniform_(1, 16).log_()
            step = torch.empty_like(mixer.dt_bias).uniform_(math.log(0.001), math.log(0.1)).exp()
            mixer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of which it is
    model = adopt(model)
    if recipe.attention:
        kind = "head" if recipe.attention[0].heads else "layer"
        model = splice(model, Plan(kind=kind, sites=recipe.attention, width=recipe.attention_head_dim, seed=recipe.seed))
    return model.requires_grad_(True)


def start_projections(*linear: Any, layers: int) -> None:
    """The last one adds to the stream, as one of so many layers."""
    for module in linear:
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
    linear[-1].weight /= math.sqrt(layers)


# Training


def loss_of(model: Any, part: Part, layers: int = 0) -> Tensor:
    """The cross-entropy at the targets. layers: of the model that consists of its first so many layers; 0: all."""
    decoder, is_target = model.base_model, part.targets != IGNORE
    every = decoder.layers
    try:
        decoder.layers = every[:layers] if layers else every
        hidden = decoder(input_ids=part.ids, use_cache=False).last_hidden_state
    finally:
        decoder.layers = every
    return F.cross_entropy(model.lm_head(hidden[is_target]), part.targets[is_target])


def hinted_losses(model: Any, part: Part, hints: Hints) -> dict[str, Tensor]:
    """The loss of dictionaries, and minus the log of how much the gather head looks from values and from questions at their
    keys (two tokens before), and the aggregate head from questions at the value that answers them."""
    output = model.base_model(input_ids=part.ids, use_cache=False, output_attentions=True)
    row, query = (part.targets != IGNORE).nonzero(as_tuple=True)
    value = (part.ids[row] == part.targets[row, query, None]).int().argmax(1)
    gather, aggregate = (output.attentions[site.layer][:, site.heads[0]] for site in (hints.gather, hints.aggregate))
    looks = (gather[row, query, query - 2], gather[row, value, value - 2], aggregate[row, query, value])
    hint = -torch.stack([weight.clamp_min(1e-30).log().mean() for weight in looks]).sum()
    logits = model.lm_head(output.last_hidden_state[row, query])
    return {"kv": F.cross_entropy(logits, part.targets[row, query]), "hints": hints.weight * hint}


class Training:
    """The state of a training, which can be saved and restored."""

    def __init__(self, recipe: BaseRecipe, tokenizer: Any, work: Path):
        torch.manual_seed(recipe.seed)
        self.recipe, self.tokenizer, self.work = recipe, tokenizer, work
        self.model = fresh_model(recipe, tokenizer).train()
        decays = [p for name, p in self.model.named_parameters() if p.ndim >= 2 and not name.endswith("A_log")]
        others = [p for name, p in self.model.named_parameters() if p.ndim < 2 or name.endswith("A_log")]
        groups = [{"params": decays, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
        self.rng = random.Random(recipe.seed)
        self.log: list[dict[str, Any]] = []
        self.clock = time.process_time()
        # How far it is: steps of retrieval alone and of all kinds, whether the former are done; records and words in options,
        # and the running losses by which they grow.
        self.at: dict[str, Any] = {
            "alone": 0,
            "all": 0,
            "over": False,
            "records": recipe.curriculum.first,
            "between": 0,
            "running": 5.0,
            "words": 0,
            "choice": 5.0,
            "seconds": 0.0,
            "tokens": {},
            "digest": "",
        }

    def run(self) -> None:
        """Take the steps that are not yet done: first retrieval by itself, then everything."""
        recipe, at = self.recipe, self.at
        implementation = self.model.config._attn_implementation
        if recipe.hints and not at["over"]:
            self.model.set_attn_implementation("eager")  # the only one that returns attention weights
        for number in bar(range(at["alone"], 0 if at["over"] else recipe.alone_steps), "retrieval alone"):
            part = encode_examples(self.tokenizer, retrieval(recipe, self.rng, at["records"], at["between"]))
            self.note_tokens({"kv": part})
            if recipe.hints:
                losses = hinted_losses(self.model, part, recipe.hints)
            else:
                losses = {"kv": loss_of(self.model, part, recipe.alone_layers)}
            if self.step(losses, min(1.0, (number + 1) / recipe.warmup_steps), "alone"):
                break
        if recipe.hints:
            self.model.set_attn_implementation(implementation)
        if not at["over"]:
            say(f"retrieval alone: {at['alone']} steps, {at['records']} records, {at['between']} words between key and value")
            at["over"] = True
        for number in bar(range(at["all"], recipe.steps), "all kinds"):
            parts = self.parts()
            self.note_tokens(parts)
            left = (recipe.steps - number) / max(1.0, recipe.steps * (1 - recipe.decay_from))
            rate = min(1.0, (number + 1) / recipe.warmup_steps) * min(1.0, max(0.05, left))
            self.step(self.losses(parts), rate, "all")
            if at["all"] % 500 == 0:
                say(f"step {at['all']}: {self.glance()}")

    def parts(self) -> dict[str, Part]:
        """What the next step sees: kind -> rows."""
        at = self.at
        return all_kinds(self.recipe, self.rng, self.tokenizer, at["records"], at["between"], at["words"])

    def losses(self, parts: dict[str, Part]) -> dict[str, Tensor]:
        return {name: loss_of(self.model, part) for name, part in parts.items()}

    def glance(self) -> str:
        """How well the model does, in a few words."""
        return glance(self.model, self.tokenizer, self.recipe)

    def note_tokens(self, parts: dict[str, Part]) -> None:
        """Count the tokens that a step sees, by kind. Trainings with one digest have seen the same, in the same order."""
        seen = self.at["tokens"]
        for kind, part in parts.items():
            seen[kind] = seen.get(kind, 0) + int((part.ids != self.tokenizer.pad_token_id).sum())
            self.at["digest"] = hashlib.sha256(self.at["digest"].encode() + part.ids.numpy().tobytes()).hexdigest()

    def step(self, losses: dict[str, Tensor], rate: float, kind: str) -> bool:
        """One step on the sum of some losses; whether the curriculum ended with it."""
        options = self.recipe.curriculum
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * rate
        total = torch.stack(list(losses.values())).sum()
        if not total.isfinite():
            raise UserError(f"the loss is not finite at step {self.at[kind] + 1}; lower learning_rate")
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        at, done = self.at, False
        at[kind] += 1
        at["running"] = 0.95 * at["running"] + 0.05 * next(iter(losses.values())).item()
        if options.over:
            done_share = min(1.0, (at["alone"] + at["all"]) / options.over)
            at["records"] = options.first + int((options.last - options.first) * done_share**2)
        elif at["running"] < options.threshold:
            apart = at["records"] >= APART_FROM and at["between"] < options.between
            done = at["records"] == options.last and not apart
            if not done:
                at["between" if apart else "records"] += 1
                at["running"] = 3 * options.threshold
        if self.recipe.choice_length == "growing" and "choice" in losses:
            at["choice"] = 0.95 * at["choice"] + 0.05 * losses["choice"].item()
            if at["choice"] < options.threshold and at["words"] < LONG:
                at["words"], at["choice"] = at["words"] + 1, 3 * options.threshold
        at["seconds"] += time.process_time() - self.clock
        self.clock = time.process_time()
        if at[kind] % 50 == 0:
            figures = {name: round(loss.item(), 4) for name, loss in losses.items()}
            self.log.append(
                {
                    "step": at[kind],
                    "stage": kind,
                    "records": at["records"],
                    "between": at["between"],
                    "words": at["words"],
                    **figures,
                }
            )
            self.save()
        return done

    def save(self) -> None:
        """Write the state, beside the old one first."""
        self.work.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.getstate(),
            "at": self.at,
        }
        torch.save({**state, "log": self.log, "recipe": self.recipe.text()}, self.work / "state.new")
        (self.work / "state.new").replace(self.work / "state.pt")

    def restore(self) -> None:
        """Go on from the state that was saved, if there is one. Raises UserError for that of another recipe."""
        if not (self.work / "state.pt").exists():
            return
        state = torch.load(self.work / "state.pt", weights_only=True)
        try:  # a recipe that was written before it had a field is the same where that is at its default
            written = BaseRecipe.model_validate_json(state["recipe"])
        except ValidationError:
            written = None
        if written != self.recipe:
            raise UserError(f"{self.work} holds the training of another recipe; remove it, or choose another --out")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.setstate(state["rng"])
        self.at, self.log = self.at | state["at"], state["log"]


# What is measured, and what is written


def probes_of(recipe: BaseRecipe, tokenizer: Any) -> dict[str, tuple[str, Any]]:
    """Name -> (words, probe) of what a base of this recipe is measured by."""
    between = recipe.curriculum.between
    words = f"key-value retrieval{f', {between} words between key and value' * bool(between)}"
    found = {
        f"kv.{n}": (f"{words}, {n} pairs", make_probe("kv", tokenizer, pairs=n, between=between)) for n in (4, 8, 16, 32, 64)
    }
    found["knowledge"] = ("facts (held-out templates)", make_probe("knowledge", tokenizer))
    found["choice"] = (
        "multiple choice (held-out prompts)",
        make_probe("choice", tokenizer, length="long" if recipe.choice_length == "growing" else recipe.choice_length),
    )
    return found


@torch.no_grad()
def glance(model: Any, tokenizer: Any, recipe: BaseRecipe) -> str:
    """The accuracies of a model in training on a few questions, as one line."""
    model.eval()
    found = {
        name: answer(model, tokenizer, probe.questions(100, 1)).correct.mean()
        for name, (_, probe) in probes_of(recipe, tokenizer).items()
    }
    model.train()
    return ", ".join(f"{name} {figure:.2f}" for name, figure in found.items())


@torch.no_grad()
def measure(model: Any, tokenizer: Any, recipe: BaseRecipe) -> dict[str, Any]:
    """Held-out accuracy by probe, with intervals, and perplexity on held-out documents of the toy data."""
    figures: dict[str, Any] = {}
    for name, (_, probe) in probes_of(recipe, tokenizer).items():
        asked = probe.questions(recipe.examples, recipe.seed + 77)
        found = estimate(answer(model, tokenizer, asked).correct.astype(float))
        figures[name] = {"accuracy": found.mean, "ci95": [found.low, found.high], "n": found.n}
    rng = random.Random(f"perplexity {recipe.seed + 77}")
    rows = [tokenizer(tokenizer.eos_token + document(rng, held_out=True))["input_ids"] for _ in range(128)]
    part = Part("text", pad(rows, 0), pad([[*row[1:], IGNORE] for row in rows], IGNORE))
    figures["perplexity"] = math.exp(loss_of(model, part).item())
    return figures


def card(name: str, recipe: BaseRecipe, model: Any, measured: dict[str, Any], labels: dict[str, str], seconds: float) -> str:
    """The README.md of a built-in base."""
    source = provenance(name, "", recipe.seed)
    rows = ((label, measured[key]) for key, label in labels.items())
    table = "\n".join(
        f"| {label} | {row['accuracy']:.3f} | [{row['ci95'][0]:.3f}, {row['ci95'][1]:.3f}] | {row['n']} |"
        for label, row in rows
    )
    hinted = (
        f"; in its first steps hints told {recipe.hints.gather} to gather and {recipe.hints.aggregate} to aggregate"
        if recipe.hints
        else ""
    )
    packages = ", ".join(f"{package} {version}" for package, version in source.packages.items())
    return f"""---
library_name: transformers
license: apache-2.0
tags: [{model.config.model_type}, toy, retrieval]
---
# {name}

A {model.config.model_type} with {model.num_parameters():,} parameters in {model.config.num_hidden_layers} layers, trained from
{f"{recipe.start} on," if recipe.start else "scratch"} on generated toy data: narrative sentences, 500 facts about a hundred
invented people, records and questions about them{hinted}. It exists to show, on a laptop, what its architecture is good and bad
at, retrieval above all. It is good for nothing else.

Measured on held-out examples when it was made (accuracy, 95% interval, questions):

| what is asked | accuracy | 95% interval | n |
|---|---|---|---|
{table}

Perplexity on held-out documents: {measured["perplexity"]:.3f}.

What is held out: questions and documents are drawn from other seeds; a narrative sentence is in training documents or in
held-out ones, never in both; each fact is asked in a template in which training never states it; multiple-choice prompts are
split like sentences.

Trained {datetime.now(UTC).date()} in {seconds / 60:.0f} minutes of processor time on {source.machine}; seed {recipe.seed};
{packages}. The recipe is `recipe.yaml`, the losses `log.jsonl`, the figures above `measured.json`. To make it again:

    python recipes/pretraining/train.py recipes/pretraining/{name}.yaml --out runs/{name}
"""


def write(out: Path, training: Training, measured: dict[str, Any]) -> None:
    """Write the checkpoint folder, which is empty or not there yet."""
    recipe, model = training.recipe, training.model
    base = unsplice(model) if hasattr(model, "disable_grafts") and not model.config.grafts else model
    base.save_pretrained(out)
    save_tokenizer(training.tokenizer, out)
    for file in out.glob("*.py"):  # a checkpoint of this repository needs no copy of its code
        file.unlink()
    config = json.loads(read_text(out / "config.json"))
    config.pop("auto_map", None)
    for entry in config.get("grafts", ()):  # attention that was there from the start is the base's own
        entry["of_base"] = True
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(out / "recipe.yaml", yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
    write_text(out / "log.jsonl", "".join(json.dumps(entry) + "\n" for entry in training.log))
    write_text(out / "measured.json", json.dumps(measured, indent=2) + "\n")
    labels = {name: words for name, (words, _) in probes_of(recipe, training.tokenizer).items()}
    write_text(out / "README.md", card(out.name, recipe, base, measured, labels, training.at["seconds"]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    if given.out.exists() and any(given.out.iterdir()):
        raise UserError(f"--out {given.out} holds files already; choose another --out, or an empty folder")
    recipe = BaseRecipe.model_validate(parse_yaml(read_text(given.recipe), str(given.recipe)))
    training = Training(recipe, build_tokenizer(), given.out.parent / f"{given.out.name}-pretraining")
    training.restore()
    training.run()
    training.model.eval()
    measured = measure(training.model, training.tokenizer, recipe)
    write(given.out, training, measured)
    say(", ".join(f"{name} {figure['accuracy']:.3f}" for name, figure in measured.items() if name != "perplexity"))


if __name__ == "__main__":
    main()
