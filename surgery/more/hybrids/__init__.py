"""Mixers, and language models around them, of the families in surgery/more/families."""
