"""Nemotron-H (arXiv 2504.03624): one mixer a layer, Mamba-2, attention, an MLP or experts."""

from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHForCausalLM, NemotronHMamba2Mixer

from surgery.families.mamba2 import Mamba2Family
from surgery.hybrids.ssd_mixer import SSDMixer
from surgery.hybrids.stock_hybrid import stock_hybrid

FAMILY = Mamba2Family(stock_hybrid(NemotronHForCausalLM, NemotronHMamba2Mixer, SSDMixer))
