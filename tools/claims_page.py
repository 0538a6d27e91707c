"""What README.md and docs/evidence/index.md claim, with every number from a record."""

import json
import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from surgery.evaluation import markdown
from surgery.evaluation.judgement import did_it_help
from surgery.evaluation.report import Report
from surgery.evaluation.results import HITS, value
from surgery.records.recipe import read_recipe
from surgery.studies import Findings, windows
from surgery.studies.cohort import KNOWLEDGE, SAME_LAYER, UNSEEN, WELL
from surgery.studies.seeds import BASE, CONTROL, SEED, TEXT
from surgery.studies.ways import DEFAULT, common_gains, costs
from tools import fresh_bases as fresh
from tools import unseen_words
from tools.copy_cache import CopyCache
from tools.estimate_check import Check
from tools.foreign_words import ForeignWords
from tools.recall import CACHED
from tools.recall_places import ADAPTERS, ELSEWHERE, GRAFTS, LOCATED, TUNED, RecallPlaces
from tools.recall_places import RECORD as PLACES

RECIPES = Path(__file__).parent.parent / "recipes"
SHOWN, PRICE, PART, NOT, LOSS = "shown", "shown, at a price", "in part", "not shown", "a loss, shown"
OUTPUT = ("base", "spliced", "tuned", "control_tuned", "control_same_layer_tuned")  # the last is the strongest control
# In unseen-words: grafts tuned on many words, and what is left out in its rivals.
VARIED, FIXED, ALONE = (
    kind + how + unseen_words.LONGER
    for kind, how in (
        (unseen_words.VARIED, unseen_words.ADAPTERS), (unseen_words.FIXED, unseen_words.ADAPTERS),
        (unseen_words.VARIED, unseen_words.ALONE),
    )
)  # fmt: skip
WITHOUT_GRAFT = {"control_tuned": "tuned without a graft", "control_lora_tuned": "LoRA without a graft"}


def report(name: str) -> Report:
    return Report.read(RECIPES / f"{name}.report.json")


def findings(name: str) -> Findings:
    return Findings.read(RECIPES / f"{name}.findings.json")


def of(record: Report, model: str, task: str) -> float:
    """A model's result at a task."""
    return value(record.models[model].results()[task])


def rows_of(record: Findings) -> dict[str, dict[str, float]]:
    """Row -> figure -> value."""
    return {row.what: {name: value(figure) for name, figure in row.figures.items()} for row in record.rows}


def over_seeds(record: Findings, model: str, figure: str) -> list[float]:
    """One value a seed."""
    return [figures[figure] for row, figures in rows_of(record).items() if row.startswith(f"{model}{SEED}")]


def source(record: Report | Findings, file: str) -> str:
    """Which record, of which version and day."""
    made = record.provenance
    return f"[{file.partition('.')[0]}](../../recipes/{file}), {made.toolkit}, {made.created[:10]}"


def claims() -> str:
    """The table of claims."""
    parts: tuple[Callable[[], Sequence[str]], ...] = (
        _demo, _auto, lambda: _ways("ways", "#the-built-in-bases", "{} toys"),
        lambda: _ways("ways-cohort", "#bases-trained-without-the-layer-0-curriculum", "{} bases of the cohort"),
        lambda: _ways("ways-prose", "#prose", "tiny-names, five novels"),
        _fresh, _seeds, _mamba1, _deltanet, _kda, _mlstm, _cohort, _seed2, _lengths, _transformer, _state,
        _windows, _text, _places, _words, _varied,
        lambda: _letters("letters-choice", "without bounds", LOSS), lambda: _letters("letters-kept", "within bounds", SHOWN),
        lambda: _letters("letters-kept-mamba1", "within bounds, Mamba-1", SHOWN),
        _skills, _target,
    )  # fmt: skip
    return markdown.table(["claim", "scope", "best control", "record", "verdict"], [list(part()) for part in parts])


