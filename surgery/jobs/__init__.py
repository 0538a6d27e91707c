"""Whole jobs from one recipe: the main job, a comparison, and the folders that they leave."""
