"""What a run will cost, before it costs: each stage's time, memory and disk, from measured samples of the functions that do it."""