def _windows() -> list[str]:
    record = findings("windows-four")
    count, groups = windows.half(record), len(record.about["groups"])
    (row,) = windows.rows_of(record, windows.WINDOWS, count)
    drawn = [value(each.figures[windows.CHANGE]) for each in windows.rows_of(record, windows.RANDOM, count)]
    change, held = value(row.figures[windows.CHANGE]), record.about["plans"]
    share = held[row.what]["attention"] / held[windows.BASE]["attention"]
    return [
        f"[Windows for {count} of {groups} attention heads](windows.md) of a small hybrid keep {share:.2f} of the attention's "
        f"cache, and change retrieval by {change:+.3f}",
        "2 attention layers, 32 pairs, 1 seed",
        f"windows at random heads, {len(drawn)} draws: {min(drawn):+.3f} to {max(drawn):+.3f}",
        source(record, "windows-four.findings.json"), SHOWN if windows.kept(row) and max(drawn) < change else LOSS,
    ]  # fmt: skip


def _kv(name: str, pairs: int, keys: str = "kv.") -> tuple[Report, str]:
    record = report(name)
    base, tuned = (of(record, model, f"{keys}{pairs}") for model in ("base", "tuned"))
    return record, f"{base:.3f} to {tuned:.3f}"


def _controls(record: Report, task: str) -> str:
    """The control that comes closest to the tuned model."""
    best = _closest(record, task)
    return f"{_titled(best)}: {of(record, best, task):.3f}"


def _closest(record: Report, task: str) -> str:
    return max((name for name in record.models if name.startswith("control")), key=lambda name: of(record, name, task))


def _titled(control: str) -> str:
    if control in WITHOUT_GRAFT:
        return WITHOUT_GRAFT[control]
    where = "at other heads of the layer" if "same_layer" in control else "in other layers"
    return f"graft {where}{', tuned' if control.endswith('_tuned') else ''}"


def _demo() -> list[str]:
    record, change = _kv("demo", 64)
    letters = " to ".join(f"{of(record, model, 'letters'):.3f}" for model in ("base", "tuned"))
    return [
        f"[Two gated heads](demo.md) raise retrieval from 64 pairs from {change}, with keys not used in tuning from "
        f"{_kv('demo', 64, 'kv_unseen.')[1]}; letters {letters}",
        f"`{Path(record.provenance.base).name}`, 1 seed",
        _controls(record, "kv.64"), source(record, "demo.report.json"), SHOWN,
    ]  # fmt: skip


def _auto() -> list[str]:
    record, change = _kv("demo-auto", 64)
    return [
        f"[Heads, gate and steps chosen by measuring](demo.md#heads-gate-and-steps-chosen-by-measuring): {change}",
        "`tiny-mamba2`, 1 seed", _controls(record, "kv.64"), source(record, "demo-auto.report.json"), SHOWN,
    ]  # fmt: skip


def _ways(name: str, anchor: str, toys: str) -> list[str]:
    record = findings(name)
    gains = {way: common_gains(record.rows, way) for way in ("attribution", DEFAULT, "layer", "random")}
    mean = {way: statistics.fmean(values) for way, values in gains.items()}
    passes = {way: sum(costs(record.about, way)[:2]) for way in ("attribution", DEFAULT)}
    bases = {base: about for base, about in record.about.items() if DEFAULT in about["cost"]}
    seeds = {about["seeds"] for about in bases.values()}
    gained = "nats saved on recall hits" if name == "ways-prose" else "unseen keys"
    return [
        f"[Attribution](ways.md{anchor}) chooses as well as {DEFAULT} at {passes['attribution'] / passes[DEFAULT]:.0%} of the "
        f"passes: {gained} {mean['attribution']:+.3f} and {mean[DEFAULT]:+.3f}",
        f"{len(gains[DEFAULT])} cases on {toys.format(len(bases))}, {', '.join(map(str, seeds))} seeds",
        f"random heads of the same layer: {mean['layer']:+.3f}; of all: {mean['random']:+.3f}",
        source(record, f"{name}.findings.json"), SHOWN,
    ]  # fmt: skip


