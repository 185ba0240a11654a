"""Judges of routers: selection, weights, capacity, drops and gradients."""
