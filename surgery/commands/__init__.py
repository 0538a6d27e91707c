"""What single commands do that no job needs: looking, choosing a recipe, comparing finished models, tuning one, the table,
publishing."""