def _fresh() -> list[str]:
    record = fresh.FreshBases.read(fresh.RECORD, unsealed="refuse")
    ran = [base for base in record.bases.values() if base.runs]
    chosen = sorted(base.runs[fresh.CHOSEN].figures[fresh.SEEN].accuracy for base in ran)
    behind = max(gap for base in ran for gap in fresh.behind_hand_set(base.runs).values())
    return [
        f"[`surgery run MODEL`, nothing set](ways.md#bases-never-seen-before): 64 pairs {chosen[0]:.3f} to {chosen[-1]:.3f}",
        f"{len(ran)} bases, seeds never used; {len(record.bases) - len(ran)} more declined",
        f"best hand-set recipe: better by at most {max(0.0, behind):.3f}",
        f"[fresh-bases](../../recipes/fresh-bases.json), {record.toolkit}, {record.created[:10]}", SHOWN,
    ]  # fmt: skip


def _five(name: str, title: str, way: str, pairs: int, verdict: str, more: str = "") -> list[str]:
    record, task = findings(name), f"kv.{pairs}"
    low, high = min(over_seeds(record, way, task)), max(over_seeds(record, CONTROL, task))
    base = max(over_seeds(record, BASE, task))
    return [
        f"[{title}](mixers.md): {pairs} pairs from at most {base:.3f} to at least {low:.3f}{more}",
        f"`{Path(record.provenance.base).name}`, {len(over_seeds(record, way, task))} seeds",
        f"tuned without a graft: at most {high:.3f}", source(record, f"{name}.findings.json"), verdict,
    ]  # fmt: skip


def _seeds() -> list[str]:
    return _five("seeds", "The gain holds on other seeds", "distil", 64, SHOWN)


def _mamba1() -> list[str]:
    return _five("seeds-mamba1", "Mamba-1", "tuned", 64, SHOWN)


def _mlstm() -> list[str]:
    return _five("seeds-mlstm", "mLSTM", "tuned", 32, SHOWN)


def _deltanet() -> list[str]:
    return _paid("seeds-deltanet", "Gated DeltaNet")


def _kda() -> list[str]:
    return _paid("seeds-kda", "Kimi Delta Attention")


def _paid(name: str, title: str) -> list[str]:
    return _five(name, title, "tuned", 64, PRICE, f"; loss on text rises by {price(name)} nats")


def price(name: str) -> str:
    """What tuning on several seeds costs on text."""
    worse = over_seeds(findings(name), "tuned", TEXT)
    return f"{min(worse):.2f} to {max(worse):.2f}"


def cohort_counts(task: str = "kv.64", model: str = "tuned") -> int:
    """How many models of the cohort reach WELL. A model that does not retrieve reaches it nowhere."""
    return sum(
        figures.get(task, 0) >= WELL for row, figures in rows_of(findings("cohort")).items() if row.endswith(f": {model}")
    )


def cohort_costs() -> tuple[float, float]:
    """By how much letters and knowledge fall at most, in the bases of the cohort that were edited."""
    rows = rows_of(findings("cohort"))
    tuned = {row.removesuffix(": tuned"): figures for row, figures in rows.items() if row.endswith(": tuned")}
    letters = max(rows[f"{name}: base"]["letters"] - figures["letters"] for name, figures in tuned.items())
    return max(0.0, letters), max(0.0, *(-figures[KNOWLEDGE] for figures in tuned.values()))


def _cohort() -> list[str]:
    record = findings("cohort")
    return [
        f"[Models trained without the layer-0 curriculum](cohort.md): {cohort_counts()} of {len(record.about)} reach "
        f"{WELL:.2f} at 64 pairs, {cohort_counts(f'{UNSEEN}64')} with keys not used in tuning",
        "toys of several shapes, LoRA and hints, 1 seed", f"graft at other heads of the layer, tuned: "
        f"{cohort_counts(model=SAME_LAYER)} reach it", source(record, "cohort.findings.json"), PART,
    ]  # fmt: skip


