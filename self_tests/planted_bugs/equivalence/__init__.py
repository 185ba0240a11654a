"""Planted bugs that two runs show that must give the same."""
