"""Judges of dispatch, what the experts are handed, and combine."""
