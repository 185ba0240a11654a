"""Judges of process groups, expert placement and configurations."""
