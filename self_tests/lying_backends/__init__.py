"""Backends that lie to the suite: they must be detected."""
