"""A family as another package would add it: one file."""

from transformers import MambaConfig, MambaForCausalLM
from transformers.models.mamba.modeling_mamba import MambaMixer

from surgery.families.mamba import HANDLED, ChannelFamily
from surgery.hybrids.mamba import MambaLanguageModel
from surgery.hybrids.selective_mixer import SelectiveMixer
from surgery.hybrids.stock_hybrid import stock_hybrid


class OutsideConfig(MambaConfig):
    model_type = "outside_mamba"


class OutsideForCausalLM(MambaForCausalLM):
    config_class = OutsideConfig


FAMILY = ChannelFamily(stock_hybrid(OutsideForCausalLM, MambaMixer, SelectiveMixer, MambaLanguageModel), HANDLED)
