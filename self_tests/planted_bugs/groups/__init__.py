"""Planted bugs of groups."""
