"""The complete Hugging Face folder: weights, tokenizer, modeling code, plan, recipe, report, card.

It is written beside its destination, reloaded from disk, compared with the live model, and only then moved into place.
"""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from surgery.bench.report import Report
from surgery.errors import UserError
from surgery.export.card import card
from surgery.plan import Plan
from surgery.recipe import Recipe

TOLERANCE = 0.0  # the same weights, the same code: nothing may differ


def export(
    hybrid: PreTrainedModel,
    path: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase,
    plan: Plan,
    base: str,
    recipe: Recipe | None = None,
    report: Report | None = None,
    figures: Path | None = None,
) -> float:
    """Write the folder and return the largest difference of logits between the reloaded and the live model (0).

    base: the base's name, for the card. figures: a folder whose report figures travel along. An existing folder at `path` is
    replaced if it is an earlier export. Raises UserError, and leaves nothing behind, if writing or verifying fails.
    """
    path = Path(path)
    if path.exists() and not (path.is_dir() and ((path / "plan.json").exists() or not any(path.iterdir()))):
        raise UserError(f"{path} exists and is not an earlier export; choose another place")
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
        hybrid.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        plan.write(temporary / "plan.json")
        if recipe is not None:
            (temporary / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False))
        if report is not None:
            report.write(temporary / "report.json")
        for name in ("retrieval.png", "atlas.png"):
            if figures is not None and (figures / name).exists():
                shutil.copy(figures / name, temporary / name)
        (temporary / "README.md").write_text(card(path.name, hybrid, plan, base, report, temporary))
        difference = _verify(hybrid, tokenizer, temporary)
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner only
        _move(temporary, path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return difference


@torch.inference_mode()
def _verify(hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> float:
    """Reload from disk and compare logits, on a prompt and on what follows it token by token."""
    reloaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=hybrid.dtype)
    reloaded = reloaded.to(hybrid.device).eval()
    ids = torch.arange(96, device=hybrid.device).view(2, 48) * 31 % len(tokenizer)
    worst = 0.0
    caches = [None, None]
    for piece in (ids[:, :40], ids[:, 40:41], ids[:, 41:]):
        outputs = [m(input_ids=piece, cache_params=c, use_cache=True) for m, c in zip((hybrid, reloaded), caches, strict=True)]
        caches = [output.cache_params for output in outputs]
        worst = max(worst, (outputs[0].logits - outputs[1].logits).abs().max().item())
    if not worst <= TOLERANCE:
        raise UserError(f"the export's logits differ from the live model's by {worst:.3g}; nothing was written")
    return worst


def _move(source: Path, target: Path) -> None:
    """Put `source` at `target`. A folder that is there is moved aside first and removed last."""
    aside = target.with_name(f".{target.name}-old-{os.getpid()}")
    if target.exists():
        os.replace(target, aside)
    os.replace(source, target)
    shutil.rmtree(aside, ignore_errors=True)
