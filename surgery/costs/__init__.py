"""What a run will cost: time, memory and disk of each stage, from measured samples of the functions that do it."""
