"""Falcon-H1 (arXiv 2507.22448): in every layer a Mamba-2 mixer and attention side by side."""

from typing import Any

from torch import Tensor
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1ForCausalLM, FalconH1Mixer

from surgery.families.mamba2 import Mamba2Family
from surgery.hybrids.stock_hybrid import stock_hybrid
from surgery.more.hybrids.falcon_h1_mixer import FalconH1SSDMixer


class FalconH1Family(Mamba2Family):
    def projection(self, mixer: Any) -> tuple[Tensor, Tensor | None]:
        """With what its rows are multiplied by: the graft's have no such numbers."""
        weight, bias = super().projection(mixer)
        multipliers = mixer.mup_vector[0, 0].to(weight)
        return weight * multipliers[:, None], None if bias is None else bias * multipliers

    def cut(self, mixer: Any, kept: Tensor) -> dict[str, Tensor]:
        """With the multipliers of the rows that are left."""
        rows, _ = self.left(mixer, kept)
        return super().cut(mixer, kept) | {"mup_vector": mixer.mup_vector[..., rows]}


FAMILY = FalconH1Family(stock_hybrid(FalconH1ForCausalLM, FalconH1Mixer, FalconH1SSDMixer))
