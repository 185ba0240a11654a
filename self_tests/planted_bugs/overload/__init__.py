"""Bugs in load meters."""
