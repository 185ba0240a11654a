"""Causes of a wrong tensor or row, the widest first."""
