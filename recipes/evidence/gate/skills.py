"""What tells a match that the base needs for itself, in multiple choice, from one that the user wants, in a dictionary?

    python recipes/evidence/gate/skills.py                    tiny-skills and tiny-letters, about 20 minutes of one core
    python recipes/evidence/gate/skills.py tiny-options 4 5   other bases and seeds, about 5 minutes each

At the last token of training questions of both kinds, of a base without grafts: how well the log-sum-exp of a located head's
scores tells them apart (a constant null key can do no better), and how well a linear function of the query does, fitted on
other questions. Then grafts with g = 1 and a null key whose logit is b + w . q for the query q:

- zero: w starts at 0, and learns with the KL divergence on skills; beside it the same divergence with a constant null key;
- fitted: plan.keep_skills, where b and w are a logistic regression, in which a graft is open at the answers of training
  dictionaries, and closed on text and on training questions of the other skills; before tuning, and tuned without the
  divergence on skills.

gate.json has the same heads and questions with a constant null key. Of other bases and seeds, the scalar gate of 0.30, a
constant null key and the fitted one are measured, all tuned. A seed draws what locate asks, what tuning sees and what is
measured. Finished cells of skills.json are kept. Fills the last table of README.md.
"""

import json
import sys
from pathlib import Path

import torch
from gate import BASES, ROOT, SEEDS, TUNE
from torch import Tensor, nn

import surgery
from surgery.evaluation.statistics import estimate
from surgery.evaluation.texts import measure_on_text, open_held_out
from surgery.modeling.graft import Graft
from surgery.planning.calibrate import read_matches
from surgery.probes import make_probe
from surgery.probes.encoded import encode
from surgery.probes.scoring import answer
from surgery.records.record import installed_version
from surgery.runtime.files import write_text
from surgery.splicing.splice import adopt

RECORD = Path(__file__).parent / "skills.json"
WAYS = {  # name -> weight of the KL divergence on skills, how the null key reads the query, whether it is tuned
    "skill KL": (1.0, None, True),
    "query and skill KL": (1.0, "zero", True),
    "fitted, untrained": (0.0, "fitted", False),
    "fitted": (0.0, "fitted", True),
    "constant": (0.0, None, True),
    "scalar 0.5": (0.0, None, True),
}
MAIN = ("tiny-skills", "tiny-letters")
OTHER = ("base", "scalar 0.5", "constant", "fitted")  # what is measured of all other bases, and of all but the first seed
BEGIN = "<!-- filled by skills.py -->"
KINDS = {"dictionary": ("kv", {"pairs": 64, "keys": "seen"}), "multiple choice": ("choice", {"part": "tune"})}
ASKED = {
    "kv.64": ("kv", {"pairs": 64, "keys": "seen"}),
    "kv_unseen.64": ("kv", {"pairs": 64, "keys": "unseen"}),
    "multiple_choice": ("choice", {"part": "bench"}),
    "knowledge": ("knowledge", {"part": "bench"}),
}
QUESTIONS, LIMIT = 128, 300  # of each kind, for the overlap; of each measurement
ROWS, LENGTH = 64, 256  # of held-out text
SLOPE = 20.0  # of the query's part of the null key, as graft.NATS of its constant


