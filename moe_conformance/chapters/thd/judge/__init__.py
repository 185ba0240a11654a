"""Judges of packed sequences, called by the checks of this chapter."""
