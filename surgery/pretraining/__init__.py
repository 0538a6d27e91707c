"""Trains the built-in reference models on the small world."""
