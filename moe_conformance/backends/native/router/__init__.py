"""Routers: scores, selection, capacity, forcing."""
