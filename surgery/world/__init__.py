"""The small world: a generated language whose text, facts, dictionaries and questions train and test the built-in models."""
