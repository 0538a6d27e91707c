"""Falcon-Mamba (arXiv 2410.05355): a Mamba-1 that normalises B, C and dt before the scan."""

from transformers import FalconMambaConfig, FalconMambaForCausalLM

from surgery.families.mamba import HANDLED, SelectiveFamily
from surgery.selective import FalconMambaKernelMixer

FAMILY = SelectiveFamily(FalconMambaConfig, FalconMambaForCausalLM, FalconMambaKernelMixer, HANDLED | {"mixer_rms_eps"})
