"""How large honest rounding errors may be: what the bounds of all chapters are made of."""
