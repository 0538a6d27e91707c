"""The formats of an export, for help texts; export.py has the modules that write them."""

DESCRIPTIONS = {
    "hf": "a complete Hugging Face folder, with the modeling code for where this package is not installed",
    "patch": "the grafts alone, and what identifies their base",
    "nemotron_h": "transformers' and vLLM's Nemotron-H; for layer grafts",
    "mamba_ssm": "the original state-spaces folder, for the package mamba_ssm; for layer grafts",
}
