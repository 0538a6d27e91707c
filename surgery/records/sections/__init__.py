"""The sections of a recipe, one file for what belongs together. Import them from surgery.records.recipe."""
