"""A module for each kind of picture or page. evaluation/views.py says what it holds and when it is called."""