def _seed2() -> list[str]:
    record = findings("seed2")
    rows = rows_of(record)
    base, tuned = rows["seed-2: base"], rows["seed-2: tuned"]
    control = max(figures["kv.64"] for row, figures in rows.items() if row.startswith("seed-2: control"))
    return [
        f"[Retrieval spread over layers](cohort.md#retrieval-spread-over-layers): {base['kv.64']:.3f} to {tuned['kv.64']:.3f}, "
        f"with keys not used in tuning {tuned[f'{UNSEEN}64']:.3f}", "one such toy, LoRA and hints, 1 seed",
        f"of all controls: {control:.3f}", source(record, "seed2.findings.json"), PART,
    ]  # fmt: skip


def _lengths() -> list[str]:
    record, task = report("lengths"), "needle.2048.50"
    return [
        f"[Longer than the training text](lengths.md): a needle in 2,048 tokens from {of(record, 'base', task):.3f} to "
        f"{of(record, 'tuned', task):.3f}", "one toy trained on short texts, 1 seed", _controls(record, task),
        source(record, "lengths.report.json"), SHOWN,
    ]  # fmt: skip


def _transformer() -> list[str]:
    record = findings("retrieval-aware")
    rows = rows_of(record)
    none, four, random = (rows[name]["kv.16"] for name in ("no head kept", "4 heads kept", "4 heads at random"))
    return [
        f"[A Transformer's retrieval heads kept](transformer.md) while the rest becomes Mamba-2: 16 pairs, no head {none:.3f}, "
        f"4 heads {four:.3f}", "`tiny-llama`, 1 seed", f"4 heads in random layers: {random:.3f}",
        source(record, "retrieval-aware.findings.json"), SHOWN,
    ]  # fmt: skip


def _state() -> list[str]:
    record = findings("state-size")
    rows = rows_of(record)
    whole, half = (rows[f"tuned, state of {size}"]["kv.64"] for size in (16, 8))
    alone = rows["base, state of 8"]["kv.64"]
    return [
        f"[Half of the state, with grafts](state.md): 64 pairs {half:.3f}; with the whole state {whole:.3f}",
        "`tiny-mamba2`, 1 seed", f"base with half of its state: {alone:.3f}", source(record, "state-size.findings.json"), PART,
    ]  # fmt: skip


def _text() -> list[str]:
    record, task = report("books"), f"{HITS}.4096"
    base, tuned = of(record, "base", task), of(record, "tuned", task)
    random = of(record, "control_random_site_tuned", task)
    cache = copy_cache().cached[task].value
    return [
        f"[Prose](text.md), an added copy mechanism: loss on repeated rare bigrams from {base:.2f} to {tuned:.2f} nats",
        "`tiny-books`, 1 seed, 1 novel",
        f"untrained n-gram cache: {cache:.2f}; grafts at random places: {random:.2f}", source(record, "books.report.json"), NOT,
    ]  # fmt: skip


def recall_places() -> tuple[str, RecallPlaces]:
    """Rows of twice the tokens of the base's training, and the record."""
    record = RecallPlaces.read(PLACES, unsealed="refuse")
    return list(record.tokens)[1], record


def _saves(name: str) -> float:
    """Nats on repeated rare bigrams, the mean over novels."""
    length, record = recall_places()
    return -record.change[name][length][HITS].mean.value


def _places() -> list[str]:
    length, record = recall_places()
    novels = len(next(iter(record.beyond.values()))[length].novels)
    return [
        f"[Prose, a base that has to recall](text.md#a-base-that-has-to-recall): grafts at the located heads save "
        f"{_saves(GRAFTS + LOCATED + TUNED):.2f} nats on repeated rare bigrams (untrained {_saves(GRAFTS + LOCATED):.2f})",
        f"`tiny-names`, 1 seed, {novels} novels",
        f"untrained n-gram cache {_saves(CACHED):.2f}; adapters alone {_saves(ADAPTERS):.2f}; grafts in other layers, tuned "
        f"{_saves(GRAFTS + ELSEWHERE + TUNED):.2f}",
        f"[recall-places](../../recipes/recall-places.json), {record.toolkit}, {record.created[:10]}", PART,
    ]  # fmt: skip


