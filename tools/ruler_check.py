"""RULER's prompts and answers beside those of lm-evaluation-harness' own generators, example by example.

    pip install wonderwords nltk && python -m nltk.downloader punkt_tab
    python -m tools.ruler_check TEXT

With the real packages, and TEXT, a file of English prose, where the harness would download essays. It writes
recipes/ruler.json, and nothing where an example differs. Tests make the same comparison with few words.
"""

import argparse
import importlib
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from surgery.more.probes.ruler import MAGIC, WRITTEN
from surgery.probes import make
from surgery.records.record import Environment, Sealed, environment

ROOT = Path(__file__).parent.parent
RECORD, MODEL = ROOT / "recipes" / "ruler.json", ROOT / "checkpoints" / "tiny-books"
LENGTHS, EXAMPLES, SEED = (4096, 8192), 20, 7
PACKAGES = ("transformers", "lm_eval", "wonderwords", "nltk")
# Task -> the harness's module, and the function in it.
GENERATORS = {
    **{name: ("niah_utils", name) for name in MAGIC},
    "ruler_vt": ("vt_utils", "get_vt_dataset"),
    "ruler_cwe": ("cwe_utils", "get_cw_dataset"),
    "ruler_fwe": ("fwe_utils", "fwe_download"),
}
MODULES = ("common_utils", "prepare_niah", "niah_utils", "vt_utils", "cwe_utils", "fwe_utils")


class RulerCheck(Sealed, Environment):
    """equal: task -> length -> how many examples were made, and are the same, prompt and answers. words: of the text."""

    seed: int
    words: int
    tokenizer: str
    equal: dict[str, dict[str, int]]


def harness_examples(tokenizer: Any, text: list[str], task: str, length: int, seed: int, n: int) -> list[dict[str, Any]]:
    """What the harness's generator makes, as when a process begins; n of its 500 examples. text: words, for its essays."""
    for name in MODULES:  # what they draw once, they draw again
        sys.modules.pop(f"lm_eval.tasks.ruler.{name}", None)
    modules: dict[str, Any] = {name: importlib.import_module(f"lm_eval.tasks.ruler.{name}") for name in MODULES}
    for name in ("niah_utils", "vt_utils", "cwe_utils", "fwe_utils", "prepare_niah"):
        modules[name].get_tokenizer = lambda name: tokenizer
        modules[name].tqdm = lambda items, desc="": items[:n]
    own = modules["prepare_niah"].get_haystack
    modules["niah_utils"].get_haystack = lambda type_haystack: text if type_haystack == "essay" else own(type_haystack)
    random.seed(f"{task} {length} {seed}")
    np.random.seed(seed)
    module, function = GENERATORS[task]
    return [*getattr(modules[module], function)(tokenizer="x", max_seq_lengths=[length])["test"]]


def prompt_of(example: dict[str, Any], task: str) -> str:
    """As the harness joins the parts of an example."""
    return example["input"] + ("\n\n" if task == "ruler_cwe" else " ") + example["gen_prefix"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    source = parser.parse_args().text
    tokenizer, words = AutoTokenizer.from_pretrained(MODEL), source.read_text().split()
    equal: dict[str, dict[str, int]] = {}
    for task in WRITTEN:
        for length in LENGTHS:
            probe = make("ruler", tokenizer=tokenizer, task=task, length=length, source=str(source), words="wonderwords")
            ours = [(each.prompt, [*each.answers]) for each in probe.writings(EXAMPLES, SEED)]  # type: ignore[union-attr]
            theirs = harness_examples(tokenizer, words, task, length, SEED, EXAMPLES)
            if ours != [(prompt_of(each, task), each["outputs"]) for each in theirs]:
                raise SystemExit(f"{task} of {length:,} tokens differs")
            equal.setdefault(task, {})[str(length)] = len(ours)
            print(f"{task}, {length:,} tokens: {len(ours)} examples are the same", flush=True)
    here = environment(PACKAGES)
    RulerCheck(**here.model_dump(), seed=SEED, words=len(words), tokenizer=MODEL.name, equal=equal).write(RECORD)


if __name__ == "__main__":
    main()
