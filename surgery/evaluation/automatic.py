"""What a run found by itself, and what that cost: the heads of plan.heads=auto, and the steps of tune.steps=auto."""

from surgery.evaluation.results import Results
from surgery.records.site import Site, shortened
from surgery.runtime.progress import duration


def automatic_choices(report: Results) -> str:
    """In sentences; empty where a recipe said everything."""
    sentences = []
    if report.plan is not None and (growth := report.plan.growth) is not None:
        heads, probe = growth.heads(), growth.probe
        named = ", ".join(shortened([Site.parse(head)]) for head in heads)
        gate = "attention in place of the SSM" if report.plan.blend is None else f"a gate that starts at {report.plan.blend:g}"
        sentences.append(
            f"plan.heads=auto added {len(heads)} head{'s' * (len(heads) != 1)} ({named}) with {gate}. It measured "
            f"{growth.measured} untrained plans, on {probe['examples']} new questions of {probe['name']} and "
            f"{probe['windows']} windows of text, in {duration(growth.seconds)}."
        )
        added = {part for head in heads for part in Site.parse(head).each()}
        if {part for site in report.plan.sites for part in site.each()} != added and growth.rounds:
            few = max((candidate.steps for candidate in growth.candidates), default=0)
            chosen = shortened(report.plan.sites)
            sentences.append(f"Of the plans that were then tuned for {few} steps, {chosen} was chosen, by gain and cache.")
    if (steps := report.training.get("tuned", {}).get("steps")) is not None:
        sentences.append(f"tune.steps=auto took {steps:.0f} steps; the controls took as many.")
    return " ".join(sentences)


def rounds(report: Results) -> tuple[list[str], list[list[str]]] | None:
    """Header and rows: the best of each round, and what it saves."""
    growth = report.plan and report.plan.growth
    if not growth:
        return None
    body = [["(the base)", "", "", f"{growth.accuracy:.3f}", f"{growth.loss:.3f}", "", ""]]
    for each in growth.rounds:
        best = each.trials[each.best]
        low, high = best.saved.ci95
        body.append(
            [
                f"+ {shortened([best.site])}", "" if best.blend is None else f"{best.blend:g}",
                f"{best.saved.value:+.3f} [{low:+.3f}, {high:+.3f}]", f"{best.accuracy:.3f}", f"{best.loss:.3f}",
                f"{best.text_loss:+.4f}", "added" if each.added else "not worth its cache",
            ]
        )  # fmt: skip
    header = ["head", "gate", "saves (nats)", "accuracy", "loss on questions", "loss on text, change", ""]
    return header, body
