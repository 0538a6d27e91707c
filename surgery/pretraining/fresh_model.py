"""The model of a recipe before any step; and whether it can be trained here at all, which is tried at once."""

import math
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from surgery.errors import UserError
from surgery.loading.hub import one_line
from surgery.models.anatomy import anatomy
from surgery.pretraining.mixer_starts import start_mixers
from surgery.pretraining.recipe import PretrainRecipe
from surgery.records.plan import Plan
from surgery.records.reading import shown
from surgery.splicing.load import load
from surgery.splicing.splice import adopt, install

TOKENS = 64  # of the row that is tried where the recipe does not say how long rows are


def fresh_model(recipe: PretrainRecipe, words: int, end: int | None) -> PreTrainedModel:
    """In float32, with random weights or those of `start`. words: entries of the tokenizer, and end: the one that ends a text.
    Raises UserError for fields that fit no model, and for a start that cannot be loaded."""
    if recipe.start is not None:
        assert recipe.corpus is not None
        model = load(recipe.start, tokenizer=recipe.corpus.tokenizer, dtype="float32").model
        embeddings: Any = model.get_input_embeddings()
        if words > (rows := len(embeddings.weight)):
            raise UserError(f"start: {recipe.start} knows {rows:,} tokens, and the tokenizer has {words:,}")
        if getattr(model.config, "grafts", None):
            raise UserError(f"start: {recipe.start} is a hybrid; `surgery tune` trains grafts")
        return model
    fields = dict(recipe.architecture)
    kind = fields.pop("model_type", None)
    if not (isinstance(kind, str) and kind in CONFIG_MAPPING):
        raise UserError(f"architecture: transformers knows no model_type {shown(kind)}; mamba2 is one")
    vocabulary = -(-words // 16) * 16
    special = {f"{name}_token_id": end for name in ("pad", "bos", "eos")}
    try:
        config = AutoConfig.for_model(kind, vocab_size=vocabulary, **special, **fields)
        model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # whatever a model's own code makes of sizes that do not fit
        raise UserError(f"architecture: no model can be made of this: {one_line(error)}") from error
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=recipe.embedding_std)
        for mixer in (part for part in model.modules() if hasattr(part, "in_proj") and hasattr(part, "out_proj")):
            for linear in (mixer.in_proj, mixer.out_proj):
                torch.nn.init.kaiming_uniform_(linear.weight, a=math.sqrt(5))
            mixer.out_proj.weight /= math.sqrt(config.num_hidden_layers)
            if isinstance(mixer, Mamba2Mixer):  # transformers' own start is 1, 2, 3, ... by head
                mixer.A_log.uniform_(1, 16).log_()
        start_mixers(model)
    if recipe.attention:
        return install(model, Plan(kind="layer", sites=recipe.attention, width=recipe.attention_head_dim, seed=recipe.seed))
    return model


def check_architecture(recipe: PretrainRecipe, source: str = "") -> None:
    """Raise UserError for a model that cannot be made, read a row of its training, or be measured. source: what the message
    begins with."""
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(recipe.seed)
            model: PreTrainedModel = adopt(fresh_model(recipe, 2, 0))
            anatomy(model)
            layers = getattr(model.base_model, "layers", None)
            if layers is None or not hasattr(model, "lm_head"):
                raise UserError(f"architecture: a {model.config.model_type} cannot be trained here: its layers are not found")
            if recipe.teacher is not None and not hasattr(model.base_model, "final_layernorm"):
                raise UserError(
                    f"teacher: the layers of a {model.config.model_type} cannot learn from one; those of llamba can"
                )
            tokens = recipe.corpus.tokens if recipe.corpus is not None else TOKENS
            try:
                model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
            except Exception as error:  # whatever a model's own code makes of sizes that do not fit
                raise UserError(f"architecture: the model cannot read {tokens} tokens: {one_line(error)}") from error
    except UserError as error:
        raise UserError(f"{source}: {error}" if source else str(error)) from error
