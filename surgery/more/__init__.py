"""Further plug-ins of the core, one file each, and what only they need: ways of choosing heads (`ways/`)."""
