"""The report as tables that a newcomer understands: for the terminal, report.md and the model card."""

import re
from pathlib import Path

from surgery.evaluation.automatic import automatic_choices, rounds
from surgery.evaluation.judgement import UNSEEN, did_it_help, heading, verdict
from surgery.evaluation.results import HITS, OTHERS, ModelReport, Results, count, needle_tasks, value
from surgery.evaluation.suites import families as shown
from surgery.evaluation.suites import wholes
from surgery.records.names import in_markdown, one_line
from surgery.records.plan import Plan
from surgery.records.site import shortened
from surgery.runtime.memory import size
from surgery.statistics import written

EXPLANATION = """\
KV n: accuracy of key-value retrieval from a dictionary of n pairs (chance 1/n); unseen keys: words not used in
tuning. Knowledge: facts asked as cloze. Letters: the same facts as multiple choice. Perplexity: on held-out text."""

HITS_EXPLANATION = """\
Recall hits: tokens of text that complete a pair of tokens which occurred before in the same row and is rare elsewhere
(bench.rare). Other tokens: all others. Lower is better. Rows of all lengths are cut from the same text; longer ones hold hits
from farther back."""


def rows(report: Results) -> tuple[list[str], list[list[str]]]:
    """Header and one row a model. Probes of several sizes have tables of their own, key-value retrieval its columns here, with
    keys not used in tuning at the largest size, and so has a suite as a whole (RULER)."""
    results = [*report.base.results()]
    largest = [task for task in results if _family(task) == UNSEEN][-1:]
    tasks = [task for task in results if _family(task) == "kv"] + largest
    tasks += [task for task in results if _family(task) in (task, *wholes())]
    header = ["model", *map(heading, tasks)]
    return header, [[name, *(_cell(model, task) for task in tasks)] for name, model in report.models.items()]


def table(header: list[str], body: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "|".join("---" for _ in header) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)])


def named_table(header: list[str], body: list[list[str]]) -> str:
    """A table whose rows begin with names, and whose columns may have such, of any characters."""
    rows = [[in_markdown(name), *(one_line(cell).replace("|", "\\|") for cell in cells)] for name, *cells in body]
    return table([*map(in_markdown, header)], rows)


def sites_text(plan: Plan) -> str:
    """Where a plan's grafts are, counted where there are too many to name, what of the state is left if not all of it, and its
    windows."""
    cut = next((f", the state cut to {len(groups[0])} dimensions" for groups in plan.kept_state.values()), "")
    windows = "" if plan.windows is None else str(plan.windows)
    return ", and ".join(filter(None, [shortened(plan.sites) + cut, windows]))


def with_pictures_of(folder: Path, text: str) -> str:
    """Markdown without those of its pictures that are not in the folder."""
    return re.sub(r"!\[[^]]*\]\(([^)]+)\)\n*", lambda found: found[0] if (folder / found[1]).exists() else "", text)


def results(report: Results) -> str:
    """The main table and what its rows are."""
    described = "\n".join(
        f"- **{in_markdown(name)}**: {in_markdown(model.description)}" + (f" ({sites_text(model.plan)})" if model.plan else "")
        for name, model in report.models.items()
    )
    quick = report.base.perplexity
    header, body = rows(report)
    main = [named_table(header, body)] if len(header) > 1 else []  # its columns may all be tables of their own
    parts = [*main, *([EXPLANATION] if quick else []), described]
    return "\n\n".join(parts) + "\n"


