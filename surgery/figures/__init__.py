"""Figures, and the page of a report. The core writes JSON and Markdown, and finds what else shows them by listing `views`."""
