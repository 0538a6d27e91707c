"""Reads checkpoints: Hugging Face folders and those in other layouts, hybrids and patches; and their digests."""
