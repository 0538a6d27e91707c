"""What README.md promises of the demo, checked against the report that it wrote: python tools/promises.py REPORT

What is promised of the base alone is checked against the thousand examples on its card, not the fewer ones of the demo."""

import json
import sys
from collections.abc import Callable
from pathlib import Path


def main(path: str) -> int:
    report = json.loads(open(path).read())  # noqa: SIM115
    models = report["models"]

    def kv(name: str, pairs: int) -> float:
        return models[name]["kv"][str(pairs)]["accuracy"]

    def unseen(name: str, pairs: int) -> float:
        return models[name]["tasks"][f"kv_unseen.{pairs}"]["accuracy"]

    def gain(accuracy: Callable[[str, int], float]) -> float:
        return accuracy("tuned", 64) - accuracy("base", 64)

    def knowledge_lost(name: str) -> float:
        return models["base"]["knowledge"]["accuracy"] - models[name]["knowledge"]["accuracy"]

    def perplexity_ratio(name: str) -> float:
        return models[name]["perplexity"]["value"] / models["base"]["perplexity"]["value"]

    card = json.loads((Path(__file__).parent.parent / "checkpoints" / "tiny-mamba2" / "measured.json").read_text())
    located, elsewhere = models["spliced"]["kv"]["32"], models["control_random_site"]["kv"]["32"]
    heads = sum(len(site.split(".H")[1].split(",")) for site in report["plan"]["sites"])
    checks = {
        "at most two heads are grafted": heads <= 2,
        "base: KV 8 at least .85": card["kv.8"]["accuracy"] >= 0.85,
        "base: KV 32 at most .60": card["kv.32"]["accuracy"] <= 0.60,
        "base: KV 64 at most .35": card["kv.64"]["accuracy"] <= 0.35,
        "base: knowledge at least .95": card["knowledge"]["accuracy"] >= 0.95,
        "spliced, untrained: KV 32 rises by at least .15": kv("spliced", 32) - kv("base", 32) >= 0.15,
        "spliced, untrained: above the random site, outside the intervals": located["ci95"][0] > elsewhere["ci95"][1],
        "tuned: KV 64 at least .90": kv("tuned", 64) >= 0.90,
        **{f"{name}: KV 64 at most .60": kv(name, 64) <= 0.60 for name in ("control_tuned", "control_same_layer_tuned")},
        "tuned: with unseen keys at least three quarters of the gain": gain(unseen) >= 0.75 * gain(kv),
        **{f"{name}: knowledge falls by at most .01": knowledge_lost(name) <= 0.01 for name in ("spliced", "tuned")},
        **{f"{name}: perplexity rises by at most 2%": perplexity_ratio(name) <= 1.02 for name in ("spliced", "tuned")},
        "at least 500 examples a cell": all(
            cell["n"] >= 500 for m in models.values() for cell in (*m["kv"].values(), m["knowledge"], m["letters"])
        ),
    }
    for promise, kept in checks.items():
        print("kept  " if kept else "BROKEN", promise)
    failed = sum(not kept for kept in checks.values())
    print(f"{len(checks) - failed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