def render(report: Results) -> str:
    """report.md."""
    provenance = report.provenance
    base = report.base
    parts = [
        f"# {in_markdown(provenance.base)}: base and hybrid compared\n", f"{_names_escaped(did_it_help(report), report)}\n",
        results(report), *_found(report),
        *_swept(report),
    ]  # fmt: skip
    changed = {name: model for name, model in report.models.items() if model.change}
    if changed:
        tasks = list(next(iter(changed.values())).change)
        body = [[name, *(str(model.change[task]) for task in tasks)] for name, model in changed.items()]
        header = ["model", *(unit(task) for task in tasks)]
        parts.append(f"## Paired difference to the base, same examples, 95% intervals\n\n{named_table(header, body)}\n")
    parts += _verdicts(changed)
    if base.kv:
        parts.append("![Retrieval against dictionary size](retrieval.png)\n")
    parts += _cost(report)
    if cells := serving(report):
        parts.append(f"## In a serving engine\n\n{named_table(*cells)}\n\n{served(report)}\n")
    parts += _weights(report)
    packages = ", ".join(f"{name} {version}" for name, version in provenance.packages.items())
    timings = ", ".join(f"{stage} {seconds:.0f} s" for stage, seconds in report.timings.items())
    peaks = ", ".join(f"{stage} {size(peak)}" for stage, peak in report.memory.items())
    counts = sorted({count(result) for result in base.results().values()})
    examples = f"{' to '.join(str(n) for n in {counts[0]: 0, counts[-1]: 0})} examples a cell; " if counts else ""
    parts.append(
        f"## Provenance\n\nMade {provenance.created} by mamba-surgery {provenance.toolkit} on {provenance.machine} "
        f"({provenance.threads_in_words}); seed {provenance.seed}; {examples}{packages}. Base fingerprint "
        f"`{provenance.base_fingerprint[:16]}`.\n"
        + (f"\nTime: {timings}.\n" if timings else "")
        + (f"\nProcessor time: {sum(report.cpu.values()):.0f} s in all.\n" if report.cpu else "")
        + (f"\nPeak memory: {peaks}.\n" if peaks else "")
    )
    return "\n".join(parts)


def _names_escaped(text: str, report: Results) -> str:
    """A sentence in which models are named."""
    for name in report.models:
        text = text.replace(name, in_markdown(name)) if in_markdown(name) != name else text
    return text


def _found(report: Results) -> list[str]:
    """What the run found by itself."""
    if not (words := automatic_choices(report)):
        return []
    cells = rounds(report)
    return [f"## What was found by measuring\n\n{words}\n" + (f"\n{named_table(*cells)}\n" if cells else "")]


def _verdicts(changed: dict[str, ModelReport]) -> list[str]:
    body = [
        [name, heading(task), str(model.change[task]), verdict(task, model.change[task], said)]
        for name, model in changed.items()
        for task, said in model.evidence.items()
    ]
    if not body:
        return []
    return [
        "## What the differences say\n\n"
        f"{named_table(['model', 'task', 'difference to the base', 'verdict'], body)}\n\n"
        f"Verdicts at 5% for all {len(body)} comparisons together (Holm), by McNemar's exact test for right and wrong answers "
        "and the paired t-test, corrected for skewness, for losses and scores. Intervals are not corrected: of twenty without "
        "a true difference, about one excludes 0. Where the interval excludes 0 and the correction fails, the verdict is "
        "'perhaps'. A difference that n was enough to see is found in four of five measurements. .02 nats of loss are 2% of "
        "perplexity.\n"
    ]


def _swept(report: Results) -> list[str]:
    """A table for every probe of several sizes."""
    families: dict[str, list[str]] = {}
    for task in report.base.tasks:
        if (family := _family(task)) != task:
            families.setdefault(family, []).append(task)
    parts = []
    for family, tasks in families.items():
        if family in wholes() or (family == UNSEEN and len(tasks) == 1):
            continue  # it has its column in the main table
        body = [[name, *(_cell(model, task) for task in tasks)] for name, model in report.models.items()]
        sizes = [task.removeprefix(f"{family}.").replace(".", " at ") for task in tasks]
        header = ["tokens" if family in shown() and shown()[family].unit == "tokens" else "size", *sizes]
        if family == "needle":
            header = ["tokens at depth", *(f"{size}%" for size in sizes)]
        title = family.replace("_", " ")
        if family in (HITS, OTHERS):
            header, title = ["tokens of a row", *sizes], f"Loss on {title} of held-out text, nats per token"
        parts.append(f"## {title}\n\n{named_table(header, body)}\n")
    if HITS in families:
        parts.append(f"{HITS_EXPLANATION}\n\n![Loss on recall hits](hits.png)\n")
    several = (shown()[family].picture for family, tasks in families.items() if family in shown() and len(tasks) > 1)
    parts += [f"![{caption}]({file})\n" for file, caption in dict.fromkeys(filter(None, several))]
    if any(len(lengths) > 1 for lengths in needle_tasks(report.base.tasks).values()):
        parts.append("![Retrieval against the length of the prompt](lengths.png)\n")
    return parts


