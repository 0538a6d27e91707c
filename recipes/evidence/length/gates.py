"""Both gates at 1, 2, 4 and 8 times the length that they were tuned at, on checkpoints/tiny-skills.

    python recipes/evidence/length/gates.py

Dictionaries of 64 pairs, with held-out text of the toy data between the dictionary and its question; and held-out text, in rows
of the tuned length (tune.text_tokens) and longer. Heads, steps and seeds are those of recipes/evidence/gate. Writes gates.json
(finished models are kept) and gates.png beside this file.
"""

import dataclasses
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

import surgery
from surgery.evaluation.statistics import difference, estimate
from surgery.evaluation.texts import by_document, measure_on_text, open_held_out, token_losses
from surgery.probes import make_probe
from surgery.probes.encoded import encode
from surgery.probes.kv import ask_value
from surgery.probes.question import Question
from surgery.probes.scoring import answer
from surgery.probes.toy import document
from surgery.records.record import installed_version
from surgery.runtime.files import write_text
from surgery.splicing.splice import adopt

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
sys.path.insert(0, str(HERE.parent / "gate"))
from gate import BASES, TUNE  # noqa: E402

BASE, SEED, PAIRS, QUESTIONS, TOKENS, TIMES = "tiny-skills", 3, 64, 200, 16 * 1536, (1, 2, 4, 8)
GATES = {  # g, share, whether the null key reads the query (plan.keep_skills)
    "scalar gate, g 0.5": (0.5, None, False),
    "null key, g 0.5": (0.5, 0.01, False),
    "reads the query, g 1": (1.0, 0.01, True),
}


def with_text(question: Question, tokenizer: Any, tokens: int, rng: random.Random) -> Question:
    """The question behind so much text that its prompt has as many tokens, or a few more."""
    at = question.prompt.rindex(ask_value("").partition("'")[0])
    head, asked, between = question.prompt[:at], question.prompt[at:], ""
    while len(tokenizer(head + between + asked)["input_ids"]) < tokens:
        between += document(rng, held_out=True, sentences=1) + "\n"
    return dataclasses.replace(question, prompt=head + between + asked, spans=(), evidence=None)


def measure(base: Any, model: Any, tokenizer: Any) -> dict[str, Any]:
    """By length: accuracies, and of a hybrid on text the change of the loss, the KL divergence and the open tokens."""
    result: dict[str, Any] = {"dictionaries": {}, "text": {}}
    questions = make_probe("kv", tokenizer, pairs=PAIRS, keys="seen").questions(QUESTIONS, SEED + 10_000)
    tuned = max(len(tokenizer(question.prompt)["input_ids"]) for question in questions)
    held_out = open_held_out(tokenizer, surgery.Data(), TOKENS, SEED + 10_000)
    for times in TIMES:
        rng = random.Random(f"between {SEED}")
        asked = questions if times == 1 else [with_text(each, tokenizer, times * tuned, rng) for each in questions]
        correct = answer(model, tokenizer, encode(tokenizer, asked), 16 // times + 1).correct.astype(float)
        result["dictionaries"][times * tuned] = estimate(correct).model_dump()
        if model is base:
            continue
        length = times * TUNE.text_tokens
        rows, owner = held_out.rows(TOKENS // length, length)
        losses = [by_document(token_losses(each, rows, 8), owner) for each in (base, model)]
        found = measure_on_text(base, model, rows, owner, 8)
        result["text"][length] = {
            "change_of_loss": difference(*losses).model_dump(),
            "kl": found.kl.model_dump(),
            "acts": None if found.acts is None else found.acts.model_dump(),
        }
    return result


def draw(models: dict[str, Any]) -> None:
    """Accuracy, and the KL divergence on text, against length."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    colours = ["#6b7280", "#d55e00", "#0072b2", "#009e73"]
    for (name, found), colour in zip(models.items(), colours, strict=True):
        for axes, what, pick in ((left, "dictionaries", lambda each: each), (right, "text", lambda each: each["kl"])):
            lengths = [int(length) for length in found[what]]
            mean, low, high = (np.array([pick(each)[key] for each in found[what].values()]) for key in ("mean", "low", "high"))
            if lengths:
                axes.errorbar(lengths, mean, [mean - low, high - mean], marker="o", color=colour, label=name, capsize=3)
    left.set(xscale="log", ylim=(0, 1), xlabel="tokens of the prompt", ylabel=f"accuracy, {PAIRS} pairs")
    right.set(xscale="log", yscale="log", xlabel="tokens of a row", ylabel="KL from the base, nats a token")
    for axes, what in ((left, "dictionaries"), (right, "text")):
        lengths = [int(length) for length in list(models.values())[-1][what]]
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.minorticks_off()
    left.legend(fontsize=8)
    figure.savefig(HERE / "gates.png", dpi=130)


def main() -> None:
    path = HERE / "gates.json"
    record = {"version": installed_version("mamba-surgery"), "base": BASE, "seed": SEED, "questions": QUESTIONS, "models": {}}
    record = json.loads(path.read_text()) if path.exists() else record
    base, tokenizer = surgery.load(str(ROOT / "checkpoints" / BASE))
    pairs, units = BASES[BASE]
    ranking = None
    for name in ("base", *GATES):
        if name in record["models"]:
            continue
        adopted = adopt(base).eval()
        model = adopted
        if name != "base":
            probe = make_probe("kv", tokenizer, pairs=pairs, keys="seen")
            options = surgery.Locate(roles=0, options={"pairs": pairs})
            ranking = ranking or surgery.locate(base, tokenizer, probe.questions(128, SEED), options)
            g, share, keep = GATES[name]
            options, unseen = (
                surgery.PlanOptions(heads=units, gate=g, share=share, keep_skills=keep),
                probe.questions(128, SEED + 10_007),
            )
            plan = surgery.choose(base, tokenizer, ranking, options, seed=SEED, questions=unseen if keep else ())
            model = surgery.splice(base, plan)
            surgery.tune(model, tokenizer, TUNE, seed=SEED, name=name)
        record["models"][name] = measure(adopted, model.eval(), tokenizer)
        write_text(path, json.dumps(record, indent=1) + "\n")
    draw(record["models"])


if __name__ == "__main__":
    main()
