"""Further plug-ins, one file each: families (`families/`), probes (`probes/`), ways of choosing heads (`ways/`); and what only
they need."""
