"""Planted bugs that no single run shows."""
