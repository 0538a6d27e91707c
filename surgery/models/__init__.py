"""What the toolkit needs to know of any transformers model: its heads, its tokens, whether its numbers are finite."""
