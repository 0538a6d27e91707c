"""Further plug-ins, one file each: ways of choosing heads (`ways/`), probes (`probes/`); and what only they need."""
