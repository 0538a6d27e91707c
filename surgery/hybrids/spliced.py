"""What the language models of all hybrids have, whatever their mixers are (stock_hybrid.py)."""

import copy
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from surgery.hybrids.parts import fetched_state
from surgery.hybrids.patching import has_note, note_of, set_note
from surgery.hybrids.sources import write_sources
from surgery.hybrids.switching import grafts_off
from surgery.hybrids.windows import is_window


class Spliced:
    """A mixin before a stock language model."""

    # Where mamba-surgery is installed. recall reads what `surgery` is to be for a model that transformers loaded; saving gives
    # a place to write to, and moves what was written to the folder that was asked for, over nothing that is the user's.
    recall: ClassVar[Any] = None
    saving: ClassVar[Any] = None

    def __repr__(self: Any) -> str:
        """In a line where its grafts are. Its backbone shows its modules."""
        if not self.config.grafts:
            return super().__repr__()
        windows = [f"L{spec['layer']}" for spec in self.config.grafts if is_window(spec)]
        grafts = [spec for spec in self.config.grafts if not is_window(spec)]
        heads = (f".H{','.join(map(str, graft['heads']))}" if graft.get("heads") else "" for graft in grafts)
        sites = "; ".join(f"L{graft['layer']}{each}" for graft, each in zip(grafts, heads, strict=True))
        parts = [f"attention at {sites}"] * bool(grafts) + [f"windows in {', '.join(windows)}"] * bool(windows)
        return f"<{type(self).__name__}: {', '.join(parts)}; print(hybrid.base_model) shows its modules>"

    @property
    def device(self: Any) -> torch.device:
        """Where the inputs belong; also of a model whose weights accelerate keeps elsewhere and fetches."""
        if (here := next((p.device for p in self.parameters() if not p.is_meta), None)) is not None:
            return here
        for module in self.modules():
            device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
            if device is not None:
                return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return torch.device("meta")

    @property
    def surgery(self: Any) -> Any:
        """What was done to the base: its plan, and the base's name and fingerprint. None for a model without grafts, and where
        mamba-surgery is not installed."""
        if not has_note(self, "surgery") and self.config.grafts and self.recall is not None:
            set_note(self, "surgery", self.recall())
        return note_of(self, "surgery")

    def disable_grafts(self) -> AbstractContextManager[None]:
        """`with hybrid.disable_grafts(): ...`: meanwhile the hybrid computes what its base computes, bit for bit. Raises
        UserError for a layer graft that was loaded from a folder, which does not hold what the graft replaced, and for a hybrid
        with a smaller state than its base's."""
        return grafts_off(self)

    def print_trainable_parameters(self: Any) -> None:
        """Say how many parameters have a gradient, as PEFT does."""
        trainable, total = self.num_parameters(only_trainable=True), self.num_parameters()
        print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {100 * trainable / total:.4f}")

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in transformers, with the modeling code and, where `surgery` knows them, plan.json and base.json. tokenizer=...
        goes into the same folder. A file that is there and that this did not write stays: then UserError names it, and nothing
        is written."""
        if self.saving is None:
            self.write_pretrained(save_directory, *args, **kwargs)
            return
        if kwargs.get("push_to_hub"):
            kwargs.setdefault("repo_id", Path(save_directory).name)
        with self.saving(save_directory, kwargs.get("is_main_process", True)) as place:
            self.write_pretrained(place, *args, **kwargs)

    def write_pretrained(self: Any, save_directory: Any, *args: Any, tokenizer: Any = None, **kwargs: Any) -> None:
        """What save_pretrained writes, into a folder that is nobody's."""
        if getattr(self, "is_quantized", False):  # transformers 5.23 cannot save again what it read as integers, otherwise
            kwargs.setdefault("save_original_format", False)
        if not hasattr(self, "hf_device_map") and any(p.is_meta for p in self.parameters()):  # else transformers fetches them
            kwargs.setdefault("state_dict", fetched_state(self))
        super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        write_sources(save_directory, type(self))
        if self.surgery is not None:
            self.surgery.write(save_directory)
        if tokenizer is not None:
            without_code(tokenizer).save_pretrained(save_directory)

    def _push_to_hub(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. base.json then names the base without its place on this machine."""
        remembered = self.surgery
        if remembered is not None:
            set_note(self, "surgery", remembered.published())
        try:
            return super().push_to_hub(*args, **kwargs)  # type: ignore[misc]
        finally:
            if remembered is not None:
                set_note(self, "surgery", remembered)

    push_to_hub: Any = _push_to_hub  # mypy would compare it with what transformers puts together when it is imported


def classes_of(module: str, name: str) -> dict[str, str]:
    """What an `auto_map` holds. module: the file of the classes; name: what their names begin with."""
    return {
        "AutoConfig": f"{module}.{name}Config",
        "AutoModel": f"{module}.{name}Model",
        "AutoModelForCausalLM": f"{module}.{name}ForCausalLM",
    }


def register(config: Any, backbone: Any, language_model: Any) -> None:
    """Tell transformers the classes of a hybrid."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, backbone, exist_ok=True)
    AutoModelForCausalLM.register(config, language_model, exist_ok=True)


def without_code(tokenizer: Any) -> Any:
    """The tokenizer, without the code that its settings name: of a stock class it has not run here, and never is to. That of a
    class of its own, which somebody has consented to, transformers copies into the folder."""
    tokenizer = copy.copy(tokenizer)
    settings = getattr(tokenizer, "init_kwargs", {})
    tokenizer.init_kwargs = {name: value for name, value in settings.items() if name != "auto_map"}
    return tokenizer


def written(model: Any) -> Any:
    """The method of any model that writes it into a folder that is nobody's."""
    return getattr(model, "write_pretrained", model.save_pretrained)
