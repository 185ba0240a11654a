"""Planted bugs on the way of the gradients."""
