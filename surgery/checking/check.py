"""`surgery check`: whether the state of a recurrent or hybrid model is right, however the model is run.

Nothing is written but a temporary folder, and nothing foreign runs, unless it is asked for.
"""

import importlib
import json
import math
import platform
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from surgery.checking.law import Finding, Law, subject_of
from surgery.checking.shrink import make_model, random_model, read_config, shrink
from surgery.errors import UserError
from surgery.kernels.explain import Sizes
from surgery.modeling.graft import GraftMixer
from surgery.runtime.listing import list_modules
from surgery.runtime.processes import threads_for
from surgery.runtime.progress import say
from surgery.splicing.splice import adopt

ORDER = ("wrong", "refused", "right", "not applicable")
WIDE = 2**31  # bytes in float64 up to which a model is checked in it


@dataclass(frozen=True)
class CheckReport:
    """What the laws have found about one model, worst first. seconds: of processor time, without imports."""

    model: str
    architecture: str
    dtype: str
    versions: dict[str, str]
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def wrong(self) -> list[Finding]:
        """The laws that are broken."""
        return [finding for finding in self.findings if finding.verdict == "wrong"]

    def table(self) -> str:
        """What the command prints."""
        counts = [f"{sum(f.verdict == verdict for f in self.findings)} {verdict}" for verdict in ORDER]
        lines = [f"{self.model} ({self.architecture}, {self.dtype}): {', '.join(counts)}", ""]
        width = max(len(finding.law) for finding in self.findings)
        for finding in self.findings:
            right, apart = finding.verdict == "right", ""
            if finding.verdict in ("wrong", "right") and math.isfinite(finding.difference):
                apart = f"{finding.difference:.1e} {'<=' if right else '>'} {finding.bound:.1e}"
            where = "" if right else finding.where
            lines.append(f"{finding.verdict:<14}  {finding.law:<{width}}  {apart:<20}{where}".rstrip())
            if finding.verdict == "wrong":
                lines.append(f"{'':<14}  {finding.meaning}; instead: {finding.advice}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """Everything, with null for a difference that is not a number."""
        return json.dumps(_plain(asdict(self)), indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check(
    model: PreTrainedModel | str | Path | None = None,
    *,
    architecture: str | Path | None = None,
    full: bool = False,
    only: tuple[str, ...] = (),
    trust_remote_code: bool = False,
    seed: int = 0,
) -> CheckReport:
    """Ask all laws of a model, or of a small random model of an architecture.

    model: a live one, a folder, a Hub id or a patch; a stock folder is opened by transformers' own class, a hybrid by ours.
    architecture: a model type, a config.json, or a folder or Hub id of which only that is read. full: slow laws, too. only:
    names of laws. Raises UserError for what cannot be opened, and for a law that does not exist.
    """
    if (model is None) == (architecture is None):
        raise UserError("check takes a model or an architecture, one of them")
    if unknown := set(only) - set(all_laws()):
        raise UserError(f"there is no law '{sorted(unknown)[0]}'; there are {', '.join(all_laws())}")
    if architecture is not None:
        config = shrink(read_config(architecture, trust_remote_code=trust_remote_code))
        live, name = random_model(config, seed=seed, trust_remote_code=trust_remote_code), f"{architecture}, small and random"
    elif isinstance(model, str | Path):
        live, name = open_model(model, trust_remote_code), str(model)
    else:
        assert model is not None
        live, name = model, type(model).__name__
    begun = time.process_time()
    found = check_laws(live, full=full, only=only)
    return CheckReport(
        model=name,
        architecture=live.config.model_type,
        dtype=found[1],
        versions={package: version(package) for package in ("torch", "transformers")} | {"python": platform.python_version()},
        seconds=round(time.process_time() - begun, 2),
        findings=found[0],
    )


def check_laws(model: PreTrainedModel, *, full: bool = False, only: tuple[str, ...] = ()) -> tuple[tuple[Finding, ...], str]:
    """(the findings, worst first; what the model was run in). full: the slow laws, too. only: these laws instead, by name."""
    size = sum(p.numel() for p in model.parameters())
    subject = subject_of(model, wide=8 * size <= WIDE)
    chosen = [law for name, law in all_laws().items() if (name in only if only else full or not law.slow)]
    findings = list[Finding]()
    with threads_for(size):
        for law in chosen:
            findings.append(law.run(subject))
    findings.sort(key=lambda finding: (ORDER.index(finding.verdict), -finding.difference))
    return tuple(findings), str(subject.dtype).removeprefix("torch.")


def all_laws() -> dict[str, Law]:
    """The laws by the names of their files."""
    names = list_modules("checking/laws", "LAW")
    return {name: importlib.import_module(f"surgery.checking.laws.{name}").LAW for name in names}


def open_source(
    model: str | None, architecture: str | None, trust_remote_code: bool = False
) -> PreTrainedModel | PreTrainedConfig:
    """What can be asked without weights: the configuration; of a hybrid the model, since a small random one has no grafts."""
    if architecture is not None:
        return read_config(architecture, trust_remote_code=trust_remote_code)
    assert model is not None
    if (Path(model) / "patch.json").is_file():
        return open_model(model, trust_remote_code)
    config = read_config(model, trust_remote_code=trust_remote_code)
    return open_model(model, trust_remote_code) if getattr(config, "grafts", None) else config


def read_sizes(source: str, trust_remote_code: bool = False) -> tuple[Sizes, torch.dtype]:
    """The sizes of a model's mixers, and what its weights are in: of a model type, a config.json, a folder or a Hub id. Raises
    UserError for a model that has no mixer of a family here."""
    config = read_config(source, trust_remote_code=trust_remote_code).get_text_config(decoder=True)
    with torch.device("meta"):
        model = adopt(make_model(config, trust_remote_code))
    mixer: Any = next((module for module in model.modules() if isinstance(module, GraftMixer)), None)
    if mixer is None:
        raise UserError(f"a {config.model_type} has no mixer that is computed by kernels of this package")
    if mixer.head_dim == 1:
        sizes = Sizes(0, channels=mixer.num_heads, channel_state=mixer.ssm_state_size)
    else:
        delta = hasattr(mixer, "log_decay")
        sizes = Sizes(mixer.num_heads, mixer.head_dim, mixer.ssm_state_size, mixer.n_groups, delta, channels=0)
    dtype = getattr(torch, str(config.dtype).removeprefix("torch."), None)
    return sizes, dtype or torch.float32


def open_model(name: str | Path, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model in a folder, on the Hub, or in a patch, by the class that its user gets. Raises UserError."""
    from surgery.models import load

    folder = load.find_folder(name)
    if (folder / load.PATCH).is_file() or load.original.is_original(load.read_content(folder)):
        return load.load(name, dtype="stored", device="cpu", trust_remote_code=trust_remote_code).model
    config = load.read_config(folder, trust_remote_code)
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise UserError(f"{name} holds no weights; `surgery check --architecture {name}` asks its configuration alone")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True
        )
    except Exception as error:
        raise UserError(f"cannot load {name}: {load.one_line(error)}") from error
    if lost := sorted(loaded[1]["missing_keys"]):
        raise UserError(f"cannot load {name}: its files lack the weight '{lost[0]}'")
    if unused := sorted(loaded[1]["unexpected_keys"]):
        say(f"{name}: {len(unused)} weights of its files are not used by the model, such as '{unused[0]}'")
    if broken := load.broken_weight(loaded[0]):  # which breaks all laws and no code
        raise UserError(f"cannot use {name}: {broken}")
    return loaded[0].eval()
