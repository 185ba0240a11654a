"""Backends that are unusual and correct: they must pass."""
