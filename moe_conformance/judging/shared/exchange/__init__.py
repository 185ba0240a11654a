"""Judges of exchanges: dispatch, rows delivered to the experts, and combine."""
