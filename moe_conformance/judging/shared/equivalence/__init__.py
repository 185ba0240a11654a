"""Judges of two runs that must give the same results."""
