"""Reads checkpoints: Hugging Face folders, original state-spaces folders, hybrids and patches; and their digests."""
