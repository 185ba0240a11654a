"""Judges of overload factors."""
