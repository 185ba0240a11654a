"""Oracles of configurations: which may be refused, and what must be shown."""
