"""Judges of the backend's own experts."""
