"""Stored values of the oracles, and how they are written: see README.md."""