def _cost(report: Results) -> list[str]:
    """What decoding costs, beside what was gained for it."""
    first, *others = report.models.values()
    parts = []
    if first.cost:
        body = [
            [name, *(f"{c.milliseconds:.2f} ms, {c.cache_bytes / 1024:.0f} KiB" for c in model.cost)]
            for name, model in report.models.items()
        ]
        header = ["model", *(f"{cost.context} tokens" for cost in first.cost)]
        parts.append(
            f"## Cost: time per decoded token and cache, batch 1\n\n{named_table(header, body)}\n\n![Cost](cost.png)\n"
        )
    if first.cost and first.kv and others:
        size, longest = list(first.kv)[-1], first.cost[-1]
        body = [
            [
                name,
                str(model.change[f"kv.{size}"]),
                f"{(model.cost[-1].cache_bytes - longest.cache_bytes) / 1024:+.1f} KiB",
                f"{model.cost[-1].milliseconds - longest.milliseconds:+.2f} ms",
            ]
            for name, model in list(report.models.items())[1:]
        ]
        header = ["model", f"KV {size}", f"cache at {longest.context} tokens", "time per token there"]
        parts.append(f"## Gain and cost, against the base\n\n{named_table(header, body)}\n")
    if first.speed:
        body = [
            [
                name, str(s.context), str(s.batch), f"{s.prefill_milliseconds:.1f} ms", f"{s.decode_milliseconds:.2f} ms",
                f"{s.cache_bytes / 1024:.0f} KiB", f"{s.peak_bytes / 2**20:.1f} MiB",
            ]
            for name, model in report.models.items()
            for s in model.speed
        ]  # fmt: skip
        header = ["model", "tokens", "batch", "prefill", "one more token", "cache", "memory of the prefill"]
        parts.append(f"## Speed and memory\n\n{named_table(header, body)}\n\n![Speed](speed.png)\n")
    return parts


def serving(report: Results) -> tuple[list[str], list[list[str]]] | None:
    """Header and rows of what the suite `serving` measured; None if it did not."""
    body = [
        [
            name, f"{s.context:,}", str(s.concurrency), f"{s.tokens_per_second:.1f}", f"{s.first_token_milliseconds:.0f} ms",
            f"{s.token_milliseconds:.1f} ms", f"{s.cache_bytes_per_token:,} B", f"{s.state_bytes / 1024:,.0f} KiB",
        ]
        for name, model in report.models.items()
        for s in model.serving
    ]  # fmt: skip
    header = [
        "model", "tokens of a prompt", "requests at a time", "tokens per second", "first token", "each further token",
        "cache per token", "state per request",
    ]  # fmt: skip
    return (header, body) if body else None


def served(report: Results) -> str:
    """How the suite `serving` measured, and in what; empty if it did not."""
    cells = [cell for model in report.models.values() for cell in model.serving]
    if not cells:
        return ""
    packages = ", ".join(f"{name} {version}" for name, version in cells[0].packages.items())
    return (
        f"By the engine's own benchmark client: random prompts, {cells[0].new_tokens} tokens after each, prefixes not cached. "
        "Tokens per second: written, of all requests together. First token, each further token: medians of requests. Cache and "
        f"state: what the engine reserves, in its pages. {packages}."
    )


def _weights(report: Results) -> list[str]:
    """Which weights were measured, and with what."""
    conditions = {name: model.conditions for name, model in report.models.items() if model.conditions is not None}
    if not conditions:
        return []
    body = [[name, f"`{each.model[:16]}`", each.dtype, each.device] for name, each in conditions.items()]
    first = next(iter(conditions.values()))
    kernels = ", ".join(f"{operation} by {backend}" for operation, backend in first.kernels.items())
    return [
        f"## Weights\n\n{named_table(['model', 'digest', 'dtype', 'device'], body)}\n\nKernels: {kernels}. Tokenizer "
        f"`{first.tokenizer[:16]}`, the toolkit's code `{first.code[:16]}`.\n"
    ]


def _family(task: str) -> str:
    """The probe of a task that is one of its sizes; a harness's task is its own."""
    family, dot, size = task.partition(".")
    return family if dot and size.replace(".", "").isdigit() else task


def _cell(model: ModelReport, task: str) -> str:
    return written(value(model.results()[task]))


def unit(task: str) -> str:
    """What differences of a task are in, for the head of a column."""
    return {"perplexity": "loss (nats per token)", "sliding": "sliding loss (nats per token)"}.get(task, heading(task))
