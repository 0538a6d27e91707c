"""The 128 common words that serve as dictionary keys: of the probes, and of the world that trains the tiny models.

Half of them may stand in lessons. The other half is for bench alone, so that it can ask for keys that tuning never saw.
"""

from typing import Literal

from surgery.errors import UserError

Keys = Literal["all", "lessons", "unseen"]

KEYS = tuple(
    """
    anchor apple arrow badge basket beacon bell bird blanket board boat bone book bottle bowl branch brick bridge broom
    brush bucket button cabin candle carpet castle chain chair chalk cheese circle clock cloud coin collar column copper
    corner cotton cradle crown curtain desk diamond dollar donkey door dragon drawer drum engine fabric feather fence field
    finger flag flame flour flower forest fork fountain garden gate giant glass glove grain hammer harbor helmet hill honey
    horn island jacket kettle kitten ladder lake lantern leaf lemon letter magnet map marble market meadow mirror monkey
    moon motor mountain nail needle ocean olive onion orange oven paper pencil pepper pillow planet plate pocket potato
    rabbit ribbon river rocket saddle sand shadow shovel silver spoon statue stone table temple thunder ticket tower tunnel
    """.split()
)[:128]


def key_words(keys: Keys, count: int) -> tuple[str, ...]:
    """All words, those that lessons may hold, or those that none of them holds. Raises UserError if there are fewer than
    `count`."""
    chosen = {"all": KEYS, "lessons": KEYS[::2], "unseen": KEYS[1::2]}[keys]
    if count > len(chosen):
        raise UserError(f"{count} different words are needed, and keys '{keys}' are {len(chosen)}; take a smaller size")
    return chosen
