"""Good inputs, tiny, of every kind: models, tokenizers, rankings, plans, hybrids, patches, reports, texts, facts, and folders
of finished runs. They are made by the commands themselves."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

from surgery.world.text import document
from tests.campaign.trial import attempt

ROOT = Path(__file__).parents[2]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# A recipe with which every verb ends within seconds.
SMALL: dict[str, Any] = {
    "model": "base",
    "seed": 0,
    "data": {"train_text": "world", "held_out_text": "world", "facts": "facts.jsonl"},
    "locate": {"probe": "kv", "options": {"pairs": 4}, "examples": 4, "exact": False, "layers": False, "batch_size": 4,
               "seeds": 1},
    "plan": {"kind": "head", "heads": 1, "blend": 0.5},
    "tune": {"steps": 1, "batch_size": 2, "text_tokens": 16,
             "lessons": [{"probe": "kv", "options": {"pairs": [2, 4]}, "queries": 2, "weight": 1.0}],
             "text_batch_size": 1, "kl_weight": 1.0, "learning_rate": 0.003, "save_steps": 50,
             "warmup_steps": 1},
    "bench": {"suites": ["quick"], "pairs": [4], "unseen_pairs": [4], "limit": 4, "windows": 2, "window": 16, "contexts": [16],
              "batches": [1], "batch_size": 4, "controls": False, "random_sites": 1},
}  # fmt: skip


def make(folder: Path) -> None:
    """Make them all in a folder."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    for name, model in _models(json.loads((ROOT / "checkpoints/tiny-mamba2/config.json").read_text())["vocab_size"]).items():
        model.save_pretrained(folder / name)
        for file in TOKENIZER:
            shutil.copy(ROOT / "checkpoints/tiny-mamba2" / file, folder / name / file)
    _texts(folder)
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL, sort_keys=False))
    with_recipe = ("--recipe", "small.yaml")
    for arguments in (
        ("locate", "base", "--out", "located", *with_recipe),
        ("plan", "located/ranking.json", "--out", "plan.json"),
        ("splice", "base", "plan.json", "--out", "hybrid", "--verify", "tensors"),
        ("export", "hybrid", "--format", "patch", "--out", "patch", "--verify", "tensors"),
        ("bench", "base", "hybrid", "--out", "benched", *with_recipe),
        ("tune", "hybrid", "--out", "tuned", "--verify", "tensors", *with_recipe),
    ):
        outcome = attempt(arguments, folder)
        if outcome.status or outcome.wrong:
            raise SystemExit(f"{' '.join(arguments)}: {outcome.wrong}\n{outcome.said}\n{outcome.printed}")
    _arrays(folder)


def _models(vocabulary: int) -> dict[str, Any]:
    common = {"vocab_size": vocabulary, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "bos_token_id": 0,
              "eos_token_id": 0}  # fmt: skip
    state = {"state_size": 8, "tie_word_embeddings": True}
    return {
        "base": Mamba2ForCausalLM(Mamba2Config(**common, **state, num_heads=4, head_dim=16, n_groups=1, chunk_size=16)),
        "mamba": MambaForCausalLM(MambaConfig(**common, **state)),
        "donor": LlamaForCausalLM(LlamaConfig(**common, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32)),
    }


def _texts(folder: Path) -> None:
    rng = random.Random("campaign texts")
    documents = [document(rng, held_out=False) for _ in range(40)]
    (folder / "text.txt").write_text("\n".join(documents))
    (folder / "held-out.txt").write_text("\n".join(document(rng, held_out=True) for _ in range(10)))
    rows = [{"text": text, "n": i} for i, text in enumerate(documents)]
    for name in ("text.jsonl", "text.json"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.csv").write_text("text,n\n" + "".join(f'"{row["text"]}",{row["n"]}\n' for row in rows))
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "text.parquet")
    capitals = (ROOT / "surgery/probes/capitals.jsonl").read_text().splitlines()[:12]
    (folder / "facts.jsonl").write_text("\n".join(capitals) + "\n")


def _arrays(folder: Path) -> None:
    """The ranking once more as one with many heads: its scores in a file of arrays beside it."""
    from surgery.locating import ranked_heads as module
    from surgery.locating.ranking import Ranking

    ranking = Ranking.read(folder / "located/ranking.json")
    many, module.MANY = module.MANY, 2
    try:
        ranking.write(folder / "arrays/ranking.json")
    finally:
        module.MANY = many