def copy_cache() -> CopyCache:
    return CopyCache.read(RECIPES / "copy-cache.json", unsealed="refuse")


def words() -> ForeignWords:
    return ForeignWords.read(RECIPES / "foreign-words.json", unsealed="refuse")


def _words() -> list[str]:
    record = words()
    base, hybrid = (record.accuracy[name]["foreign"]["16"].accuracy for name in ("base", "hybrid"))
    return [
        f"[Keys from outside the base's pretraining](demo.md#keys-from-outside-the-pretraining): 16 pairs {base:.3f} to "
        f"{hybrid:.3f}", "the demo's hybrid", "none", f"[foreign-words](../../recipes/foreign-words.json), "
        f"{record.toolkit}, {record.created[:10]}", NOT,
    ]  # fmt: skip


def _unknown_words(model: str) -> list[float]:
    """How many words that a base does not know a model of tools/unseen_words.py reads, one value a base."""
    record = unseen_words.UnseenWords.read(unseen_words.RECORD, unsealed="refuse")
    return [by_model[model][unseen_words.UNKNOWN].accuracy for by_model in record.accuracy.values()]


def _varied() -> list[str]:
    record = unseen_words.UnseenWords.read(unseen_words.RECORD, unsealed="refuse")
    before, after = _unknown_words(unseen_words.BASE), _unknown_words(VARIED)
    rivals = {"examples of 64 words": FIXED, "no graft": ALONE}
    return [
        f"[Examples of many words](cohort.md#words-and-forms-that-no-example-holds), grafts and adapters, {record.steps[1]} "
        f"steps: words that the base does not know, {record.pairs} pairs, {statistics.fmean(before):.3f} to "
        f"{statistics.fmean(after):.3f} ({min(after):.3f} to {max(after):.3f})",
        f"{len(after)} bases of the cohort, 1 seed",
        "; ".join(f"{name}: {statistics.fmean(_unknown_words(model)):.3f}" for name, model in rivals.items()),
        f"[unseen-words](../../recipes/unseen-words.json), {record.toolkit}, {record.created[:10]}", PART,
    ]  # fmt: skip


def _skills() -> list[str]:
    bounded, free = rows_of(findings("skills")), rows_of(findings("skills-unbounded"))
    bases = [row.partition(": ")[0] for row in bounded if row.endswith(": base")]

    def gains(rows: dict[str, dict[str, float]]) -> list[float]:
        return [rows[f"{name}: tuned"]["kv.64"] - rows[f"{name}: base"]["kv.64"] for name in bases]

    def fall(rows: dict[str, dict[str, float]]) -> float:
        return max(rows[f"{name}: base"]["letters"] - rows[f"{name}: tuned"]["letters"] for name in bases)

    share = min(ours / theirs for ours, theirs in zip(gains(bounded), gains(free), strict=True))
    others = sorted(bounded[f"{name}: {SAME_LAYER}"]["kv.64"] for name in bases)
    return [
        f"[Within bounds](letters.md#bases-that-answer-letters) letters fall by at most {max(0.0, fall(bounded)):.3f} "
        f"(unbounded: {fall(free):.3f}), and at least {100 * share:.0f}% of the gain at 64 pairs stays",
        f"{len(bases)} bases, 1 seed each", f"graft at other heads of the layer, tuned: {others[0]:.3f} to {others[-1]:.3f}",
        source(findings("skills"), "skills.findings.json"), SHOWN,
    ]  # fmt: skip


