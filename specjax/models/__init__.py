"""Language models: what can stand as a target or a draft."""
