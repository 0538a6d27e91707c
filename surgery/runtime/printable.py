"""Text of others, such as names of folders and models, on a terminal."""

import re

STEERING = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text without characters that steer a terminal, or turn the direction in which it is read."""
    return STEERING.sub("\N{REPLACEMENT CHARACTER}", text)
