"""Judges of what a step costs on the wire."""