def _target() -> list[str]:
    rows = rows_of(findings("letters-target"))
    edited = [row.partition(": ")[0] for row in rows if row.endswith(": tuned")]
    changes = [rows[f"{name}: tuned"]["letters"] - rows[f"{name}: base"]["letters"] for name in edited]
    bases = [row for row in rows if row.endswith(": base")]
    return [
        f"[Letters as the target](letters.md#lettered-choice-as-the-target): a change of {min(changes):+.3f} to "
        f"{max(changes):+.3f} on {len(edited)} bases, no plan on {len(bases) - len(edited)}",
        f"{len(bases)} bases, 1 seed each", "the same tuning without a graft: no gain either",
        source(findings("letters-target"), "letters-target.findings.json"), NOT,
    ]  # fmt: skip


def _letters(name: str, way: str, said: str) -> list[str]:
    record, change = _kv(name, 64)
    before, after = (of(record, model, "letters") for model in ("base", "tuned"))
    control = _closest(record, "kv.64")
    return [
        f"[Another skill of the same head](letters.md), {way}: 64 pairs {change}, letters {before:.3f} to {after:.3f}",
        f"`{record.provenance.base}`, 1 seed", f"{_controls(record, 'kv.64')}; letters {of(record, control, 'letters'):.3f}",
        source(record, f"{name}.report.json"), said,
    ]  # fmt: skip


# README.md


def picture() -> str:
    """The demo's picture under its message."""
    record = report("demo")
    assert record.plan is not None
    heads = sum(len(site.heads) for site in record.plan.sites)
    base, tuned = (of(record, model, "kv.64") for model in ("base", "tuned"))
    plain, elsewhere = (of(record, model, "kv.64") for model in ("control_tuned", "control_same_layer_tuned"))
    cost = {name: record.models[name].cost[-1] for name in ("base", "tuned")}
    cache, time = ({name: each.cache_bytes / 1024 for name, each in cost.items()},
                   {name: each.milliseconds for name, each in cost.items()})  # fmt: skip
    shape = json.loads((RECIPES.parent / "checkpoints" / record.provenance.base / "config.json").read_text())
    of_all = shape["num_heads"] * shape["num_hidden_layers"]
    letters = [of(record, model, "letters") for model in ("base", "tuned")]
    message = f"Attention at {heads} of {of_all} heads raises retrieval from 64 pairs from {base:.2f} to {tuned:.2f}"
    made = record.provenance
    return f"""**{message}**

![{message}](recipes/demo.retrieval.png)

The attention is mixed in behind a gate that begins at {record.plan.blend} and is learned. The same tuning without a graft \
ends at {plain:.3f}, and with grafts at random other heads of the layer at {elsewhere:.3f}. Another skill, lettered \
questions, stays: {letters[0]:.3f} before, {letters[1]:.3f} after. The price: after {cost["base"].context:,} tokens the \
cache holds {cache["tuned"]:,.0f} KiB instead of {cache["base"]:,.0f} and grows with the text, and a token takes \
{time["tuned"]:.1f} ms instead of {time["base"]:.1f}. \
Measured {made.created[:10]} by version {made.toolkit} (`recipes/demo.report.json`)."""


def output() -> str:
    """What `make record` prints at the end, abridged."""
    record = report("demo")
    tasks = {"KV 16": "kv.16", "KV 64": "kv.64", "knowledge": "knowledge", "letters": "letters", "perplexity": "perplexity"}
    lines = [f"{'model':<25}" + "".join(f"{name:>12}" for name in tasks)]
    lines += [f"{name:<25}" + "".join(f"{_result(record, name, task):>12.3f}" for task in tasks.values()) for name in OUTPUT]
    answer = textwrap.fill(did_it_help(record), 100)
    text = "\n".join([*lines, "...", answer, "", "Report: runs/record/report.html (and .md, .json)"])
    return f"```text\n{text}\n```\n\n{_demo_words(record)}"


def _result(record: Report, name: str, task: str) -> float:
    if task == "perplexity":
        perplexity = record.models[name].perplexity
        assert perplexity is not None
        return perplexity.value
    return of(record, name, task)


