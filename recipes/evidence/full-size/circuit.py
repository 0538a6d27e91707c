"""Does `locate` name the heads of a small model that is hidden in one of mamba2-130m's shape, and in what time?

    python recipes/evidence/full-size/circuit.py      tiny-skills in 24 layers of 24 heads, about 10 minutes of two cores

The layers, heads, channels and states of the small model take places in the large one that are drawn at random; all other
layers have random weights that say little. So it is known which heads have a role. Writes circuit.json and the table of
README.md.
"""

import json
import os
import platform
import random
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import surgery
from surgery.automatic import estimate
from surgery.look import look
from surgery.probes import make_probe
from surgery.records.recipe import make_recipe
from surgery.runtime.files import read_text, write_text

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[3]
BASE, SEED, QUESTIONS, NOISE = "tiny-skills", 0, 64, 0.0005
ASKED = {"retrieval": ("kv", {"pairs": 16})}
SHAPE = {"hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "state_size": 128, "vocab_size": 50288}
BEGIN = "<!-- filled by circuit.py -->"


@torch.no_grad()
def hide(small: Any, seed: int) -> tuple[Any, dict[str, str]]:
    """A model of SHAPE that answers as the small one does, and the names of the small one's heads and layers in it."""
    rng, own, own_config = random.Random(seed), small.state_dict(), small.config
    torch.manual_seed(seed)
    large = Mamba2ForCausalLM(Mamba2Config(**SHAPE, n_groups=1, tie_word_embeddings=True)).eval()
    config, weights, names = large.config, large.state_dict(), dict[str, str]()
    inner, own_inner = config.num_heads * config.head_dim, own_config.num_heads * own_config.head_dim
    narrow = (own_config.hidden_size / config.hidden_size) ** 0.5  # a mean of squares over more channels, of which most are 0

    def put(name: str, value: torch.Tensor, *places: torch.Tensor | slice) -> None:
        weights[name].zero_()
        target = weights[name]
        grid = [p if isinstance(p, torch.Tensor) else torch.arange(target.shape[i])[p] for i, p in enumerate(places)]
        target[torch.meshgrid(*grid, indexing="ij")] = value

    hidden = torch.tensor(sorted(rng.sample(range(config.hidden_size), own_config.hidden_size)))
    put("backbone.embeddings.weight", own["backbone.embeddings.weight"], slice(own_config.vocab_size), hidden)
    put("backbone.norm_f.weight", own["backbone.norm_f.weight"] * narrow, hidden)
    layers = sorted(rng.sample(range(config.num_hidden_layers), own_config.num_hidden_layers))
    for layer in range(config.num_hidden_layers):
        mixer = f"backbone.layers.{layer}.mixer"
        if layer not in layers:
            weights[f"{mixer}.out_proj.weight"].normal_(std=NOISE)
            continue
        source, old = layers.index(layer), f"backbone.layers.{layers.index(layer)}"
        heads = torch.tensor(sorted(rng.sample(range(config.num_heads), own_config.num_heads)))
        states = torch.tensor(sorted(rng.sample(range(config.state_size), own_config.state_size)))
        names |= {f"L{source}.H{number}": f"L{layer}.H{int(head)}" for number, head in enumerate(heads)} | {
            f"L{source}": f"L{layer}"
        }
        channels = (heads[:, None] * config.head_dim + torch.arange(own_config.head_dim)).flatten()
        convolved = torch.cat([channels, inner + states, inner + config.state_size + states])
        rows = torch.cat([channels, inner + convolved, 2 * inner + 2 * config.state_size + heads])
        put(f"backbone.layers.{layer}.norm.weight", own[f"{old}.norm.weight"] * narrow, hidden)
        put(f"{mixer}.in_proj.weight", own[f"{old}.mixer.in_proj.weight"], rows, hidden)
        put(f"{mixer}.conv1d.weight", own[f"{old}.mixer.conv1d.weight"], convolved, slice(1), slice(None))
        put(f"{mixer}.conv1d.bias", own[f"{old}.mixer.conv1d.bias"], convolved)
        put(f"{mixer}.norm.weight", own[f"{old}.mixer.norm.weight"] * (own_inner / inner) ** 0.5, channels)
        put(f"{mixer}.out_proj.weight", own[f"{old}.mixer.out_proj.weight"], hidden, channels)
        for name in ("dt_bias", "A_log", "D"):
            put(f"{mixer}.{name}", own[f"{old}.mixer.{name}"], heads)
    return large, names


def locate(model: Any, tokenizer: Any, what: str) -> tuple[Any, float, float]:
    """The circuit of a model, seconds, and seconds of processor time."""
    probe, options = ASKED[what]
    questions = make_probe(probe, tokenizer, **options).questions(QUESTIONS, SEED)
    begun = time.perf_counter(), time.process_time()
    ranking = surgery.locate(model, tokenizer, questions, surgery.Locate(probe=probe, options=options))
    return ranking.circuit, time.perf_counter() - begun[0], time.process_time() - begun[1]


def main() -> None:
    small, tokenizer = surgery.load(str(ROOT / "checkpoints" / BASE))
    large, names = hide(small, SEED)
    recipe = make_recipe({"model": BASE, "locate": {"examples": QUESTIONS, "options": ASKED["retrieval"][1]}}, BASE)
    said = estimate(recipe, look(large, tokenizer, name=BASE)).seconds["locate"]
    entry = {
        "base": BASE,
        "shape": SHAPE,
        "questions": QUESTIONS,
        "seed": SEED,
        "noise": NOISE,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "versions": {package: version(package) for package in ("mamba-surgery", "torch", "transformers")}
        | {"python": platform.python_version()},
        "names": names,
        "estimated_seconds": said,
        "measured": {},
    }
    for what in ASKED:
        circuit, seconds, processor = locate(large, tokenizer, what)
        entry["measured"][what] = {
            "seconds": seconds,
            "processor_seconds": processor,
            "large": circuit.model_dump(mode="json"),
            "small": locate(small, tokenizer, what)[0].model_dump(mode="json"),
        }
        write_text(HERE / "circuit.json", json.dumps(entry, indent=1) + "\n")
    rows = ["| asked | minutes, processor minutes | the small model alone | hidden in the large one |", "|---|---|---|---|"]
    for what, found in entry["measured"].items():
        times = f"{found['seconds'] / 60:.1f}, {found['processor_seconds'] / 60:.1f}"
        rows.append(f"| {what} | {times} | {found['small']['sentence']} | {found['large']['sentence']} |")
    said = f"Estimated, for retrieval: {entry['estimated_seconds'] / 60:.1f} minutes."
    where = ", ".join(f"{name} became {place}" for name, place in names.items() if "H" not in name)
    page = read_text(HERE / "README.md")
    page = page[: page.index(BEGIN) + len(BEGIN)]
    write_text(HERE / "README.md", "\n".join([page, "", *rows, "", f"{said} Layers: {where}.", ""]))


if __name__ == "__main__":
    main()
