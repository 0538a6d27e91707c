"""surgery check"""


def check() -> None:
    """Is a model's state right?"""