def _demo_words(record: Report) -> str:
    seconds, asked = sum(record.timings.values()), read_recipe(RECIPES / "demo-short.yaml").bench.limit
    return (
        f"KV n: accuracy on dictionaries of n pairs (chance 1/n). spliced: grafted and not tuned. control_tuned: the same "
        f"tuning without a graft. control_same_layer_tuned: grafts at random other heads of the layer. The record took "
        f"{seconds:.0f} seconds on {record.provenance.machine.partition(', ')[2]}, with other work on them. "
        f"`make demo` writes to `runs/demo` and asks {asked} questions a cell instead of {record.settings['limit']:,}, for "
        "wider intervals and the same answer."
    )


def status() -> str:
    """What is shown, in part, and not."""
    free, kept = (report(name) for name in ("letters-choice", "letters-kept"))
    edited = sum(row.endswith(": tuned") for name in ("skills", "skills-shapes") for row in rows_of(findings(name)))
    foreign = words().accuracy
    least_unknown, *_, most_unknown = sorted(_unknown_words(VARIED))
    stopped = sum("stopped" in each for each in findings("cohort").about.values())
    least = min(over_seeds(findings("seeds"), "distil", "kv.64"))
    most = max(over_seeds(findings("seeds"), CONTROL, "kv.64"))
    return f"""\
- **Shown** on toy models (Mamba-2, Mamba-1, mLSTM): the gain in retrieval, on five seeds each. Mamba-2 reaches {least:.3f} or \
more at 64 pairs; tuned without a graft it reaches {most:.3f} at most.
- **Shown at a price** on toys of Gated DeltaNet and Kimi Delta Attention: loss on text rises by {price("seeds-deltanet")} and \
{price("seeds-kda")} nats.
- **In part**: of {len(findings("cohort").about)} toys trained without our layer-0 curriculum, {cohort_counts()} reach \
{WELL:.2f} at 64 pairs; {cohort_counts(f"{UNSEEN}64")} do with keys not used in tuning; random heads of the same layer \
reach it in {cohort_counts(model=SAME_LAYER)}. Letters, near chance there, fall by at most {cohort_costs()[0]:.3f}, \
knowledge by {cohort_costs()[1]:.3f}; on {stopped} no plan keeps the other skills.
- **Shown** on toys that answer lettered questions ({edited} of Mamba-2, one of Mamba-1): an edit within bounds keeps them \
({of(kept, "base", "letters"):.3f} to {of(kept, "tuned", "letters"):.3f} on one). Without bounds \
{of(free, "tuned", "letters"):.3f} is left there.
- **In part** on prose: on a toy that has to recall, grafts at the located heads save {_saves(GRAFTS + LOCATED + TUNED):.2f} \
nats on repeated rare bigrams, at random heads of other layers {_saves(GRAFTS + ELSEWHERE + TUNED):.2f}; but adapters alone \
save {_saves(ADAPTERS):.2f}, an untrained n-gram cache {_saves(CACHED):.2f}. Where a base hardly recalls, nothing is shown.
- **Hardly shown** for words that the base does not know: {foreign["base"]["foreign"]["16"].accuracy:.3f} to \
{foreign["hybrid"]["foreign"]["16"].accuracy:.3f} at 16 pairs. Tuned with adapters on examples of many words, \
{least_unknown:.3f} to {most_unknown:.3f} at 64 pairs on five toys.
- **Not measured**: published checkpoints, and GPUs (the GPU kernels have run in an interpreter only)."""


def shape_of_130m() -> str:
    """What is known of mamba2-130m."""
    record = Check.read(RECIPES / "estimates.json")
    case = record.cases["mamba2-130m"]
    made = case.environment or record.environment
    work = " of processor time" if (case.clock or record.clock) == "cpu" else ""
    return (
        f"The checkpoint itself was never measured: not its retrieval, nor what an edit gains. A model of its shape with "
        f"random weights went through a small version of the whole job in {case.whole.seconds[1] / 60:.0f} minutes{work} and "
        f"{case.whole.memory[1] / 2**30:.1f} GiB on {made.machine.partition(', ')[2]} "
        f"(`recipes/estimates.json`, version {made.toolkit})."
    )
