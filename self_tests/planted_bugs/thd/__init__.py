"""Planted bugs of packed sequences."""
