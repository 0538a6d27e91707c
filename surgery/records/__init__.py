"""What travels between the parts: frozen, strict, JSON or YAML."""
