"""What README.md promises of the demo, checked against the report that it wrote: python tools/promises.py REPORT

REPORT is of `make demo` or of `make record`; of the shorter one, the order of models has to be that of the record, and its cost
has a bound. What is promised of the base alone is checked against the thousand examples on its card."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
SECONDS, MEMORY = 80, 1.5 * 2**30  # of `make demo`: processor time, and the most that is held at once


def main(path: str) -> int:
    report = json.loads(Path(path).read_text())
    record = json.loads((ROOT / "recipes" / "demo.report.json").read_text())
    checks = of_both(report) | (
        of_the_record(report) if "control_random_site" in report["models"] else of_the_demo(report, record)
    )
    for promise, kept in checks.items():
        print("kept  " if kept else "BROKEN", promise)
    failed = sum(not kept for kept in checks.values())
    print(f"{len(checks) - failed} passed, {failed} failed")
    return failed > 0


def kv(report: dict[str, Any], name: str, pairs: int) -> float:
    return report["models"][name]["kv"][str(pairs)]["accuracy"]


def of_both(report: dict[str, Any]) -> dict[str, bool]:
    models = report["models"]

    def unseen_gain() -> float:
        tuned, base = (models[name]["tasks"]["kv_unseen.64"]["accuracy"] for name in ("tuned", "base"))
        return tuned - base

    def knowledge_lost(name: str) -> float:
        return models["base"]["knowledge"]["accuracy"] - models[name]["knowledge"]["accuracy"]

    def perplexity_ratio(name: str) -> float:
        return models[name]["perplexity"]["value"] / models["base"]["perplexity"]["value"]

    def letters_lost(name: str) -> float:
        return models["base"]["letters"]["accuracy"] - models[name]["letters"]["accuracy"]

    card = json.loads((ROOT / "checkpoints" / report["provenance"]["base"] / "measured.json").read_text())
    heads = sum(len(site.split(".H")[1].split(",")) for site in report["plan"]["sites"])
    gain = kv(report, "tuned", 64) - kv(report, "base", 64)
    return {
        "at most two heads are grafted": heads <= 2,
        "base: KV 8 at least .85": card["kv.8"]["accuracy"] >= 0.85,
        "base: KV 32 at most .70": card["kv.32"]["accuracy"] <= 0.70,
        "base: KV 64 at most .35": card["kv.64"]["accuracy"] <= 0.35,
        "base: knowledge at least .95": card["knowledge"]["accuracy"] >= 0.95,
        "base: letters at least .95": card["letters"]["accuracy"] >= 0.95,
        "spliced, untrained: KV 64 rises by at least .15": kv(report, "spliced", 64) - kv(report, "base", 64) >= 0.15,
        "tuned with unseen keys: at least three quarters of the gain": unseen_gain() >= 0.75 * gain,
        **{f"{name}: perplexity rises by at most 2%": perplexity_ratio(name) <= 1.02 for name in ("spliced", "tuned")},
        **{f"{name}: knowledge falls by at most .01": knowledge_lost(name) <= 0.01 for name in ("spliced", "tuned")},
        **{f"{name}: letters fall by at most .01": letters_lost(name) <= 0.01 for name in ("spliced", "tuned")},
    }


def of_the_record(report: dict[str, Any]) -> dict[str, bool]:
    models = report["models"]
    located, elsewhere = models["spliced"]["kv"]["32"], models["control_random_site"]["kv"]["32"]
    return {
        "spliced, untrained: above the random site, outside the intervals": located["ci95"][0] > elsewhere["ci95"][1],
        "tuned: KV 64 at least .90": kv(report, "tuned", 64) >= 0.90,
        **{
            f"{name}: KV 64 at most .60": kv(report, name, 64) <= 0.60 for name in ("control_tuned", "control_same_layer_tuned")
        },
        "at least 500 examples a cell": all(
            cell["n"] >= 500 for m in models.values() for cell in (*m["kv"].values(), m["knowledge"], m["letters"])
        ),
    }


def of_the_demo(report: dict[str, Any], record: dict[str, Any]) -> dict[str, bool]:
    models = report["models"]
    known = {name: record["models"][name]["kv"]["64"]["ci95"] for name in models}
    apart = [(low, high) for low in known for high in known if known[low][1] < known[high][0]]
    tuned, control = models["tuned"]["kv"]["64"], models["control_tuned"]["kv"]["64"]
    return {
        "the heads are those of the record": report["plan"]["sites"] == record["plan"]["sites"],
        "KV 64: models that the record tells apart are in its order": all(
            kv(report, low, 64) < kv(report, high, 64) for low, high in apart
        ),
        "tuned: KV 64 above the control, outside the intervals": tuned["ci95"][0] > control["ci95"][1],
        f"at most {SECONDS} seconds of processor time": sum(report["cpu"].values()) <= SECONDS,
        f"peak memory below {MEMORY / 2**30} GiB": max(report["memory"].values()) < MEMORY,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