def read_query(graft: Graft) -> None:
    """Add w . q, with w = 0 at first, to the logit of the null key: the same as to move all keys by -w."""
    graft.slope = nn.Parameter(torch.zeros(len(graft.signs), graft.width))
    sharpen = graft.sharpen

    def moved(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = sharpen(q, k)
        return q, k - SLOPE * graft.slope[:, None]

    graft.sharpen = moved  # type: ignore[method-assign]


def auc(high: Tensor, low: Tensor) -> float:
    """The probability that one of `high` is above one of `low`."""
    return float((high[:, None] > low).double().mean() + (high[:, None] == low).double().mean() / 2)


def overlap(base, tokenizer, plan, seed: int) -> dict:
    """Head -> medians of both kinds' log-sum-exp, and how well it, and a linear function of the query, tell them apart."""
    closed, read = surgery.splice(base, plan.model_copy(update={"gate": 0.0})).eval(), {}
    for kind, (probe, options) in KINDS.items():
        encoded = encode(tokenizer, make_probe(probe, tokenizer, **options).questions(QUESTIONS, seed))
        found = read_matches(closed, encoded.padded(), encoded.mask("query"), 8)
        read[kind] = {str(site): each for site, each in found.items()}
    result = {}
    for head in plan.starts:
        (lse, q), (other_lse, other_q) = ((each[head][0][:, 0], each[head][1]) for each in read.values())
        fitted, tested = ([each[half::2] for each in (q, other_q)] for half in (0, 1))
        spread = sum(each.T.cov() for each in fitted)
        ridge = 1e-3 * spread.trace() / len(spread) * torch.eye(len(spread), dtype=spread.dtype)
        direction = torch.linalg.solve(spread + ridge, fitted[0].mean(0) - fitted[1].mean(0))  # Fisher's
        result[head] = {
            "medians": {kind: float(each[head][0].median()) for kind, each in read.items()},
            "auc_log_sum_exp": auc(lse, other_lse),
            "auc_query": auc(tested[0] @ direction, tested[1] @ direction),
        }
    return result


def measure(base, tokenizer, plan, way: str, seed: int) -> dict:
    """One way: accuracy of every measurement with its interval."""
    skill_weight, start, is_tuned = WAYS.get(way, (0.0, None, False))
    hybrid = surgery.splice(base, plan) if way != "base" else adopt(base)
    for graft in (hybrid.mixer_at(site.layer).graft for site in plan.sites if start == "zero"):
        read_query(graft)
    if is_tuned:
        surgery.tune(hybrid, tokenizer, TUNE.model_copy(update={"skill_weight": skill_weight}), seed=seed, name=way)
    asked = {name: make_probe(probe, tokenizer, **o).questions(LIMIT, seed + 10_000) for name, (probe, o) in ASKED.items()}
    found = {
        name: estimate(answer(hybrid.eval(), tokenizer, questions, what=name).correct.astype(float)).model_dump()
        for name, questions in asked.items()
    }
    rows, owner = open_held_out(tokenizer, surgery.Data(), ROWS * LENGTH, seed + 10_000).rows(ROWS, LENGTH)
    return found | {"on_text": measure_on_text(adopt(base).eval(), hybrid.eval(), rows, owner, 16).model_dump()}


def table(seeds: dict) -> str:
    """Every base with each gate: means over seeds, and the least and the largest."""
    columns = ("kv.64", "kv_unseen.64", "multiple_choice", "knowledge")
    lines = ["| base | seeds | gate | 64 pairs | new keys | multiple choice | facts | KL on text |", "|---" * 8 + "|"]

    def shown(values: list[float]) -> str:
        mean = f"{sum(values) / len(values):.3f}"
        return mean if len(values) == 1 else f"{mean} ({min(values):.3f} \N{EN DASH} {max(values):.3f})"

    for name in dict.fromkeys(name for bases in seeds.values() for name in bases):
        for way in OTHER:
            cells = [bases[name][way] for bases in seeds.values() if way in bases.get(name, {})]
            if cells:
                scores = " | ".join(shown([cell[column]["mean"] for cell in cells]) for column in columns)
                kl = sum(cell["on_text"]["kl"]["mean"] for cell in cells) / len(cells)
                lines.append(f"| {name} | {len(cells)} | {way} | {scores} | {kl:.1e} |")
    return "\n".join(lines)


def main(*given: str) -> None:
    record = {"version": installed_version("mamba-surgery"), "seeds": {}}
    record = json.loads(RECORD.read_text()) if RECORD.exists() else record
    names = [each for each in given if not each.isdecimal()]
    for seed in [int(each) for each in given if each.isdecimal()] or [SEEDS[0]]:
        for name in names or MAIN:
            folder = next(each / name for each in (ROOT / "checkpoints", ROOT / "runs" / "circuit") if (each / name).is_dir())
            base, tokenizer = surgery.load(str(folder))
            kept = record["seeds"].setdefault(str(seed), {}).setdefault(name, {})
            pairs, units = BASES.get(name, (32, 2))
            probe = make_probe("kv", tokenizer, pairs=pairs, keys="seen")
            ranking = None
            for way in (*OTHER, *(("overlap", *WAYS) if name in MAIN and seed == SEEDS[0] else ())):
                if way in kept:
                    continue
                options = surgery.Locate(roles=0, options={"pairs": pairs})
                ranking = ranking or surgery.locate(base, tokenizer, probe.questions(128, seed), options)
                choice = surgery.PlanOptions(heads=units, gate=1.0, keep_skills=way.startswith("fitted"))
                if way == "scalar 0.5":
                    choice = surgery.PlanOptions(heads=units, gate=0.5, share=None)
                unseen = probe.questions(128, seed + 10_007)
                plan = surgery.choose(base, tokenizer, ranking, choice, surgery.Data(), seed=seed, questions=unseen)
                of = base, tokenizer, plan
                kept[way] = overlap(*of, seed) if way == "overlap" else measure(*of, way, seed)
                write_text(RECORD, json.dumps(record, indent=1) + "\n")
    page = RECORD.with_name("README.md")
    before, _, rest = page.read_text().partition(BEGIN)
    write_text(page, f"{before}{BEGIN}\n\n{table(record['seeds'])}\n{rest[rest.index(chr(10) * 2 + '#') :]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
