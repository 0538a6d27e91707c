"""The 128 common words that serve as dictionary keys. One list for the probe and for the world that trains the tiny models."""

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
