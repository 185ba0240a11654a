"""Judges of routers: selection, weights, capacity, forced routing."""
